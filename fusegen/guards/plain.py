"""Plain values: immutable ones that are nothing but their value, and which values of these select the same code."""

from __future__ import annotations

import datetime
import decimal
import fractions
import math

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
    """Whether a value cannot change and has no identity that code could depend on."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(map(is_plain, value))  # type: ignore[call-overload]
    return kind in _PLAIN or issubclass(kind, np.generic)  # `isinstance` would ask an object for its class


def same(one: object, other: object) -> bool:
    """Whether two values are the same plain value: of one type (1, 1.0 and True are equal, but not the same), with one sign of
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
    """Whether a value is equal to nothing but itself, or says nothing of equality that could be relied on."""
    kind = type(value)
    return kind.__eq__ is object.__eq__ or kind.__hash__ is None
