"""Computes values that are too large to materialize in loops over blocks of rows.

A matmul with many columns whose rows are reduced again (attention scores, logits) is larger than its operands and than the results.
If no kernel keeps it on chip, all of its users are computed for one block of rows at a time, and sums over all rows accumulate in
32 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fusegen.ir.blocks import rows_of
from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, product
from fusegen.passes.blocks.body import GraphLoop, loop_of
from fusegen.passes.blocks.region import regions
from fusegen.passes.rewrite import copy_after_operands


@dataclass(frozen=True)
class BlockwiseGraph:
    """A graph with loops; `large` holds the element counts of the values that are no longer materialized."""

    graph: Graph
    large: tuple[Dim, ...]


def with_block_loops(graph: Graph, elsewhere: Collection[int], depth: int) -> BlockwiseGraph | None:
    """Moves large values of a graph (in primitives) into loops; None if there are none.

    Args:
        elsewhere: matmuls that kernels compute without materializing them.
        depth: the number of enclosing loops, which are over other dims.
    """
    large: list[Dim] = []
    count = 0
    outer = [rows_of(before) for before in range(depth)]
    while (region := next(regions(graph, elsewhere, outer), None)) is not None:
        large += [product(graph.nodes[p].shape) for p in region.large(graph)]
        looped = _WithLoop(graph, loop_of(graph, region, f"{graph.name}_rows_{count}", depth))
        count += 1
        graph, elsewhere = looped.graph, {looped.moved[p] for p in elsewhere if p in looped.moved}
    return BlockwiseGraph(graph, tuple(dict.fromkeys(large))) if large else None


class _WithLoop:
    """Replaces a region by a loop; `moved` maps old nodes to new ones."""

    def __init__(self, graph: Graph, loop: GraphLoop) -> None:
        self._before, self._loop = graph, loop
        self._results = {p: number for number, p in enumerate(loop.results)}
        self._builder = GraphBuilder.like(graph)
        self._unrounded: dict[int, int] = {}  # rounded results, before rounding
        self.moved: dict[int, int] = {}
        for position, node in graph:
            if node.op in (Op.INPUT, Op.SCALAR):
                self.moved[position] = self._builder.add_node(node, graph.locations[position])
        outputs, writes = ([self._position(p) for p in requested] for requested in (graph.outputs, graph.writes))
        self.graph = self._builder.build(outputs, writes)

    def _position(self, position: int) -> int:
        return copy_after_operands(position, self.moved, self._operands, self._rebuilt)

    def _operands(self, position: int) -> tuple[int, ...]:
        return self._loop.operands if position in self._results else self._before.nodes[position].args

    def _rebuilt(self, position: int) -> int:
        node, location = self._before.nodes[position], self._before.locations[position]
        args = tuple(self.moved[a] for a in self._operands(position))
        if position in self._results:
            return self._result(position, args)
        unrounded = self._unrounded.get(args[0]) if node.op is Op.CAST else None  # avoids a cast to 16 bits and back
        if unrounded is not None and self._builder.nodes[unrounded].dtype is node.dtype:
            return unrounded
        return self._builder.add_node(replace(node, args=args), location)

    def _result(self, position: int, args: Sequence[int]) -> int:
        blocks, number = self._loop.blocks, self._results[position]
        spec, location = blocks.results[number], self._before.locations[position]
        attrs = {"blocks": blocks, "dtype": spec.dtype, "result": number, "shape": spec.shape}
        result = self._builder.add(Op.BLOCKS, args, location=location, **attrs)
        dtype = self._before.nodes[position].dtype
        if spec.dtype is dtype:
            return result
        rounded = self._builder.add(Op.CAST, [result], location=location, dtype=dtype)
        self._unrounded[rounded] = result
        return rounded
