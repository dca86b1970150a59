"""Rows in the order in which they go on: a view of what was normalized becomes a view of what the norm reads.

Models normalize heads, or whole rows, as a product wrote them, arrange them for attention, and go on point by point (a rotation).
In the order of the arrangement all of it is over one shape, so that one kernel computes it. A result that the norm reads, as a sum
that goes on as the residual, is computed over that shape too, where it only splits dims.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.index_map import reshape_blocks
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape, same
from fusegen.passes.rewrite import rebuilt

ORDERLESS = (Op.SUM, Op.PROD, Op.AMAX, Op.AMIN, Op.MOMENTS, Op.NORMALIZER)
"""Reductions whose result does not say where in the row it comes from."""

_Part: TypeAlias = tuple[int, ...]
"""Part of a dim: the dim's number, and at each split the part's; so parts of a shape are sorted as its dims are."""


@dataclass(frozen=True)
class _Layout:
    """Another order of a shape's dims, some of them split.

    Attributes:
        splits: for each dim of the shape, the extents of its parts.
        order: the parts, counted through all dims, in their new order.
    """

    splits: tuple[Shape, ...]
    order: tuple[int, ...]

    def split(self, shape: Shape) -> Shape:
        """The dims of a shape, split and in their old order; an extent of 1 is read at every place and stays such."""
        return tuple(1 if same(own, 1) else part for own, parts in zip(shape, self.splits, strict=True) for part in parts)

    def arranged(self, shape: Shape) -> Shape:
        """The dims of a shape, split and in their new order."""
        split = self.split(shape)
        return tuple(split[dim] for dim in self.order)

    def dims_of(self, dims: Collection[int]) -> tuple[int, ...]:
        """The dims that some dims become."""
        owners = [dim for dim, split in enumerate(self.splits) for _ in split]
        return tuple(new for new, old in enumerate(self.order) if owners[old] in dims)


@dataclass(frozen=True)
class _Moved:
    """The nodes that are computed in another order.

    Attributes:
        end: the value that is viewed, the last one in the old order.
        view: the last of the views.
        inside: nodes that are computed in the order of the view, `end` among them.
        results: results of the graph that these are computed of point by point, and which a reshape gives back.
    """

    end: int
    view: int
    layout: _Layout
    inside: frozenset[int] = field(repr=False)
    results: frozenset[int] = field(repr=False)


def canonicalized(graph: Graph) -> Graph:
    """The graph with reductions, and what is made of them, in the order in which it goes on point by point."""
    moves = list(_moves(graph))
    return rebuilt(graph, _Canonicalized(graph, moves).replaced) if moves else graph


def _moves(graph: Graph) -> Iterator[_Moved]:
    for position, node in graph:
        if node.family is not Family.POINTWISE or not _is_hidden(graph, position) or len(graph.users[position]) != 1:
            continue
        found = _arranged(graph, position)  # rarely, and found at once; the walk back is over all that a value is made of
        if found is not None and _goes_on(graph, found[0]):
            inside = _made_of_reductions(graph, position)
            if inside:
                yield _Moved(position, *found, inside, _results_read(graph, position, inside, found[1]))


def _is_hidden(graph: Graph, position: int) -> bool:
    return position not in graph.outputs and position not in graph.writes


def _made_of_reductions(graph: Graph, end: int) -> frozenset[int]:
    """A value, the reductions along its rows that it is made of, and what lies between; nothing where others need that too."""
    shape = graph.nodes[end].shape
    dims: set[object] = set()
    reached: set[int] = set()
    stack = [end]
    while stack:
        position = stack.pop()
        node = graph.nodes[position]
        if position in reached or len(node.shape) != len(shape):
            continue
        if node.op in ORDERLESS and _is_along_last(graph, position, shape):
            dims.add(node.attr("dims"))
        elif node.family is not Family.POINTWISE:
            continue
        reached.add(position)
        stack += node.args
    inside: set[int] = set()
    for position in sorted(reached):
        node = graph.nodes[position]
        if node.op in ORDERLESS or not inside.isdisjoint(node.args):
            inside.add(position)
    own = inside - {end}
    is_alone = all(_is_hidden(graph, p) and inside.issuperset(graph.users[p]) for p in own)
    return frozenset(inside) if is_alone and len(dims) == 1 else frozenset()


def _results_read(graph: Graph, end: int, inside: Collection[int], layout: _Layout) -> frozenset[int]:
    """Results of a value's shape that the nodes it is made of read, and that a kernel of rows can write: a layout only splits their
    dims, and no product ends in them."""
    if layout.order != tuple(range(len(layout.order))):
        return frozenset()
    read = {a for p in inside for a in graph.nodes[p].args}.intersection(graph.outputs).difference(inside)
    return frozenset(p for p in read if graph.nodes[p].shape == graph.nodes[end].shape and _is_of_points(graph, p))


def _is_of_points(graph: Graph, position: int) -> bool:
    """True if a value is computed point by point of what lies in memory, and of nothing that has a kernel of its own."""
    below = {graph.nodes[p].family for p in graph.ancestors[position]}
    return graph.nodes[position].family is Family.POINTWISE and below <= {Family.POINTWISE, Family.VIEW, Family.LEAF}


def _is_along_last(graph: Graph, reduction: int, shape: Shape) -> bool:
    """True if a reduction is of all of a shape, and along its last dim among others."""
    (operand,) = graph.operands(reduction)
    dims = cast(tuple[int, ...], graph.nodes[reduction].attr("dims"))
    return len(shape) - 1 in dims and len(operand.shape) == len(shape) and all(map(same, operand.shape, shape))


def _arranged(graph: Graph, end: int) -> tuple[int, _Layout] | None:
    """The last of the views through which alone a value is used, and how it arranges the value's dims; None where it mixes them, or
    where neighbours do not stay such."""
    shape = graph.nodes[end].shape
    extents: dict[_Part, Dim] = {(dim,): extent for dim, extent in enumerate(shape)}
    order, position = list(extents), end
    while (user := _arrangement_of(graph, position)) is not None:
        node = graph.nodes[user]
        if node.op is Op.PERMUTE:
            order = [order[dim] for dim in cast(tuple[int, ...], node.attr("dims"))]
        else:
            arranged: list[_Part] = []
            for old, new in reshape_blocks(graph.nodes[position].shape, node.shape):
                if len(old) != 1:
                    return None
                parts = {(*order[old[0]], number): node.shape[dim] for number, dim in enumerate(new)}
                extents |= parts
                arranged += parts
            order = arranged
        position = user
    before = sorted(order)
    is_whole = len({part[0] for part in order}) == len(shape)  # no dim is gone
    if position == end or not is_whole or order[-1] != before[-1]:
        return None
    splits = tuple(tuple(extents[part] for part in before if part[0] == dim) for dim in range(len(shape)))
    return position, _Layout(splits, tuple(before.index(part) for part in order))


def _arrangement_of(graph: Graph, position: int) -> int | None:
    """The view of other dims through which alone a value is used."""
    users = graph.users[position]
    is_one = len(users) == 1 and _is_hidden(graph, position) and graph.nodes[users[0]].op in (Op.PERMUTE, Op.RESHAPE)
    return users[0] if is_one else None


def _goes_on(graph: Graph, view: int) -> bool:
    """True if something is computed of a view point by point."""
    stack = [view]
    while stack:
        families = [(user, graph.nodes[user].family) for user in graph.users[stack.pop()]]
        if any(family is Family.POINTWISE for _, family in families):
            return True
        stack += [user for user, family in families if family is Family.VIEW]
    return False


class _Canonicalized:
    """Rebuilds a graph with some values in another order."""

    def __init__(self, graph: Graph, moves: list[_Moved]) -> None:
        self.graph = graph
        self.layouts = {position: move.layout for move in moves for position in move.inside}
        self.results = {position: move.layout for move in moves for position in move.results}
        self.views = {move.view: move.end for move in moves}
        self.viewed: dict[tuple[int, _Layout], int] = {}

    def replaced(self, builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        """A node in its new order; views between a value and the last one are built, and dropped since nothing needs them."""
        self.builder, self.moved, node = builder, moved, self.graph.nodes[position]
        if position in self.views:
            return moved[self.views[position]]
        if position in self.layouts:
            return self._in_layout(position, node, self.layouts[position])
        if position not in self.results:
            return None
        layout = self.results[position]
        found = self.viewed[position, layout] = self._in_layout(position, node, layout)
        return builder.add(Op.RESHAPE, (found,), location=self.graph.locations[position], shape=node.shape)

    def _in_layout(self, position: int, node: Node, layout: _Layout) -> int:
        args = [self.moved[a] if a in self.layouts else self._viewed(a, layout) for a in node.args]
        location = self.graph.locations[position]
        if node.family is not Family.REDUCTION:
            return self.builder.put(replace(node, args=tuple(args), shape=layout.arranged(node.shape)), location)
        attrs = dict(node.attrs) | {"dims": layout.dims_of(cast(tuple[int, ...], node.attr("dims")))}
        return self.builder.add(node.op, args, location=location, **attrs)

    def _viewed(self, position: int, layout: _Layout) -> int:
        """An operand from outside, in a layout's order; numbers have none."""
        if (position, layout) in self.viewed:
            return self.viewed[position, layout]
        shape, location = self.graph.nodes[position].shape, self.graph.locations[position]
        if not shape:
            return self.moved[position]
        split = layout.split((1,) * (len(layout.splits) - len(shape)) + shape)
        reshaped = self.builder.add(Op.RESHAPE, (self.moved[position],), location=location, shape=split)
        return self.builder.add(Op.PERMUTE, (reshaped,), location=location, dims=layout.order)
