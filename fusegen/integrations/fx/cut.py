"""Cuts a graph into regions: sets of nodes that a single function can compute.

A region is *convex*: no path leaves it and returns. All nodes of a region have the same depth, and the depth grows along each edge
that leaves a region, so a path cannot return. Regions of different depths are joined afterwards, if one reads all results
of the other and the union is convex.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from fusegen.compiler.dispatch import Dispatcher
from fusegen.integrations.fx.capture import VALUE, WRITES, meta_like
from fusegen.integrations.fx.function import NoSourceText, function_name, region_function
from fusegen.ir.ops import Family, Op
from fusegen.target import Target

# Cost classes of nodes: each node is traced alone, as a kernel of its own.


class NodeCost(Enum):
    """The cost class of a node.

    FREE: a view, an identity, a size. LIGHT: pointwise work, reductions, lookups. HEAVY: a matmul, attention, or another step that
    a library may compute. OPAQUE: fusegen cannot trace it.
    """

    FREE = "free"
    LIGHT = "light"
    HEAVY = "heavy"
    OPAQUE = "opaque"


_HEAVY = (Family.CONTRACTION, Family.LIBRARY, Family.ORDER, Family.SCAN)
_FREE = (Family.LEAF, Family.VIEW)


class NodeCosts:
    """Classifies nodes for a target; equal calls are traced once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[tuple[Any, ...], tuple[NodeCost, str]] = {}

    def of(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, NodeCost]:
        return {node: self.kind(node)[0] for node in nodes}

    def kind(self, node: fx.Node) -> tuple[NodeCost, str]:
        """Returns the class of a node; for an opaque node, also the reason."""
        if _is_size(node):
            return NodeCost.FREE, ""
        if node.meta.get(WRITES):
            return NodeCost.OPAQUE, "it writes in place"
        if node.op not in ("call_function", "call_method") or not _gives_tensors(value_of(node)):
            return NodeCost.OPAQUE, "it returns something other than tensors"
        if selects_result(node):
            return self.kind(node.all_input_nodes[0])
        cost, reason = self._traced(node)
        if cost is NodeCost.HEAVY and not isinstance(value_of(node), Tensor):
            return NodeCost.OPAQUE, "it is a separate step with several results"
        return cost, reason

    def _traced(self, node: fx.Node) -> tuple[NodeCost, str]:
        try:
            region = region_function([node], [node])
        except NoSourceText as error:
            return NodeCost.OPAQUE, f"no source text for {error}"
        values = [example_of(parameter) for parameter in region.parameters]
        if not any(isinstance(value, Tensor) for value in values):
            return NodeCost.OPAQUE, "it reads no tensor"
        key = (region.text, *(_trace_key(value) for value in values))
        if key not in self._known:
            try:
                traced = Dispatcher(region.function(), region.name).variants.traced(values, self._target, _DEVICE)[1]
            except Exception as error:  # also an error of torch: then torch runs the node
                self._known[key] = (NodeCost.OPAQUE, str(getattr(error, "what", error)))
            else:
                self._known[key] = (_kind_of(node.op for node in traced.graph.nodes), "")
        return self._known[key]


_DEVICE = torch.device("cuda")


def value_of(node: fx.Node) -> Any:
    return node.meta.get(VALUE, node.meta.get("example_value"))


def example_of(node: fx.Node) -> Any:
    """Returns an example of a node's value for tracing: a meta tensor, a number, or a tuple of these."""
    return _example(value_of(node))


def _example(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_example, value))
    if isinstance(value, Tensor):
        return meta_like(value)
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _is_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel") and not isinstance(value_of(node), Tensor)
    is_number = isinstance(value_of(node), (int, float, torch.SymInt, torch.SymFloat)) and node.op == "call_function"
    return is_number and getattr(operator, getattr(node.target, "__name__", ""), None) is node.target


def selects_result(node: fx.Node) -> bool:
    """True if a node selects one result of another node."""
    return (
        function_name(node) == "getitem"
        and isinstance(node.args[1], int)
        and isinstance(value_of(node.all_input_nodes[0]), (tuple, list))
    )


def _gives_tensors(value: Any) -> bool:
    is_several = isinstance(value, (tuple, list)) and value and all(isinstance(element, Tensor) for element in value)
    return isinstance(value, Tensor) or bool(is_several)


def _trace_key(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_trace_key, value))
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _kind_of(ops: Iterable[Op]) -> NodeCost:
    families: Mapping[Family, None] = dict.fromkeys(op.family for op in ops)
    if any(family in families for family in _HEAVY):
        return NodeCost.HEAVY
    return NodeCost.FREE if all(family in _FREE for family in families) else NodeCost.LIGHT


# Regions.


@dataclass(frozen=True)
class CutRegion:
    """Nodes in the graph's order.

    Attributes:
        results: nodes that others read, or that have no readers. Views are left out, because readers recompute them.
    """

    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def regions_of(
    graph: fx.Graph, kinds: dict[fx.Node, NodeCost], allowed: Collection[NodeCost], group: Callable[[fx.Node], Hashable]
) -> list[CutRegion]:
    """The regions of a graph, in order.

    Args:
        allowed: the classes of nodes in regions.
        group: maps a node to its group; a region does not extend across groups.
    """
    members = [node for node in graph.nodes if kinds.get(node) in allowed]
    cut = _RegionBuilder(graph, members, group)
    cut.join_across_depths()
    regions = [trimmed(nodes, kinds) for nodes in cut.sets()]
    return [region_of(nodes, kinds) for nodes in regions if nodes]


def region_of(nodes: Sequence[fx.Node], kinds: dict[fx.Node, NodeCost]) -> CutRegion:
    inside = set(nodes)
    read = {node for node in nodes if not node.users or any(user not in inside for user in node.users)}
    results = dict.fromkeys(base for node in nodes if node in read for base in _bases(node, inside, kinds))
    return CutRegion(tuple(nodes), tuple(node for node in nodes if node in results))


def _bases(node: fx.Node, inside: Collection[fx.Node], kinds: dict[fx.Node, NodeCost]) -> Iterable[fx.Node]:
    """Returns the region's values below a view or a chain of views; for any other node, the node itself."""
    if kinds[node] is not NodeCost.FREE:
        return [node]
    return [base for operand in node.all_input_nodes if operand in inside for base in _bases(operand, inside, kinds)]


def trimmed(nodes: Sequence[fx.Node], kinds: dict[fx.Node, NodeCost]) -> list[fx.Node]:
    """The nodes without leading and trailing views, which launch nothing, and without selections whose source is outside."""
    inside = dict.fromkeys(nodes)
    is_changed = True
    while is_changed:
        ends = [
            node for node in inside
            if (kinds[node] is NodeCost.FREE and not any(user in inside for user in node.users))
            or ((kinds[node] is NodeCost.FREE or selects_result(node)) and not any(n in inside for n in node.all_input_nodes))
        ]  # fmt: skip
        is_changed = bool(ends)
        for node in ends:
            del inside[node]
    return list(inside)


def is_convex(nodes: Collection[fx.Node], order: dict[fx.Node, int]) -> bool:
    """True if no path leaves the nodes and returns; ``order`` has the index of each node in the graph."""
    last = max(order[node] for node in nodes)
    stack = [user for node in nodes for user in node.users if user not in nodes]
    seen = set(stack)
    while stack:
        for user in stack.pop().users:
            if user in nodes:
                return False
            if user not in seen and order.get(user, last) < last:
                seen.add(user)
                stack.append(user)
    return True


class _RegionBuilder:
    def __init__(self, graph: fx.Graph, members: Sequence[fx.Node], group: Callable[[fx.Node], Hashable]) -> None:
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._members = dict.fromkeys(members)
        self._groups = {node: group(node) for node in members}
        self._set: dict[fx.Node, list[fx.Node]] = {}
        depths: dict[fx.Node, int] = {}
        for node in graph.nodes:
            is_leaving = [operand in self._members and not self._share_group(operand, node) for operand in node.all_input_nodes]
            steps = zip(node.all_input_nodes, is_leaving, strict=True)
            depths[node] = max((depths[operand] + step for operand, step in steps), default=0)
        for node in members:
            self._set[node] = [node]
            for operand in node.all_input_nodes:
                if self._share_group(operand, node) and depths[operand] == depths[node]:
                    self._join(operand, node)

    def _share_group(self, first: fx.Node, second: fx.Node) -> bool:
        return first in self._members and second in self._members and self._groups[first] == self._groups[second]

    def _join(self, first: fx.Node, second: fx.Node) -> None:
        if self._set[first] is not self._set[second]:
            union = self._set[first] + self._set[second]
            for node in union:
                self._set[node] = union

    def join_across_depths(self) -> None:
        """Joins each set with the set that reads it, if there is only one and the union is convex."""
        for node in self._members:
            readers = [
                user
                for member in self._set[node]
                for user in member.users
                if user not in self._members or self._set[user] is not self._set[node]
            ]
            if not readers or any(user not in self._members or self._set[user] is not self._set[readers[0]] for user in readers):
                continue
            union = {*self._set[node], *self._set[readers[0]]}
            if self._share_group(node, readers[0]) and is_convex(union, self._order):
                self._join(node, readers[0])

    def sets(self) -> list[list[fx.Node]]:
        """The sets in the order of their first nodes; each is sorted by the graph's order."""
        sorted_sets = {id(nodes): sorted(nodes, key=self._order.__getitem__) for nodes in self._set.values()}
        return sorted(sorted_sets.values(), key=lambda nodes: self._order[nodes[0]])
