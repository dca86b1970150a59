"""Derivatives of what torch computes in one step, which torch computes in turn."""

from __future__ import annotations

from functools import partial
from typing import cast

from fusegen.autodiff.rules.rule import Gradients, Rule, refused
from fusegen.dtypes import DType
from fusegen.ir.ops import Op
from fusegen.passes.algebra import Value


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
