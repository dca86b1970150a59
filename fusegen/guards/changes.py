"""Detects side effects of a traced function that later calls would not repeat.

In `rejecting_side_effects`, writes to existing objects are undone and rejected, and I/O and other irreversible effects are
rejected. Drawing from a Python or NumPy generator is rejected always; torch's random functions are rejected where they are called.
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

_KEYS = (torch.device, torch.dtype)  # argument values that select a kernel
_WATCHED = ("__getattribute__", "__setattr__")  # installed by `Watch`
_HINT = "return the value, and set or store it outside of the kernel"


class _Thread(threading.local):
    refuses = False


_THREAD = _Thread()


@contextmanager
def rejecting_side_effects() -> Iterator[None]:
    """Makes traces of this thread reject functions that change objects which existed before the call."""
    previous, _THREAD.refuses = _THREAD.refuses, True
    try:
        yield
    finally:
        _THREAD.refuses = previous


def rejects_side_effects() -> bool:
    return _THREAD.refuses


class ChangeError(UnsupportedError):
    """The function changes an object that existed before the call. A later call may find it changed and skip the change."""


class Changes:
    """Detects changes of existing objects in traces under `rejecting_side_effects`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, _Snapshot]] = []
        self._variables = contextvars.copy_context()
        self._settings = _settings()

    def add(self, value: Any) -> None:
        """Takes a snapshot of a container, a cell, or an object's attributes."""
        if (held := _snapshot_of(value)) is not None:
            self._before.append((value, held))

    def require_same(self, owner: Any, name: str, value: Any, where: str | None) -> None:
        if not isinstance(value, _KEYS) and inspect.getattr_static(owner, name, None) is not value:
            what = f"the attribute {name!r} of a {type(owner).__name__} is set, which later calls would not repeat"
            raise ChangeError(what, where=where, hint=_HINT)

    def undo(self) -> ChangeError | None:
        """Restores all snapshots. Returns the error to raise, or None if nothing had changed."""
        changed = [(value, held) for value, held in self._before if not _is_unchanged(value, held)]
        for value, held in changed:
            _restore(value, held)
        names = [type(value).__name__ for value, _ in changed] + _restored_variables(self._variables)
        if self._settings != _settings():
            names.append("setting of torch")
            torch.set_grad_enabled(self._settings[0])
            torch.set_default_dtype(self._settings[1])
        if not names:
            return None
        return ChangeError(f"a {names[0]} is changed, which later calls would not repeat", hint=_HINT)


def _settings() -> tuple[bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.get_default_dtype()


_Snapshot: TypeAlias = tuple[Any, ...] | dict[Any, Any]
"""A snapshot: elements, or values by key or attribute name."""

_FILLERS: tuple[tuple[Any, Callable[[Any, Any], object]], ...] = ((list, list.extend), (deque, deque.extend), (set, set.update))


def _snapshot_of(value: Any) -> _Snapshot | None:
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
    """The attribute dictionary of an object, read without triggering `Watch`."""
    return object.__getattribute__(value, "__dict__")


def _is_unchanged(value: Any, held: _Snapshot) -> bool:
    now = _snapshot_of(value)
    if isinstance(held, dict) and isinstance(now, dict):
        news = [name for name, each in now.items() if not isinstance(each, _KEYS) or name in held]
        return news == [*held] and all(isinstance(now[name], _KEYS) or _is_same(now[name], held[name]) for name in news)
    return now is not None and len(now) == len(held) and all(map(_is_same, now, held))


def _is_same(a: Any, b: Any) -> bool:
    if a is b or (is_plain(a) and same(a, b)):
        return True
    if isinstance(a, np.ndarray):
        return bool(a.shape == b.shape and a.tobytes() == b.tobytes())
    return isinstance(a, (frozenset, bytearray, array.array)) and bool(a == b)


def _restore(value: Any, held: _Snapshot) -> None:
    if isinstance(held, dict):
        _restore_items(value, held)
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
        kind, fill = next(each for each in _FILLERS if isinstance(value, each[0]))
        kind.clear(value)
        fill(value, held[0] if kind is set else held)


def _restore_items(value: Any, held: dict[Any, Any]) -> None:
    items: Any = value if isinstance(value, dict) else _attributes(value)
    setter: Callable[[Any, Any], object]
    deleter: Callable[[Any], object]
    if isinstance(value, type):
        setter, deleter = partial(type.__setattr__, value), partial(type.__delattr__, value)
    else:
        kind: Any = OrderedDict if isinstance(items, OrderedDict) else dict
        if [name for name in items if name in held] != [*held]:  # setting one alone would move it to the end
            kind.clear(items)
        setter, deleter = partial(kind.__setitem__, items), partial(kind.__delitem__, items)
    for name in [name for name in items if name not in held and name not in _WATCHED]:
        deleter(name)
    for name in [name for name, each in held.items() if name not in items or items[name] is not each]:
        setter(name, held[name])


def _restored_variables(before: contextvars.Context) -> list[str]:
    """Restores context variables that had a value. Returns their type's name if any changed."""
    changed = [variable for variable, value in contextvars.copy_context().items() if not _is_same(before.get(variable), value)]
    for variable in changed:
        if variable in before:
            variable.set(before[variable])
    return ["ContextVar"] if changed else []


# Generators of random numbers.


class Generators:
    """The random number generators that a function can reach, with the states they had before it ran."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []  # generator, name, state
        self._reached: set[int] = set()
        self._is_alone = threading.active_count() == 1
        for value, name in _GLOBAL_GENERATORS:
            self._before.append((value, name, _state_accessors(value)[0]()))

    def add(self, value: Any, name: str) -> None:
        """Snapshots a generator that the function reaches, directly or as a bound method. Ignores other values."""
        value = value.__self__ if isinstance(value, BuiltinFunctionType) else value
        if value is random or value is np.random or isinstance(value, _GENERATORS):
            self._before.append((value, name, _state_accessors(value)[0]()))
            self._reached.add(id(value))

    def add_all(self) -> None:
        self._reached.update(id(value) for value, _ in _GLOBAL_GENERATORS)

    def library_call(self, variables: dict[str, Any]) -> None:
        """Marks a global generator as reachable if the called library function has it, or its module, in its globals."""
        if variables is globals():
            return
        for value, name in _GLOBAL_GENERATORS:
            if variables.get("random") is value or variables.get("__name__") == value.__name__:
                self.add(value, name)

    def restore(self) -> None:
        """Restores the generators that were drawn from, so that a rejected function can run again unchanged."""
        for value, _, state in self._drawn():
            _state_accessors(value)[1](state)

    def require_untouched(self) -> None:
        for _, name, _ in self._drawn():
            what = f"the kernel draws a random number from {name} while it is traced, which every later call would reuse"
            hint = "draw it outside of the kernel, and pass it"
            raise TraceError(what, hint=hint if self._is_alone else f"{hint}; or let no other thread draw during the first call")

    def _drawn(self) -> list[tuple[Any, str, Any]]:
        """Returns the generators that were drawn from. With several threads, unreachable ones do not count."""
        self._is_alone &= threading.active_count() == 1
        drawn = [each for each in self._before if pickle.dumps(_state_accessors(each[0])[0]()) != pickle.dumps(each[2])]
        return [each for each in drawn if self._is_alone or id(each[0]) in self._reached]


_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_GLOBAL_GENERATORS = ((random, "random"), (np.random, "numpy.random"))


def _state_accessors(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    if value is random or isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state")
    return value.get_state, value.set_state


# Side effects of standard library functions that cannot be undone.

_THREAD_STARTS = {
    threading.Thread.start.__code__: "starts a thread",
    ThreadPoolExecutor.submit.__code__: "hands work to a thread",
}

_DEEDS = {
    logging.Logger.handle.__code__: "writes to a log",
    type(os.environ).__setitem__.__code__: "sets an environment variable",
    type(os.environ).__delitem__.__code__: "deletes an environment variable",
}

_IMPORT = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]


def side_effect_of(frame: FrameType) -> str | None:
    """Returns the side effect of a function about to run, as text, or None. Raises if it hands work to another thread."""
    code = frame.f_code
    if code in _THREAD_STARTS:
        what = f"the kernel {_THREAD_STARTS[code]} while it is traced; reads in another thread cannot be tracked"
        raise TraceError(what, where=called_at(frame), hint="do that outside of the kernel, and pass the result")
    return _DEEDS[code] if code in _DEEDS and not _is_once(frame) else None


def _is_once(frame: FrameType) -> bool:
    """True if the effect happens once per process: a `*_once` warning, or a module's first import."""
    caller: FrameType | None = frame
    while caller is not None and not (caller.f_code.co_name.endswith("_once") or caller.f_code is _IMPORT):
        caller = caller.f_back
    return caller is not None
