"""A softmax of scores beside one more, the sink, whose own weight is left out: ``softmax(cat([s, sink], -1))[..., :-1]``.

It lets a query attend to nothing (Xiao et al., arXiv 2309.17453, keep tokens for that; gpt-oss learns the score). Without the
concatenation the weights are ``exp(s - m) / (sum(exp(s - m)) + exp(sink - m))`` with ``m = max(amax(s), sink)``.
"""

from __future__ import annotations

from typing import cast

from fusegen.ir.ops import Op
from fusegen.ir.symbolic import same
from fusegen.passes.algebra import Value


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
    """What a softmax along the last dim is of, below conversions, and below a difference to its own largest, which changes nothing:
    the largest of the differences is 0."""
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
