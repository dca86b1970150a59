"""What is known of a call's arguments while a graph is recorded, as constants.

torch.compile reads this file as it reads a user's: it is plain Python, whose questions are answered while it compiles. A size
that is not known then is a negative number, the same for sizes that are known to be equal; beside it stands its value in this call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import has_static_value, statically_known_true

TENSOR, CONSTANT, INT, FLOAT = "tensor", "constant", "int", "float"
"""Kinds of arguments: the last two are numbers that are not known."""

_hint: Any = getattr(symbolic_shapes, "optimization_hint", None)  # which older versions of torch do not answer while they compile


def facts_of(values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What is known of some arguments.

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
            found.append((CONSTANT,))
    return found


def _size(size: Any, unknown: list[Any]) -> int:
    """A size as a constant: its value, or the place of the first one like it, from -1 downwards."""
    if has_static_value(size):
        return int(size) if _hint is None else _hint(size)  # of a symbol that has one value, which int() leaves a symbol
    for place, other in enumerate(unknown):
        if statically_known_true(size == other):
            return -1 - place
    unknown.append(size)
    return -len(unknown)
