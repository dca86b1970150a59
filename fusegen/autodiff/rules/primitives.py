"""Derivatives of the pointwise primitives, of reductions and scans, and of library calls. Where a function has none (a tie of
`maximum`, `abs` at 0), torch's choice."""

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
"""From a node and the gradient by it to the gradients by its operands."""


def refused(y: Value, why: str = "") -> UnsupportedError:
    """The error for a node that has no derivative."""
    at = y.location
    where = None if at is None else f"{at.file}, {f'line {at.line}' if at.line else 'first line'} of the function: {at.text}"
    hint = "compute it outside of the kernel and pass it, or name in wrt= what does not reach it"
    return UnsupportedError(f"{y.node.op.row.name} has no derivative{why and f': {why}'}", where=where, hint=hint)


def nothing(y: Value, _dy: Value) -> Gradients:
    """The rule of what is constant wherever it has a derivative."""
    return (None,) * len(y.node.args)


def _div(y: Value, dy: Value) -> Gradients:
    """dy·y/b, in which the quotient is taken first: it is in range where dy/b is not."""
    return dy / y.arg(1), -dy * (y / y.arg(1))


def _pow(y: Value, dy: Value) -> Gradients:
    """b·a^(b − 1), which is 0 for b = 0 whatever a is, and y·log(a), which is 0 for a = 0."""
    a, b = y.arg(0), y.arg(1)
    is_number = b.node.op is Op.CONSTANT and b.node.weak  # some powers of numbers are better known by other names
    by_a = dy * (b * a.apply(Op.POW, b.node.number - 1 if is_number else b - 1))
    if b.node.op is not Op.CONSTANT:
        by_a = b.apply(Op.EQ, 0).where(0, by_a)
    elif b.node.number == 0:
        return None, None
    is_zero = a.apply(Op.EQ, 0).apply(Op.LOGICAL_AND, b.apply(Op.GE, 0))
    return by_a, is_zero.where(0, dy * (y * a.apply(Op.LOG)))


def _extremum(y: Value, dy: Value) -> Gradients:
    """To the operand that was chosen; a tie is shared."""
    a, b = y.arg(0), y.arg(1)
    loses = Op.LT if y.node.op is Op.MAXIMUM else Op.GT
    ties = a.apply(Op.EQ, b).where(0.5 * dy, dy)
    return a.apply(loses, b).where(0, ties), b.apply(loses, a).where(0, ties)


def _atan2(y: Value, dy: Value) -> Gradients:
    """b/(a² + b²) and −a/(a² + b²), and 0 where both legs are."""
    a, b = y.arg(0), y.arg(1)
    square = a * a + b * b
    scaled = square.apply(Op.EQ, 0).where(0, dy / square)
    return scaled * b, -scaled * a


POINTWISE: dict[Op, GradientRule] = {
    Op.CAST: lambda y, dy: (dy,),
    Op.COPY: lambda y, dy: (dy,),
    Op.NEG: lambda y, dy: (-dy,),
    Op.ABS: lambda y, dy: (dy * y.arg(0).apply(Op.SIGN),),
    Op.SIGN: nothing,
    Op.LOGICAL_NOT: nothing,
    Op.FLOOR: nothing,
    Op.CEIL: nothing,
    Op.TRUNC: nothing,
    Op.ROUND: nothing,
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
    Op.FLOOR_DIVIDE: nothing,
    Op.REMAINDER: lambda y, dy: (dy, -dy * y.arg(0).apply(Op.FLOOR_DIVIDE, y.arg(1))),
    Op.POW: _pow,
    Op.ATAN2: _atan2,
    Op.MAXIMUM: _extremum,
    Op.MINIMUM: _extremum,
    Op.EQ: nothing,
    Op.NE: nothing,
    Op.LT: nothing,
    Op.LE: nothing,
    Op.GT: nothing,
    Op.GE: nothing,
    Op.LOGICAL_AND: nothing,
    Op.LOGICAL_OR: nothing,
    Op.LOGICAL_XOR: nothing,
    Op.BITWISE_AND: nothing,
    Op.BITWISE_OR: nothing,
    Op.BITWISE_XOR: nothing,
    Op.LEFT_SHIFT: nothing,
    Op.RIGHT_SHIFT: nothing,
    Op.WHERE: lambda y, dy: (None, y.arg(0).where(dy, 0), y.arg(0).where(0, dy)),
}


# Derivatives of what torch computes in one step, which torch computes in turn.


def _attention(y: Value, dy: Value) -> Gradients:
    """The gradients by queries, keys, values and bias, made of the logsumexp: Dao et al., arXiv 2205.14135, appendix B."""
    attrs, operands = dict(y.node.attrs), y.args
    if attrs["result"]:
        raise refused(y)
    of_both = {name: attrs[name] for name in ("scale", "causal", "dropout")}
    q, *others = operands
    beside = partial(q.apply, Op.ATTENTION, *others, **of_both, orders=attrs["orders"])
    sums = beside(result=1, order=(0, 1, 2), dtype=q.dtype.compute)
    state = [beside(result=2, order=(0,), dtype=DType.INT64)] if attrs["dropout"] else []
    order = cast(tuple[int, ...], attrs["order"])
    given = dy.unpermuted(order), y.unpermuted(order), sums, *operands, *state
    orders = (*cast(tuple[tuple[int, ...], ...], attrs["orders"]), (0, 1, 2, 3))
    return tuple(
        given[0]
        .apply(Op.ATTENTION_BACKWARD, *given[1:], **of_both, result=number, order=orders[number], dtype=operand.dtype)
        .unpermuted(orders[number])
        for number, operand in enumerate(operands)
    )


LIBRARY: dict[Op, GradientRule] = {Op.ATTENTION: _attention}


# Derivatives of reductions and scans.


def _dims(y: Value) -> tuple[int, ...]:
    return cast(tuple[int, ...], y.node.attr("dims"))


def _extremum_of_all(y: Value, dy: Value) -> Gradients:
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
    Op.CUMSUM: lambda _y, dy: (_summed_from(dy),),
    Op.CUMPROD: _cumprod,
    Op.LAST_MAX: nothing,
    Op.LAST_MIN: nothing,
    Op.LOGCUMSUMEXP: _logcumsumexp,
}
