"""Cuts a graph into regions: sets of nodes that one function can compute at one place.

A region is *convex*: no path leaves it and comes back. Its nodes have one depth, which grows along each edge that leaves
a region: a path that leaves and returns would end deeper than it began. Regions of different depths are joined afterwards
where all that one gives is read by the other, and nothing lies between.
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
from fusegen.integrations.fx.function import Unwritable, function_name, region_function
from fusegen.ir.ops import Family, Op
from fusegen.target import Target

# Sorts the nodes of a graph by what fusegen makes of them: each is traced alone.


class NodeCost(Enum):
    """A node to fusegen.

    FREE: a view, the tensor itself, a size. LIGHT: elementwise work, reductions, lookups. HEAVY: a matmul, attention, or another
    step that torch's library may compute. OPAQUE: nothing that fusegen traces.
    """

    FREE = "free"
    LIGHT = "light"
    HEAVY = "heavy"
    OPAQUE = "opaque"


_HEAVY = (Family.CONTRACTION, Family.LIBRARY, Family.ORDER, Family.SCAN)
_NOTHING = (Family.LEAF, Family.VIEW)


class Kinds:
    """The kinds of nodes; equal calls are traced once.

    Args:
        target: the machine that it is asked for.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[tuple[Any, ...], tuple[NodeCost, str]] = {}

    def of(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, NodeCost]:
        """The kind of each node."""
        return {node: self.kind(node)[0] for node in nodes}

    def kind(self, node: fx.Node) -> tuple[NodeCost, str]:
        """The kind of a node, and why it is opaque."""
        if _is_size(node):
            return NodeCost.FREE, ""
        if node.meta.get(WRITES):
            return NodeCost.OPAQUE, "it writes in place"
        if node.op not in ("call_function", "call_method") or not _gives_tensors(value_of(node)):
            return NodeCost.OPAQUE, "it does not give tensors alone"
        if is_part(node):
            return self.kind(node.all_input_nodes[0])
        found, reason = self._traced(node)
        if found is NodeCost.HEAVY and not isinstance(value_of(node), Tensor):
            return NodeCost.OPAQUE, "a step of its own with several results"
        return found, reason

    def _traced(self, node: fx.Node) -> tuple[NodeCost, str]:
        try:
            region = region_function([node], [node])
        except Unwritable as error:
            return NodeCost.OPAQUE, f"no text stands for {error}"
        values = [example_of(each) for each in region.parameters]
        if not any(isinstance(value, Tensor) for value in values):
            return NodeCost.OPAQUE, "it reads no tensor"
        key = (region.text, *(_facts(value) for value in values))
        if key not in self._known:
            try:
                traced = Dispatcher(region.function(), region.name).variants.traced(values, self._target, _SHOWN)[1]
            except Exception as error:  # of torch itself, too: then fusegen leaves it to torch
                self._known[key] = (NodeCost.OPAQUE, str(getattr(error, "what", error)))
            else:
                self._known[key] = (_kind_of(node.op for node in traced.graph.nodes), "")
        return self._known[key]


_SHOWN = torch.device("cuda")


def value_of(node: fx.Node) -> Any:
    """The example value of a node: None where there is none."""
    return node.meta.get(VALUE, node.meta.get("example_value"))


def example_of(node: fx.Node) -> Any:
    """A value to trace with: a meta tensor, a number, or a tuple of such."""
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


def is_part(node: fx.Node) -> bool:
    """True if a node takes one of the results of another."""
    return (
        function_name(node) == "getitem"
        and isinstance(node.args[1], int)
        and isinstance(value_of(node.all_input_nodes[0]), (tuple, list))
    )


def _gives_tensors(value: Any) -> bool:
    is_several = isinstance(value, (tuple, list)) and value and all(isinstance(each, Tensor) for each in value)
    return isinstance(value, Tensor) or bool(is_several)


def _facts(value: Any) -> Any:
    """A value, as far as a trace depends on it."""
    if isinstance(value, tuple):
        return tuple(map(_facts, value))
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _kind_of(ops: Iterable[Op]) -> NodeCost:
    families: Mapping[Family, None] = dict.fromkeys(op.family for op in ops)
    if any(family in families for family in _HEAVY):
        return NodeCost.HEAVY
    return NodeCost.FREE if all(family in _NOTHING for family in families) else NodeCost.LIGHT


# Regions.


@dataclass(frozen=True)
class CutRegion:
    """Nodes of a graph, in its order.

    Attributes:
        results: those that others read, or nobody. Views are left out: whoever reads one makes it again.
    """

    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def regions_of(
    graph: fx.Graph, kinds: dict[fx.Node, NodeCost], taken: Collection[NodeCost], group: Callable[[fx.Node], Hashable]
) -> list[CutRegion]:
    """The regions of a graph, in order.

    Args:
        kinds: of its nodes.
        taken: the kinds that regions are made of.
        group: nodes of different groups are not in one region.
    """
    members = [node for node in graph.nodes if kinds.get(node) in taken]
    cut = _Cut(graph, members, group)
    cut.join_across_depths()
    found = [trimmed(nodes, kinds) for nodes in cut.sets()]
    return [region_of(nodes, kinds) for nodes in found if nodes]


def region_of(nodes: Sequence[fx.Node], kinds: dict[fx.Node, NodeCost]) -> CutRegion:
    """The region of some nodes in order."""
    inside = set(nodes)
    read = {node for node in nodes if not node.users or any(user not in inside for user in node.users)}
    results = dict.fromkeys(base for node in nodes if node in read for base in _bases(node, inside, kinds))
    return CutRegion(tuple(nodes), tuple(node for node in nodes if node in results))


def _bases(node: fx.Node, inside: Collection[fx.Node], kinds: dict[fx.Node, NodeCost]) -> Iterable[fx.Node]:
    """The values that a node is a view of, the first that are none; itself where it is none."""
    if kinds[node] is not NodeCost.FREE:
        return [node]
    return [base for each in node.all_input_nodes if each in inside for base in _bases(each, inside, kinds)]


def trimmed(nodes: Sequence[fx.Node], kinds: dict[fx.Node, NodeCost]) -> list[fx.Node]:
    """The nodes without views that begin or end the region: they launch nothing. No part stays without what it is a part of."""
    inside = dict.fromkeys(nodes)
    changes = True
    while changes:
        ends = [
            node for node in inside
            if (kinds[node] is NodeCost.FREE and not any(user in inside for user in node.users))
            or ((kinds[node] is NodeCost.FREE or is_part(node)) and not any(each in inside for each in node.all_input_nodes))
        ]  # fmt: skip
        changes = bool(ends)
        for node in ends:
            del inside[node]
    return list(inside)


def is_convex(nodes: Collection[fx.Node], order: dict[fx.Node, int]) -> bool:
    """True if no path leaves some nodes and comes back.

    Args:
        order: the place of each node in the graph.
    """
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


class _Cut:
    """Sets of nodes in the making."""

    def __init__(self, graph: fx.Graph, members: Sequence[fx.Node], group: Callable[[fx.Node], Hashable]) -> None:
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._members = dict.fromkeys(members)
        self._groups = {node: group(node) for node in members}
        self._set: dict[fx.Node, list[fx.Node]] = {}
        depths: dict[fx.Node, int] = {}
        for node in graph.nodes:
            leaves = [each in self._members and not self._are_alike(each, node) for each in node.all_input_nodes]
            steps = zip(node.all_input_nodes, leaves, strict=True)
            depths[node] = max((depths[each] + leaving for each, leaving in steps), default=0)
        for node in members:
            self._set[node] = [node]
            for each in node.all_input_nodes:
                if self._are_alike(each, node) and depths[each] == depths[node]:
                    self._join(each, node)

    def _are_alike(self, one: fx.Node, other: fx.Node) -> bool:
        return one in self._members and other in self._members and self._groups[one] == self._groups[other]

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        if self._set[one] is not self._set[other]:
            both = self._set[one] + self._set[other]
            for node in both:
                self._set[node] = both

    def join_across_depths(self) -> None:
        """Joins a set with the only one that reads it."""
        for node in self._members:
            readers = [
                user
                for each in self._set[node]
                for user in each.users
                if user not in self._members or self._set[user] is not self._set[node]
            ]
            if not readers or any(user not in self._members or self._set[user] is not self._set[readers[0]] for user in readers):
                continue
            both = {*self._set[node], *self._set[readers[0]]}
            if self._are_alike(node, readers[0]) and is_convex(both, self._order):
                self._join(node, readers[0])

    def sets(self) -> list[list[fx.Node]]:
        """All sets, each in the order of the graph, by their first nodes."""
        found = {id(nodes): sorted(nodes, key=self._order.__getitem__) for nodes in self._set.values()}
        return sorted(found.values(), key=lambda nodes: self._order[nodes[0]])
