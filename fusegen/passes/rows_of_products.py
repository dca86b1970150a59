"""Views of the rows of a product with a matrix, moved to the rows that it multiplies.

``(x @ w).view(-1, columns)`` is ``x.view(-1, depth) @ w``: with one dim of rows, as losses want it, what is computed row by row is
one dim everywhere. Of a slice of rows, no more is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Shape, same
from fusegen.passes.rewrite import rebuilt


def with_views_below_products(graph: Graph) -> Graph:
    """The graph with such views moved below products, and below what is computed point by point of these."""
    return rebuilt(graph, lambda builder, moved, position: _moved_below(graph, builder, moved, position))


def _moved_below(graph: Graph, builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
    node = graph.nodes[position]
    if node.op not in (Op.RESHAPE, Op.SLICE) or not _keeps_columns(node.shape, graph.nodes[node.args[0]].shape):
        return None
    if node.op is Op.SLICE and node.attr("dim") == len(node.shape) - 1:
        return None
    return _Moving(graph, builder, position).over(node.args[0], moved[node.args[0]])


def _keeps_columns(one: Shape, other: Shape) -> bool:
    return len(one) > 1 and len(other) > 1 and same(one[-1], other[-1])


class _Moving:
    """A view on its way down."""

    def __init__(self, graph: Graph, builder: GraphBuilder, view: int) -> None:
        self._graph, self._builder, self._view = graph, builder, graph.nodes[view]
        self._location = graph.locations[view]

    def over(self, before: int, now: int) -> int | None:
        """The view of a value that nothing else reads; None where there is no product to move below.

        Args:
            before: the value in the old graph.
            now: in the new one.
        """
        node = self._builder.nodes[now]
        if len(self._graph.users[before]) > 1 or before in self._graph.outputs:
            return None
        if node.op is Op.MATMUL and len(self._builder.nodes[node.args[1]].shape) == 2:
            return self._put(now, (self._seen(node.args[0]), node.args[1]))
        if node.family is not Family.POINTWISE:
            return None
        large = [slot for slot, a in enumerate(node.args) if not self._is_of_columns(a)]
        if len(large) != 1 or self._graph.nodes[before].op is not node.op:
            return None
        (slot,) = large
        moved = self.over(self._graph.nodes[before].args[slot], node.args[slot])
        return None if moved is None else self._put(now, (*node.args[:slot], moved, *node.args[slot + 1 :]))

    def _is_of_columns(self, position: int) -> bool:
        """True if each row meets the same, also where the rows are other dims."""
        shape = self._builder.nodes[position].shape
        return len(shape) <= len(self._view.shape) and all(same(dim, 1) for dim in shape[:-1])

    def _seen(self, position: int) -> int:
        """The view of rows of another width."""
        node, attrs = self._builder.nodes[position], dict(self._view.attrs)
        shape = (*self._view.shape[:-1], node.shape[-1])
        if "shape" in attrs:
            attrs["shape"] = shape
        return self._builder.add(self._view.op, [position], location=self._location, **attrs)

    def _put(self, now: int, args: tuple[int, ...]) -> int:
        return self._builder.put(replace(self._builder.nodes[now], args=args, shape=self._view.shape), self._builder.locations[now])
