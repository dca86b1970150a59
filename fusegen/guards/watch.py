"""Watching a function while it is traced: reads and writes of attributes, and calls.

A class reports by a ``__getattribute__`` and a ``__setattr__`` of its own, put there for as long as a trace watches the class, and
shared by all that do. Each thread reports to its own traces; other threads read through them as before. No lock is held while the
function runs: it may wait for a thread that traces as well.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from fusegen.guards.code import is_closed
from fusegen.threads import new_lock

if TYPE_CHECKING:
    from fusegen.guards.recorder import Recorder

_LOCK = new_lock()
"""For what is put into classes and modules; no code of the user's runs under it."""


class _Thread(threading.local):
    """The watches of this thread, the outermost first: a trace may be made inside of another."""

    watches: tuple[Watch, ...] = ()


_THREAD = _Thread()


class Watch:
    """Reports attribute reads of this thread to a listener while it is entered.

    Args:
        listener: who is told.
    """

    def __init__(self, listener: Recorder) -> None:
        self._listener = listener
        self._depth = 0  # of reads that are part of another read
        self._watched: set[_Watched] = set()

    def __enter__(self) -> Self:
        _THREAD.watches = (*_THREAD.watches, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _THREAD.watches = tuple(watch for watch in _THREAD.watches if watch is not self)
        with _LOCK:
            for each in self._watched:
                each.release()
        self._watched.clear()

    def add(self, cls: type) -> None:
        """Watches a class, if it can be watched."""
        if not is_closed(cls):
            self._add(partial(_class_watched, cls))

    def add_module(self, module: ModuleType) -> None:
        """Watches a module, unless it has a class of its own."""
        self._add(partial(_module_watched, module))

    def _add(self, find: Callable[[], _Watched | None]) -> None:
        with _LOCK:
            watched = find()
            if watched is not None and watched not in self._watched:
                self._watched.add(watched)
                watched.users += 1

    def reads(self, watched: _Watched) -> bool:
        """Tells if reads of a class or module are to be reported now."""
        return not self._depth and watched in self._watched

    def read(self, original: Callable[[Any, str], Any], owner: Any, name: str) -> Any:
        """Reads an attribute, and reports it."""
        with self._unwatched():
            self._listener.attribute_wanted(owner, name)
        try:
            value = original(owner, name)
        except AttributeError as error:
            with self._unwatched():
                return self._fallback(owner, name, error)
        with self._unwatched():
            self._listener.attribute_read(owner, name, value)
        return value

    def write(self, owner: Any, name: str, value: Any) -> None:
        """Reports that an attribute is about to be set."""
        with self._unwatched():
            self._listener.attribute_set(owner, name, value)

    def _fallback(self, owner: Any, name: str, error: AttributeError) -> Any:
        """The value that the class's ``__getattr__`` gives; its own reads do not count, since what it gives does."""
        fallback = next((vars(cls)["__getattr__"] for cls in type(owner).__mro__ if "__getattr__" in vars(cls)), None)
        try:
            if fallback is None:
                raise error
            value = fallback(owner, name)
        except AttributeError:
            self._listener.attribute_missed(owner, name)
            raise
        self._listener.attribute_read(owner, name, value)
        return value

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


class _Watched:
    """A class or a module whose reads are reported; everything but reads is done under the lock.

    Args:
        original: what reads an attribute.
        restore: puts back what was there.

    Attributes:
        users: how many watches it reports to.
    """

    def __init__(self, original: Callable[[Any, str], Any], restore: Callable[[], object]) -> None:
        self._original, self._restore = original, restore
        self.users = 0

    def release(self) -> None:
        """One watch less; the last one puts back what was there."""
        self.users -= 1
        if not self.users:
            self._restore()

    def reporting(self) -> Callable[[Any, str], Any]:
        """The ``__getattribute__`` that reports."""

        def __getattribute__(owner: Any, name: str) -> Any:
            watches = _THREAD.watches
            if not watches or _by_library(name):
                return self._original(owner, name)
            read = self._original
            for watch in watches:
                if watch.reads(self):
                    read = partial(watch.read, read)
            return read(owner, name)

        __getattribute__.watched = self  # type: ignore[attr-defined]
        return __getattribute__

    def writing(self, original: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
        """The ``__setattr__`` that reports.

        Args:
            original: sets an attribute.
        """

        def __setattr__(owner: Any, name: str, value: Any) -> None:
            for watch in _THREAD.watches:
                if watch.reads(self):
                    watch.write(owner, name, value)
            original(owner, name, value)

        return __setattr__


def _class_watched(cls: type) -> _Watched | None:
    """Finds or puts there the reporter of a class's objects, which may be a base's; None where there can be none."""
    found = type.__getattribute__(cls, "__getattribute__")  # past a metaclass of the user's
    there: _Watched | None = getattr(found, "watched", None)
    if there is not None:
        return there
    own = {name: cls.__dict__.get(name) for name in ("__getattribute__", "__setattr__")}
    watched = _Watched(found, partial(_restore_class, cls, own))
    setter = type.__getattribute__(cls, "__setattr__")
    try:
        type.__setattr__(cls, "__getattribute__", watched.reporting())
        type.__setattr__(cls, "__setattr__", watched.writing(setter))
    except TypeError:  # a class that is closed by other means
        return None
    return watched


def _restore_class(cls: type, own: Mapping[str, Any]) -> None:
    for name, method in own.items():
        if method is None:
            type.__delattr__(cls, name)
        else:
            type.__setattr__(cls, name, method)


_MODULES: dict[int, _Watched] = {}


def _module_watched(module: ModuleType) -> _Watched | None:
    """Likewise of a module."""
    if type(module) is ModuleType:
        watched = _Watched(ModuleType.__getattribute__, partial(_restore_module, module))
        module.__class__ = type("module", (ModuleType,), {"__getattribute__": watched.reporting()})
        _MODULES[id(module)] = watched
    return _MODULES.get(id(module))


def _restore_module(module: ModuleType) -> None:
    module.__class__ = ModuleType
    del _MODULES[id(module)]


def _by_library(name: str) -> bool:
    """True if it is a library that looks into an object's dictionary, as torch does to find a module's parameters."""
    if name == "__class__":
        return True
    return name == "__dict__" and str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] in ("torch", "copy", "typing")


# Notice of the calls of Python functions in this thread, by the interpreter's hooks for debuggers and profilers.


Notice: TypeAlias = Callable[[FrameType], None]


class _Collector:
    """The garbage collector, which is the whole process's: it waits while any thread traces."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._pauses = 0
        self._was_on = False

    def pause(self) -> None:
        """Has it wait."""
        with self._lock:
            if not self._pauses:
                self._was_on = gc.isenabled()
                gc.disable()
            self._pauses += 1

    def resume(self) -> None:
        """Ends one pause; the last one leaves it as it was before the first."""
        with self._lock:
            self._pauses = max(self._pauses - 1, 0)
            if not self._pauses and self._was_on:
                gc.enable()

    def end_all(self) -> None:
        """Ends all pauses: of threads that a forked child does not have."""
        if self._pauses:
            self._pauses = 1
            self.resume()


_COLLECTOR = _Collector()
os.register_at_fork(after_in_child=_COLLECTOR.end_all)


class Calls:
    """Tells of every call while it is entered, before the function's first line.

    The hook of debuggers is taken where it is free, since it is asked least; else that of profilers, and a profiler that is there
    is told as before. What was there is put back. The garbage collector waits: what it calls (finalizers, callbacks of other
    libraries) would count as calls of the function.

    Args:
        notice: is given the frame of the call.
    """

    def __init__(self, notice: Notice) -> None:
        self._notice = notice
        self._traces = sys.gettrace() is None
        self._before: Any = None

    def __enter__(self) -> Self:
        _COLLECTOR.pause()
        if self._traces:
            sys.settrace(self._traced)
        else:
            self._before = sys.getprofile()
            sys.setprofile(self._profiled)
        return self

    def __exit__(self, *_: object) -> None:
        if self._traces:
            sys.settrace(None)
        else:
            sys.setprofile(self._before if callable(self._before) else None)
        _COLLECTOR.resume()

    def _traced(self, frame: FrameType, event: str, argument: Any) -> None:
        self._notice(frame)

    _traced.follows_users = True  # type: ignore[attr-defined]

    def _profiled(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._notice(frame)
        if callable(self._before):
            self._before(frame, event, argument)
