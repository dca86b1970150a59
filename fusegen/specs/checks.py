"""Checks of arguments: shapes that would broadcast by accident raise `ArgumentError`. Also a cast to the dtype of sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusegen.errors import ArgumentError


def require_shapes(**tensors: tuple[Any, str]) -> None:
    """Checks tensors' shapes against dims.

    Args:
        tensors: by name, pairs of a tensor (or None) and its dims, separated by spaces. A dim is a number, or a name that stands
            for one size in the whole call. A leading ``*`` stands for any leading dims, equal in the whole call.
    """
    known: dict[str, Any] = {}
    for name, (value, dims) in tensors.items():
        if value is None or (isinstance(value, Tensor) and _fits(tuple(value.shape), dims.split(), known)):
            continue
        actual = f"has shape {_shape_text(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
        hint = f"give a tensor of shape {_expected(dims.split(), known)}: ({dims.replace(' ', ', ')})"
        raise ArgumentError(f"{name} {actual}", hint=hint)


def _fits(shape: tuple[Any, ...], dims: list[str], known: dict[str, Any]) -> bool:
    """True if a shape matches the dims. Binds names that are not known yet."""
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
    """Returns the dims as text, with known sizes."""
    leading = known.get("*", ("…",)) if dims[:1] == ["*"] else ()
    return _shape_text((*leading, *(known.get(dim, dim) for dim in dims if dim != "*")))


def _shape_text(shape: Any) -> str:
    return f"({', '.join(f'{extent}' for extent in shape)})"


def is_one(extent: int) -> bool:
    """True for the int 1. A symbolic size is False, so that one specialization also serves size 1."""
    return type(extent) is int and extent == 1


def require_integers(**tensors: Tensor | None) -> None:
    """Requires integer tensors."""
    for name, value in tensors.items():
        if value is not None and (value.is_floating_point() or value.dtype == torch.bool):
            raise ArgumentError(f"{name} has dtype {value.dtype}, not an integer dtype", hint="convert it to torch.int64")


def require_broadcast(name: str, value: Tensor, other: Tensor) -> None:
    """Requires that a tensor broadcasts to the shape of another one."""
    shape, target = tuple(value.shape), tuple(other.shape)
    ends = zip(reversed(shape), reversed(target), strict=False)
    if len(shape) > len(target) or not all(is_one(extent) or extent == to for extent, to in ends):
        hint = f"give a shape that broadcasts to {_shape_text(target)}"
        raise ArgumentError(f"{name} of shape {_shape_text(shape)} does not broadcast", hint=hint)


def require_mask(mask: Tensor, scores: Tensor) -> None:
    """Requires a float or bool mask that broadcasts to scores. Tokenizers' integer masks are rejected as ambiguous."""
    if not (mask.is_floating_point() or mask.dtype == torch.bool):
        hint = "give mask.bool(), True where a key is seen, or floats to add to the scores"
        raise ArgumentError(f"the mask is {mask.dtype}, neither bool nor floats", hint=hint)
    require_broadcast("mask", mask, scores)


def widened(x: Tensor) -> Tensor:
    """Casts to float32; float64 is unchanged."""
    return x if x.dtype == torch.float64 else x.float()
