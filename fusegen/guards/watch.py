"""Watches a function during tracing: attribute reads and writes, calls, and the code that runs.

A class under watch gets a ``__getattribute__`` and a ``__setattr__`` that report; all traces that watch it share them. Each thread
reports to its own traces only. No lock is held while the function runs, since it may wait for another thread that traces.
"""

from __future__ import annotations

import dis
import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

from fusegen.errors import UnsupportedError
from fusegen.guards.values import cell_contents, is_a
from fusegen.threads import new_lock

if TYPE_CHECKING:
    from fusegen.guards.recorder import StateRecorder


_LOCK = new_lock()
"""Protects the installation of hooks in classes and modules. No user code runs under it."""


class _Thread(threading.local):
    """The watches of this thread, outermost first. Traces may nest."""

    watches: tuple[Watch, ...] = ()


_THREAD = _Thread()


class Watch:
    """Reports this thread's attribute reads to a recorder while it is entered."""

    def __init__(self, listener: StateRecorder) -> None:
        self._listener = listener
        self._depth = 0  # of nested reads
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
        if not is_closed(cls):
            self._add(partial(_class_watched, cls))

    def add_module(self, module: ModuleType) -> None:
        self._add(partial(_module_watched, module))

    def _add(self, find: Callable[[], _Watched | None]) -> None:
        with _LOCK:
            watched = find()
            if watched is not None and watched not in self._watched:
                self._watched.add(watched)
                watched.users += 1

    def reads(self, watched: _Watched) -> bool:
        return not self._depth and watched in self._watched

    def read(self, original: Callable[[Any, str], Any], owner: Any, name: str) -> Any:
        with self._unwatched():
            self._listener.before_attribute_read(owner, name)
        try:
            value = original(owner, name)
        except AttributeError as error:
            with self._unwatched():
                return self._fallback(owner, name, error)
        with self._unwatched():
            self._listener.attribute_read(owner, name, value)
        return value

    def write(self, owner: Any, name: str, value: Any) -> None:
        with self._unwatched():
            self._listener.attribute_set(owner, name, value)

    def _fallback(self, owner: Any, name: str, error: AttributeError) -> Any:
        """Reads through the class's ``__getattr__``. Its result is recorded, its own reads are not."""
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
    """A class or a module with reporting hooks, and its number of watches. All methods but the hooks run under the lock."""

    def __init__(self, original: Callable[[Any, str], Any], restore: Callable[[], object]) -> None:
        self._original, self._restore = original, restore
        self.users = 0

    def release(self) -> None:
        """Removes one watch. The last one restores the class."""
        self.users -= 1
        if not self.users:
            self._restore()

    def reporting(self) -> Callable[[Any, str], Any]:
        def __getattribute__(owner: Any, name: str) -> Any:
            watches = _THREAD.watches
            if not watches or _is_library_read(name):
                return self._original(owner, name)
            read = self._original
            for watch in watches:
                if watch.reads(self):
                    read = partial(watch.read, read)
            return read(owner, name)

        __getattribute__.watched = self  # type: ignore[attr-defined]
        return __getattribute__

    def writing(self, original: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
        def __setattr__(owner: Any, name: str, value: Any) -> None:
            for watch in _THREAD.watches:
                if watch.reads(self):
                    watch.write(owner, name, value)
            original(owner, name, value)

        return __setattr__


def _class_watched(cls: type) -> _Watched | None:
    """Returns the reporter of a class or its base, installing one if needed; None if the class is immutable."""
    getter = type.__getattribute__(cls, "__getattribute__")  # bypasses the user's metaclass
    existing: _Watched | None = getattr(getter, "watched", None)
    if existing is not None:
        return existing
    own = {name: cls.__dict__.get(name) for name in ("__getattribute__", "__setattr__")}
    watched = _Watched(getter, partial(_restore_class, cls, own))
    setter = type.__getattribute__(cls, "__setattr__")
    try:
        type.__setattr__(cls, "__getattribute__", watched.reporting())
        type.__setattr__(cls, "__setattr__", watched.writing(setter))
    except TypeError:  # immutable by other means
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
    """Returns the reporter of a module, installing one if needed; None if its class is not `ModuleType`."""
    if type(module) is ModuleType:
        watched = _Watched(ModuleType.__getattribute__, partial(_restore_module, module))
        module.__class__ = type("module", (ModuleType,), {"__getattribute__": watched.reporting()})
        _MODULES[id(module)] = watched
    return _MODULES.get(id(module))


def _restore_module(module: ModuleType) -> None:
    module.__class__ = ModuleType
    del _MODULES[id(module)]


def _is_library_read(name: str) -> bool:
    if name == "__class__":
        return True
    return name == "__dict__" and str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] in ("torch", "copy", "typing")


# Hooks on the calls of Python functions in this thread.


Notice: TypeAlias = Callable[[FrameType], None]


class _Collector:
    """Pauses the garbage collector of the process while any thread traces."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._pauses = 0
        self._was_on = False

    def pause(self) -> None:
        with self._lock:
            if not self._pauses:
                self._was_on = gc.isenabled()
                gc.disable()
            self._pauses += 1

    def resume(self) -> None:
        """Ends one pause. The last one restores the collector's state."""
        with self._lock:
            self._pauses = max(self._pauses - 1, 0)
            if not self._pauses and self._was_on:
                gc.enable()

    def end_all(self) -> None:
        """Ends the pauses of threads that do not exist in a forked child."""
        if self._pauses:
            self._pauses = 1
            self.resume()


_COLLECTOR = _Collector()
os.register_at_fork(after_in_child=_COLLECTOR.end_all)


class CallHook:
    """Reports every call in this thread, before the function's first line.

    Uses ``sys.settrace`` if it is free, since it calls back least; otherwise ``sys.setprofile``, and forwards to the existing
    profiler. The garbage collector is paused: finalizers and callbacks that it runs would be reported as calls.
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


# Names and strings in code objects.

_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_SETS_GLOBAL = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})
_SETS_ATTRIBUTE = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_DYNAMIC_LOOKUPS = frozenset({"getattr", "hasattr", "vars", "globals", "__dict__"})
"""Names that allow access to attributes that the code does not spell out."""


@dataclass(frozen=True)
class CodeNames:
    """The names in a code object, without those of nested functions.

    Attributes:
        variables: globals that it reads or sets, in the order of their use.
        attributes: attributes that it reads or sets, and strings that may name one.
        modules: modules that it imports when it runs.
        compares: whether it compares identities.
        computes: whether it may look up a name that is not in the code.
        stores: whether it sets globals.
        sets: whether it may set attributes.
        maybe_missing: attributes that may be missing: arguments of ``getattr`` and the like, and all attributes in code with
            exception handlers.
    """

    variables: tuple[str, ...]
    attributes: frozenset[str]
    modules: tuple[str, ...]
    compares: bool
    computes: bool
    stores: bool
    sets: bool
    maybe_missing: frozenset[str]


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> CodeNames:
    variables: dict[str, None] = {}
    modules: dict[str, None] = {}
    compares = stores = False
    sets = "setattr" in code.co_names
    last = None
    strings = frozenset(c for constant in code.co_consts for c in _strings(constant))
    attributes, changed = set(strings), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in _GLOBAL or step.opname in _SETS_GLOBAL:
            variables[str(step.argval)] = None
        elif step.opname in _ATTRIBUTE:
            attributes.add(str(step.argval))
        elif step.opname in _SETS_ATTRIBUTE:
            changed.add(str(step.argval))
        elif step.opname == "IMPORT_NAME":
            modules[str(step.argval)] = None
        stores |= step.opname in _SETS_GLOBAL
        compares |= step.opname == "IS_OP" and not (last is not None and last.opname == "LOAD_CONST")
        last = step
    sets |= bool(changed)
    compares |= "id" in variables
    computes = not _DYNAMIC_LOOKUPS.isdisjoint({*variables, *attributes})
    asked = frozenset(attributes) if code.co_exceptiontable else strings if computes else frozenset[str]()
    return CodeNames(tuple(variables), frozenset(attributes | changed), tuple(modules), compares, computes, stores, sets, asked)


def _strings(constant: object) -> Iterator[str]:
    """Yields identifiers in a constant that may name an attribute; dotted strings are split."""
    if isinstance(constant, str) and len(constant) < 100:
        yield from (word for word in constant.split(".") if word.isidentifier())
    elif isinstance(constant, (tuple, frozenset)):
        for element in constant:
            yield from _strings(element)


# Libraries: torch, NumPy, the standard library and fusegen are assumed not to change. All other code is the user's.

_PACKAGES = ("torch", "numpy", "sympy", "mpmath", "fusegen")
_NAMES = frozenset({*_PACKAGES, *sys.stdlib_module_names} - {"__main__"})
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def of_library(cls: type) -> bool:
    """True if a class belongs to a library. Classes made without a module name claim to be of ``builtins``."""
    return is_library(cls.__module__) and not (cls.__module__ == "builtins" and is_heap(cls))


def is_heap(cls: type) -> bool:
    return bool(cls.__flags__ & _HEAP)


def is_closed(cls: type) -> bool:
    """True if reads of a class's objects cannot be watched: a builtin or immutable class."""
    return not is_heap(cls) or bool(cls.__flags__ & _IMMUTABLE)


def is_library(module: object) -> bool:
    """True for a library's module name, unless a file of the user's shadows it."""
    root = str(module).partition(".")[0]
    if root not in _NAMES:
        return False
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is None or _is_library_file(file)


def runs_library(frame: FrameType) -> bool:
    """True if a frame runs library code. Code without a file, e.g. of dataclasses, is judged by its globals."""
    file = frame.f_code.co_filename
    return is_library(frame.f_globals.get("__name__")) if file.startswith("<") else _is_library_file(file)


@lru_cache(maxsize=4096)
def _is_library_file(file: str) -> bool:
    if file.startswith(_package_paths()):
        return True
    return file.startswith(_install_paths("stdlib", "platstdlib")) and not file.startswith(_install_paths("purelib", "platlib"))


@lru_cache(maxsize=1)
def _package_paths() -> tuple[str, ...]:
    origins = [spec.origin for name in _PACKAGES if (spec := find_spec(name)) is not None and spec.origin is not None]
    return tuple(f"{Path(origin).parent}/" for origin in origins)


def _install_paths(*names: str) -> tuple[str, ...]:
    return tuple(f"{sysconfig.get_path(name)}/" for name in names)


_UNTRACEABLE = {
    ("torch.nn.attention.flex_attention", "flex_attention"): "call F.scaled_dot_product_attention with attn_mask or is_causal, or "
    "flex_attention outside of the kernel",
}
"""Hints for library functions that read tensor internals, by module and name."""


def require_traceable(frame: FrameType) -> None:
    name = frame.f_code.co_name
    hint = _UNTRACEABLE.get((str(frame.f_globals.get("__name__")), name))
    if hint is not None:
        raise UnsupportedError(f"{name} cannot be traced", where=called_at(frame), hint=hint)


# Functions and callers of frames.

FUNCTIONS_OF = ("__wrapped__", "function", "fget", "func", "__func__", "default_factory")
"""Attributes in which wrappers of the standard library, and kernels, store the wrapped function."""

_UNSET = object()


def closes_over(function: FunctionType, frame: FrameType) -> bool:
    """True if the cells of a function's closure hold the same objects as a frame's variables."""
    cells = zip(function.__code__.co_freevars, map(cell_contents, function.__closure__ or ()), strict=True)
    held = frame.f_locals
    return all(now[0] is held.get(name, _UNSET) if now else name not in held for name, now in cells)


def method_of(frame: FrameType) -> FunctionType | None:
    """Returns the method of a frame whose closure is ``__class__`` alone. Searching its class avoids `functions_of`, which takes
    0.1 s in a large process."""
    cls = frame.f_locals.get("__class__")
    for value in tuple(vars(cls).values()) if is_a(cls, type) else ():
        wrapped = [getattr(value, attribute, None) for attribute in FUNCTIONS_OF] if of_library(type(value)) else []
        for function in (value, *wrapped):
            if is_a(function, FunctionType) and function.__code__ is frame.f_code:
                return cast(FunctionType, function)
    return None


def functions_of(code: CodeType, start: object) -> list[FunctionType]:
    """Returns functions with a code object that are older than a start object, if the collector has not run since."""
    young = gc.get_objects(generation=0)
    first = next((position for position, each in enumerate(young) if each is start), -1) + 1
    new_ids = set(map(id, young[first:]))
    return [each for each in gc.get_referrers(code) if is_a(each, FunctionType) and id(each) not in new_ids]


def called_at(frame: FrameType) -> str | None:
    """Returns the user's source line that led to a call of a library function."""
    caller: FrameType | None = frame
    while caller is not None and runs_library(caller):
        caller = caller.f_back
    return None if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}"
