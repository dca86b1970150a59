"""Chooses which forward values the backward pass saves: those that move the fewest bytes.

The rule. Inputs and results lie in memory anyway, so that they cost their bytes once, read by the backward pass; every other value
costs them twice, since the forward pass has to write it first. Of all sets of values from which the backward pass can compute what
it needs point by point, the cheapest is read (`cheapest_cut`); at equal cost what lies there anyway, then what the forward pass
computes anyway, then the set that leaves least to compute. So what can be computed from values that are read anyway is never read
itself. Three things are not left to that:

- Products, and what else torch computes, are not computed again, nor are statistics: reductions to at most an eighth of the
  elements that they are made of.
- A statistic is kept as wide as it is computed, since everything that is made of it has its error. One that the forward pass
  rounds, as a result in 16 bits, does not serve.
- A value that is larger than all that it is made of, and than all that is made of it, as scores of attention and logits are
  (`passes.blocks`), is never read. Its product is computed again, unless the backward pass can go by what the forward pass makes of
  it: of a loss, by gradients that are its multiples (`derive`), kept as wide as they are computed.
- A greatest or least element is always computed again: it is compared with what it is the greatest of, and a rounded one may miss
  that.

Symbolic sizes count as large (`ir.symbolic.nominal`).

That is the rule "auto". Two others choose among fewer values, by the same cost. By "all", inputs and results alone are read, and
everything else is computed again, products too, but for what torch draws random bits for. By "none", what the forward pass
computes is not computed again, nor are random bits; what costs nothing is (views, casts, broadcasts, a choice of two numbers), and
a greatest or least element.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import nominal, product
from fusegen.passes.blocks.region import regions
from fusegen.passes.rewrite import part_of

Recompute: TypeAlias = Literal["auto", "all", "none"]
"""By which rule a backward pass computes values of the forward pass again."""

RECOMPUTES: tuple[str, ...] = get_args(Recompute)

_STATISTIC = 8  # how many times fewer elements than what it is made of

_NEVER_AGAIN = (Family.CONTRACTION, Family.LIBRARY)
_COMPARED = (Op.AMAX, Op.AMIN)
_REARRANGED = (Op.EXPAND, Op.PERMUTE, Op.RESHAPE)  # as well read in the order in which its operand lies


@dataclass(frozen=True)
class KeptValue:
    """A value of the forward pass that the backward pass reads.

    Attributes:
        position: the node.
        dtype: in which it is kept.
        in_memory: whether it lies there anyway: an input or a result.
    """

    position: int
    dtype: DType
    in_memory: bool


def kept(
    graph: Graph,
    results: Collection[int],
    gradients: Collection[int],
    wanted: Collection[int],
    recompute: Recompute = "auto",
) -> tuple[KeptValue, ...]:
    """The values of the forward pass that the backward pass reads, in the order of the graph.

    Args:
        graph: of both passes, in primitives.
        results: of the forward pass.
        gradients: the inputs of the backward pass that are gradients by them.
        wanted: results of the backward pass.
        recompute: the rule.
    """
    backward = _made_of(graph, gradients)
    leaves = (Op.INPUT, Op.RANDOM) if recompute == "none" else (Op.INPUT,)
    made = _made_of(graph, {p for p, node in graph if node.op in leaves}) - backward
    needed = {a for p in _needed_for(graph, wanted) & backward for a in graph.nodes[p].args}.union(wanted) & made
    large = large_values(graph, results) if recompute == "auto" else frozenset()
    values = _Values(graph, frozenset(results), recompute, large)
    found = _cut(values, made, needed)
    if found is None:
        values = _Values(graph, frozenset(results), recompute, large, is_large_again=True)
        found = _cut(values, made, needed)
    assert found is not None  # since inputs can be kept, and all else is computed of them
    return tuple(KeptValue(p, values.dtype(p), values.is_in_memory(p)) for p in sorted(found))


def large_values(graph: Graph, results: Collection[int]) -> frozenset[int]:
    """Values that never lie in memory whole, in blocks of rows alone.

    Args:
        graph: in primitives.
        results: of a part of it, which has loops of its own.
    """
    part, before = part_of(graph, tuple(results))
    in_part = (before[p] for region in regions(part) for p in region.large(part))
    return frozenset(in_part).union(p for region in regions(graph) for p in region.large(graph))


def _cut(values: _Values, made: Collection[int], needed: Collection[int]) -> frozenset[int] | None:
    """The values to keep; None where what must not be kept cannot be computed again either."""
    nodes = values.graph.nodes
    origins = {p for p in made if not values.is_computed_again(p)}
    args = {p: [a for a in nodes[p].args if a in made] if p not in origins else [] for p in sorted(made)}
    costs = {p: values.cost(p) for p in made}
    found = cheapest_cut(args, costs, origins, needed)
    reached, stack = set(needed), list(needed)
    while stack:
        position = stack.pop()
        if position in found:
            if costs[position] is None:
                return None
        elif position in origins:
            return None
        else:
            stack += [a for a in args[position] if a not in reached]
            reached.update(args[position])
    return found


def _made_of(graph: Graph, positions: Collection[int]) -> set[int]:
    """Some nodes, and all that depends on them."""
    found = set(positions)
    for position, node in graph:
        if not found.isdisjoint(node.args):
            found.add(position)
    return found


def _needed_for(graph: Graph, wanted: Collection[int]) -> set[int]:
    """Some nodes, and all that they depend on."""
    found = set(wanted)
    for position in range(len(graph.nodes) - 1, -1, -1):
        if position in found:
            found.update(graph.nodes[position].args)
    return found


def _draws(node: Node) -> bool:
    """Tells if torch draws random bits for a node, which would be others the next time."""
    return bool(dict(node.attrs).get("dropout"))


class _Values:
    """The cost of keeping a value.

    Args:
        graph: of both passes.
        results: of the forward pass.
        recompute: the rule.
        large: values that are never kept.
        is_large_again: whether products among them are computed again.
    """

    def __init__(
        self, graph: Graph, results: frozenset[int], recompute: Recompute, large: frozenset[int], *, is_large_again: bool = False
    ) -> None:
        self.graph, self._large, self._is_large_again = graph, large, is_large_again
        self._recompute = recompute
        self.results = results
        self._forward = _needed_for(graph, results)
        self._counts = [nominal(product(node.shape)) for node in graph.nodes]
        self._largest: list[int] = []  # elements of the largest value that one is made of, since the last product
        for node in graph.nodes:
            largest = max((max(self._counts[a], self._largest[a]) for a in node.args), default=0)
            self._largest.append(0 if node.family in _NEVER_AGAIN else largest)

    def is_computed_again(self, position: int) -> bool:
        """Tells if the backward pass may compute a value of its operands."""
        node = self.graph.nodes[position]
        if node.op is Op.INPUT or self._recompute == "all":
            return node.op is not Op.INPUT and not _draws(node)
        if self._recompute == "none" and position in self._forward:
            return node.op in _COMPARED or self._is_free(node)
        if node.family in _NEVER_AGAIN:
            return self._is_large_again and position in self._large
        if self._is_large_again and not self._large.isdisjoint(node.args):
            return True  # in the block that has its operand
        return node.op in _COMPARED or not (node.family is Family.REDUCTION and self._is_statistic(position))

    def _is_free(self, node: Node) -> bool:
        """Tells if a value of the forward pass costs nothing to compute: a view, a cast, or a choice of two numbers."""
        is_choice = node.op is Op.WHERE and all(self._counts[a] == 1 for a in node.args[1:])
        return is_choice or node.op is Op.CAST or node.family is Family.VIEW

    def cost(self, position: int) -> int | None:
        """Bytes that keeping a value moves; None where it must not be kept."""
        size = self._counts[position] * self.dtype(position).itemsize
        if self.is_in_memory(position):
            return size
        node = self.graph.nodes[position]
        if (self._recompute == "all" and not _draws(node)) or node.op in (*_COMPARED, *_REARRANGED) or position in self._large:
            return None
        return 2 * size + (1 if position in self._forward else 2)  # decides where bytes are equal

    def is_in_memory(self, position: int) -> bool:
        """Tells if a value lies in memory anyway, as the backward pass would keep it."""
        node = self.graph.nodes[position]
        is_result = position in self.results and node.op not in _COMPARED and self.dtype(position) is node.dtype
        return is_result or node.op is Op.INPUT

    def dtype(self, position: int) -> DType:
        """In which type a value is kept."""
        node = self.graph.nodes[position]
        is_early = node.op is Op.MATMUL and position not in self._forward
        return node.dtype.compute if node.dtype.is_float and (is_early or self._is_statistic(position)) else node.dtype

    def _is_statistic(self, position: int) -> bool:
        return _STATISTIC * self._counts[position] <= self._largest[position]


# The cheapest set of nodes that separates what a graph is made of from what is made of it: a minimum cut.


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
        self._left: list[int] = []  # capacity of each edge that is not used yet
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
        """The distance of the sink from each place from which it can be reached."""
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
