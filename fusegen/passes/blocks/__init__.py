"""Values that are too large to lie in memory whole: loops compute them, a block of rows at a time.

A product of many columns whose rows are reduced again (scores of attention, logits) is larger than all that it is made of, and
than all that is made of it. Where no kernel holds it on its way, all that needs it is computed for a block of rows at a time, and
what adds up over all rows is added up, in 32 bits.
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
from fusegen.passes.rewrite import moved_after_operands


@dataclass(frozen=True)
class InBlocks:
    """A graph with loops.

    Attributes:
        graph: it.
        large: elements of the values that do not lie in memory whole any more.
    """

    graph: Graph
    large: tuple[Dim, ...]


def in_blocks(graph: Graph, elsewhere: Collection[int], depth: int) -> InBlocks | None:
    """A graph with its loops; None where it could have none.

    Args:
        graph: in primitives.
        elsewhere: products that kernels compute without storing them.
        depth: how many loops it is in, which are over other dims.
    """
    large: list[Dim] = []
    count = 0
    outer = [rows_of(before) for before in range(depth)]
    while (region := next(regions(graph, elsewhere, outer), None)) is not None:
        large += [product(graph.nodes[p].shape) for p in region.large(graph)]
        looped = _Looped(graph, loop_of(graph, region, f"{graph.name}_rows_{count}", depth))
        count += 1
        graph, elsewhere = looped.graph, {looped.moved[p] for p in elsewhere if p in looped.moved}
    return InBlocks(graph, tuple(dict.fromkeys(large))) if large else None


class _Looped:
    """A graph with a loop in it.

    Attributes:
        graph: it.
        moved: where nodes of the graph before are in it.
    """

    def __init__(self, graph: Graph, loop: GraphLoop) -> None:
        self._before, self._loop = graph, loop
        self._results = {p: number for number, p in enumerate(loop.results)}
        self._builder = GraphBuilder.like(graph)
        self._wide: dict[int, int] = {}  # results that are rounded, as they were
        self.moved: dict[int, int] = {}
        for position, node in graph:
            if node.op in (Op.INPUT, Op.SCALAR):
                self.moved[position] = self._builder.put(node, graph.locations[position])
        outputs, writes = ([self._position(p) for p in wanted] for wanted in (graph.outputs, graph.writes))
        self.graph = self._builder.build(outputs, writes)

    def _position(self, position: int) -> int:
        """A value's place, after those of what it is made of."""
        return moved_after_operands(position, self.moved, self._made_of, self._rebuilt)

    def _made_of(self, position: int) -> tuple[int, ...]:
        return self._loop.operands if position in self._results else self._before.nodes[position].args

    def _rebuilt(self, position: int) -> int:
        node, location = self._before.nodes[position], self._before.locations[position]
        args = tuple(self.moved[a] for a in self._made_of(position))
        if position in self._results:
            return self._result(position, args)
        wide = self._wide.get(args[0]) if node.op is Op.CAST else None  # so that nothing is rounded to be cast back
        if wide is not None and self._builder.nodes[wide].dtype is node.dtype:
            return wide
        return self._builder.put(replace(node, args=args), location)

    def _result(self, position: int, args: Sequence[int]) -> int:
        """A result of the loop, in the dtype of the value that it is."""
        blocks, number = self._loop.blocks, self._results[position]
        spec, location = blocks.results[number], self._before.locations[position]
        attrs = {"blocks": blocks, "dtype": spec.dtype, "result": number, "shape": spec.shape}
        made = self._builder.add(Op.BLOCKS, args, location=location, **attrs)
        dtype = self._before.nodes[position].dtype
        if spec.dtype is dtype:
            return made
        rounded = self._builder.add(Op.CAST, [made], location=location, dtype=dtype)
        self._wide[rounded] = made
        return rounded
