"""Matches attention: a matmul of streaming weights with values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import cast

import sympy

from fusegen.dtypes import DType
from fusegen.families.attention.bounds import NumberInMemory, first_visible_key, visible_keys
from fusegen.families.attention.operands import (
    STORED,
    AttentionOperands,
    operand_candidates,
    operands_of,
    without_widening,
)
from fusegen.families.attention.plan import attention_plans
from fusegen.families.gemm.epilogue import is_computed_once
from fusegen.fusion.groups import Domain, Group, GroupKind, matmuls_below, matmuls_of
from fusegen.fusion.producers import Producers, domain_axes, walk
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Dim, Index, literal, same
from fusegen.target import Target

# The online recurrence of a weighted sum whose weights depend on a reduction along the same axis.
#
# For o = sum_j p_j v_j with p_j = f(s_j, r1) / r2, r1 a reduction of s and r2 = sum_j f(s_j, r1), one pass over j suffices when
# f separates in r1: f(s, r) = F(s) H(r). Sums relative to an old r1 are rescaled to a new one by the factor H(new) / H(old) =
# f(old, new) for f(s, r) = exp(s - r) (Milakov and Gimelshein, arXiv 1805.02867, for softmax; here it follows from the graph).


ATTENTION = GroupKind("attention", reads_logical_dtype=True)


@dataclass(frozen=True)
class Recurrence:
    """The nodes of the recurrence.

    Attributes:
        scores: s, as the reductions read it.
        first: r1, the reduction that the weights are relative to.
        weights: f(s, r1).
        second: r2, the sum of the weights.
        values: the matmul sum_j p_j v_j.
        score_product: the matmul that computes the scores.
        separation: the rule by which f separates in r1.
        zeroes_masked_rows: True if p_j is 0, and not f / 0, for fully masked rows: r1 is its initial value and r2 is 0.
        sink: the attention sink, a score without a value: p_j = f(s_j, r) / (r2 + f(sink, r)) with r = max(r1, sink).
    """

    scores: int
    first: int
    weights: int
    second: int
    values: int
    score_product: int
    separation: Separation
    zeroes_masked_rows: bool = False
    sink: int | None = None


@dataclass(frozen=True)
class Separation:
    """A form of streaming weights f(s, r), as the operations from f down to the score s and the reduction r.

    Attributes:
        name: the name in error messages.
        outer, inner: f(s, r) = outer(inner(s, r)).
        reduction: the reduction that must compute r, so that f stays bounded.
        pair: the same reduction of two numbers.
    """

    name: str
    outer: Op
    inner: Op
    reduction: Op
    pair: Op


SEPARATIONS: tuple[Separation, ...] = (Separation("exponential of a difference", Op.EXP, Op.SUB, Op.AMAX, Op.MAXIMUM),)
"""The supported forms; for each, rescale(old, new) = outer(inner(old, new))."""


def match_recurrence(graph: Graph, values: int) -> Recurrence | None:
    """Returns the recurrence whose weights are the first operand of a matmul, or None."""
    node = graph.nodes[values]
    return match_weighted_sum(graph, values, node.args[0]) if node.op is Op.MATMUL else None


def match_weighted_sum(graph: Graph, values: int, operand: int) -> Recurrence | None:
    """Returns the recurrence of a matmul whose first operand is a view of ``operand`` with the same matrices, or None."""
    guard, normalized = _guard(graph, _without_cast(graph, operand))
    if graph.nodes[normalized].op is not Op.DIV:
        return None
    weights, total = (_without_cast(graph, a) for a in graph.nodes[normalized].args)
    for separation in SEPARATIONS:
        parts = _separated(graph, weights, total, separation)
        if parts is not None:
            scores, first, second, sink = parts
            product = _single_product(graph, scores)
            if product is not None and guard in (None, first):
                return Recurrence(scores, first, weights, second, values, product, separation, guard is not None, sink)
    return None


def _separated(graph: Graph, weights: int, total: int, separation: Separation) -> tuple[int, int, int, int | None] | None:
    """Returns the scores, the reduction that weights are relative to, their sum, and the sink or None."""
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
    """Returns r and p of ``where(r == -inf, 0, p)``; for any other value, None and the value itself."""
    node = graph.nodes[position]
    if node.op is not Op.WHERE:
        return None, position
    condition, chosen, value = node.args
    test, zero = graph.nodes[condition], graph.nodes[chosen]
    if test.op is not Op.EQ or zero.op is not Op.CONSTANT or zero.number != 0:
        return None, position
    reduction, least = test.args
    if graph.nodes[least].op is not Op.CONSTANT or graph.nodes[least].number != -math.inf:
        return None, position
    return (reduction, _without_cast(graph, value)) if _is_reduction(graph, reduction, Op.AMAX) else (None, position)


def _relative(graph: Graph, weights: int, separation: Separation) -> tuple[int, int] | None:
    """Returns s and r of f(s, r)."""
    outer = graph.nodes[weights]
    if outer.op is not separation.outer:
        return None
    inner = graph.nodes[outer.args[0]]
    return (inner.args[0], inner.args[1]) if inner.op is separation.inner else None


def _reference(graph: Graph, reference: int, separation: Separation) -> tuple[int, int | None]:
    node = graph.nodes[reference]
    return (node.args[0], node.args[1]) if node.op is separation.pair else (reference, None)


def _without_sink(graph: Graph, total: int, sink: int, reference: int, separation: Separation) -> int | None:
    """Returns the sum of weights without the sink's; None if the sink is not added, or is not one score per row."""
    node, shape = graph.nodes[total], graph.nodes[sink].shape
    is_of_rows = len(shape) == len(node.shape) and same(shape[-1], 1)
    is_added = node.op is Op.ADD and _relative(graph, node.args[1], separation) == (sink, reference)
    return node.args[0] if is_of_rows and is_added else None


def _without_cast(graph: Graph, position: int) -> int:
    """Skips casts between float types: a fused kernel need not round there."""
    while graph.nodes[position].op is Op.CAST and graph.nodes[graph.nodes[position].args[0]].dtype.is_float:
        position = graph.nodes[position].args[0]
    return position


def _is_reduction(graph: Graph, position: int, op: Op) -> bool:
    node = graph.nodes[position]
    if node.op is not op:
        return False
    return cast(tuple[int, ...], node.attr("dims")) == (len(node.shape) - 1,)


def _single_product(graph: Graph, scores: int) -> int | None:
    """Returns the only matmul that the scores depend on through pointwise operations and views, or None."""
    products = [scores] if graph.nodes[scores].op is Op.MATMUL else matmuls_below(graph, scores)
    return products[0] if len(products) == 1 else None


_OF_PAGES = (128, 64, 32, 16, 8, 4, 2, 1)  # keys that are read at once from a page
_CHANNELS = 8  # the head dim is a multiple: vectors of 16 bytes
_MOST_CHANNELS = 256


@dataclass(frozen=True)
class AttentionMatch:
    """The recurrence of an attention, and q, k and v in memory.

    Attributes:
        visible_keys: a bound on the keys that a query sees, over (batch, head, query); None if it may see all.
        first_key: the first key that a query may see, likewise.
    """

    recurrence: Recurrence
    operands: AttentionOperands
    visible_keys: Index | None
    first_key: Index | None

    @property
    def reads(self) -> tuple[int, ...]:
        """The values in memory that the kernel reads besides those of scores and epilogue."""
        table = self.operands.table
        integers = (self.visible_keys, self.first_key, self.operands.present_keys, None if table is None else table.number)
        functions = set().union(*(sympy.sympify(i).atoms(NumberInMemory) for i in integers if i is not None))
        return (*(view.base for view in self.operands.views), *sorted({int(number.args[0]) for number in functions}))


_FEWEST_HEADS = 4


def is_supported(operands: AttentionOperands, target: Target) -> bool:
    """True if a target has a kernel for an attention. Without `wgmma`, it needs few queries, whose number is literal, and not few
    heads of keys: a head is the work of one block."""
    if target.wgmma:
        return True
    queries, channels, values = (literal(size) for size in (*operands.q.shape[-2:], operands.v.shape[-1]))
    heads = literal(operands.k.shape[1]) or _FEWEST_HEADS
    if not target.products or not queries or not channels or not values or heads < _FEWEST_HEADS:
        return False
    return bool(attention_plans(channels, values, operands.gqa_group, queries, target))


def attention_group(graph: Graph, root: int, target: Target, materialized: Collection[int]) -> Group | None:
    """Returns the attention group that ends in ``root``, or None if there is none or the pipeline does not support it."""
    for values in _products_at(graph, root):
        recurrence = match_recurrence(graph, values)
        if recurrence is None or rejection_reason(graph, recurrence, root, target) is not None:
            continue
        operands = attention_operands(graph, recurrence, target)
        assert operands is not None  # checked by `rejection_reason`
        scores = recurrence.scores
        match = AttentionMatch(recurrence, operands, visible_keys(graph, scores), first_visible_key(graph, scores))
        inputs = _inputs(graph, match, root, materialized)
        if inputs is not None:
            core_nodes = tuple(sorted((recurrence.score_product, recurrence.first, recurrence.second, values)))
            return Group(ATTENTION, (root,), inputs, Domain(graph.nodes[root].shape), core_nodes, match=match)
    return None


def _products_at(graph: Graph, root: int) -> list[int]:
    """Returns the root itself, or the matmuls below its pointwise epilogue."""
    if graph.nodes[root].family is Family.CONTRACTION:
        return [root]
    if graph.nodes[root].family is not Family.POINTWISE:
        return []
    return matmuls_below(graph, root)


def rejection_reason(graph: Graph, recurrence: Recurrence, root: int, target: Target) -> str | None:
    """Returns the reason why the attention pipeline cannot compute a recurrence; None if it can."""
    values, scores = graph.nodes[recurrence.values], graph.nodes[recurrence.score_product]
    q, keys = (graph.nodes[without_widening(graph, a)] for a in scores.args)
    if len(values.shape) != 4 or not all(map(same, graph.nodes[root].shape, values.shape)):
        return "the tensors are not (batch, head, position, channel)"
    if not all(map(same, graph.nodes[recurrence.scores].shape, scores.shape)):
        return "the scores do not have the shape of the matmul"
    if values.dtype not in (DType.BFLOAT16, DType.FLOAT16) or {q.dtype, keys.dtype} != {values.dtype}:
        dtypes = ", ".join(dict.fromkeys(str(node.dtype) for node in (q, keys, values)))
        return f"operands are {dtypes}, not 16-bit floats of one dtype"
    if graph.nodes[root].dtype not in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32):
        return f"the result is {graph.nodes[root].dtype}"
    for channels in (q.shape[-1], values.shape[-1]):
        if (literal(channels) or _MOST_CHANNELS + 1) > _MOST_CHANNELS or (literal(channels) or 1) % _CHANNELS:
            return f"the head dim is {channels}, not a multiple of {_CHANNELS} up to {_MOST_CHANNELS}"
    operands = attention_operands(graph, recurrence, target)
    if operands is None:
        return "q, k or v does not have contiguous channels and 16-byte strides, or batch and heads are broadcast"
    return None if is_supported(operands, target) else f"{target.name} has one for few queries of several heads of keys only"


def attention_operands(graph: Graph, recurrence: Recurrence, target: Target) -> AttentionOperands | None:
    """Returns q, k and v as TMA reads them, or None."""
    q, keys = graph.nodes[recurrence.score_product].args
    return operands_of(graph, q, keys, graph.nodes[recurrence.values].args[1], target)


def extents_of_attention(graph: Graph, target: Target) -> dict[Dim, tuple[int, ...]]:
    """Returns the symbolic extents whose bounds and divisors decide which caches the kernels read in place, with these divisors:
    sizes of pages, and numbers of queries over caches of 8 bits."""
    found = (o for each in _matmul_operands(graph, target) for o in operand_candidates(graph, *each, target))
    operands = [o for o in found if is_supported(o, target)]
    extents: dict[Dim, tuple[int, ...]] = {o.q.shape[-2]: (1,) for o in operands if graph.nodes[o.k.base].dtype in STORED}
    extents |= {o.table.page: _OF_PAGES for o in operands if o.table is not None}
    return {extent: divisors for extent, divisors in extents.items() if literal(extent) is None}


def _matmul_operands(graph: Graph, target: Target) -> Iterator[tuple[int, int, int]]:
    """Yields queries, keys and values of each attention; nothing on targets without attention kernels."""
    recurrences = (match_recurrence(graph, matmul) for matmul in (matmuls_of(graph) if target.products else ()))
    for found in recurrences:
        if found is not None:
            q, keys = graph.nodes[found.score_product].args
            yield q, keys, graph.nodes[found.values].args[1]


def _inputs(graph: Graph, match: AttentionMatch, root: int, materialized: Collection[int]) -> tuple[int, ...] | None:
    """Returns the inputs from memory; None if the scores or the epilogue depend on values that the kernel cannot compute."""
    producers, recurrence = Producers(), match.recurrence
    _walk(graph, recurrence.scores, recurrence.score_product, producers, materialized)
    _walk(graph, root, recurrence.values, producers, materialized)
    if recurrence.sink is not None:
        _walk(graph, recurrence.sink, recurrence.values, producers, materialized)
    matmuls = {recurrence.score_product, recurrence.values}
    if not matmuls <= set(producers.core_nodes) or matmuls & set(producers.inputs):
        return None
    if not is_computed_once(graph, recurrence.values, (root,), producers.inputs):
        return None
    return tuple(sorted({*producers.inputs, *match.reads}))


def _walk(graph: Graph, root: int, product: int, producers: Producers, materialized: Collection[int]) -> None:
    domain = Domain(graph.nodes[root].shape)
    axes = domain_axes(domain)
    walk(graph, root, axes.symbols, axes, lambda p, at, _bounds: p == product and _is_identity(at, axes), producers, materialized)


def _is_identity(at: Position, axes: Axes) -> bool:
    return all(i in (s, 0) and (i == s or same(e, 1)) for i, s, e in zip(at, axes.symbols, axes.extents, strict=True))
