"""Layout canonicalization: a view of a normalized value becomes a view of the norm's input.

Models normalize heads or whole rows of a matmul's result, permute them for attention, and continue pointwise (a rotation). In the
permuted order all of it has one shape, so that one kernel computes it. A result that the norm reads, e.g. the residual sum, is
computed in that shape too if it only splits dims.
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
"""Reductions whose result does not depend on the order of elements."""

_Part: TypeAlias = tuple[int, ...]
"""Part of a dim: the dim's number, then the part's number at each split; sorts in the order of the dims."""


@dataclass(frozen=True)
class _Layout:
    """A permutation of a shape's dims, some of them split.

    Attributes:
        splits: for each dim, the extents of its parts.
        order: the parts, numbered through all dims, in their new order.
    """

    splits: tuple[Shape, ...]
    order: tuple[int, ...]

    def split(self, shape: Shape) -> Shape:
        """Splits the dims in their old order; each part of a broadcast dim has extent 1."""
        return tuple(1 if same(extent, 1) else part for extent, parts in zip(shape, self.splits, strict=True) for part in parts)

    def arranged(self, shape: Shape) -> Shape:
        split = self.split(shape)
        return tuple(split[dim] for dim in self.order)

    def dims_of(self, dims: Collection[int]) -> tuple[int, ...]:
        owners = [dim for dim, split in enumerate(self.splits) for _ in split]
        return tuple(new for new, old in enumerate(self.order) if owners[old] in dims)


@dataclass(frozen=True)
class _Relayout:
    """Nodes that are computed in another layout.

    Attributes:
        end: the last value in the old layout.
        view: the last of its views.
        inside: nodes that are computed in the new layout, including `end`.
        results: graph outputs that these nodes read pointwise, reshaped back for the caller.
    """

    end: int
    view: int
    layout: _Layout
    inside: frozenset[int] = field(repr=False)
    results: frozenset[int] = field(repr=False)


def canonicalize_layouts(graph: Graph) -> Graph:
    """Computes reductions and values that depend on them in the layout of their pointwise users."""
    relayouts = list(_moves(graph))
    return rebuilt(graph, _Canonicalized(graph, relayouts).replaced) if relayouts else graph


def _moves(graph: Graph) -> Iterator[_Relayout]:
    for position, node in graph:
        if node.family is not Family.POINTWISE or not _is_internal(graph, position) or len(graph.users[position]) != 1:
            continue
        arrangement = _arranged(graph, position)  # rare and cheap; the backward walk below visits all ancestors
        if arrangement is not None and _is_read_pointwise(graph, arrangement[0]):
            inside = _reduction_subgraph(graph, position)
            if inside:
                yield _Relayout(position, *arrangement, inside, _results_read(graph, position, inside, arrangement[1]))


def _is_internal(graph: Graph, position: int) -> bool:
    return position not in graph.outputs and position not in graph.writes


def _reduction_subgraph(graph: Graph, end: int) -> frozenset[int]:
    """A value, the row reductions that it depends on, and the nodes between them; empty if other nodes read these."""
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
    others = inside - {end}
    is_alone = all(_is_internal(graph, p) and inside.issuperset(graph.users[p]) for p in others)
    return frozenset(inside) if is_alone and len(dims) == 1 else frozenset()


def _results_read(graph: Graph, end: int, inside: Collection[int], layout: _Layout) -> frozenset[int]:
    """Graph outputs that the nodes read and that a row kernel can write: pointwise values of the same shape, if the layout only
    splits dims."""
    if layout.order != tuple(range(len(layout.order))):
        return frozenset()
    read = {a for p in inside for a in graph.nodes[p].args}.intersection(graph.outputs).difference(inside)
    return frozenset(p for p in read if graph.nodes[p].shape == graph.nodes[end].shape and _is_pointwise_of_inputs(graph, p))


def _is_pointwise_of_inputs(graph: Graph, position: int) -> bool:
    """True if a value is computed pointwise from materialized values, and no operand has its own kernel."""
    families = {graph.nodes[p].family for p in graph.ancestors[position]}
    return graph.nodes[position].family is Family.POINTWISE and families <= {Family.POINTWISE, Family.VIEW, Family.LEAF}


def _is_along_last(graph: Graph, reduction: int, shape: Shape) -> bool:
    """True if a reduction reads the complete shape and includes its last dim."""
    (operand,) = graph.operands(reduction)
    dims = cast(tuple[int, ...], graph.nodes[reduction].attr("dims"))
    return len(shape) - 1 in dims and len(operand.shape) == len(shape) and all(map(same, operand.shape, shape))


def _arranged(graph: Graph, end: int) -> tuple[int, _Layout] | None:
    """The last of the views that are a value's only users, and its layout; None if a view mixes dims or separates neighbours."""
    shape = graph.nodes[end].shape
    extents: dict[_Part, Dim] = {(dim,): extent for dim, extent in enumerate(shape)}
    order, position = list(extents), end
    while (user := _only_view(graph, position)) is not None:
        node = graph.nodes[user]
        if node.op is Op.PERMUTE:
            order = [order[dim] for dim in cast(tuple[int, ...], node.attr("dims"))]
        else:
            arranged: list[_Part] = []
            for old_dims, new_dims in reshape_blocks(graph.nodes[position].shape, node.shape):
                if len(old_dims) != 1:
                    return None
                split = {(*order[old_dims[0]], number): node.shape[dim] for number, dim in enumerate(new_dims)}
                extents |= split
                arranged += split
            order = arranged
        position = user
    sorted_parts = sorted(order)
    has_all_dims = len({part[0] for part in order}) == len(shape)  # no dim is gone
    if position == end or not has_all_dims or order[-1] != sorted_parts[-1]:
        return None
    splits = tuple(tuple(extents[part] for part in sorted_parts if part[0] == dim) for dim in range(len(shape)))
    return position, _Layout(splits, tuple(sorted_parts.index(part) for part in order))


def _only_view(graph: Graph, position: int) -> int | None:
    users = graph.users[position]
    is_one = len(users) == 1 and _is_internal(graph, position) and graph.nodes[users[0]].op in (Op.PERMUTE, Op.RESHAPE)
    return users[0] if is_one else None


def _is_read_pointwise(graph: Graph, view: int) -> bool:
    stack = [view]
    while stack:
        families = [(user, graph.nodes[user].family) for user in graph.users[stack.pop()]]
        if any(family is Family.POINTWISE for _, family in families):
            return True
        stack += [user for user, family in families if family is Family.VIEW]
    return False


class _Canonicalized:
    def __init__(self, graph: Graph, moves: list[_Relayout]) -> None:
        self.graph = graph
        self.layouts = {position: move.layout for move in moves for position in move.inside}
        self.results = {position: move.layout for move in moves for position in move.results}
        self.views = {move.view: move.end for move in moves}
        self.viewed: dict[tuple[int, _Layout], int] = {}

    def replaced(self, builder: GraphBuilder, indices: Sequence[int], position: int) -> int | None:
        """A node in its new layout; intermediate views become dead."""
        self.builder, self.indices, node = builder, indices, self.graph.nodes[position]
        if position in self.views:
            return indices[self.views[position]]
        if position in self.layouts:
            return self._in_layout(position, node, self.layouts[position])
        if position not in self.results:
            return None
        layout = self.results[position]
        arranged = self.viewed[position, layout] = self._in_layout(position, node, layout)
        return builder.add(Op.RESHAPE, (arranged,), location=self.graph.locations[position], shape=node.shape)

    def _in_layout(self, position: int, node: Node, layout: _Layout) -> int:
        args = [self.indices[a] if a in self.layouts else self._viewed(a, layout) for a in node.args]
        location = self.graph.locations[position]
        if node.family is not Family.REDUCTION:
            return self.builder.add_node(replace(node, args=tuple(args), shape=layout.arranged(node.shape)), location)
        attrs = dict(node.attrs) | {"dims": layout.dims_of(cast(tuple[int, ...], node.attr("dims")))}
        return self.builder.add(node.op, args, location=location, **attrs)

    def _viewed(self, position: int, layout: _Layout) -> int:
        """An operand from outside in the new layout; numbers have none."""
        if (position, layout) in self.viewed:
            return self.viewed[position, layout]
        shape, location = self.graph.nodes[position].shape, self.graph.locations[position]
        if not shape:
            return self.indices[position]
        split = layout.split((1,) * (len(layout.splits) - len(shape)) + shape)
        reshaped = self.builder.add(Op.RESHAPE, (self.indices[position],), location=location, shape=split)
        return self.builder.add(Op.PERMUTE, (reshaped,), location=location, dims=layout.order)
