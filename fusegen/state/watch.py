"""Watching attribute reads: while a function is traced, the classes of the objects that it can reach report each read.

A class reports by a ``__getattribute__`` of its own, put there for as long as the trace lasts. Other threads read through it as
before. One trace at a time watches.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self

from fusegen.state.libraries import is_heap

_IMMUTABLE = 1 << 8  # a flag of CPython's types: closed to changes
_TURN = threading.RLock()


class Listener(Protocol):
    """Who is told of reads."""

    def attribute_wanted(self, owner: Any, name: str) -> None:
        """An attribute is about to be read."""

    def attribute_read(self, owner: Any, name: str, value: Any) -> None:
        """An attribute was read."""

    def attribute_missed(self, owner: Any, name: str) -> None:
        """An attribute was asked for that is not there."""


class Watch:
    """Reports attribute reads of this thread to a listener while it is entered.

    Args:
        listener: who is told.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._thread = 0
        self._depth = 0  # of reads that are part of another read
        self._watched: list[tuple[type, Any]] = []
        self._modules: list[ModuleType] = []
        reporting = self._reporting(_of_module)
        self._reporting_module = type("module", (ModuleType,), {"__getattribute__": reporting})

    def __enter__(self) -> Self:
        _TURN.acquire()
        self._thread = threading.get_ident()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread = 0
        for cls, own in reversed(self._watched):
            if own is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = own
        self._watched.clear()
        for module in self._modules:
            module.__class__ = ModuleType
        self._modules.clear()
        _TURN.release()

    def add(self, cls: type) -> None:
        """Watches a class, if it can be watched."""
        if not is_heap(cls) or cls.__flags__ & _IMMUTABLE or getattr(cls.__getattribute__, "watch", None) is self:
            return
        own = cls.__dict__.get("__getattribute__")
        reporting = self._reporting(_attributes_of(cls))
        try:
            type.__setattr__(cls, "__getattribute__", reporting)
        except TypeError:  # a class that is closed by other means
            return
        self._watched.append((cls, own))

    def add_module(self, module: ModuleType) -> None:
        """Watches a module, unless it has a class of its own."""
        if type(module) is ModuleType:
            module.__class__ = self._reporting_module
            self._modules.append(module)

    def _reporting(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def __getattribute__(owner: Any, name: str) -> Any:
            if threading.get_ident() != self._thread or self._depth or _by_library(name):
                return original(owner, name)
            return self._read(original, owner, name)

        __getattribute__.watch = self  # type: ignore[attr-defined]
        return __getattribute__

    def _read(self, original: Callable[[Any, str], Any], owner: Any, name: str) -> Any:
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

    def _fallback(self, owner: Any, name: str, error: AttributeError) -> Any:
        """What the class's ``__getattr__`` gives; its own reads do not count, since what it gives does."""
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


def _attributes_of(cls: type) -> Callable[[Any, str], Any]:
    found: Callable[[Any, str], Any] = cls.__getattribute__  # type: ignore[assignment]
    return found


def _of_module(module: Any, name: str) -> Any:
    return ModuleType.__getattribute__(module, name)


def _by_library(name: str) -> bool:
    """Whether it is a library that looks into an object's dictionary, as torch does to find a module's parameters."""
    if name == "__class__":
        return True
    return name == "__dict__" and str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] in ("torch", "copy", "typing")
