"""Checks of arguments at the door of a function, which refuses shapes that would broadcast by accident; the precision of sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusegen.errors import ArgumentError


def require_shapes(**given: tuple[Any, str]) -> None:
    """Compares the shapes of tensors with each other.

    Args:
        given: by the name of a parameter, its tensor, or None, which fits; and its dims, apart by spaces: a name, which stands for
            one extent throughout; a number; ``*`` before them, which stands for any leading dims, the same throughout.

    Raises:
        ArgumentError: a tensor of another shape, or no tensor.
    """
    known: dict[str, Any] = {}
    for name, (value, dims) in given.items():
        if value is None or (isinstance(value, Tensor) and _fits(tuple(value.shape), dims.split(), known)):
            continue
        found = f"of shape {_shown(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
        hint = f"give a tensor of shape {_expected(dims.split(), known)}: ({dims.replace(' ', ', ')})"
        raise ArgumentError(f"{name} {found}", hint=hint)


def _fits(shape: tuple[Any, ...], dims: list[str], known: dict[str, Any]) -> bool:
    """True if a shape is that of the dims; what they name for the first time is known from now on."""
    if dims[:1] == ["*"]:
        leading = len(shape) - len(dims) + 1
        if leading < 0:
            return False
        shape = (shape[:leading], *shape[leading:])
    extents = zip(dims, shape, strict=False)
    return len(shape) == len(dims) and all(
        extent == (int(dim) if dim.isdigit() else known.setdefault(dim, extent)) for dim, extent in extents
    )


def _expected(dims: list[str], known: dict[str, Any]) -> str:
    """The shape that the dims are of, with the numbers that are known."""
    leading = known.get("*", ("…",)) if dims[:1] == ["*"] else ()
    return _shown((*leading, *(known.get(dim, dim) for dim in dims if dim != "*")))


def _shown(shape: Any) -> str:
    return f"({', '.join(f'{extent}' for extent in shape)})"


def is_one(extent: int) -> bool:
    """True if an extent is the number 1. A symbolic one is not asked, so that its variant is good for 1 as well."""
    return type(extent) is int and extent == 1


def require_integers(**given: Tensor | None) -> None:
    """Checks that tensors are of integers.

    Raises:
        ArgumentError: one of them is of floats or bools.
    """
    for name, value in given.items():
        if value is not None and (value.is_floating_point() or value.dtype == torch.bool):
            raise ArgumentError(f"{name} of {value.dtype}", hint="give integers")


def require_broadcast(name: str, value: Tensor, other: Tensor) -> None:
    """Checks that a tensor broadcasts to another, and does not widen it.

    Raises:
        ArgumentError: it has more dims than the other, or another extent than 1 where the other has one of its own.
    """
    shape, wanted = tuple(value.shape), tuple(other.shape)
    ends = zip(reversed(shape), reversed(wanted), strict=False)
    if len(shape) > len(wanted) or not all(is_one(extent) or extent == to for extent, to in ends):
        hint = f"give one that broadcasts to {_shown(wanted)}"
        raise ArgumentError(f"{name} of shape {_shown(shape)}", hint=hint)


def require_mask(mask: Tensor, scores: Tensor) -> None:
    """Checks that a mask is added to scores, or says which keys are seen.

    Raises:
        ArgumentError: it is of integers, as those of tokenizers are, which mean neither; or does not broadcast to the scores.
    """
    if not (mask.is_floating_point() or mask.dtype == torch.bool):
        hint = "give mask.bool(), True where a key is seen, or floats that are added to scores"
        raise ArgumentError(f"a mask of {mask.dtype}", hint=hint)
    require_broadcast("mask", mask, scores)


def widened(x: Tensor) -> Tensor:
    """x in float32, or in float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()
