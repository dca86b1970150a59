"""Facts about a call's arguments while a graph is recorded, as constants.

torch.compile reads this file as it reads a user's: it is plain Python, whose questions are answered while it compiles. A size
that is not known then is a negative number, the same for sizes that are known to be equal; beside it stands its value in this call.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import guard_scalar, has_static_value, statically_known_true

TENSOR, CONSTANT, OBJECT, INT, FLOAT = "tensor", "constant", "object", "int", "float"
"""Kinds of arguments: an object is what older versions of torch.compile take for no constant, and the last two are numbers that are
not known."""

_hint: Any = getattr(symbolic_shapes, "optimization_hint", getattr(symbolic_shapes, "size_hint", None))
"""A size in this call, by the name of this or of an older version of torch."""

_TAKES_OBJECTS = torch.__version__ >= "2.13"  # torch.compile, for constants
_NUMBERS = (bool, int, float)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple, list, dict, torch.dtype, torch.device)


def constants_of(values: Sequence[Any], facts: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The values that are no tensors, as torch.compile takes them for constants: of an object, where it lies."""
    found = []
    for value, fact in zip(values, facts, strict=True):
        if fact[0] == CONSTANT:
            found.append(guard_scalar(value) if type(value) in _NUMBERS else value)  # a symbol of one value is no constant yet
        elif fact[0] == OBJECT:
            found.append(id(value))
    return found


def value_of(fact: tuple[Any, ...], constant: Any) -> Any:
    """The value of a constant; an object lives, as the call that it is given to is under way."""
    return ctypes.cast(constant, ctypes.py_object).value if fact[0] == OBJECT else constant


def facts_of(values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Facts about some arguments, as far as they are known.

    Returns:
        For each argument its kind, and of a tensor dtype, device, shape, the shape in this call (None where that is not known),
        whether it needs a gradient, and whether it is a parameter. A value is not among them: torch.compile takes an object for a
        constant by itself alone.
    """
    unknown: list[Any] = []
    found: list[tuple[Any, ...]] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            shape = tuple([_size(size, unknown) for size in value.shape])
            hints = None if _hint is None else tuple([_hint(size) for size in value.shape])
            is_parameter = isinstance(value, torch.nn.Parameter)
            found.append((TENSOR, value.dtype, value.device, shape, hints, value.requires_grad, is_parameter))
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and not has_static_value(value):
            found.append((INT if isinstance(value, int) else FLOAT,))
        else:
            found.append((CONSTANT if _TAKES_OBJECTS or isinstance(value, _PLAIN) else OBJECT,))
    return found


def has_unknown_floats(values: Iterable[Any]) -> bool:
    """Tells if some of a call's arguments are floats that are not known."""
    return any(isinstance(value, float) and not has_static_value(value) for value in values)


def _size(size: Any, unknown: list[Any]) -> int:
    """A size as a constant: its value, or the place of the first one like it, from -1 downwards."""
    if has_static_value(size):
        return operator.index(size)  # int() leaves a symbol that has one value a symbol
    for place, other in enumerate(unknown):
        if statically_known_true(size == other):
            return -1 - place
    unknown.append(size)
    return -len(unknown)
