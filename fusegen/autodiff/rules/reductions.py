"""Derivatives of reductions and scans."""

from __future__ import annotations

import math
from typing import cast

from fusegen.autodiff.rules.pointwise import Gradients, Rule, nothing
from fusegen.dtypes import DType
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import simplify_dim
from fusegen.passes.algebra import Value


def _dims(y: Value) -> tuple[int, ...]:
    return cast(tuple[int, ...], y.node.attr("dims"))


def _extremum(y: Value, dy: Value) -> Gradients:
    """To where the extremum is; equal ones share it. Where it is NaN, no element equals it, and 0/0 is the share of all."""
    found = y.arg(0).apply(Op.EQ, y).apply(Op.CAST, dtype=y.dtype)
    return (dy / found.reduce(Op.SUM, _dims(y)) * found,)


def _extremum_of_dim(y: Value, dy: Value) -> Gradients:
    """To the element whose index the operation gives beside the value."""
    if y.node.attr("part") != "values":
        return (None,)
    x, dims = y.arg(0), _dims(y)
    chosen = x.reduce(y.node.op, dims, part="indices")
    return (places(x, dims[0]).apply(Op.EQ, chosen).where(dy, 0),)


def places(x: Value, dim: int) -> Value:
    """The index along a dim, beside the value's other dims."""
    shape = x.node.shape
    iota = Value(x.builder, x.builder.add(Op.IOTA, (), location=x.location, shape=(shape[dim],), dtype=DType.INT64), x.location)
    return iota.apply(Op.RESHAPE, shape=tuple(size if d == dim else 1 for d, size in enumerate(shape)))


def _prod(y: Value, dy: Value) -> Gradients:
    """The product of the other elements: p/x with p the product of those that are not 0; a single zero has p itself, and
    beside a zero all others have 0."""
    x, dims = y.arg(0), _dims(y)
    is_zero = x.apply(Op.EQ, 0)
    zeros = is_zero.apply(Op.CAST, dtype=y.dtype).reduce(Op.SUM, dims)
    rest = dy * is_zero.where(1, x).reduce(Op.PROD, dims)
    alone = zeros.apply(Op.EQ, 1).where(rest, 0)
    return (is_zero.where(alone, zeros.apply(Op.EQ, 0).where(rest / x, 0)),)


def _centered(x: Value, dims: tuple[int, ...]) -> Value:
    return x - x.mean(dims)


def _var(y: Value, dy: Value) -> Gradients:
    x, dims = y.arg(0), _dims(y)
    return ((2.0 * dy * _centered(x, dims)).per(x.count(dims), y.number("correction")),)


def _std(y: Value, dy: Value) -> Gradients:
    """(x − mean)/y over the count, and 0 where all are equal. Where they nearly are, x − mean is the rounding of the mean, which
    is y as well: it is the same in all elements, so that centering twice takes it away."""
    x, dims = y.arg(0), _dims(y)
    scale = y.apply(Op.EQ, 0).where(0, dy / y)
    return ((scale * _centered(_centered(x, dims), dims)).per(x.count(dims), y.number("correction")),)


def _vector_norm(y: Value, dy: Value) -> Gradients:
    """sign(x)·(|x|/y)^(p − 1), and 0 where y is 0; of an order below 1 also where x is 0."""
    x, order = y.arg(0), y.number("ord")
    if order == 2:
        return (x * y.apply(Op.EQ, 0).where(0, dy / y),)
    powers = x.apply(Op.SIGN) * x.apply(Op.ABS).apply(Op.POW, order - 1.0)
    if isinstance(order, Value) or order < 1:
        powers = x.apply(Op.EQ, 0).where(0, powers)
    if not isinstance(order, Value) and order < 1:
        return (powers * dy * y.apply(Op.POW, 1.0 - order),)
    return (powers * y.apply(Op.EQ, 0).where(0, dy / y.apply(Op.POW, order - 1.0)),)


def _summed_from(x: Value) -> Value:
    """The sums of the elements of the last dim from each on."""
    return _reversed(_reversed(x).apply(Op.CUMSUM))


def _reversed(x: Value) -> Value:
    """The elements of the last dim from the last to the first."""
    last = len(x.node.shape) - 1
    size = x.node.shape[last]
    return x.apply(Op.SLICE, dim=last, start=simplify_dim(size - 1), length=size, step=-1)


def _cumprod(y: Value, dy: Value) -> Gradients:
    """Σ dy·y/x over all products that have x as a factor. Beside a zero before it, an element has 0; the first zero has the sum of
    dy times the products without it."""
    x = y.arg(0)
    is_zero = x.apply(Op.EQ, 0)
    zeros = is_zero.apply(Op.CAST, dtype=y.dtype).apply(Op.CUMSUM)
    is_first = is_zero.apply(Op.LOGICAL_AND, zeros.apply(Op.EQ, 1))
    before = _summed_from(dy * y) / x
    at_first = _summed_from(dy * is_first.where(1, x).apply(Op.CUMPROD))
    return (is_first.where(at_first, zeros.apply(Op.EQ, 0).where(before, 0)),)


def _logcumsumexp(y: Value, dy: Value) -> Gradients:
    """Σ dy·e^(x − y) over all sums that have e^x as a term. Logarithms of gradients are summed as the operand was, of those above
    and below 0 apart, so that no exponential leaves the range."""
    return (_shares(y, dy) - _shares(y, -dy),)


def _shares(y: Value, dy: Value) -> Value:
    """Σ dy·e^(x − y) of the gradients above 0."""
    logarithms = (dy > 0).where(dy.apply(Op.LOG), -math.inf) - y
    return (_reversed(_reversed(logarithms).apply(Op.LOGCUMSUMEXP)) + y.arg(0)).apply(Op.EXP)


REDUCTIONS: dict[Op, Rule] = {
    Op.SUM: lambda _y, dy: (dy,),  # repeated where gradients take their operands' shapes
    Op.PROD: _prod,
    Op.AMAX: _extremum,
    Op.AMIN: _extremum,
    Op.MAX: _extremum_of_dim,
    Op.MIN: _extremum_of_dim,
    Op.VAR: _var,
    Op.STD: _std,
    Op.VECTOR_NORM: _vector_norm,
    Op.LOGSUMEXP: lambda y, dy: (dy * (y.arg(0) - y).apply(Op.EXP),),
    Op.CUMSUM: lambda _y, dy: (_summed_from(dy),),
    Op.CUMPROD: _cumprod,
    Op.LAST_MAX: nothing,
    Op.LAST_MIN: nothing,
    Op.LOGCUMSUMEXP: _logcumsumexp,
}
