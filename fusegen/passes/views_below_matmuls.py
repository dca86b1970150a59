"""Moves row views of a matmul's result to its left operand.

``(x @ w).view(-1, columns)`` becomes ``x.view(-1, depth) @ w``: row-wise values get one dim of rows, as losses need it. For a slice
of rows, only those rows are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Shape, same
from fusegen.passes.rewrite import rebuilt


def move_views_below_matmuls(graph: Graph) -> Graph:
    return rebuilt(graph, lambda builder, indices, position: _moved_below(graph, builder, indices, position))


def _moved_below(graph: Graph, builder: GraphBuilder, indices: Sequence[int], position: int) -> int | None:
    node = graph.nodes[position]
    if node.op not in (Op.RESHAPE, Op.SLICE) or not _keeps_columns(node.shape, graph.nodes[node.args[0]].shape):
        return None
    if node.op is Op.SLICE and node.attr("dim") == len(node.shape) - 1:
        return None
    return _RowView(graph, builder, position).over(node.args[0], indices[node.args[0]])


def _keeps_columns(view: Shape, viewed: Shape) -> bool:
    """True for a view of rows, unless it splits them: a loop over blocks could not compute the matmul's row dims."""
    return 1 < len(view) <= len(viewed) and same(view[-1], viewed[-1])


class _RowView:
    def __init__(self, graph: Graph, builder: GraphBuilder, view: int) -> None:
        self._graph, self._builder, self._view = graph, builder, graph.nodes[view]
        self._location = graph.locations[view]

    def over(self, old: int, new: int) -> int | None:
        """Moves the view through a value (its old and new index) to a matmul; None if the value has other readers or no matmul
        below it."""
        node = self._builder.nodes[new]
        if len(self._graph.users[old]) > 1 or old in self._graph.outputs:
            return None
        if node.op is Op.MATMUL and len(self._builder.nodes[node.args[1]].shape) == 2:
            return self._put(new, (self._viewed(node.args[0]), node.args[1]))
        if node.family is not Family.POINTWISE:
            return None
        large = [slot for slot, a in enumerate(node.args) if not self._is_of_columns(a)]
        if len(large) != 1 or self._graph.nodes[old].op is not node.op:
            return None
        (slot,) = large
        operand = self.over(self._graph.nodes[old].args[slot], node.args[slot])
        return None if operand is None else self._put(new, (*node.args[:slot], operand, *node.args[slot + 1 :]))

    def _is_of_columns(self, position: int) -> bool:
        """True if the operand is the same for each row."""
        shape = self._builder.nodes[position].shape
        return len(shape) <= len(self._view.shape) and all(same(dim, 1) for dim in shape[:-1])

    def _viewed(self, position: int) -> int:
        node, attrs = self._builder.nodes[position], dict(self._view.attrs)
        shape = (*self._view.shape[:-1], node.shape[-1])
        if "shape" in attrs:
            attrs["shape"] = shape
        return self._builder.add(self._view.op, [position], location=self._location, **attrs)

    def _put(self, new: int, args: tuple[int, ...]) -> int:
        return self._builder.add_node(
            replace(self._builder.nodes[new], args=args, shape=self._view.shape), self._builder.locations[new]
        )
