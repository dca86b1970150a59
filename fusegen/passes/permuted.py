"""A value that is computed point by point, in another order of its dims: the permutation goes down to the views that it is made of.

Eager torch computes so as well: a result of views that are permuted alike has their order in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Family, Op
from fusegen.passes.algebra import Value

_MOST = 64  # nodes that are computed again
_ALONG_A_DIM = (Op.SLICE, Op.CONCAT)


@dataclass
class Permuted:
    """Values in an order of dims, as they come to be in a new graph.

    Args:
        graph: the old graph.
        order: the old dims in their new order.
        at: a value of the old graph in the new one.
    """

    graph: Graph
    order: tuple[int, ...]
    at: Callable[[int], Value]
    _made: dict[int, Value] = field(default_factory=dict)

    def leaves(self, position: int) -> frozenset[int] | None:
        """The values that a value is computed of, which lie in memory or are views; None where it is one of these, or is computed
        in another way than point by point."""
        found: set[int] = set()
        seen = {position}
        stack = [position]
        while stack:
            node = self.graph.nodes[stack.pop()]
            if not self._is_computed(node):
                return None
            for arg in node.args:
                if arg not in seen:
                    seen.add(arg)
                    (found.add if self._is_leaf(arg) else stack.append)(arg)
            if len(seen) > _MOST:
                return None
        return frozenset(found)

    def value(self, position: int) -> Value:
        """A value of which `leaves` are known, in the new order."""
        if position not in self._made:
            self._made[position] = self._leaf(position) if self._is_leaf(position) else self._computed(position)
        return self._made[position]

    def _is_computed(self, node: Node) -> bool:
        is_ours = node.op in _ALONG_A_DIM or node.family is Family.POINTWISE
        return is_ours and not node.numbers and len(node.shape) == len(self.order)

    def _is_leaf(self, position: int) -> bool:
        """True if a value is a view, a number, or lies in memory."""
        node = self.graph.nodes[position]
        if node.op is Op.SLICE:
            return self._is_leaf(node.args[0])
        return node.op is not Op.CONCAT and node.family in (Family.VIEW, Family.LEAF, Family.CONTRACTION)

    def _leaf(self, position: int) -> Value:
        value, missing = self.at(position), len(self.order) - len(self.graph.nodes[position].shape)
        if missing == len(self.order):
            return value  # a number
        if missing:
            value = value.apply(Op.RESHAPE, shape=(1,) * missing + value.node.shape)
        return value.apply(Op.PERMUTE, dims=self.order)

    def _computed(self, position: int) -> Value:
        node = self.graph.nodes[position]
        args = tuple(self.value(arg).position for arg in node.args)
        shape = tuple(node.shape[dim] for dim in self.order)
        attrs = dict(node.attrs)
        if node.op in _ALONG_A_DIM:
            attrs["dim"] = self.order.index(cast(int, attrs["dim"]))
        here = self.at(node.args[0])
        changed = replace(node, args=args, shape=shape, attrs=tuple(attrs.items()))
        return Value(here.builder, here.builder.put(changed, here.location), here.location)
