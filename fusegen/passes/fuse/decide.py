"""What lies in memory: decided before any kernel is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.passes.fuse.attention import attention_group, unserved
from fusegen.passes.fuse.contraction import epilogue_group, operand_base
from fusegen.passes.fuse.groups import is_stored_elsewhere, strip_views
from fusegen.passes.fuse.keep import ends_of, shared_values
from fusegen.passes.fuse.recurrence import derive
from fusegen.target import Target

Kept: TypeAlias = frozenset[int]
"""Values that lie in memory, though a kernel that needs them could compute them."""


@dataclass(frozen=True)
class Decision:
    """What fusion goes by.

    Attributes:
        ends: values in which a product or attention ends, each with a kernel of its own.
        stored: all computed values that lie in memory, as far as is known before there are kernels.
        kept: those of them that kernels read, though they could compute them.
        refusals: for a product that looked like attention's, why no kernel of ours takes it.
    """

    ends: Kept
    stored: Kept
    kept: Kept
    refusals: Mapping[int, str]


@dataclass
class _Products:
    """The products of a graph, as they are taken.

    Attributes:
        ends: values in which those end that a kernel of ours computes.
        inside: products that are computed on the way, which never lie in memory.
        streamed: those among them whose first operand does not either.
        refusals: as in `Decision`.
    """

    ends: set[int] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)
    streamed: set[int] = field(default_factory=set)
    refusals: dict[int, str] = field(default_factory=dict)


def decide(graph: Graph, target: Target) -> Decision:
    """Which values lie in memory besides the results and the operands of products.

    Args:
        graph: in primitives, after the passes.
        target: says which skeletons can be used.
    """
    products = [position for position, node in graph if node.op is Op.MATMUL]
    taken = _Products()
    for product in products:
        _take_attention(graph, product, target, taken)
    for product in products:
        if product not in taken.inside:
            _take_epilogue(graph, product, target, taken)
    stored = _stored(graph, products, taken)
    shared = shared_values(graph, stored, taken.ends.union(products), taken.streamed)
    return Decision(frozenset(taken.ends), stored | shared, shared.union(taken.ends), taken.refusals)


def _take_attention(graph: Graph, product: int, target: Target, taken: _Products) -> None:
    recurrence = derive(graph, product)
    if recurrence is None or not target.wgmma:
        return
    for end in (*ends_of(graph, product), product):
        group = attention_group(graph, end, target, taken.ends)
        if group is not None and product in group.anchors:
            taken.ends.add(end)
            taken.inside.update((recurrence.score_product, product))
            taken.streamed.add(product)
            return
    why = unserved(graph, recurrence, product) or "its scores need something that the kernel cannot compute at their place"
    taken.refusals.update(dict.fromkeys((recurrence.score_product, product), f"no attention kernel: {why}"))


def _take_epilogue(graph: Graph, product: int, target: Target, taken: _Products) -> None:
    for end in ends_of(graph, product):
        group = epilogue_group(graph, end, target, taken.ends)
        if group is not None and product in group.anchors:
            taken.ends.add(end)
            taken.inside.add(product)
            return


def _stored(graph: Graph, products: list[int], taken: _Products) -> frozenset[int]:
    """Computed values that lie in memory in any case."""
    wanted = [*graph.outputs, *taken.ends, *(p for p in products if p not in taken.inside)]
    for product in products:
        operands = graph.nodes[product].args
        wanted += [operand_base(graph, a) for a in operands[product in taken.streamed :]]
    return frozenset(p for p in (strip_views(graph, w) for w in wanted) if not is_stored_elsewhere(graph, p))
