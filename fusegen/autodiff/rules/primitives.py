"""Derivatives of the pointwise primitives, of reductions and scans, and of library calls. The rules follow torch where a function
has none (a tie of `maximum`, `abs` at 0)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast

from fusegen.dtypes import DType
from fusegen.errors import UnsupportedError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import simplify_dim
from fusegen.passes.algebra import Value

Gradients: TypeAlias = tuple[Value | None, ...]
GradientRule: TypeAlias = Callable[[Value, Value], Gradients]
"""Maps a node and its gradient to the gradients of its operands."""


def refused(y: Value, reason: str = "") -> UnsupportedError:
    """Returns the error for a node without a derivative."""
    at = y.location
    where = None if at is None else f"{at.file}, line {at.line} of the function: {at.text}"
    hint = "compute it outside of the kernel and pass the result, or leave the inputs that reach it out of wrt="
    return UnsupportedError(f"{y.node.op.row.name} has no derivative{reason and f': {reason}'}", where=where, hint=hint)


def no_gradient(y: Value, _dy: Value) -> Gradients:
    """The rule of functions that are piecewise constant."""
    return (None,) * len(y.node.args)


def _div(y: Value, dy: Value) -> Gradients:
    """dy/b and −dy·(y/b); the quotient y/b comes first, since dy/b may overflow."""
    return dy / y.arg(1), -dy * (y / y.arg(1))


def _pow(y: Value, dy: Value) -> Gradients:
    """dy·b·a^(b − 1), and 0 for b = 0; dy·y·log(a), and 0 for a = 0 and b ≥ 0."""
    a, b = y.arg(0), y.arg(1)
    is_number = b.node.op is Op.CONSTANT and b.node.weak  # powers by numbers simplify further
    by_a = dy * (b * a.apply(Op.POW, b.node.number - 1 if is_number else b - 1))
    if b.node.op is not Op.CONSTANT:
        by_a = b.apply(Op.EQ, 0).where(0, by_a)
    elif b.node.number == 0:
        return None, None
    is_zero = a.apply(Op.EQ, 0).apply(Op.LOGICAL_AND, b.apply(Op.GE, 0))
    return by_a, is_zero.where(0, dy * (y * a.apply(Op.LOG)))


def _extremum(y: Value, dy: Value) -> Gradients:
    """dy for the selected operand, 0 for the other; equal operands get half each."""
    a, b = y.arg(0), y.arg(1)
    loses = Op.LT if y.node.op is Op.MAXIMUM else Op.GT
    ties = a.apply(Op.EQ, b).where(0.5 * dy, dy)
    return a.apply(loses, b).where(0, ties), b.apply(loses, a).where(0, ties)


def _atan2(y: Value, dy: Value) -> Gradients:
    """dy·b/(a² + b²) and −dy·a/(a² + b²), and 0 for a = b = 0."""
    a, b = y.arg(0), y.arg(1)
    square = a * a + b * b
    scaled = square.apply(Op.EQ, 0).where(0, dy / square)
    return scaled * b, -scaled * a


POINTWISE: dict[Op, GradientRule] = {
    Op.CAST: lambda y, dy: (dy,),
    Op.COPY: lambda y, dy: (dy,),
    Op.NEG: lambda y, dy: (-dy,),
    Op.ABS: lambda y, dy: (dy * y.arg(0).apply(Op.SIGN),),
    Op.SIGN: no_gradient,
    Op.LOGICAL_NOT: no_gradient,
    Op.FLOOR: no_gradient,
    Op.CEIL: no_gradient,
    Op.TRUNC: no_gradient,
    Op.ROUND: no_gradient,
    Op.EXP: lambda y, dy: (dy * y,),
    Op.EXP2: lambda y, dy: (dy * (y * math.log(2.0)),),
    Op.EXPM1: lambda y, dy: (dy * y.arg(0).apply(Op.EXP),),
    Op.LOG: lambda y, dy: (dy / y.arg(0),),
    Op.LOG1P: lambda y, dy: (dy / (1.0 + y.arg(0)),),
    Op.LOG2: lambda y, dy: (dy / (y.arg(0) * math.log(2.0)),),
    Op.SQRT: lambda y, dy: (dy / (2.0 * y),),
    Op.RSQRT: lambda y, dy: (-0.5 * (dy * y) * (y * y),),
    Op.SIN: lambda y, dy: (dy * y.arg(0).apply(Op.COS),),
    Op.COS: lambda y, dy: (-dy * y.arg(0).apply(Op.SIN),),
    Op.TANH: lambda y, dy: (dy * (1.0 - y * y),),
    Op.ERF: lambda y, dy: (dy * (2.0 / math.sqrt(math.pi) * (-(y.arg(0) * y.arg(0))).apply(Op.EXP)),),
    Op.ERFC: lambda y, dy: (dy * (-2.0 / math.sqrt(math.pi) * (-(y.arg(0) * y.arg(0))).apply(Op.EXP)),),
    Op.LGAMMA: lambda y, dy: (dy * y.arg(0).apply(Op.DIGAMMA),),
    Op.SIGMOID: lambda y, dy: (dy * (y * (1.0 - y)),),
    Op.ADD: lambda y, dy: (dy, dy),
    Op.SUB: lambda y, dy: (dy, -dy),
    Op.MUL: lambda y, dy: (dy * y.arg(1), dy * y.arg(0)),
    Op.DIV: _div,
    Op.FLOOR_DIVIDE: no_gradient,
    Op.REMAINDER: lambda y, dy: (dy, -dy * y.arg(0).apply(Op.FLOOR_DIVIDE, y.arg(1))),
    Op.POW: _pow,
    Op.ATAN2: _atan2,
    Op.MAXIMUM: _extremum,
    Op.MINIMUM: _extremum,
    Op.EQ: no_gradient,
    Op.NE: no_gradient,
    Op.LT: no_gradient,
    Op.LE: no_gradient,
    Op.GT: no_gradient,
    Op.GE: no_gradient,
    Op.LOGICAL_AND: no_gradient,
    Op.LOGICAL_OR: no_gradient,
    Op.LOGICAL_XOR: no_gradient,
    Op.BITWISE_AND: no_gradient,
    Op.BITWISE_OR: no_gradient,
    Op.BITWISE_XOR: no_gradient,
    Op.LEFT_SHIFT: no_gradient,
    Op.RIGHT_SHIFT: no_gradient,
    Op.WHERE: lambda y, dy: (None, y.arg(0).where(dy, 0), y.arg(0).where(0, dy)),
}


# Derivatives of library calls, which are library calls.


def _attention(y: Value, dy: Value) -> Gradients:
    """The gradients of queries, keys, values and bias, from the logsumexp: Dao et al., arXiv 2205.14135, appendix B."""
    attrs, operands = dict(y.node.attrs), y.args
    if attrs["result"]:
        raise refused(y)
    shared = {name: attrs[name] for name in ("scale", "causal", "dropout")}
    q, *inputs = operands
    forward = partial(q.apply, Op.ATTENTION, *inputs, **shared, orders=attrs["orders"])
    sums = forward(result=1, order=(0, 1, 2), dtype=q.dtype.compute)
    state = [forward(result=2, order=(0,), dtype=DType.INT64)] if attrs["dropout"] else []
    order = cast(tuple[int, ...], attrs["order"])
    arguments = dy.unpermuted(order), y.unpermuted(order), sums, *operands, *state
    orders = (*cast(tuple[tuple[int, ...], ...], attrs["orders"]), (0, 1, 2, 3))
    return tuple(
        arguments[0]
        .apply(Op.ATTENTION_BACKWARD, *arguments[1:], **shared, result=index, order=orders[index], dtype=operand.dtype)
        .unpermuted(orders[index])
        for index, operand in enumerate(operands)
    )


LIBRARY: dict[Op, GradientRule] = {Op.ATTENTION: _attention}


# Derivatives of reductions and scans.


def _dims(y: Value) -> tuple[int, ...]:
    return cast(tuple[int, ...], y.node.attr("dims"))


def _extremum_of_all(y: Value, dy: Value) -> Gradients:
    """dy, shared equally by all elements that equal the extremum. A NaN extremum equals none, so all elements get 0/0 = NaN."""
    matches = y.arg(0).apply(Op.EQ, y).apply(Op.CAST, dtype=y.dtype)
    return (dy / matches.reduce(Op.SUM, _dims(y)) * matches,)


def _extremum_of_dim(y: Value, dy: Value) -> Gradients:
    """dy for the element that the operation's index result selects, 0 for the others."""
    if y.node.attr("part") != "values":
        return (None,)
    x, dims = y.arg(0), _dims(y)
    selected = x.reduce(y.node.op, dims, part="indices")
    return (positions_along(x, dims[0]).apply(Op.EQ, selected).where(dy, 0),)


def positions_along(x: Value, dim: int) -> Value:
    """Returns the indices along a dim, of extent 1 in all other dims."""
    shape = x.node.shape
    iota = Value(x.builder, x.builder.add(Op.IOTA, (), location=x.location, shape=(shape[dim],), dtype=DType.INT64), x.location)
    return iota.apply(Op.RESHAPE, shape=tuple(size if d == dim else 1 for d, size in enumerate(shape)))


def _prod(y: Value, dy: Value) -> Gradients:
    """dy·p/x with p the product of the nonzero elements. A single zero gets dy·p; the others get 0 then."""
    x, dims = y.arg(0), _dims(y)
    is_zero = x.apply(Op.EQ, 0)
    zeros = is_zero.apply(Op.CAST, dtype=y.dtype).reduce(Op.SUM, dims)
    product = dy * is_zero.where(1, x).reduce(Op.PROD, dims)
    at_zero = zeros.apply(Op.EQ, 1).where(product, 0)
    return (is_zero.where(at_zero, zeros.apply(Op.EQ, 0).where(product / x, 0)),)


def _centered(x: Value, dims: tuple[int, ...]) -> Value:
    return x - x.mean(dims)


def _var(y: Value, dy: Value) -> Gradients:
    x, dims = y.arg(0), _dims(y)
    return ((2.0 * dy * _centered(x, dims)).per(x.count(dims), y.number("correction")),)


def _std(y: Value, dy: Value) -> Gradients:
    """(x − mean)/y over the count, and 0 where y is 0. If the elements are almost equal, x − mean is dominated by the mean's
    rounding, which is the same in all elements, so that centering twice removes it."""
    x, dims = y.arg(0), _dims(y)
    scale = y.apply(Op.EQ, 0).where(0, dy / y)
    return ((scale * _centered(_centered(x, dims), dims)).per(x.count(dims), y.number("correction")),)


def _vector_norm(y: Value, dy: Value) -> Gradients:
    """dy·sign(x)·(|x|/y)^(p − 1), and 0 where y is 0; for p < 1 also where x is 0."""
    x, order = y.arg(0), y.number("ord")
    if order == 2:
        return (x * y.apply(Op.EQ, 0).where(0, dy / y),)
    powers = x.apply(Op.SIGN) * x.apply(Op.ABS).apply(Op.POW, order - 1.0)
    if isinstance(order, Value) or order < 1:
        powers = x.apply(Op.EQ, 0).where(0, powers)
    if not isinstance(order, Value) and order < 1:
        return (powers * dy * y.apply(Op.POW, 1.0 - order),)
    return (powers * y.apply(Op.EQ, 0).where(0, dy / y.apply(Op.POW, order - 1.0)),)


def _suffix_sums(x: Value) -> Value:
    """Returns the sums along the last dim from each element to the end."""
    return _reversed(_reversed(x).apply(Op.CUMSUM))


def _reversed(x: Value) -> Value:
    """Reverses the last dim."""
    last = len(x.node.shape) - 1
    size = x.node.shape[last]
    return x.apply(Op.SLICE, dim=last, start=simplify_dim(size - 1), length=size, step=-1)


def _cumprod(y: Value, dy: Value) -> Gradients:
    """Σ dy·y/x over all prefix products with the factor x. Elements after a zero get 0; the first zero gets the sum over the
    products without it."""
    x = y.arg(0)
    is_zero = x.apply(Op.EQ, 0)
    zeros = is_zero.apply(Op.CAST, dtype=y.dtype).apply(Op.CUMSUM)
    is_first = is_zero.apply(Op.LOGICAL_AND, zeros.apply(Op.EQ, 1))
    at_others = _suffix_sums(dy * y) / x
    at_first = _suffix_sums(dy * is_first.where(1, x).apply(Op.CUMPROD))
    return (is_first.where(at_first, zeros.apply(Op.EQ, 0).where(at_others, 0)),)


def _logcumsumexp(y: Value, dy: Value) -> Gradients:
    """Σ dy·e^(x − y) over all prefix sums with the term e^x. Positive and negative gradients are summed separately, as logarithms,
    so that no exponential overflows."""
    return (_shares(y, dy) - _shares(y, -dy),)


def _shares(y: Value, dy: Value) -> Value:
    """Σ dy·e^(x − y) over the positive gradients."""
    logarithms = (dy > 0).where(dy.apply(Op.LOG), -math.inf) - y
    return (_reversed(_reversed(logarithms).apply(Op.LOGCUMSUMEXP)) + y.arg(0)).apply(Op.EXP)


REDUCTIONS: dict[Op, GradientRule] = {
    Op.SUM: lambda _y, dy: (dy,),  # repeated where gradients take their operands' shapes
    Op.PROD: _prod,
    Op.AMAX: _extremum_of_all,
    Op.AMIN: _extremum_of_all,
    Op.MAX: _extremum_of_dim,
    Op.MIN: _extremum_of_dim,
    Op.VAR: _var,
    Op.STD: _std,
    Op.VECTOR_NORM: _vector_norm,
    Op.LOGSUMEXP: lambda y, dy: (dy * (y.arg(0) - y).apply(Op.EXP),),
    Op.CUMSUM: lambda _y, dy: (_suffix_sums(dy),),
    Op.CUMPROD: _cumprod,
    Op.LAST_MAX: no_gradient,
    Op.LAST_MIN: no_gradient,
    Op.LOGCUMSUMEXP: _logcumsumexp,
}
