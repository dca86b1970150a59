"""Packed products: one of which only ranges of columns are wanted becomes a product a range, of as many columns of the weight.

What follows can then end in the accumulators of each. The products share their first operand, so that one launch computes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import sympy

from fusegen.families.gemm.epilogue import sorted_dims
from fusegen.families.gemm.pipelines import serving
from fusegen.fusion.accumulator import OCTET
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.index_map import Position, identity_axes, sources
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import linearize, literal, product, same
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
    """Whether columns of several ranges come to lie side by side again, as the halves of a head that is rotated: one epilogue
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
    """Whether no column is wanted twice: it would be computed twice."""
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
    if start is None or length is None or start % OCTET or length % OCTET or length >= (literal(whole[-1]) or 0):
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
