"""Packed products: one of which only ranges of columns are wanted becomes a product a range, of as many columns of the weight.

What follows can then end in the accumulators of each. The products share their first operand, so that one launch computes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import sympy

from fusegen.families.gemm.cost import COSTS, ProductSize, library_time, unaligned_time
from fusegen.families.gemm.epilogue import sorted_dims
from fusegen.families.gemm.pipelines import is_heavy, rows_are_aligned, serving
from fusegen.fusion.accumulator import FRAGMENT
from fusegen.fusion.groups import products_of, strip_views
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.index_map import ROW_MULTIPLE, Position, identity_axes, may_pad, sources, strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import linearize, literal, nominal, product, same
from fusegen.passes.rewrite import OUT, rebuilt
from fusegen.target import Target


@dataclass(frozen=True)
class _Range:
    """A view of some columns.

    Attributes:
        packed: the value over all columns that it is a view of.
        start, length: the columns.
        order: its dims in the order of the columns' elements.
    """

    packed: int
    start: int
    length: int
    order: tuple[int, ...]


def split_products(graph: Graph, target: Target) -> Graph:
    """The graph with no product of which kernels want ranges of columns only, as far as tensor cores serve them."""
    while (found := _next_split(graph, target)) is not None:
        graph = rebuilt(graph, _Split(graph, *found).replaced)
    return graph


def _next_split(graph: Graph, target: Target) -> tuple[int, Mapping[int, _Range]] | None:
    for position, node in graph:
        ranges = _ranges(graph, position) if node.op is Op.MATMUL else None
        if ranges is not None and serving(graph, position, position, target) is not None:
            return position, ranges
    return None


def _ranges(graph: Graph, matmul: int) -> dict[int, _Range] | None:
    """The views through which alone a product is used, each of columns of its own; None where it is used in any other way."""
    found: dict[int, _Range] = {}
    stack = [(matmul, matmul)]  # a value over all columns, and a view of it
    while stack:
        packed, view = stack.pop()
        if view in graph.outputs:
            return None
        for user in graph.users[view]:
            node = graph.nodes[user]
            if node.op is Op.SLICE:
                taken = _range_of(graph, user, packed)
                if taken is None:
                    return None
                found[user] = taken
            elif node.op in (Op.RESHAPE, Op.PERMUTE):
                stack.append((packed, user))
            elif node.family is Family.POINTWISE and view == packed and node.shape == graph.nodes[matmul].shape:
                stack.append((user, user))
            else:
                return None
    return found if found and _are_apart(list(found.values())) and not _meet_again(graph, found) else None


def _meet_again(graph: Graph, ranges: Mapping[int, _Range]) -> bool:
    """True if columns of several ranges come to lie side by side again, as the halves of a head that is rotated: one epilogue
    computes them of the whole product."""
    of: dict[int, set[int]] = {view: {taken.start} for view, taken in ranges.items()}
    for position, node in graph:
        if position not in of and node.family in (Family.POINTWISE, Family.VIEW):
            starts = set().union(*(of.get(a, set()) for a in node.args))
            if node.op is Op.CONCAT and len(starts) > 1:
                return True
            if starts:
                of[position] = starts
    return False


def _are_apart(ranges: list[_Range]) -> bool:
    """True if no column is wanted twice: it would be computed twice."""
    columns = sorted({(r.start, r.start + r.length) for r in ranges})
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(columns))


def _range_of(graph: Graph, view: int, base: int) -> _Range | None:
    """The columns of a value that a view is of; None where it is not of whole rows of a range, of whole eights of columns."""
    shape, whole = graph.nodes[view].shape, graph.nodes[base].shape
    axes = identity_axes(shape)
    position, at = view, cast(Position, axes.symbols)
    while position != base:
        (source,) = sources(graph, position, at, axes)
        position, at = source.arg, source.index
    first = dict.fromkeys(axes.symbols, 0)
    start = literal(sympy.sympify(at[-1]).subs(first))
    length = literal(sympy.cancel(product(shape) / sympy.sympify(product(whole[:-1]))))
    if start is None or length is None or start % FRAGMENT or length % FRAGMENT or length >= (literal(whole[-1]) or 0):
        return None
    column = sympy.expand(at[-1] - start)
    if not axes.below(column, length):  # some rows of it, with as many elements
        return None
    order = sorted_dims(sympy.expand(linearize((*at[:-1], column), (*whole[:-1], length))), axes)
    return None if order is None else _Range(base, start, length, order)


def _packed(graph: Graph, matmul: int, ranges: Mapping[int, _Range]) -> set[int]:
    """The product, and what is made of it over all columns before some are taken."""
    wanted = {taken.packed for taken in ranges.values()}
    found = {matmul}
    for position in range(matmul + 1, max(wanted) + 1):
        node = graph.nodes[position]
        if node.family is Family.POINTWISE and not found.isdisjoint(node.args):
            found.add(position)
    return found


class _Split:
    """Rebuilds a graph with products of ranges in the place of one."""

    def __init__(self, graph: Graph, matmul: int, ranges: Mapping[int, _Range]) -> None:
        self.graph, self.matmul, self.ranges = graph, matmul, ranges
        self.packed = _packed(graph, matmul, ranges)
        self.sliced: dict[tuple[int, int, int], int] = {}

    def replaced(self, builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        """A range in place of a view; nothing in place of what is made of packed columns alone."""
        self.builder, self.moved = builder, moved
        if position in self.ranges:
            return self._range(position, self.ranges[position])
        is_packed = position in self.packed or any(moved[a] == OUT for a in self.graph.nodes[position].args)
        return OUT if is_packed else None

    def _range(self, view: int, taken: _Range) -> int:
        shape, location = self.graph.nodes[view].shape, self.graph.locations[view]
        columns = self._columns(taken.packed, taken.start, taken.length)
        ordered = tuple(shape[d] for d in taken.order)
        shaped = self.builder.add(Op.RESHAPE, (columns,), location=location, shape=ordered)
        dims = tuple(taken.order.index(d) for d in range(len(shape)))
        return shaped if dims == tuple(range(len(dims))) else self.builder.add(Op.PERMUTE, (shaped,), location=location, dims=dims)

    def _columns(self, position: int, start: int, length: int) -> int:
        """Some columns of what is made of the product, point by point."""
        stack = [position]
        while stack:
            current = stack[-1]
            needed = [a for a in self.graph.nodes[current].args if a in self.packed and (a, start, length) not in self.sliced]
            if needed and current != self.matmul:
                stack += needed
            else:
                self.sliced[current, start, length] = self._one(stack.pop(), start, length)
        return self.sliced[position, start, length]

    def _one(self, position: int, start: int, length: int) -> int:
        node, location = self.graph.nodes[position], self.graph.locations[position]
        if position == self.matmul:
            a, b = (self.moved[arg] for arg in node.args)
            return self.builder.add(Op.MATMUL, (a, self._slice(b, start, length)), location=location)
        args = tuple(self._operand(a, node, start, length) for a in node.args)
        shape = (*node.shape[:-1], length)
        return self.builder.put(Node(node.op, args, node.attrs, shape, node.dtype, node.weak), location)

    def _operand(self, position: int, node: Node, start: int, length: int) -> int:
        if position in self.packed:
            return self.sliced[position, start, length]
        moved, shape = self.moved[position], self.graph.nodes[position].shape
        return self._slice(moved, start, length) if shape and same(shape[-1], node.shape[-1]) else moved

    def _slice(self, position: int, start: int, length: int) -> int:
        dim = len(self.builder.nodes[position].shape) - 1
        return self.builder.add(Op.SLICE, (position,), dim=dim, start=start, length=length, step=1)


@dataclass(frozen=True)
class _Copies:
    """The operands that are copied for a matmul.

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
