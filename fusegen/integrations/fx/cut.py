"""Cuts a graph into regions: sets of nodes that one function can compute at one place.

A region is *convex*: no path leaves it and comes back. Its nodes have one depth, which grows along each edge that leaves
a region: a path that leaves and returns would end deeper than it began. Regions of different depths are joined afterwards
where all that one gives is read by the other, and nothing lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from fusegen.integrations.fx.kinds import Kind, is_part


@dataclass(frozen=True)
class Region:
    """Nodes of a graph, in its order.

    Attributes:
        nodes: them.
        results: those that others read, or nobody. Views are left out: whoever reads one makes it again.
    """

    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def regions_of(
    graph: fx.Graph, kinds: dict[fx.Node, Kind], taken: Collection[Kind], group: Callable[[fx.Node], Hashable]
) -> list[Region]:
    """The regions of a graph, in order.

    Args:
        graph: the graph.
        kinds: of its nodes.
        taken: the kinds that regions are made of.
        group: nodes of different groups are not in one region.
    """
    members = [node for node in graph.nodes if kinds.get(node) in taken]
    cut = _Cut(graph, members, group)
    cut.join_across_depths()
    found = [trimmed(nodes, kinds) for nodes in cut.sets()]
    return [region_of(nodes, kinds) for nodes in found if nodes]


def region_of(nodes: Sequence[fx.Node], kinds: dict[fx.Node, Kind]) -> Region:
    """The region of some nodes in order."""
    inside = set(nodes)
    read = {node for node in nodes if not node.users or any(user not in inside for user in node.users)}
    results = dict.fromkeys(base for node in nodes if node in read for base in _bases(node, inside, kinds))
    return Region(tuple(nodes), tuple(node for node in nodes if node in results))


def _bases(node: fx.Node, inside: Collection[fx.Node], kinds: dict[fx.Node, Kind]) -> Iterable[fx.Node]:
    """The values that a node is a view of, the first that are none; itself where it is none."""
    if kinds[node] is not Kind.FREE:
        return [node]
    return [base for each in node.all_input_nodes if each in inside for base in _bases(each, inside, kinds)]


def trimmed(nodes: Sequence[fx.Node], kinds: dict[fx.Node, Kind]) -> list[fx.Node]:
    """The nodes without views that begin or end the region: they launch nothing. No part stays without what it is a part of."""
    inside = dict.fromkeys(nodes)
    changes = True
    while changes:
        ends = [
            node for node in inside
            if (kinds[node] is Kind.FREE and not any(user in inside for user in node.users))
            or ((kinds[node] is Kind.FREE or is_part(node)) and not any(each in inside for each in node.all_input_nodes))
        ]  # fmt: skip
        changes = bool(ends)
        for node in ends:
            del inside[node]
    return list(inside)


def is_convex(nodes: Collection[fx.Node], order: dict[fx.Node, int]) -> bool:
    """True if no path leaves some nodes and comes back.

    Args:
        nodes: them.
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
