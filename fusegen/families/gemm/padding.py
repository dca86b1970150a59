"""Copies for the library's matmuls: of operands and results whose rows start at no multiples of 16 bytes, where a matmul of padded
rows with its copies is expected to be faster.

A copy lies in memory of the call's own, whose rows `schedule.lower.padding` pads. Where rows go along the depth of a matmul, the
library sums over a multiple of 8 elements, and the kernel behind it adds the products of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen.families.gemm.cost import COSTS, ProductSize, library_time, unaligned_time
from fusegen.families.gemm.operands import is_heavy, rows_are_aligned
from fusegen.families.gemm.pipelines import serving
from fusegen.fusion.groups import products_of, strip_views
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.index_map import ROW_MULTIPLE, may_pad, strided_view
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal, nominal, product, same
from fusegen.passes.rewrite import rebuilt
from fusegen.target import Target


@dataclass(frozen=True)
class _Copies:
    """What is copied for a matmul.

    Attributes:
        operands: values below its operands.
        result: True if its result is computed in memory of the call's own first.
        depth: elements over which the library sums; None where it sums over all.
    """

    operands: frozenset[int]
    result: bool
    depth: int | None


def with_copied_rows(graph: Graph, target: Target) -> Graph:
    """The graph with such copies; targets of which no costs are known have none."""
    found = {matmul: copies for matmul in products_of(graph) if (copies := _copies(graph, matmul, target)) is not None}
    return _with(graph, found) if found else graph


def _with(graph: Graph, found: Mapping[int, _Copies]) -> Graph:
    def replaced(builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        return _Copying(graph, builder, moved, found[position]).matmul(position) if position in found else None

    return rebuilt(graph, replaced)


@dataclass(frozen=True)
class _Copying:
    """Puts a matmul with its copies into a new graph."""

    graph: Graph
    builder: GraphBuilder
    moved: Sequence[int]
    copies: _Copies

    def matmul(self, position: int) -> int:
        """The matmul, or the copy of its result."""
        node, location = self.graph.nodes[position], self.graph.locations[position]
        operands = tuple(map(self._operand, node.args))
        if self.copies.depth is not None:
            return self._summed(node, operands, self.copies.depth, position)
        made = self.builder.put(replace(node, args=operands), location)
        return self._copy(made, position) if self.copies.result else made

    def _summed(self, node: Node, operands: tuple[int, ...], depth: int, position: int) -> int:
        """The matmul over a depth, and the products of what lies behind it."""
        location = self.graph.locations[position]
        total = self.builder.put(replace(node, args=self._columns(operands, 0, depth)), location)
        given = tuple(self.moved[a] for a in node.args)
        for k in range(depth, literal(self.builder.nodes[operands[1]].shape[0]) or 0):
            rest = self.builder.add(Op.MUL, self._columns(given, k, 1), location=location)
            total = self.builder.add(Op.ADD, [total, rest], location=location)
        return total

    def _columns(self, operands: Sequence[int], start: int, length: int) -> tuple[int, int]:
        """Some elements of the depth of both operands."""
        a, b = operands
        last = len(self.builder.nodes[a].shape) - 1
        dims = ((a, last), (b, 0))
        first, second = (self.builder.add(Op.SLICE, [p], dim=dim, start=start, length=length, step=1) for p, dim in dims)
        return first, second

    def _operand(self, position: int) -> int:
        """An operand: the same view of the copy below it, if there is one."""
        below = _below_permutations(self.graph, position)
        if below not in self.copies.operands:
            return self.moved[position]
        if position == below:
            return self._copy(self.moved[position], position)
        node = self.graph.nodes[position]
        return self.builder.put(replace(node, args=(self._operand(node.args[0]),)), self.graph.locations[position])

    def _copy(self, value: int, before: int) -> int:
        return self.builder.add(Op.COPY, [value], location=self.graph.locations[before], role="rows", write=0)


def _copies(graph: Graph, matmul: int, target: Target) -> _Copies | None:
    """The copies for a matmul; None where it needs none, where they don't help, or take longer than they save."""
    if target.name not in COSTS or not is_heavy(graph, matmul) or serving(graph, matmul, matmul, target) is not None:
        return None
    unaligned = [p for p in graph.nodes[matmul].args if not rows_are_aligned(graph, strided_view(graph, p))]
    operands = {p: _below_permutations(graph, p) for p in unaligned}
    foreign = {value for p, value in operands.items() if graph.nodes[strided_view(graph, p).base].op is Op.INPUT}
    is_result = _has_odd_rows(graph, matmul) and any(strip_views(graph, o) == matmul for o in graph.outputs)
    depth = _even_depth(graph, matmul)
    if not all(_has_odd_rows(graph, value) for value in operands.values()) or not (foreign or is_result or depth):
        return None
    copies = _Copies(frozenset(foreign), is_result, depth)
    return copies if _pays(graph, matmul, copies, target) else None


def _pays(graph: Graph, matmul: int, copies: _Copies, target: Target) -> bool:
    """True if a matmul of padded rows takes less time than one of others, with all copies."""
    node, costs = graph.nodes[matmul], COSTS[target.name]
    depth = nominal(graph.operands(matmul)[0].shape[-1])
    size = ProductSize(nominal(product(node.shape[:-1])), nominal(node.shape[-1]), depth)
    values = [*copies.operands, *([matmul] if copies.result or copies.depth is not None else [])]
    moved = [2 * graph.nodes[value].dtype.itemsize * nominal(product(graph.nodes[value].shape)) for value in values]
    copying = sum(costs.epilogue_start + count / costs.epilogue_bandwidth for count in moved)
    return library_time(costs, (size,), 0, target.processors) + copying < unaligned_time(costs, size, target.processors)


def _even_depth(graph: Graph, matmul: int) -> int | None:
    """The multiple of 8 elements over which the library sums, where rows of an operand go along the depth; None where it is all."""
    depth = literal(graph.operands(matmul)[0].shape[-1])
    a, b = (strided_view(graph, p).strides for p in graph.nodes[matmul].args)
    is_along = same(a[-1], 1) or same(b[0], 1)
    return depth // ROW_MULTIPLE * ROW_MULTIPLE if is_along and depth is not None and may_pad(depth) else None


def _below_permutations(graph: Graph, position: int) -> int:
    while graph.nodes[position].op is Op.PERMUTE:
        (position,) = graph.nodes[position].args
    return position


def _has_odd_rows(graph: Graph, position: int) -> bool:
    """True if row-major memory of a value's own can be padded, and has to be."""
    extent = literal(graph.nodes[position].shape[-1])
    return extent is not None and may_pad(extent)
