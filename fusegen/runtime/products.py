"""Matrix products of a call: one function of torch on views that are known when it is bound.

What torch, or `library.multiply`, looks at before it comes to cuBLAS takes as long as some kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from fusegen.program.call import MatrixProduct, StridedOperand
from fusegen.runtime.library import FAR, multiply, multiply_into


@dataclass(frozen=True)
class Place:
    """A view of a buffer, in elements."""

    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_near(self) -> bool:
        """True if cuBLAS reads it rightly."""
        return sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)) < FAR


def place_of(operand: StridedOperand, sizes: Mapping[str, int]) -> Place:
    """An operand at the sizes of a call."""
    shape, strides = (tuple(formula(sizes) for formula in formulas) for formulas in (operand.shape, operand.strides))
    return Place(operand.buffer, shape, strides, operand.offset(sizes))


def product_of(product: MatrixProduct, sizes: Mapping[str, int], *, is_rounded_once: bool) -> tuple[Any, Place, Place, Place]:
    """The function that computes a product, and its views of both operands and of the result.

    Args:
        product: what is computed.
        sizes: values of all sizes and strides, by name.
        is_rounded_once: whether torch's own function rounds the result once, to its dtype.
    """
    a, b, out = (place_of(operand, sizes) for operand in (product.a, product.b, product.out))
    if product.adds(sizes):
        return multiply_into, a, b, out
    return _function_of(a, b, out) if is_rounded_once and a.is_near and b.is_near else (multiply, a, b, out)


def _function_of(a: Place, b: Place, out: Place) -> tuple[Any, Place, Place, Place]:
    """torch's own function, where one takes such views."""
    rows, results = _as_matrix(a), _as_matrix(out)
    if math.prod(b.shape[:-2]) == 1 and rows is not None and results is not None:
        return torch.mm, rows, replace(b, shape=b.shape[-2:], strides=b.strides[-2:]), results
    first, second, third = (_as_planes(place, out.shape[:-2]) for place in (a, b, out))
    if first is not None and second is not None and third is not None:
        return torch.bmm, first, second, third
    return multiply, a, b, out


def _as_matrix(place: Place) -> Place | None:
    """Leading dims as one, where their strides allow it."""
    shape, strides = place.shape, place.strides
    merged = _merged(shape[:-1], strides[:-1])
    return None if merged is None else replace(place, shape=(merged[0], shape[-1]), strides=(merged[1], strides[-1]))


def _as_planes(place: Place, batch: Sequence[int]) -> Place | None:
    """Leading dims as one, of as many as a result has, where their strides allow it; over dims that an operand lacks it repeats."""
    missing = len(batch) + 2 - len(place.shape)
    extents, steps = (1,) * missing + place.shape[:-2], (0,) * missing + place.strides[:-2]
    repeated = [0 if extent == 1 else step for extent, step in zip(extents, steps, strict=True)]
    merged = _merged(batch, repeated)
    if merged is None:
        return None
    return replace(place, shape=(merged[0], *place.shape[-2:]), strides=(merged[1], *place.strides[-2:]))


def _merged(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Some dims as one: how many elements it has, and the stride between them."""
    dims = [dim for dim in range(len(shape)) if shape[dim] != 1]
    if any(strides[outer] != shape[inner] * strides[inner] for outer, inner in pairwise(dims)):
        return None
    last = dims[-1] if dims else len(shape) - 1
    return math.prod(shape), strides[last] if shape else 0
