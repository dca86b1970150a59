"""Changes that a function makes while it is traced, which later calls would not make again.

Where they are looked for, changes of what was there before are refused and undone, and deeds that cannot be undone are refused. A
random number that is drawn would be the same in every later call; torch's own functions that draw are refused where called.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import importlib._bootstrap
import inspect
import logging
import os
import pickle
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from types import BuiltinFunctionType, CellType, FrameType
from typing import Any, TypeAlias

import numpy as np
import torch

from fusegen.errors import TraceError, UnsupportedError
from fusegen.guards.values import cell_contents, is_plain, same
from fusegen.guards.watch import called_at

_KEYS = (torch.device, torch.dtype)  # of arguments, which tell kernels apart
_WATCHED = ("__getattribute__", "__setattr__")  # which `Watch` puts into classes
_MEND = "return the value, and set or store it outside"


class _Thread(threading.local):
    refuses = False


_THREAD = _Thread()


@contextmanager
def refusing_changes() -> Iterator[None]:
    """Traces of this thread refuse functions that change what is there before they run."""
    given, _THREAD.refuses = _THREAD.refuses, True
    try:
        yield
    finally:
        _THREAD.refuses = given


def refuses_changes() -> bool:
    """True if traces of this thread refuse such functions."""
    return _THREAD.refuses


class ChangeError(UnsupportedError):
    """The function changes what is there before it runs; once what it looks for is there, a later call may change nothing."""


class Changes:
    """Looks for changes where traces refuse them (`refusing_changes`)."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, _Held]] = []
        self._variables = contextvars.copy_context()
        self._settings = _settings()

    def add(self, value: Any) -> None:
        """Remembers what a container, a cell, or an object's attributes hold."""
        if (held := _held(value)) is not None:
            self._before.append((value, held))

    def require_same(self, owner: Any, name: str, value: Any, where: str | None) -> None:
        """Refuses to set an attribute to something else than is there."""
        if not isinstance(value, _KEYS) and inspect.getattr_static(owner, name, None) is not value:
            what = f"the attribute {name!r} of a {type(owner).__name__} is set, which a kernel's later calls would not do again"
            raise ChangeError(what, where=where, hint=_MEND)

    def undo(self) -> ChangeError | None:
        """Puts back what was held: the error that says so, or None if nothing had changed."""
        changed = [(value, held) for value, held in self._before if not _is_held(value, held)]
        for value, held in changed:
            _put_back(value, held)
        names = [type(value).__name__ for value, _ in changed] + _undone_variables(self._variables)
        if self._settings != _settings():
            names.append("setting of torch")
            torch.set_grad_enabled(self._settings[0])
            torch.set_default_dtype(self._settings[1])
        if not names:
            return None
        return ChangeError(f"a {names[0]} is changed, which a kernel's later calls would not do again", hint=_MEND)


def _settings() -> tuple[bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.get_default_dtype()


_Held: TypeAlias = tuple[Any, ...] | dict[Any, Any]
"""Elements, or what is held under keys or names."""

_FILLED: tuple[tuple[Any, Callable[[Any, Any], object]], ...] = ((list, list.extend), (deque, deque.extend), (set, set.update))
"""Functions that fill containers, past what a class of the user's does then."""


def _held(value: Any) -> _Held | None:
    kind = type(value)
    if issubclass(kind, dict):
        return dict(value)
    if issubclass(kind, (list, deque)):
        return tuple(value)
    if issubclass(kind, set):
        return (frozenset(value),)
    if issubclass(kind, (np.ndarray, bytearray, array.array)):
        return (value.copy() if issubclass(kind, np.ndarray) else value[:],)
    if issubclass(kind, ctypes.Array):
        return (bytes(value),)
    if kind is CellType:
        return cell_contents(value)
    with suppress(AttributeError):
        return {name: each for name, each in _attributes(value).items() if name not in _WATCHED}
    return None


def _attributes(value: Any) -> Any:
    """The dictionary of an object's attributes, read past what reports reads."""
    return object.__getattribute__(value, "__dict__")


def _is_held(value: Any, held: _Held) -> bool:
    now = _held(value)
    if isinstance(held, dict) and isinstance(now, dict):
        news = [name for name, each in now.items() if not isinstance(each, _KEYS) or name in held]
        return news == [*held] and all(isinstance(now[name], _KEYS) or _is_same(now[name], held[name]) for name in news)
    return now is not None and len(now) == len(held) and all(map(_is_same, now, held))


def _is_same(one: Any, other: Any) -> bool:
    if one is other or (is_plain(one) and same(one, other)):
        return True
    if isinstance(one, np.ndarray):
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    return isinstance(one, (frozenset, bytearray, array.array)) and bool(one == other)


def _put_back(value: Any, held: _Held) -> None:
    if isinstance(held, dict):
        _put_items_back(value, held)
    elif isinstance(value, np.ndarray):
        value[...] = held[0]
    elif isinstance(value, (bytearray, array.array)):
        value[:] = held[0]
    elif isinstance(value, ctypes.Array):
        memoryview(value).cast("B")[:] = held[0]
    elif isinstance(value, CellType):
        if held:
            value.cell_contents = held[0]
        else:
            del value.cell_contents
    else:
        kind, fill = next(each for each in _FILLED if isinstance(value, each[0]))
        kind.clear(value)
        fill(value, held[0] if kind is set else held)


def _put_items_back(value: Any, held: dict[Any, Any]) -> None:
    """Sets what differs, and nothing else: other threads may read a module's or a class's attributes."""
    items: Any = value if isinstance(value, dict) else _attributes(value)
    setter: Callable[[Any, Any], object]
    deleter: Callable[[Any], object]
    if isinstance(value, type):
        setter, deleter = partial(type.__setattr__, value), partial(type.__delattr__, value)
    else:
        kind: Any = OrderedDict if isinstance(items, OrderedDict) else dict
        if [name for name in items if name in held] != [*held]:  # one that is set again would be the last
            kind.clear(items)
        setter, deleter = partial(kind.__setitem__, items), partial(kind.__delitem__, items)
    for name in [name for name in items if name not in held and name not in _WATCHED]:
        deleter(name)
    for name in [name for name, each in held.items() if name not in items or items[name] is not each]:
        setter(name, held[name])


def _undone_variables(before: contextvars.Context) -> list[str]:
    """Puts back context variables that had a value: the kind of thing that changed, if one did."""
    changed = [variable for variable, value in contextvars.copy_context().items() if not _is_same(before.get(variable), value)]
    for variable in changed:
        if variable in before:
            variable.set(before[variable])
    return ["ContextVar"] if changed else []


# Generators of random numbers.


class Generators:
    """The generators that a function can reach, and whether it has drawn from one."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []  # each with its name, and the state that it had
        self._reached: set[int] = set()
        self._is_alone = threading.active_count() == 1
        for value, name in _OF_ALL:
            self._before.append((value, name, _access(value)[0]()))

    def add(self, value: Any, name: str) -> None:
        """Remembers where a generator is that the function can reach, by one of its methods also; anything else is left alone."""
        value = value.__self__ if isinstance(value, BuiltinFunctionType) else value
        if value is random or value is np.random or isinstance(value, _GENERATORS):
            self._before.append((value, name, _access(value)[0]()))
            self._reached.add(id(value))

    def add_all(self) -> None:
        """The function can reach those of the whole process."""
        self._reached.update(id(value) for value, _ in _OF_ALL)

    def library_call(self, variables: dict[str, Any]) -> None:
        """A library's function runs: it can reach a generator that is one of its module's variables, or the module itself."""
        if variables is globals():
            return
        for value, name in _OF_ALL:
            if variables.get("random") is value or variables.get("__name__") == value.__name__:
                self.add(value, name)

    def restore(self) -> None:
        """Puts back those that the function has drawn from, so that a function which is refused can run again as it is."""
        for value, _, state in self._drawn():
            _access(value)[1](state)

    def require_untouched(self) -> None:
        """Raises if one of them has been drawn from, naming it."""
        for _, name, _ in self._drawn():
            what = f"the kernel draws a random number from {name} while it is traced, which every later call would use again"
            hint = "draw it outside of the kernel, and pass it"
            raise TraceError(what, hint=hint if self._is_alone else f"{hint}; or let no other thread draw during the first call")

    def _drawn(self) -> list[tuple[Any, str, Any]]:
        """Those that have been drawn from; another thread may draw from one that the function does not reach."""
        self._is_alone &= threading.active_count() == 1
        drawn = [each for each in self._before if pickle.dumps(_access(each[0])[0]()) != pickle.dumps(each[2])]
        return [each for each in drawn if self._is_alone or id(each[0]) in self._reached]


_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_OF_ALL = ((random, "random"), (np.random, "numpy.random"))
"""The generators of the whole process."""


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Functions that read a generator's state, and set it."""
    if value is random or isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state")
    return value.get_state, value.set_state


# Deeds of the standard library's that cannot be undone.

_THREADS = {
    threading.Thread.start.__code__: "starts a thread",
    ThreadPoolExecutor.submit.__code__: "hands work to a thread",
}

_DEEDS_OF = {
    logging.Logger.handle.__code__: "writes to a log",
    type(os.environ).__setitem__.__code__: "sets an environment variable",
    type(os.environ).__delitem__.__code__: "deletes an environment variable",
}

_IMPORT = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
"""Loads a module that is not loaded yet."""


def deed_of(frame: FrameType) -> str | None:
    """The deed that a function which is about to run does, if it does one.

    Raises:
        TraceError: it works in another thread, where nothing is watched.
    """
    code = frame.f_code
    if code in _THREADS:
        what = f"the kernel {_THREADS[code]} while it is traced; what it reads there is not seen"
        raise TraceError(what, where=called_at(frame), hint="do that outside of the kernel, and pass what it gives")
    return _DEEDS_OF[code] if code in _DEEDS_OF and not _is_once(frame) else None


def _is_once(frame: FrameType) -> bool:
    """True if something is done once in a process: a message, as its function's name says, or a module that is imported first."""
    caller: FrameType | None = frame
    while caller is not None and not (caller.f_code.co_name.endswith("_once") or caller.f_code is _IMPORT):
        caller = caller.f_back
    return caller is not None
