"""Small, named, order-independent rewrites that make the arithmetic cheaper or more exact.

A rule returns a better value for a node, or None. No rule loses accuracy: only powers of two are moved as factors, and 1 + tanh(u)
= 2 sigmoid(2u) removes a cancellation for negative u.
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
from fusegen.passes.topk import gathered_topk, reduced_topk, topk_as_reductions


def softmax_with_sink(x: Value) -> Value | None:
    """Avoids the concatenation in a softmax of scores and an attention sink, if a slice of the result keeps only the scores."""
    weights = _below_casts(x.arg(0))
    concatenated = _softmax_of(weights)
    operands = None if concatenated is None else _scores_and_sink(concatenated, x)
    if operands is None:
        return None
    last = len(x.node.shape) - 1
    scores, sink = (p if p.dtype is weights.dtype else p.apply(Op.CAST, dtype=weights.dtype) for p in operands)
    row_max = scores.reduce(Op.AMAX, (last,)).apply(Op.MAXIMUM, sink)
    powers = (scores - row_max).apply(Op.EXP)
    result = powers / (powers.reduce(Op.SUM, (last,)) + (sink - row_max).apply(Op.EXP))
    return result if result.dtype is x.dtype else result.apply(Op.CAST, dtype=x.dtype)


def _scores_and_sink(concatenated: Value, kept_slice: Value) -> tuple[Value, Value] | None:
    """Returns the two operands of a concatenation along the last dim: the scores, which the slice keeps, and the attention sink."""
    last = len(kept_slice.node.shape) - 1
    is_pair = concatenated.node.op is Op.CONCAT and len(concatenated.node.args) == 2
    if not is_pair or concatenated.node.attr("dim") != last or kept_slice.node.attr("dim") != last:
        return None
    first, second = concatenated.arg(0), concatenated.arg(1)
    scores, sink = (first, second) if kept_slice.node.attr("start") == 0 else (second, first)
    is_all = same(kept_slice.node.shape[-1], scores.node.shape[-1])
    return (scores, sink) if is_all and same(sink.node.shape[-1], 1) else None


def _softmax_of(weights: Value) -> Value | None:
    """Returns the operand of a softmax along the last dim, below a subtraction of the row max if there is one; else None."""
    if weights.node.op is not Op.DIV:
        return None
    powers, total = weights.arg(0), weights.arg(1)
    is_total = _is_along_last(total, Op.SUM) and total.arg(0).position == powers.position
    operand = _minus_row_max(powers.arg(0)) if is_total and powers.node.op is Op.EXP else None
    if operand is None:
        return None
    shifted = _minus_row_max(operand)
    return operand if shifted is None else shifted


def _minus_row_max(x: Value) -> Value | None:
    if x.node.op is not Op.SUB:
        return None
    y, largest = x.arg(0), x.arg(1)
    is_largest = _is_along_last(largest, Op.AMAX) or (_is_along_last(largest, Op.MAX) and largest.node.attr("part") == "values")
    return _below_casts(y) if is_largest and largest.arg(0).position == y.position else None


def _is_along_last(x: Value, op: Op) -> bool:
    return x.node.op is op and cast(tuple[int, ...], x.node.attr("dims")) == (len(x.node.shape) - 1,)


def _below_casts(x: Value) -> Value:
    """Skips casts between floats, whose rounding a fused kernel would not perform."""
    while x.node.op is Op.CAST and x.arg(0).dtype.is_float:
        x = x.arg(0)
    return x


Rewrite: TypeAlias = Callable[[Value], Value | None]


@dataclass(frozen=True)
class Rule:
    name: str
    op: Op | Family
    rewrite: Rewrite


def _pow_of_literal(x: Value) -> Value | None:
    base, exponent = x.arg(0), x.arg(1).node
    if exponent.op is not Op.CONSTANT or base.dtype is not x.dtype or not base.dtype.is_float or base.node.weak:
        return None
    rewrites: dict[float, Callable[[], Value]] = {
        1.0: lambda: base,
        2.0: lambda: base * base,
        3.0: lambda: base * base * base,
        4.0: lambda: (base * base) * (base * base),
        -1.0: lambda: 1.0 / base,
        -2.0: lambda: 1.0 / (base * base),
        0.5: lambda: base.apply(Op.SQRT),
        -0.5: lambda: base.apply(Op.RSQRT),
    }
    rewrite = rewrites.get(float(exponent.number))
    return rewrite() if rewrite else None


def _one_plus_tanh(x: Value) -> Value | None:
    a, b = x.arg(0), x.arg(1)
    if b.is_constant(1.0):
        a, b = b, a
    if a.is_constant(1.0) and b.node.op is Op.TANH:
        return 2.0 * _doubled(b.noted("1 + tanh(u) as 2 sigmoid(2u).").arg(0)).apply(Op.SIGMOID)
    return None


def _doubled(x: Value) -> Value:
    """Returns 2x; the constant factor of a product is doubled, which is exact."""
    if x.node.op is Op.MUL:
        for factor, factored in ((x.arg(0), x.arg(1)), (x.arg(1), x.arg(0))):
            is_scale = factor.node.op is Op.CONSTANT and factor.node.weak and _is_moderate(abs(float(factor.node.number)))
            if is_scale and not factored.node.weak and factored.dtype is x.dtype:
                return 2.0 * float(factor.node.number) * factored
    return 2.0 * x


def _one_plus_erf(x: Value) -> Value | None:
    a, b = x.arg(0), x.arg(1)
    if b.is_constant(1.0):
        a, b = b, a
    return b.arg(0).apply(Op.ONE_PLUS_ERF) if a.is_constant(1.0) and b.node.op is Op.ERF else None


def _one_minus_erf(x: Value) -> Value | None:
    a, b = x.arg(0), x.arg(1)
    return (-b.arg(0)).apply(Op.ONE_PLUS_ERF) if a.is_constant(1.0) and b.node.op is Op.ERF else None


def _times_sigmoid(x: Value) -> Value | None:
    """Computes x * sigmoid(y) with one division, which rounds once less. 16-bit results would not show the difference."""
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
    """Returns c and y of a float c * y, where c is a constant power of two; for other values, 1 and the value."""
    if x.node.op is Op.MUL and x.dtype.is_float:
        for factor, factored in ((x.arg(0), x.arg(1)), (x.arg(1), x.arg(0))):
            is_scale = factor.node.op is Op.CONSTANT and factor.node.weak and _is_power_of_two(float(factor.node.number))
            if is_scale and not factored.node.weak and factored.dtype is x.dtype:
                return float(factor.node.number), factored
    return 1.0, x


def _is_moderate(*factors: float) -> bool:
    """True if moving the factors neither overflows nor underflows."""
    return all(2.0**-16 <= f <= 2.0**16 for f in factors)


def _is_power_of_two(value: float) -> bool:
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5


def _choice_of_one(value: Value) -> Value | None:
    chosen, alternative = value.arg(1), value.arg(2)
    is_same = chosen.position == alternative.position and chosen.node.shape == value.node.shape and chosen.dtype is value.dtype
    return chosen if is_same else None


def _times_one(x: Value) -> Value | None:
    for factor, value in ((x.arg(0), x.arg(1)), (x.arg(1), x.arg(0))):
        if factor.is_constant(1.0) and value.dtype is x.dtype and value.node.shape == x.node.shape:
            return value
    return None


def _double_negation(x: Value) -> Value | None:
    return x.arg(0).arg(0) if x.arg(0).node.op is Op.NEG else None


def _absolute_of_negation(x: Value) -> Value | None:
    return x.arg(0).arg(0).apply(Op.ABS) if x.arg(0).node.op is Op.NEG and x.dtype.is_float else None


def _sum_of_log_softmax(x: Value) -> Value | None:
    """The sum of u - log(sum(exp(u))) with u = v - amax(v): subtracts n logarithms at once from the sum of u, which saves a pass
    over the row."""
    terms, dims = x.arg(0), x.node.attr("dims")
    if terms.node.op is not Op.SUB or terms.arg(1).node.op is not Op.LOG:
        return None
    shifted, logarithm = terms.arg(0), terms.arg(1)
    row_sum = logarithm.arg(0)
    if row_sum.node.op is not Op.SUM or row_sum.arg(0).node.op is not Op.EXP or row_sum.arg(0).arg(0).position != shifted.position:
        return None
    row_max = shifted.arg(1).node if shifted.node.op is Op.SUB else None
    is_below = (
        row_max is not None and row_max.op is Op.AMAX and row_max.args == shifted.node.args[:1] and row_max.attr("dims") == dims
    )
    count = terms.count(cast(tuple[int, ...], dims))
    if not is_below or row_sum.node.attr("dims") != dims or not isinstance(count, int):
        return None
    return shifted.reduce(Op.SUM, cast(tuple[int, ...], dims)) - logarithm * float(count)


def _sum_of_one_hot(x: Value) -> Value | None:
    """The sum along a dim of where(position == index, value, 0), as in a loss's gradient, is the value if the index is in range."""
    terms, dims = x.arg(0), cast(tuple[int, ...], x.node.attr("dims"))
    if len(dims) != 1 or terms.node.op is not Op.WHERE or terms.arg(0).node.op is not Op.EQ or not terms.arg(2).is_constant(0.0):
        return None
    shape, (dim,), value = terms.node.shape, dims, terms.arg(1)
    for positions, index in (terms.arg(0).args, terms.arg(0).args[::-1]):
        if index.dtype.is_float:  # 1.5 is in range, and equals no position
            continue
        if _is_position(positions, shape, dim) and all(_is_constant_along(v, dim - len(shape)) for v in (index, value)):
            index = index if index.dtype is DType.INT64 else index.apply(Op.CAST, dtype=DType.INT64)
            is_in_range = index.apply(Op.GE, 0).apply(Op.LOGICAL_AND, index.apply(Op.LT, cast(int, shape[dim])))
            result = is_in_range.where(value, terms.arg(2))
            return result if result.node.shape == x.node.shape and result.dtype is x.dtype else None
    return None


def _is_position(x: Value, shape: Shape, dim: int) -> bool:
    """True for the positions 0, 1, … along a dim of a shape of known extent there."""
    behind = len(shape) - dim
    is_along = len(x.node.shape) >= behind and same(x.node.shape[-behind], shape[dim]) and len(_without_ones(x.node.shape)) == 1
    while x.node.op is Op.RESHAPE:
        x = x.arg(0)
    return is_along and x.node.op is Op.IOTA and isinstance(shape[dim], int)


def _is_constant_along(x: Value, dim: int) -> bool:
    return len(x.node.shape) < -dim or same(x.node.shape[dim], 1)


def _reciprocal_sqrt(x: Value) -> Value | None:
    if x.arg(0).is_constant(1.0) and x.arg(1).node.op is Op.SQRT:
        return x.arg(1).arg(0).apply(Op.RSQRT)
    return None


def _concat_of_nothing(x: Value) -> Value | None:
    dim = cast(int, x.node.attr("dim"))
    operands = [x.arg(n) for n in range(len(x.node.args)) if not same(x.arg(n).node.shape[dim], 0)]
    if len(operands) == len(x.node.args) > 1 or not operands or operands[0].dtype is not x.dtype:
        return None
    return operands[0] if len(operands) == 1 else operands[0].apply(Op.CONCAT, *operands[1:], dim=dim)


def _product_of_permuted_rows(x: Value) -> Value | None:
    """Permutes rows after the matmul, because in their original order they are a matrix in memory."""
    rows, weight = x.arg(0), x.arg(1)
    if rows.node.op is not Op.PERMUTE or len(weight.node.shape) != 2:
        return None
    dims = cast(tuple[int, ...], rows.node.attr("dims"))
    if dims[-1] != len(dims) - 1:
        return None
    return rows.arg(0).apply(Op.MATMUL, weight).apply(Op.PERMUTE, dims=dims)


def _product_of_widened_views(x: Value) -> Value | None:
    """Casts operands to float32 after their views, so that attention recognizes 16-bit operands."""
    if x.dtype is not DType.FLOAT32:
        return None
    a, b = (_widened_behind_views(x.arg(number)) for number in (0, 1))
    return None if a is None and b is None else (a or x.arg(0)).apply(Op.MATMUL, b or x.arg(1))


def _widened_behind_views(x: Value) -> Value | None:
    views: list[Value] = []
    source = x
    while source.node.family is Family.VIEW and len(source.node.args) == 1:
        views.append(source)
        source = source.arg(0)
    if not views or source.node.op is not Op.CAST or not source.arg(0).dtype.is_half:
        return None
    narrow = source.arg(0)
    for view in reversed(views):
        node = replace(view.node, args=(narrow.position,), dtype=narrow.dtype)
        narrow = Value(x.builder, x.builder.add_node(node, x.location), x.location)
    return narrow.apply(Op.CAST, dtype=DType.FLOAT32)


def _in_dims_of_a_statistic(x: Value) -> Value | None:
    """Computes math on row statistics in a shape with the reduced dims, so that it shares the rows' domain."""
    operands = [x.arg(number) for number in range(len(x.node.args))]
    shapes = [o.arg(0).node.shape for o in operands if _is_statistic_without_dims(o) and len(o.node.shape) == len(x.node.shape)]
    if not shapes or any(o.node.shape not in ((), x.node.shape) for o in operands):
        return None
    is_in_dims = [bool(o.node.shape) or (not x.node.shape and o.node.op is Op.RESHAPE) for o in operands]
    args = tuple((_in_shape(o, shapes[0]) if reshapes else o).position for o, reshapes in zip(operands, is_in_dims, strict=True))
    with_dims = x.builder.add_node(replace(x.node, args=args, shape=shapes[0]), x.location)
    return Value(x.builder, with_dims, x.location).apply(Op.RESHAPE, shape=x.node.shape)


def _is_statistic_without_dims(x: Value) -> bool:
    """True for a reshape that drops dims of extent 1 from a reduction, from math on a reduction, or from one element of each
    row."""
    if x.node.op is not Op.RESHAPE or x.arg(0).node.family not in (Family.REDUCTION, Family.POINTWISE, Family.INDEXING):
        return False
    dims, original = x.node.shape, x.arg(0).node.shape
    return len(dims) < len(original) and _without_ones(dims) == _without_ones(original)


def _without_ones(shape: Shape) -> Shape:
    return tuple(extent for extent in shape if not same(extent, 1))


def _in_shape(x: Value, shape: Shape) -> Value:
    if x.node.op is Op.RESHAPE and x.arg(0).node.shape == shape:
        return x.arg(0)
    return x.apply(Op.RESHAPE, shape=shape)


def _back_and_forth(x: Value) -> Value | None:
    operand = x.arg(0)
    return operand.arg(0) if operand.node.op is Op.RESHAPE and operand.arg(0).node.shape == x.node.shape else None


def _whole_slice(x: Value) -> Value | None:
    is_identity = x.node.shape == x.arg(0).node.shape and x.node.attr("step") == 1
    return x.arg(0) if is_identity else None


RULES: tuple[Rule, ...] = (
    Rule("back-and-forth", Op.RESHAPE, _back_and_forth),
    Rule("product-of-widened-views", Op.MATMUL, _product_of_widened_views),
    Rule("product-of-permuted-rows", Op.MATMUL, _product_of_permuted_rows),
    Rule("whole-slice", Op.SLICE, _whole_slice),
    Rule("softmax-beside-a-sink", Op.SLICE, softmax_with_sink),
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
    Rule("sum-of-one-hot", Op.SUM, _sum_of_one_hot),
    Rule("reciprocal-sqrt", Op.DIV, _reciprocal_sqrt),
    Rule("first-few", Op.TOPK, topk_as_reductions),
    Rule("reduced-few", Family.REDUCTION, reduced_topk),
    Rule("at-few", Op.GATHER, gathered_topk),
    Rule("in-dims-of-a-statistic", Family.POINTWISE, _in_dims_of_a_statistic),
)

_BY_OP: dict[Op, tuple[Rule, ...]] = {op: tuple(r for r in RULES if r.op in (op, op.family)) for op in Op}


def simplify(value: Value) -> Value:
    if value.node.weak:
        return value  # arithmetic on numbers is the host's
    for rule in _BY_OP[value.node.op]:
        replacement = rule.rewrite(value)
        if replacement is not None:
            return replacement
    return value
