"""The cheapest set of nodes that separates what a graph is made of from what is made of it: a minimum cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

_NEVER = 1 << 60  # more than the bytes of any graph


def cheapest_cut(
    args: Mapping[int, Sequence[int]], costs: Mapping[int, int | None], origins: Collection[int], wanted: Collection[int]
) -> frozenset[int]:
    """The nodes of least cost that every way from an origin to what is wanted passes; of several such sets, the one nearest to
    what is wanted, from which least has to be computed.

    Args:
        args: operands, by node.
        costs: what a node costs; None is more than all others.
        origins: nodes that are made of nothing.
        wanted: nodes.

    Each node is an edge that carries as much as it costs. Dinic, Algorithm for Solution of a Problem of Maximum Flow in Networks
    with Power Estimation (1970).
    """
    network = _Network(2 * len(args) + 2)
    place = {node: 2 * number for number, node in enumerate(args)}
    source, sink = 2 * len(args), 2 * len(args) + 1
    for node, operands in args.items():
        cost = costs[node]
        network.join(place[node], place[node] + 1, _NEVER if cost is None else cost)
        for operand in operands:
            network.join(place[operand] + 1, place[node], _NEVER)
    for node in origins:
        network.join(source, place[node], _NEVER)
    for node in wanted:
        network.join(place[node] + 1, sink, _NEVER)
    behind = network.saturate(source, sink)
    return frozenset(node for node in args if place[node] + 1 in behind and place[node] not in behind)


class _Network:
    """Edges in pairs, each beside the one that takes back what flows along it."""

    def __init__(self, count: int) -> None:
        self._ends: list[int] = []
        self._left: list[int] = []  # what an edge can still carry
        self._edges: list[list[int]] = [[] for _ in range(count)]

    def join(self, start: int, end: int, capacity: int) -> None:
        """An edge."""
        for place, other, left in ((start, end, capacity), (end, start, 0)):
            self._edges[place].append(len(self._ends))
            self._ends.append(other)
            self._left.append(left)

    def saturate(self, source: int, sink: int) -> set[int]:
        """Sends as much as can flow; gives the places from which the sink can still be reached."""
        while True:
            distance = self._distances(sink)
            if source not in distance:
                return set(distance)
            self._block(source, sink, distance)

    def _distances(self, sink: int) -> dict[int, int]:
        """How far the sink is from each place from which it can be reached."""
        distance = {sink: 0}
        queue = deque([sink])
        while queue:
            place = queue.popleft()
            for edge in self._edges[place]:
                other = self._ends[edge]
                if self._left[edge ^ 1] and other not in distance:
                    distance[other] = distance[place] + 1
                    queue.append(other)
        return distance

    def _block(self, source: int, sink: int, distance: Mapping[int, int]) -> None:
        """Sends flow along shortest ways until each of them is blocked."""
        following = [0] * len(self._edges)  # edges before it lead nowhere
        way: list[int] = []
        place = source
        while True:
            if place == sink:
                self._send(way)
                way, place = [], source
            elif following[place] < len(self._edges[place]):
                edge = self._edges[place][following[place]]
                if self._left[edge] and distance.get(self._ends[edge], -1) == distance[place] - 1:
                    way.append(edge)
                    place = self._ends[edge]
                else:
                    following[place] += 1
            elif way:
                place = self._ends[way.pop() ^ 1]
                following[place] += 1
            else:
                return

    def _send(self, way: Sequence[int]) -> None:
        amount = min(self._left[edge] for edge in way)
        for edge in way:
            self._left[edge] -= amount
            self._left[edge ^ 1] += amount
