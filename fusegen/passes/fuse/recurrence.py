"""The online recurrence of a weighted sum whose weights depend on a reduction along the same axis.

For o = sum_j p_j v_j with p_j = f(s_j, r1) / r2, r1 a reduction of s and r2 = sum_j f(s_j, r1), one pass over j suffices when
f separates in r1: f(s, r) = F(s) H(r). What was accumulated relative to an old r1 moves to a new one by the factor
H(new) / H(old) = f(old, new) for f(s, r) = exp(s - r) (Milakov and Gimelshein, arXiv 1805.02867, derive it for softmax;
here it follows from the graph). A streaming skeleton needs only the functions that are named here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import same
from fusegen.passes.fuse.groups import products_below


@dataclass(frozen=True)
class Recurrence:
    """The nodes of the recurrence.

    Attributes:
        scores: s, as the reductions see it.
        first: r1, the reduction that the weights are relative to.
        weights: f(s, r1).
        second: r2, the sum of the weights.
        values: the product sum_j p_j v_j.
        score_product: the product that the scores are made of.
        separation: the rule by which f separates in r1.
        guarded: whether p_j is 0 where r1 is what it starts from, and not f / 0: no key counts, so that r2 is 0.
        sink: one more score, of which only the weight counts: p_j = f(s_j, r) / (r2 + f(sink, r)), r being the larger of r1 and it.
    """

    scores: int
    first: int
    weights: int
    second: int
    values: int
    score_product: int
    separation: Separation
    guarded: bool = False
    sink: int | None = None


@dataclass(frozen=True)
class Separation:
    """One way in which weights separate: the form of f(s, r), as the operations from f down to s and r.

    Attributes:
        name: for `explain`.
        outer, inner: f(s, r) = outer(inner(s, r)).
        reduction: the reduction that r must be, so that f stays bounded.
        pair: the same of two numbers.
    """

    name: str
    outer: Op
    inner: Op
    reduction: Op
    pair: Op


SEPARATIONS: tuple[Separation, ...] = (Separation("exponential of a difference", Op.EXP, Op.SUB, Op.AMAX, Op.MAXIMUM),)
"""The known ways; for each, carry(old, new) = outer(inner(old, new))."""


def derive(graph: Graph, values: int) -> Recurrence | None:
    """The recurrence of a product whose first operand is made of such weights, or None."""
    node = graph.nodes[values]
    return weighted(graph, values, node.args[0]) if node.op is Op.MATMUL else None


def weighted(graph: Graph, values: int, operand: int) -> Recurrence | None:
    """The same where the product's first operand is a view of ``operand``, of the same matrices."""
    guard, normalized = _guard(graph, _without_cast(graph, operand))
    if graph.nodes[normalized].op is not Op.DIV:
        return None
    weights, total = (_without_cast(graph, a) for a in graph.nodes[normalized].args)
    for separation in SEPARATIONS:
        found = _separated(graph, weights, total, separation)
        if found is not None:
            scores, first, second, sink = found
            product = _single_product(graph, scores)
            if product is not None and guard in (None, first):
                return Recurrence(scores, first, weights, second, values, product, separation, guard is not None, sink)
    return None


def _separated(graph: Graph, weights: int, total: int, separation: Separation) -> tuple[int, int, int, int | None] | None:
    """The scores, the reduction that weights are relative to, their sum, and the sink if there is one."""
    relative = _relative(graph, weights, separation)
    if relative is None:
        return None
    scores, reference = relative
    first, sink = _reference(graph, reference, separation)
    second = total if sink is None else _without_sink(graph, total, sink, reference, separation)
    if second is None:
        return None
    is_first = _is_reduction(graph, first, separation.reduction) and graph.nodes[first].args[0] == scores
    is_second = _is_reduction(graph, second, Op.SUM) and graph.nodes[second].args[0] == weights
    return (scores, first, second, sink) if is_first and is_second else None


def _guard(graph: Graph, position: int) -> tuple[int | None, int]:
    """Of ``where(r == -inf, 0, p)`` the reduction r and p; of anything else no reduction, and itself."""
    node = graph.nodes[position]
    if node.op is not Op.WHERE:
        return None, position
    condition, chosen, other = node.args
    test, zero = graph.nodes[condition], graph.nodes[chosen]
    if test.op is not Op.EQ or zero.op is not Op.CONSTANT or zero.number != 0:
        return None, position
    reduction, least = test.args
    if graph.nodes[least].op is not Op.CONSTANT or graph.nodes[least].number != -math.inf:
        return None, position
    return (reduction, _without_cast(graph, other)) if _is_reduction(graph, reduction, Op.AMAX) else (None, position)


def _relative(graph: Graph, weights: int, separation: Separation) -> tuple[int, int] | None:
    """s and r of f(s, r)."""
    outer = graph.nodes[weights]
    if outer.op is not separation.outer:
        return None
    inner = graph.nodes[outer.args[0]]
    return (inner.args[0], inner.args[1]) if inner.op is separation.inner else None


def _reference(graph: Graph, reference: int, separation: Separation) -> tuple[int, int | None]:
    """The reduction that weights are relative to, and the sink where it takes part."""
    node = graph.nodes[reference]
    return (node.args[0], node.args[1]) if node.op is separation.pair else (reference, None)


def _without_sink(graph: Graph, total: int, sink: int, reference: int, separation: Separation) -> int | None:
    """The sum to which the weight of a sink is added; None where it is not, or where the sink is no score of each row."""
    node, shape = graph.nodes[total], graph.nodes[sink].shape
    is_of_rows = len(shape) == len(node.shape) and same(shape[-1], 1)
    is_added = node.op is Op.ADD and _relative(graph, node.args[1], separation) == (sink, reference)
    return node.args[0] if is_of_rows and is_added else None


def _without_cast(graph: Graph, position: int) -> int:
    """Below casts between float types, which a fused kernel need not round at."""
    while graph.nodes[position].op is Op.CAST and graph.nodes[graph.nodes[position].args[0]].dtype.is_float:
        position = graph.nodes[position].args[0]
    return position


def _is_reduction(graph: Graph, position: int, op: Op) -> bool:
    """Whether a node reduces its operand along the last dim by an operation."""
    node = graph.nodes[position]
    if node.op is not op:
        return False
    return cast(tuple[int, ...], node.attr("dims")) == (len(node.shape) - 1,)


def _single_product(graph: Graph, scores: int) -> int | None:
    """The one product that the scores reach through pointwise operations and views."""
    products = [scores] if graph.nodes[scores].op is Op.MATMUL else products_below(graph, scores)
    return products[0] if len(products) == 1 else None
