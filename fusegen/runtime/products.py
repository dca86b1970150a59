"""Matrix products as lines of a call's function: one call of torch on views that are known when it is bound.

What torch, or `library.multiply`, looks at before it comes to cuBLAS takes as long as some kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from fusegen.program.call import MatrixProduct, StridedOperand
from fusegen.runtime.library import FAR, multiply, multiply_into
from fusegen.runtime.straight import Writer


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

    def text(self, writer: Writer) -> str:
        """The view, as an expression."""
        return writer.view(self.buffer, self.shape, self.strides, self.offset)


def place_of(writer: Writer, operand: StridedOperand) -> Place:
    """An operand at the sizes of a call."""
    shape, strides = (tuple(formula(writer.sizes) for formula in formulas) for formulas in (operand.shape, operand.strides))
    return Place(operand.buffer, shape, strides, operand.offset(writer.sizes))


def write_product(writer: Writer, product: MatrixProduct) -> None:
    """Adds the call of a product."""
    a, b, out = (place_of(writer, operand) for operand in (product.a, product.b, product.out))
    dtypes = [writer.spec(place.buffer).dtype for place in (a, out)]
    is_rounded_once = dtypes[0] is dtypes[1] or writer.device.type == "cuda"
    function, views = (multiply_into, [a, b, out]) if product.adds(writer.sizes) else _function_of(a, b, out)
    if function in (torch.mm, torch.bmm) and not (is_rounded_once and a.is_near and b.is_near):
        function, views = multiply, [a, b, out]
    *operands, result = (view.text(writer) for view in views)
    if function not in (torch.mm, torch.bmm):
        writer.add(f"{writer.value(function, 'multiply')}({', '.join([*operands, result])})")
        return
    wider = "" if dtypes[0] is dtypes[1] else f", out_dtype={writer.dtype(product.out.buffer)}"
    writer.add(f"{writer.value(function, 'product')}({', '.join(operands)}, out={result}{wider})")


def _function_of(a: Place, b: Place, out: Place) -> tuple[Any, list[Place]]:
    """The function that computes a product, and the views that it takes."""
    if math.prod(b.shape[:-2]) == 1:
        matrices = [_as_matrix(a), replace(b, shape=b.shape[-2:], strides=b.strides[-2:]), _as_matrix(out)]
        if None not in matrices:
            return torch.mm, [m for m in matrices if m is not None]
    planes = [_as_planes(place, out.shape[:-2]) for place in (a, b, out)]
    if None not in planes:
        return torch.bmm, [p for p in planes if p is not None]
    return multiply, [a, b, out]


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
