"""Changes that a function makes while it is traced, of what was there before: later calls would not make them again. Where they
are looked for, they are refused and undone."""

from __future__ import annotations

import array
import contextvars
import ctypes
import inspect
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType
from typing import Any, TypeAlias

import numpy as np
import torch

from fusegen.errors import UnsupportedError
from fusegen.guards.content import cell_contents
from fusegen.guards.plain import is_plain, same

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
    """Looks for changes, if this is wanted (`refusing_changes`)."""

    def __init__(self) -> None:
        self.are_refused = _THREAD.refuses
        self._before: list[tuple[Any, _Held]] = []
        self._variables = contextvars.copy_context()
        self._settings = _settings()

    def add(self, value: Any) -> None:
        """Remembers what a container, a cell, or an object's attributes hold."""
        if self.are_refused and (held := _held(value)) is not None:
            self._before.append((value, held))

    def require_same(self, owner: Any, name: str, value: Any, where: str | None) -> None:
        """Refuses an attribute that is about to be set.

        Raises:
            ChangeError: the object has something else there.
        """
        if self.are_refused and not isinstance(value, _KEYS) and inspect.getattr_static(owner, name, None) is not value:
            what = f"the attribute {name!r} of a {type(owner).__name__} is set, which a kernel's later calls would not do again"
            raise ChangeError(what, where=where, mend=_MEND)

    def refuse(self, deed: str, where: str | None) -> None:
        """Refuses what is about to be done, and could not be undone.

        Args:
            deed: completes "the layer ...".

        Raises:
            ChangeError: always, where changes are refused.
        """
        if self.are_refused:
            raise ChangeError(f"it {deed}, which a kernel's later calls would not do again", where=where, mend="do that outside")

    def undo(self) -> ChangeError | None:
        """Puts back what was held: the error that says so, or None if nothing had changed."""
        if not self.are_refused:
            return None
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
        return ChangeError(f"a {names[0]} is changed, which a kernel's later calls would not do again", mend=_MEND)


def _settings() -> tuple[bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.get_default_dtype()


_Held: TypeAlias = tuple[Any, ...] | dict[Any, Any]
"""Elements, or what is held under keys or names."""

_FILLED: tuple[tuple[Any, Callable[[Any, Any], object]], ...] = ((list, list.extend), (deque, deque.extend), (set, set.update))
"""How containers are filled, past what a class of the user's does then."""


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
