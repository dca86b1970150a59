"""Matrix products and what is made of them."""

from __future__ import annotations

from typing import Any

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import same
from fusegen.lang.functions import pointwise
from fusegen.lang.functions.common import cast, dtype_of, numbers, tracer_of
from fusegen.lang.functions.reductions import reduced
from fusegen.lang.functions.views import reshaped, transpose, unsqueeze
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("matmul", "mm", "bmm")
def matmul(input: Any, mat2: Any = None, *, other: Any = None) -> TracedTensor:
    """torch.matmul: vectors take part as one row or one column."""
    tracer = tracer_of(input, mat2, other)
    a, b = numbers("matmul", tracer.lift(input)), tracer.lift(other if mat2 is None else mat2)
    if not a.ndim or not b.ndim:
        raise ShapeError("matmul of a scalar")
    if b.ndim == 2:  # a weight: its sizes are features, whatever place they stand in
        for size in b._node.shape:
            tracer.require_literal(size)
    tracer.require_literal_feature(b._node.shape[-1])
    left, right = a.ndim == 1, b.ndim == 1
    result = tracer.add(Op.MATMUL, unsqueeze(a, 0) if left else a, unsqueeze(b, 1) if right else b)
    shape = list(result._node.shape)
    if left:
        del shape[-2]
    if right:
        del shape[-1]
    return reshaped(result, shape)


@implements("linear")
def linear(input: Any, weight: Any, bias: Any = None) -> TracedTensor:
    """x @ weight.T + bias."""
    tracer = tracer_of(input, weight, bias)
    product = matmul(input, transpose(tracer.lift(weight), -2, -1))
    return product if bias is None else pointwise.add(product, bias)


@implements("mv")
def mv(input: Any, vec: Any) -> TracedTensor:
    """A matrix and a vector."""
    return matmul(input, vec)


@implements("dot", "inner", "vdot")
def dot(input: Any, other: Any = None, *, tensor: Any = None) -> TracedTensor:
    """The sum of the products of two vectors of one dtype, which the result has as well: integers wrap."""
    second = tensor if other is None else other
    tracer = tracer_of(input, second)
    a, b = tracer.lift(input), tracer.lift(second)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"dot of tensors of {a.ndim} and {b.ndim} dims", mend="use vectors, or matmul")
    if dtype_of(a) is not dtype_of(b) or dtype_of(a) is DType.BOOL:
        raise TraceError(f"dot of {dtype_of(a)} and {dtype_of(b)}", mend="convert both to one number dtype, as torch asks as well")
    if not same(a._node.shape[0], b._node.shape[0]):
        tracer.require_equal([(a._node.shape[0], b._node.shape[0])])
        raise ShapeError(f"dot of vectors of {a.shape[0]} and {b.shape[0]} elements", mend="make the sizes equal")
    return cast(reduced(Op.SUM, tracer.add(Op.MUL, a, b), 0, False), a.dtype)


@implements("outer", "ger")
def outer(input: Any, vec2: Any) -> TracedTensor:
    """All products of the elements of two vectors."""
    tracer = tracer_of(input, vec2)
    a, b = tracer.lift(input), tracer.lift(vec2)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"outer of tensors of {a.ndim} and {b.ndim} dims", mend="use vectors")
    return tracer.add(Op.MUL, unsqueeze(a, 1), b)


@implements("addmm")
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> TracedTensor:
    """beta * input + alpha * mat1 @ mat2, of one dtype; where beta is 0, whatever the input holds."""
    tracer = tracer_of(input, mat1, mat2)
    product = matmul(mat1, mat2)
    beside, dtype = tracer.lift(input), dtype_of(product)
    if dtype_of(beside) is not dtype or dtype is DType.BOOL:
        raise TraceError(f"addmm of {dtype_of(beside)} and a product of {dtype}", mend="convert all to one number dtype")
    beside = tracer.add(Op.EXPAND, beside, shape=product._node.shape)  # which refuses what is wider
    scaled = _times(product, alpha)
    return scaled if _is_zero(beta) else tracer.add(Op.ADD, scaled, _times(beside, beta))


@implements("baddbmm")
def baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> TracedTensor:
    """beta * input + alpha * batch1 @ batch2, of one dtype; where beta is 0, whatever the input holds."""
    return addmm(input, batch1, batch2, beta=beta, alpha=alpha)


def _is_zero(factor: Any) -> bool:
    return isinstance(factor, (bool, int, float)) and factor == 0


def scaled(x: TracedTensor, factor: Any) -> TracedTensor:
    """A value times a number."""
    return x._tracer.add(Op.MUL, x, x._tracer.lift(factor))


def _times(x: TracedTensor, factor: Any) -> TracedTensor:
    """A value times a number, which torch makes a whole one for integers."""
    if isinstance(factor, (bool, int, float)):
        factor = factor if dtype_of(x).is_float else int(factor)
        return x if factor == 1 else scaled(x, factor)
    return cast(scaled(x, factor if dtype_of(x).is_float else cast(x._tracer.lift(factor), x.dtype)), x.dtype)
