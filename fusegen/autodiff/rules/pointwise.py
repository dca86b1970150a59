"""Rules of derivatives, and those of the pointwise primitives and of library calls. Where a function has none (a tie
of `maximum`, `abs` at 0), torch's choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast

from fusegen.dtypes import DType
from fusegen.errors import UnsupportedError
from fusegen.ir.ops import Op
from fusegen.passes.algebra import Value

# What a rule is.


Gradients: TypeAlias = tuple[Value | None, ...]
Rule: TypeAlias = Callable[[Value, Value], Gradients]
"""From a node and the gradient by it to the gradients by its operands."""


def refused(y: Value, why: str = "") -> UnsupportedError:
    """The error for a node that has no derivative."""
    at = y.location
    where = None if at is None else f"{at.file}, {f'line {at.line}' if at.line else 'first line'} of the function: {at.text}"
    mend = "compute it outside of the kernel and pass it, or name in wrt= what does not reach it"
    return UnsupportedError(f"{y.node.op.row.name} has no derivative{why and f': {why}'}", where=where, mend=mend)


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


POINTWISE: dict[Op, Rule] = {
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


LIBRARY: dict[Op, Rule] = {Op.ATTENTION: _attention}
