"""Diagonals of matrices: taken out, and put in."""

from __future__ import annotations

import sympy

from fusegen.errors import ShapeError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, simplify_dim
from fusegen.lang.functions import pointwise, reductions
from fusegen.lang.functions.arrangements import pad
from fusegen.lang.functions.common import cast, each_dim, normalize_dim, numbers
from fusegen.lang.functions.creation import iota
from fusegen.lang.functions.views import holds, movedim, own, reshaped, sliced, unsqueeze, within
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("diagonal")
def diagonal_of(input: TracedTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TracedTensor:
    """The elements whose index in one dim is that in another less an offset, as the last dim."""
    if input.ndim < 2:
        raise ShapeError(f"diagonal of a tensor of {input.ndim} dims", mend="give it two dims or more")
    x = movedim(input, each_dim((dim1, dim2), input.ndim), (-2, -1))
    *outer, rows, columns = x._node.shape
    below, behind = max(0, -int(offset)), max(0, int(offset))
    length = _lesser(x, simplify_dim(rows - below), simplify_dim(columns - behind))
    if not holds(x._tracer, sympy.sympify(length) > 0):
        return sliced(reshaped(x, (*outer, simplify_dim(rows * columns))), len(outer), 0, 0)
    flat = reshaped(x, (*outer, simplify_dim(rows * columns)))
    return within(sliced(flat, len(outer), simplify_dim(below * columns + behind), length, columns + 1), x)


def _lesser(x: TracedTensor, a: Dim, b: Dim) -> Dim:
    return a if holds(x._tracer, sympy.sympify(a) <= b) else b


@implements("linalg.diagonal")
def linalg_diagonal(A: TracedTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TracedTensor:
    """The diagonals of matrices in the last two dims, unless others are named."""
    return diagonal_of(A, offset, dim1, dim2)


@implements("diag")
def diag(input: TracedTensor, diagonal: int = 0) -> TracedTensor:
    """The diagonal of a matrix, or the matrix with a vector as its diagonal."""
    if input.ndim == 1:
        return diag_embed(input, diagonal)
    if input.ndim != 2:
        raise ShapeError(f"diag of a tensor of {input.ndim} dims", mend="give it a vector or a matrix, or use torch.diagonal")
    return own(diagonal_of(input, diagonal))


@implements("trace")
def trace(input: TracedTensor) -> TracedTensor:
    """The sum of a matrix's diagonal."""
    if input.ndim != 2:
        raise ShapeError(f"trace of a tensor of {input.ndim} dims", mend="give it a matrix")
    return reductions.sum(diagonal_of(numbers("trace", input)))


@implements("diag_embed")
def diag_embed(input: TracedTensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TracedTensor:
    """Matrices with vectors as their diagonals, and zeros elsewhere."""
    if not input.ndim:
        raise ShapeError("diag_embed of a tensor without dims", mend="give it one dim or more")
    tracer, shift = input._tracer, int(offset)
    wide = pad(input, (0, abs(shift)))
    number = iota(tracer, wide._node.shape[-1])
    is_on = tracer.add(Op.EQ, number, pointwise.add(unsqueeze(number, 1), shift))
    along = unsqueeze(wide, -1 if shift >= 0 else -2)
    rank = input.ndim + 1
    places = tuple(normalize_dim(d, rank) for d in (dim1, dim2))
    filled = cast(pointwise.where(is_on, along, 0), input.dtype)
    return movedim(filled, (-2, -1), places)
