"""Values: which plain ones select the same code, and whether a container holds what it held when a function read it, however deep.

A plain value is immutable and nothing but its value. In a container, plain elements are compared by value, objects and containers
inside by identity; objects are not kept alive. Tensors are compared by type alone: those that a kernel uses are its inputs, and
found anew in each call.
"""

from __future__ import annotations

import _thread
import array
import collections
import contextvars
import copy
import ctypes
import datetime
import decimal
import fractions
import functools
import io
import math
import queue
import threading
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from operator import is_
from typing import Any, TypeAlias, cast

import numpy as np
import torch

_NUMBERS = (bool, int, float, complex)
_PLAIN = frozenset(
    {
        *_NUMBERS, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, slice,
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
        decimal.Decimal, fractions.Fraction, datetime.date, datetime.datetime, datetime.timedelta,
    }
)  # fmt: skip


def is_plain(value: object) -> bool:
    """True if a value cannot change and has no identity that code could depend on."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(map(is_plain, value))  # type: ignore[call-overload]
    return kind in _PLAIN or issubclass(kind, np.generic)  # `isinstance` would ask an object for its class


def same(one: object, other: object) -> bool:
    """True if two values are the same plain value: of one type (1, 1.0 and True are equal, but not the same), with one sign of
    zero, and one NaN like another; anything else is the same as itself only."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other) or not is_plain(one):
        return False
    if kind is float:
        return _same_float(one, other)  # type: ignore[arg-type]
    if kind is tuple:
        return len(one) == len(other) and all(map(same, one, other))  # type: ignore[arg-type, call-overload]
    if kind is complex:
        return _same_float(one.real, other.real) and _same_float(one.imag, other.imag)  # type: ignore[attr-defined]
    if kind is frozenset:
        return {(type(e), e) for e in one} == {(type(e), e) for e in other}  # type: ignore[attr-defined]
    if isinstance(one, np.generic):
        return bool(one.tobytes() == other.tobytes())  # type: ignore[attr-defined]
    return bool(one == other)


def _same_float(one: float, other: float) -> bool:
    if one != one:
        return other != other
    return one == other and math.copysign(1.0, one) == math.copysign(1.0, other)


def exact(value: object) -> object:
    """A value as part of a key, where 1, 1.0 and True are three, 0.0 and -0.0 two, and NaN is itself."""
    kind = type(value)
    if isinstance(value, tuple):
        return (kind, tuple(map(exact, value)))
    if isinstance(value, frozenset):
        return (kind, frozenset(map(exact, value)))
    if kind is slice:  # which has no hash before Python 3.12
        return (kind, exact((value.start, value.stop, value.step)))  # type: ignore[attr-defined]
    return (kind, repr(value) if isinstance(value, (float, complex, np.generic)) else value)


def has_identity(value: object) -> bool:
    """True if a value is equal to nothing but itself, or says nothing of equality that could be relied on."""
    kind = type(value)
    return kind.__eq__ is object.__eq__ or kind.__hash__ is None


Matcher: TypeAlias = Callable[[Any], bool]

# Containers.

_SEQUENCES = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_BYTES = (bytearray, memoryview, array.array, ctypes.Array)
_DICTS: tuple[dict[Any, Any], ...] = ({}, collections.OrderedDict())
_VIEWS = tuple(type(view) for each in _DICTS for view in (each.keys(), each.values(), each.items()))
_INSIDE: dict[type, Callable[[Any], Any]] = {
    types.SimpleNamespace: vars,
    types.MappingProxyType: dict,
    threading.local: vars,
    functools.partial: lambda part: (part.func, part.args, part.keywords),
    contextvars.ContextVar: lambda variable: (variable.get(None),),
    weakref.ref: lambda reference: (reference(),),
    types.BuiltinFunctionType: lambda method: (method.__self__,),
    types.MethodWrapperType: lambda method: (method.__self__,),
    types.CellType: lambda cell: cell_contents(cell),
    decimal.Context: lambda context: (context.prec, context.rounding, context.Emin, context.Emax, context.clamp),
    queue.SimpleQueue: lambda waiting: (waiting.qsize(),),
    _thread.LockType: lambda lock: (lock.locked(),),
    **dict.fromkeys((io.StringIO, io.BytesIO), lambda stream: () if stream.closed else (stream.getvalue(), stream.tell())),
    **dict.fromkeys(_VIEWS, lambda view: dict(view.mapping)),
}
"""Objects of the interpreter's own types, whose reads cannot be watched: what they hold, as a container."""


def cell_contents(cell: types.CellType) -> tuple[Any, ...]:
    """The content of a cell, none before it is assigned."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` by the type that a value has, whatever class it says to be of."""
    return issubclass(type(value), kinds)


def contents(value: Any) -> Collection[Any] | None:
    """The contents of a container, as a tuple; None for what is no container."""
    if is_a(value, dict):
        return (*value.keys(), *value.values(), *_factory(value))
    if is_a(value, (*_SEQUENCES, *_SETS)):
        return tuple(value)
    if _holds_objects(value):
        return tuple(value.flat)
    if is_a(value, (np.ndarray, *_BYTES)):
        return ()
    if type(value) is types.BuiltinFunctionType and (value.__self__ is None or is_a(value.__self__, (types.ModuleType, type))):
        return None  # a function, or a method of a class
    inside = _inside(type(value))
    return None if inside is None else (inside(value),)


def _inside(kind: type) -> Callable[[Any], Any] | None:
    if issubclass(kind, BaseException) and kind.__module__ == "builtins":
        return lambda error: (error.args, vars(error))
    return _INSIDE.get(kind)


def is_opaque(value: Any) -> bool:
    """True if a container is an object of the interpreter's: equal to itself alone, whatever it comes to hold."""
    return _inside(type(value)) is not None


def _holds_objects(value: Any) -> bool:
    return is_a(value, np.ndarray) and bool(value.dtype.hasobject)


def _factory(value: Any) -> tuple[Any, ...]:
    """The function of a dictionary that makes what it lacks."""
    return (value.default_factory,) if is_a(value, collections.defaultdict) else ()


def matcher(value: object) -> Matcher:
    """A function that says whether a value is, or a container holds, what this one does now."""
    builder = _Builder()
    return builder.of(value) if contents(value) is None else builder.container(value)


class _Builder:
    """Makes matchers; what holds itself is matched by identity where it comes again."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def of(self, value: Any) -> Matcher:
        """The matcher of a value."""
        if is_plain(value):
            return lambda other: same(value, other)
        if is_a(value, torch.Tensor):
            kind = type(value)
            return lambda other: type(other) is kind
        if contents(value) is None:
            same_object = _identical((value,))
            return lambda other: same_object((other,))
        if id(value) in self._open:
            return lambda other: other is value
        holds = self.container(value)
        return lambda other: other is value and holds(other)

    def container(self, value: Any) -> Matcher:
        """The matcher of a container, whichever holds the same."""
        self._open.add(id(value))
        found = self._container(value)
        self._open.discard(id(value))
        return found

    def _container(self, value: Any) -> Matcher:
        kind = type(value)
        if _is_text(value, dict):
            kept, order = copy.deepcopy(value), tuple(value)
            return lambda other: type(other) is kind and other == kept and tuple(other) == order
        if _holds_objects(value):
            shape, objects = value.shape, self._elements(tuple(value.flat))
            return lambda other: type(other) is kind and other.shape == shape and objects(tuple(other.flat))
        if is_a(value, np.ndarray):
            return _bytes(kind, lambda a: (a.dtype, a.shape, a.tobytes()), value)
        if is_a(value, _BYTES):
            return _bytes(kind, bytes, value)
        if (inside := _inside(kind)) is not None:
            matches = self.container(inside(value))
            return lambda other: type(other) is kind and matches(inside(other))
        if is_a(value, _SETS):
            return _set(kind, value)
        if is_a(value, dict):
            keys, values = self._elements(tuple(value)), self._elements((*value.values(), *_factory(value)))
            return lambda other: type(other) is kind and keys(tuple(other)) and values((*other.values(), *_factory(other)))
        elements = self._elements(tuple(value))
        return lambda other: type(other) is kind and elements(other)

    def _elements(self, values: tuple[Any, ...]) -> Matcher:
        """The matcher of a sequence of any type: plain ones at the speed of C."""
        count = len(values)
        if all(type(value) is str for value in values):
            return lambda other: tuple(other) == values
        if all(map(is_plain, values)):
            return lambda other: len(other) == count and (all(map(is_, other, values)) or all(map(same, values, other)))
        if not any(is_plain(value) or is_a(value, torch.Tensor) or contents(value) is not None for value in values):
            return _identical(values)
        parts = [self.of(value) for value in values]
        return lambda other: len(other) == count and all(part(each) for part, each in zip(parts, other, strict=True))


def _is_text(value: Any, *kinds: type) -> bool:
    """True if a container holds nothing but text, which Python's own comparison compares as we do."""
    if is_a(value, dict):
        return type(value) in kinds and all(type(key) is str and _is_text(each) for key, each in value.items())
    return type(value) is str or (type(value) in (list, tuple) and all(map(_is_text, value)))


def _identical(values: Sequence[object]) -> Matcher:
    """The matcher of a sequence of the very same objects, which are not kept alive: none of them may be gone."""
    ids = tuple(map(id, values))
    alive: list[object] = []
    alive += (weak(value, lambda _: alive.clear()) or value for value in values)
    return lambda other: bool(alive) and tuple(map(id, other)) == ids


def weak(value: Any, at_end: Callable[[Any], object] | None = None) -> weakref.ref[Any] | None:
    """A weak reference, which calls a function at its object's end; None where there can be none."""
    try:
        return weakref.ref(value, at_end)
    except TypeError:
        return None


def _bytes(kind: type, of: Callable[[Any], object], value: Any) -> Matcher:
    wanted = of(value)
    return lambda other: type(other) is kind and of(other) == wanted


def _set(kind: type, value: Any) -> Matcher:
    if all(type(each) is str or _is_identical_class(each) for each in value):  # equal to none of another type
        kept = frozenset(value)
        return lambda other: type(other) is kind and other == kept
    wanted = _typed(value)
    return lambda other: type(other) is kind and _typed(other) == wanted


def _is_identical_class(value: object) -> bool:
    return is_a(value, type) and cast(Any, type(value)).__eq__ is type.__eq__


def _typed(values: Any) -> set[tuple[type, Any]]:
    return {(type(value), value) for value in values}
