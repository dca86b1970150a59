"""Comparison of Python values: plain values that select the same code, and containers with unchanged contents at any depth.

A plain value is immutable and has no identity. In containers, plain elements are compared by value, objects and nested containers
by identity. Objects are not kept alive. Tensors are compared by type alone, since each call reads the captured tensors anew.
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
    """True if a value is immutable and has no identity that code could depend on."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(map(is_plain, value))  # type: ignore[call-overload]
    return kind in _PLAIN or issubclass(kind, np.generic)  # `isinstance` would read the object's `__class__`


def same(a: object, b: object) -> bool:
    """True if two values are the same object, or plain values of one type that are equal. The sign of zero counts, all NaNs are
    equal."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b) or not is_plain(a):
        return False
    if kind is float:
        return _same_float(a, b)  # type: ignore[arg-type]
    if kind is tuple:
        return len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type, call-overload]
    if kind is complex:
        return _same_float(a.real, b.real) and _same_float(a.imag, b.imag)  # type: ignore[attr-defined]
    if kind is frozenset:
        return {(type(e), e) for e in a} == {(type(e), e) for e in b}  # type: ignore[attr-defined]
    if isinstance(a, np.generic):
        return bool(a.tobytes() == b.tobytes())  # type: ignore[attr-defined]
    return bool(a == b)


def _same_float(a: float, b: float) -> bool:
    if a != a:
        return b != b
    return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)


def exact_key(value: object) -> object:
    """Returns a hashable key of a value that distinguishes 1, 1.0 and True, and 0.0 and -0.0; NaN equals itself."""
    kind = type(value)
    if isinstance(value, tuple):
        return (kind, tuple(map(exact_key, value)))
    if isinstance(value, frozenset):
        return (kind, frozenset(map(exact_key, value)))
    if kind is slice:  # unhashable before Python 3.12
        return (kind, exact_key((value.start, value.stop, value.step)))  # type: ignore[attr-defined]
    return (kind, repr(value) if isinstance(value, (float, complex, np.generic)) else value)


def has_identity(value: object) -> bool:
    """True if a value compares by identity, or is unhashable."""
    kind = type(value)
    return kind.__eq__ is object.__eq__ or kind.__hash__ is None


Matcher: TypeAlias = Callable[[Any], bool]

# Containers.

_SEQUENCES = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_BYTES = (bytearray, memoryview, array.array, ctypes.Array)
_DICTS: tuple[dict[Any, Any], ...] = ({}, collections.OrderedDict())
_VIEWS = tuple(type(view) for each in _DICTS for view in (each.keys(), each.values(), each.items()))
_GETTERS: dict[type, Callable[[Any], Any]] = {
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


def cell_contents(cell: types.CellType) -> tuple[Any, ...]:
    """Returns a cell's content as a tuple, empty if the cell is unassigned."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    return issubclass(type(value), kinds)


def contents(value: Any) -> Collection[Any] | None:
    """Returns the contents of a container as a tuple, or None for other values."""
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
    inside = _getter(type(value))
    return None if inside is None else (inside(value),)


def _getter(kind: type) -> Callable[[Any], Any] | None:
    if issubclass(kind, BaseException) and kind.__module__ == "builtins":
        return lambda error: (error.args, vars(error))
    return _GETTERS.get(kind)


def is_opaque(value: Any) -> bool:
    """True for interpreter objects with contents that compare by identity."""
    return _getter(type(value)) is not None


def _holds_objects(value: Any) -> bool:
    return is_a(value, np.ndarray) and bool(value.dtype.hasobject)


def _factory(value: Any) -> tuple[Any, ...]:
    return (value.default_factory,) if is_a(value, collections.defaultdict) else ()


def equality_test(value: object) -> Matcher:
    """Returns a predicate that tells whether a value equals this one, or a container has the contents that this one has now."""
    builder = _Builder()
    return builder.of(value) if contents(value) is None else builder.container(value)


class _Builder:
    def __init__(self) -> None:
        self._open: set[int] = set()

    def of(self, value: Any) -> Matcher:
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
        self._open.add(id(value))
        match = self._container(value)
        self._open.discard(id(value))
        return match

    def _container(self, value: Any) -> Matcher:
        kind = type(value)
        if _is_only_text(value, dict):
            saved, order = copy.deepcopy(value), tuple(value)
            return lambda other: type(other) is kind and other == saved and tuple(other) == order
        if _holds_objects(value):
            shape, objects = value.shape, self._elements(tuple(value.flat))
            return lambda other: type(other) is kind and other.shape == shape and objects(tuple(other.flat))
        if is_a(value, np.ndarray):
            return _bytes_matcher(kind, lambda a: (a.dtype, a.shape, a.tobytes()), value)
        if is_a(value, _BYTES):
            return _bytes_matcher(kind, bytes, value)
        if (getter := _getter(kind)) is not None:
            matches = self.container(getter(value))
            return lambda other: type(other) is kind and matches(getter(other))
        if is_a(value, _SETS):
            return _set_matcher(kind, value)
        if is_a(value, dict):
            keys, values = self._elements(tuple(value)), self._elements((*value.values(), *_factory(value)))
            return lambda other: type(other) is kind and keys(tuple(other)) and values((*other.values(), *_factory(other)))
        elements = self._elements(tuple(value))
        return lambda other: type(other) is kind and elements(other)

    def _elements(self, values: tuple[Any, ...]) -> Matcher:
        count = len(values)
        if all(type(value) is str for value in values):
            return lambda other: tuple(other) == values
        if all(map(is_plain, values)):
            return lambda other: len(other) == count and (all(map(is_, other, values)) or all(map(same, values, other)))
        if not any(is_plain(value) or is_a(value, torch.Tensor) or contents(value) is not None for value in values):
            return _identical(values)
        matchers = [self.of(value) for value in values]
        return lambda other: len(other) == count and all(match(each) for match, each in zip(matchers, other, strict=True))


def _is_only_text(value: Any, *kinds: type) -> bool:
    """True if a container holds only strings, which Python compares exactly."""
    if is_a(value, dict):
        return type(value) in kinds and all(type(key) is str and _is_only_text(each) for key, each in value.items())
    return type(value) is str or (type(value) in (list, tuple) and all(map(_is_only_text, value)))


def _identical(values: Sequence[object]) -> Matcher:
    """Returns the matcher of a sequence of the same objects. It holds them weakly and fails once one is collected."""
    ids = tuple(map(id, values))
    alive: list[object] = []
    alive += (weak_reference(value, lambda _: alive.clear()) or value for value in values)
    return lambda other: bool(alive) and tuple(map(id, other)) == ids


def weak_reference(value: Any, at_end: Callable[[Any], object] | None = None) -> weakref.ref[Any] | None:
    """Returns a weak reference with an optional finalizer, or None if the type does not support it."""
    try:
        return weakref.ref(value, at_end)
    except TypeError:
        return None


def _bytes_matcher(kind: type, of: Callable[[Any], object], value: Any) -> Matcher:
    expected = of(value)
    return lambda other: type(other) is kind and of(other) == expected


def _set_matcher(kind: type, value: Any) -> Matcher:
    if all(type(each) is str or _is_identical_class(each) for each in value):  # never equal to a value of another type
        elements = frozenset(value)
        return lambda other: type(other) is kind and other == elements
    expected = _typed(value)
    return lambda other: type(other) is kind and _typed(other) == expected


def _is_identical_class(value: object) -> bool:
    return is_a(value, type) and cast(Any, type(value)).__eq__ is type.__eq__


def _typed(values: Any) -> set[tuple[type, Any]]:
    return {(type(value), value) for value in values}
