"""Rewrites that make the arithmetic cheaper or exact: small, named, independent of order.

A rule looks at one node and returns a better value, or None where it does not apply. No rule gives up accuracy: factors
are moved only when they are powers of two, and 1 + tanh(u) = 2 sigmoid(2u) removes a cancellation for negative u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

from fusegen.dtypes import DType
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Shape, same
from fusegen.passes.algebra import Value
from fusegen.passes.topk import at_few, first_few, reduced_few


def softmax_beside_a_sink(x: Value) -> Value | None:
    """The weights of the scores alone, where a slice takes them out of those of the concatenation."""
    weights = _below_casts(x.arg(0))
    joined = _softmax_of(weights)
    parts = None if joined is None else _parts(joined, x)
    if parts is None:
        return None
    last = len(x.node.shape) - 1
    scores, sink = (p if p.dtype is weights.dtype else p.apply(Op.CAST, dtype=weights.dtype) for p in parts)
    most = scores.reduce(Op.AMAX, (last,)).apply(Op.MAXIMUM, sink)
    own = (scores - most).apply(Op.EXP)
    found = own / (own.reduce(Op.SUM, (last,)) + (sink - most).apply(Op.EXP))
    return found if found.dtype is x.dtype else found.apply(Op.CAST, dtype=x.dtype)


def _parts(joined: Value, taken: Value) -> tuple[Value, Value] | None:
    """The scores that a slice takes out of a concatenation along the last dim, and the one score before or behind them."""
    last = len(taken.node.shape) - 1
    is_pair = joined.node.op is Op.CONCAT and len(joined.node.args) == 2
    if not is_pair or joined.node.attr("dim") != last or taken.node.attr("dim") != last:
        return None
    first, second = joined.arg(0), joined.arg(1)
    scores, sink = (first, second) if taken.node.attr("start") == 0 else (second, first)
    is_all = same(taken.node.shape[-1], scores.node.shape[-1])
    return (scores, sink) if is_all and same(sink.node.shape[-1], 1) else None


def _softmax_of(weights: Value) -> Value | None:
    """The operand of a softmax along the last dim, below conversions and below a difference to its own largest, which changes
    nothing: the largest of the differences is 0."""
    if weights.node.op is not Op.DIV:
        return None
    powers, total = weights.arg(0), weights.arg(1)
    is_total = _is_along_last(total, Op.SUM) and total.arg(0).position == powers.position
    found = _less_its_largest(powers.arg(0)) if is_total and powers.node.op is Op.EXP else None
    if found is None:
        return None
    shifted = _less_its_largest(found)
    return found if shifted is None else shifted


def _less_its_largest(x: Value) -> Value | None:
    """y, of ``y - max(y)`` along the last dim."""
    if x.node.op is not Op.SUB:
        return None
    y, largest = x.arg(0), x.arg(1)
    is_largest = _is_along_last(largest, Op.AMAX) or (_is_along_last(largest, Op.MAX) and largest.node.attr("part") == "values")
    return _below_casts(y) if is_largest and largest.arg(0).position == y.position else None


def _is_along_last(x: Value, op: Op) -> bool:
    return x.node.op is op and cast(tuple[int, ...], x.node.attr("dims")) == (len(x.node.shape) - 1,)


def _below_casts(x: Value) -> Value:
    """Below conversions between floats that lose nothing that a fused kernel would keep."""
    while x.node.op is Op.CAST and x.arg(0).dtype.is_float:
        x = x.arg(0)
    return x


Rewrite: TypeAlias = Callable[[Value], Value | None]


@dataclass(frozen=True)
class Rule:
    """A named rewrite of one operation, or of all of a family."""

    name: str
    op: Op | Family
    rewrite: Rewrite


def _pow_of_literal(x: Value) -> Value | None:
    base, exponent = x.arg(0), x.arg(1).node
    if exponent.op is not Op.CONSTANT or base.dtype is not x.dtype or not base.dtype.is_float or base.node.weak:
        return None
    forms: dict[float, Callable[[], Value]] = {
        1.0: lambda: base,
        2.0: lambda: base * base,
        3.0: lambda: base * base * base,
        4.0: lambda: (base * base) * (base * base),
        -1.0: lambda: 1.0 / base,
        -2.0: lambda: 1.0 / (base * base),
        0.5: lambda: base.apply(Op.SQRT),
        -0.5: lambda: base.apply(Op.RSQRT),
    }
    form = forms.get(float(exponent.number))
    return form() if form else None


def _one_plus_tanh(x: Value) -> Value | None:
    a, b = x.arg(0), x.arg(1)
    if b.is_constant(1.0):
        a, b = b, a
    if a.is_constant(1.0) and b.node.op is Op.TANH:
        return 2.0 * (2.0 * b.arg(0)).apply(Op.SIGMOID)
    return None


def _one_plus_erf(x: Value) -> Value | None:
    a, b = x.arg(0), x.arg(1)
    if b.is_constant(1.0):
        a, b = b, a
    return b.arg(0).apply(Op.ONE_PLUS_ERF) if a.is_constant(1.0) and b.node.op is Op.ERF else None


def _one_minus_erf(x: Value) -> Value | None:
    a, b = x.arg(0), x.arg(1)
    return (-b.arg(0)).apply(Op.ONE_PLUS_ERF) if a.is_constant(1.0) and b.node.op is Op.ERF else None


def _times_sigmoid(x: Value) -> Value | None:
    """One division instead of a reciprocal and a product: a rounding less, which a 16-bit result does not show."""
    if x.dtype not in (DType.FLOAT32, DType.FLOAT64):
        return None
    for factor, gate in ((x.arg(0), x.arg(1)), (x.arg(1), x.arg(0))):
        if gate.node.op is Op.SIGMOID and gate.dtype is x.dtype and factor.dtype is x.dtype and not factor.node.weak:
            return factor / (1.0 + (-gate.arg(0)).apply(Op.EXP))
    return None


def _gather_powers_of_two(x: Value) -> Value | None:
    (scale_a, a), (scale_b, b) = _scaled(x.arg(0)), _scaled(x.arg(1))
    if (scale_a, scale_b) == (1.0, 1.0) or not x.dtype.is_float or not _is_moderate(scale_a, scale_b):
        return None
    factor = scale_a * scale_b
    result = a * b
    if factor == 1.0:
        return result
    return factor * result if (scale_a != 1.0 and scale_b != 1.0) else None


def _scaled(x: Value) -> tuple[float, Value]:
    """c and y of c * y, for a constant power of two c and a float y; else 1 and the value itself."""
    if x.node.op is Op.MUL and x.dtype.is_float:
        for factor, rest in ((x.arg(0), x.arg(1)), (x.arg(1), x.arg(0))):
            is_scale = factor.node.op is Op.CONSTANT and factor.node.weak and _is_power_of_two(float(factor.node.number))
            if is_scale and not rest.node.weak and rest.dtype is x.dtype:
                return float(factor.node.number), rest
    return 1.0, x


def _is_moderate(*factors: float) -> bool:
    """True if moving factors neither overflows nor loses what they were there to keep."""
    return all(2.0**-16 <= f <= 2.0**16 for f in factors)


def _is_power_of_two(value: float) -> bool:
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5


def _choice_of_one(value: Value) -> Value | None:
    """Either of two values that are the same one."""
    one, other = value.arg(1), value.arg(2)
    is_whole = one.position == other.position and one.node.shape == value.node.shape and one.dtype is value.dtype
    return one if is_whole else None


def _times_one(x: Value) -> Value | None:
    for factor, rest in ((x.arg(0), x.arg(1)), (x.arg(1), x.arg(0))):
        if factor.is_constant(1.0) and rest.dtype is x.dtype and rest.node.shape == x.node.shape:
            return rest
    return None


def _double_negation(x: Value) -> Value | None:
    return x.arg(0).arg(0) if x.arg(0).node.op is Op.NEG else None


def _absolute_of_negation(x: Value) -> Value | None:
    return x.arg(0).arg(0).apply(Op.ABS) if x.arg(0).node.op is Op.NEG and x.dtype.is_float else None


def _sum_of_log_softmax(x: Value) -> Value | None:
    """The sum of u - log(sum(exp(u))) with u = v - amax(v): n logarithms are taken from the sum of u at once, both of one sign, so
    that rows are looked at once less."""
    terms, dims = x.arg(0), x.node.attr("dims")
    if terms.node.op is not Op.SUB or terms.arg(1).node.op is not Op.LOG:
        return None
    below, logarithm = terms.arg(0), terms.arg(1)
    mass = logarithm.arg(0)
    if mass.node.op is not Op.SUM or mass.arg(0).node.op is not Op.EXP or mass.arg(0).arg(0).position != below.position:
        return None
    peak = below.arg(1).node if below.node.op is Op.SUB else None
    is_below = peak is not None and peak.op is Op.AMAX and peak.args == below.node.args[:1] and peak.attr("dims") == dims
    count = terms.count(cast(tuple[int, ...], dims))
    if not is_below or mass.node.attr("dims") != dims or not isinstance(count, int):
        return None
    return below.reduce(Op.SUM, cast(tuple[int, ...], dims)) - logarithm * float(count)


def _reciprocal_sqrt(x: Value) -> Value | None:
    if x.arg(0).is_constant(1.0) and x.arg(1).node.op is Op.SQRT:
        return x.arg(1).arg(0).apply(Op.RSQRT)
    return None


def _concat_of_nothing(x: Value) -> Value | None:
    """Parts without elements leave a concatenation; one of a single part is that."""
    dim = cast(int, x.node.attr("dim"))
    parts = [x.arg(n) for n in range(len(x.node.args)) if not same(x.arg(n).node.shape[dim], 0)]
    if len(parts) == len(x.node.args) > 1 or not parts or parts[0].dtype is not x.dtype:
        return None
    return parts[0] if len(parts) == 1 else parts[0].apply(Op.CONCAT, *parts[1:], dim=dim)


def _product_of_permuted_rows(x: Value) -> Value | None:
    """Rows may be arranged after they are multiplied: in their own order they are a matrix in memory."""
    rows, weight = x.arg(0), x.arg(1)
    if rows.node.op is not Op.PERMUTE or len(weight.node.shape) != 2:
        return None
    dims = cast(tuple[int, ...], rows.node.attr("dims"))
    if dims[-1] != len(dims) - 1:
        return None
    return rows.arg(0).apply(Op.MATMUL, weight).apply(Op.PERMUTE, dims=dims)


def _product_of_widened_views(x: Value) -> Value | None:
    """Operands are converted to float32 behind their views, where attention finds that they have 16 bits."""
    if x.dtype is not DType.FLOAT32:
        return None
    a, b = (_widened_behind_views(x.arg(number)) for number in (0, 1))
    return None if a is None and b is None else (a or x.arg(0)).apply(Op.MATMUL, b or x.arg(1))


def _widened_behind_views(x: Value) -> Value | None:
    """The value as a conversion of a view, where it is a view of a conversion from 16 bits."""
    views: list[Value] = []
    below = x
    while below.node.family is Family.VIEW and len(below.node.args) == 1:
        views.append(below)
        below = below.arg(0)
    if not views or below.node.op is not Op.CAST or not below.arg(0).dtype.is_half:
        return None
    narrow = below.arg(0)
    for view in reversed(views):
        node = replace(view.node, args=(narrow.position,), dtype=narrow.dtype)
        narrow = Value(x.builder, x.builder.put(node, x.location), x.location)
    return narrow.apply(Op.CAST, dtype=DType.FLOAT32)


def _in_dims_of_a_statistic(x: Value) -> Value | None:
    """Computes values of a statistic without the reduced dims with these dims: so rows stay rows of one domain."""
    operands = [x.arg(number) for number in range(len(x.node.args))]
    shapes = [o.arg(0).node.shape for o in operands if _is_statistic_without_dims(o) and len(o.node.shape) == len(x.node.shape)]
    if not shapes or any(o.node.shape not in ((), x.node.shape) for o in operands):
        return None
    is_in_dims = [bool(o.node.shape) or (not x.node.shape and o.node.op is Op.RESHAPE) for o in operands]
    args = tuple((_in_shape(o, shapes[0]) if moved else o).position for o, moved in zip(operands, is_in_dims, strict=True))
    kept = x.builder.put(replace(x.node, args=args, shape=shapes[0]), x.location)
    return Value(x.builder, kept, x.location).apply(Op.RESHAPE, shape=x.node.shape)


def _is_statistic_without_dims(x: Value) -> bool:
    """True if this is a reduction, math on one, or one element of each row, without the dims that have one element."""
    if x.node.op is not Op.RESHAPE or x.arg(0).node.family not in (Family.REDUCTION, Family.POINTWISE, Family.INDEXING):
        return False
    dims, kept = x.node.shape, x.arg(0).node.shape
    return len(dims) < len(kept) and _without_ones(dims) == _without_ones(kept)


def _without_ones(shape: Shape) -> Shape:
    return tuple(extent for extent in shape if not same(extent, 1))


def _in_shape(x: Value, shape: Shape) -> Value:
    """A value in other dims; the value itself where it is a view of one in these."""
    if x.node.op is Op.RESHAPE and x.arg(0).node.shape == shape:
        return x.arg(0)
    return x.apply(Op.RESHAPE, shape=shape)


def _back_and_forth(x: Value) -> Value | None:
    below = x.arg(0)
    return below.arg(0) if below.node.op is Op.RESHAPE and below.arg(0).node.shape == x.node.shape else None


def _whole_slice(x: Value) -> Value | None:
    """A slice of all elements of a dim, in their order."""
    is_whole = x.node.shape == x.arg(0).node.shape and x.node.attr("step") == 1
    return x.arg(0) if is_whole else None


RULES: tuple[Rule, ...] = (
    Rule("back-and-forth", Op.RESHAPE, _back_and_forth),
    Rule("product-of-widened-views", Op.MATMUL, _product_of_widened_views),
    Rule("product-of-permuted-rows", Op.MATMUL, _product_of_permuted_rows),
    Rule("whole-slice", Op.SLICE, _whole_slice),
    Rule("softmax-beside-a-sink", Op.SLICE, softmax_beside_a_sink),
    Rule("concat-of-nothing", Op.CONCAT, _concat_of_nothing),
    Rule("pow-of-literal", Op.POW, _pow_of_literal),
    Rule("one-plus-tanh", Op.ADD, _one_plus_tanh),
    Rule("one-plus-erf", Op.ADD, _one_plus_erf),
    Rule("one-minus-erf", Op.SUB, _one_minus_erf),
    Rule("times-one", Op.MUL, _times_one),
    Rule("choice-of-one", Op.WHERE, _choice_of_one),
    Rule("gather-powers-of-two", Op.MUL, _gather_powers_of_two),
    Rule("times-sigmoid", Op.MUL, _times_sigmoid),
    Rule("double-negation", Op.NEG, _double_negation),
    Rule("absolute-of-negation", Op.ABS, _absolute_of_negation),
    Rule("sum-of-log-softmax", Op.SUM, _sum_of_log_softmax),
    Rule("reciprocal-sqrt", Op.DIV, _reciprocal_sqrt),
    Rule("first-few", Op.TOPK, first_few),
    Rule("reduced-few", Family.REDUCTION, reduced_few),
    Rule("at-few", Op.GATHER, at_few),
    Rule("in-dims-of-a-statistic", Family.POINTWISE, _in_dims_of_a_statistic),
)

_BY_OP: dict[Op, tuple[Rule, ...]] = {op: tuple(r for r in RULES if r.op in (op, op.family)) for op in Op}


def simplify(value: Value) -> Value:
    """The value after the first rule that applies to it; rules see operands that are simplified already."""
    if value.node.weak:
        return value  # numbers among themselves are Python's
    for rule in _BY_OP[value.node.op]:
        better = rule.rewrite(value)
        if better is not None:
            return better
    return value
