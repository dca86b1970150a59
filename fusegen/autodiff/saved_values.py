"""Chooses which forward values the backward pass saves: the minimum cut by bytes.

Inputs and results are materialized anyway, so they cost their bytes once: the backward pass reads them. Any other value costs its
bytes twice, since the forward pass has to write it first. `cheapest_cut` returns the cheapest set of values from which the backward
pass can recompute all others that it needs, pointwise. Ties prefer materialized values, then values that the forward pass computes,
then the set with the least recomputation. Exceptions:

- Matmuls, other library calls and statistics are not recomputed. Statistics are reductions to at most an eighth of the elements.
- A statistic is saved in its computing type, since its error enters everything that depends on it. A result that the forward pass
  rounds to 16 bits is no substitute.
- A value that is larger than its sources and than its users' results, e.g. attention scores or logits (`passes.blocks`), is never
  saved. Its matmul is recomputed, unless the forward pass of a loss can compute its gradients up to a factor (`derive`). These
  gradients are saved in their computing type, or that of the logits in their own if it takes no more memory: its matmuls are left
  to the backward pass.
- A maximum or minimum of computed elements is always recomputed: a rounded one may equal none of them. So is one that is compared
  with its elements, as in its own gradient: it would be saved together with a mask as large as they are, though the input is in
  memory. Others, of an input's elements, are exact in their dtype and saved like statistics.

Symbolic sizes count as large (`ir.symbolic.nominal`).

This is the rule "auto". The rule "all" reads only inputs and results and recomputes everything else, including matmuls, except if
torch draws random bits for it. The rule "none" recomputes no value of the forward pass and no random bits, except free operations
(views, casts, broadcasts, a choice of two numbers) and such maxima and minima.
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
from fusegen.passes.rewrite import subgraph_of

Recompute: TypeAlias = Literal["auto", "all", "none"]
"""The rule that selects the values to recompute in a backward pass."""

RECOMPUTES: tuple[str, ...] = get_args(Recompute)

_STATISTIC = 8  # the least ratio of a reduction's operand to its result

_NOT_RECOMPUTED = (Family.CONTRACTION, Family.LIBRARY)
_COMPARED = (Op.AMAX, Op.AMIN)
_REARRANGED = (Op.EXPAND, Op.PERMUTE, Op.RESHAPE)  # read through the operand at no cost


@dataclass(frozen=True)
class SavedValue:
    """A value of the forward pass that the backward pass reads, in its saved dtype. Inputs and results are in memory anyway."""

    position: int
    dtype: DType
    in_memory: bool


def saved_values(
    graph: Graph,
    results: Collection[int],
    gradients: Collection[int],
    requested: Collection[int],
    recompute: Recompute = "auto",
    *,
    has_one_block: bool = False,
) -> tuple[SavedValue, ...]:
    """Returns the values of the forward pass that the backward pass reads, in the order of the graph.

    Args:
        graph: both passes, in primitives.
        gradients: the backward pass's inputs that are gradients of the results.
        requested: results of the backward pass.
        has_one_block: True if large values may be saved like others. Gradients that the forward pass could compute are computed by
            the backward pass, from that of the logits.
    """
    backward = _dependents(graph, gradients)
    leaves = (Op.INPUT, Op.RANDOM) if recompute == "none" else (Op.INPUT,)
    computable = _dependents(graph, {p for p, node in graph if node.op in leaves}) - backward
    needed = {a for p in _producers(graph, requested) & backward for a in graph.nodes[p].args}.union(requested) & computable
    large = large_values(graph, results) if recompute == "auto" and not has_one_block else frozenset()
    values = _Values(graph, frozenset(results), recompute, large, has_one_block=has_one_block)
    cut = _cut(values, computable, needed)
    if cut is None:
        values = _Values(graph, frozenset(results), recompute, large, recomputes_large=True)
        cut = _cut(values, computable, needed)
    assert cut is not None  # inputs can be saved, and everything else can be computed from them
    return tuple(SavedValue(p, values.dtype(p), values.is_in_memory(p)) for p in sorted(cut))


def large_values(graph: Graph, results: Collection[int]) -> frozenset[int]:
    """Returns the values that are computed in blocks of rows and never materialized whole, in the graph or in the forward pass
    alone."""
    forward, origins = subgraph_of(graph, tuple(results))
    in_forward = (origins[p] for region in regions(forward) for p in region.large(forward))
    return frozenset(in_forward).union(p for region in regions(graph) for p in region.large(graph))


def _cut(values: _Values, computable: Collection[int], needed: Collection[int]) -> frozenset[int] | None:
    """Returns the values to save; None if a value can be neither saved nor recomputed."""
    nodes = values.graph.nodes
    origins = {p for p in computable if not values.is_recomputable(p)}
    args = {p: [a for a in nodes[p].args if a in computable] if p not in origins else [] for p in sorted(computable)}
    costs = {p: values.cost(p) for p in computable}
    cut = cheapest_cut(args, costs, origins, needed)
    reached, stack = set(needed), list(needed)
    while stack:
        position = stack.pop()
        if position in cut:
            if costs[position] is None:
                return None
        elif position in origins:
            return None
        else:
            stack += [a for a in args[position] if a not in reached]
            reached.update(args[position])
    return cut


def _dependents(graph: Graph, positions: Collection[int]) -> set[int]:
    """Returns some nodes and all that depend on them."""
    dependents = set(positions)
    for position, node in graph:
        if not dependents.isdisjoint(node.args):
            dependents.add(position)
    return dependents


def _producers(graph: Graph, nodes: Collection[int]) -> set[int]:
    """Returns some nodes and all that they depend on."""
    producers = set(nodes)
    for position in range(len(graph.nodes) - 1, -1, -1):
        if position in producers:
            producers.update(graph.nodes[position].args)
    return producers


def _draws(node: Node) -> bool:
    """True if torch draws random bits for a node: they would differ in a second call."""
    return bool(dict(node.attrs).get("dropout"))


class _Values:
    """The costs of saving values. Large ones are never saved; matmuls among them are recomputed if `recomputes_large`. If
    `has_one_block`, the backward pass computes its matmuls, even if they do not depend on the gradients of the results."""

    def __init__(
        self,
        graph: Graph,
        results: frozenset[int],
        recompute: Recompute,
        large: frozenset[int],
        *,
        recomputes_large: bool = False,
        has_one_block: bool = False,
    ) -> None:
        self.graph, self._large, self._recomputes_large = graph, large, recomputes_large
        self._recompute = recompute
        self.results = results
        self._forward = _producers(graph, results)
        early = [p for p, _ in graph if self._is_early(p)] if has_one_block else []
        self._left_to_backward = _dependents(graph, early)
        self._equated = {position for node in graph.nodes if node.op is Op.EQ for position in node.args}
        self._counts = [nominal(product(node.shape)) for node in graph.nodes]
        self._largest: list[int] = []  # elements of the largest value that a node depends on, since the last matmul
        for node in graph.nodes:
            largest = max((max(self._counts[a], self._largest[a]) for a in node.args), default=0)
            self._largest.append(0 if node.family in _NOT_RECOMPUTED else largest)

    def is_recomputable(self, position: int) -> bool:
        """True if the backward pass may compute a value from its operands."""
        node = self.graph.nodes[position]
        if node.op is Op.INPUT or self._recompute == "all":
            return node.op is not Op.INPUT and not _draws(node)
        if self._recompute == "none" and position in self._forward:
            return self._is_compared(position) or self._is_free(node)
        if node.family in _NOT_RECOMPUTED:
            return position in self._left_to_backward or (self._recomputes_large and position in self._large)
        if self._recomputes_large and not self._large.isdisjoint(node.args):
            return True  # in the block that holds its operand
        return self._is_compared(position) or not (node.family is Family.REDUCTION and self._is_statistic(position))

    def _is_early(self, position: int) -> bool:
        """True for a matmul of gradients; one in a cut does not depend on gradients of the results."""
        return self.graph.nodes[position].op is Op.MATMUL and position not in self._forward

    def _is_compared(self, position: int) -> bool:
        """True for a maximum or minimum that is recomputed."""
        node = self.graph.nodes[position]
        return node.op in _COMPARED and (position in self._equated or self.graph.nodes[node.args[0]].op is not Op.INPUT)

    def _is_free(self, node: Node) -> bool:
        """True if recomputing is free: a view, a cast, or a choice of two numbers."""
        is_choice = node.op is Op.WHERE and all(self._counts[a] == 1 for a in node.args[1:])
        return is_choice or node.op is Op.CAST or node.family is Family.VIEW

    def cost(self, position: int) -> int | None:
        """Returns the bytes that saving a value moves; None if it must not be saved."""
        size = self._counts[position] * self.dtype(position).itemsize
        if self.is_in_memory(position):
            return size
        node = self.graph.nodes[position]
        if (
            (self._recompute == "all" and not _draws(node))
            or self._is_compared(position)
            or node.op in _REARRANGED
            or position in self._large
            or position in self._left_to_backward
        ):
            return None
        return 2 * size + (1 if position in self._forward else 2)  # breaks ties

    def is_in_memory(self, position: int) -> bool:
        """True if a value is materialized anyway, in the dtype that the backward pass needs."""
        node = self.graph.nodes[position]
        is_result = position in self.results and not self._is_compared(position) and self.dtype(position) is node.dtype
        return is_result or node.op is Op.INPUT

    def dtype(self, position: int) -> DType:
        node = self.graph.nodes[position]
        is_wide = self._is_early(position) or (self._is_statistic(position) and node.op not in _COMPARED)
        return node.dtype.compute if node.dtype.is_float and is_wide else node.dtype

    def _is_statistic(self, position: int) -> bool:
        return _STATISTIC * self._counts[position] <= self._largest[position]


# A minimum cut between a graph's sources and the requested nodes.


_NEVER = 1 << 60  # a capacity above the bytes of any graph


def cheapest_cut(
    args: Mapping[int, Sequence[int]], costs: Mapping[int, int | None], origins: Collection[int], targets: Collection[int]
) -> frozenset[int]:
    """Returns the node set of least cost that cuts all paths from origins, which have no operands, to targets. Among equal
    sets it takes the one nearest to the targets, which needs the least recomputation. A cost of None exceeds all others.

    Each node is an edge with its cost as capacity. Dinic, Algorithm for Solution of a Problem of Maximum Flow in Networks with
    Power Estimation (1970).
    """
    network = _Network(2 * len(args) + 2)
    vertex = {node: 2 * number for number, node in enumerate(args)}
    source, sink = 2 * len(args), 2 * len(args) + 1
    for node, operands in args.items():
        cost = costs[node]
        network.join(vertex[node], vertex[node] + 1, _NEVER if cost is None else cost)
        for operand in operands:
            network.join(vertex[operand] + 1, vertex[node], _NEVER)
    for node in origins:
        network.join(source, vertex[node], _NEVER)
    for node in targets:
        network.join(vertex[node] + 1, sink, _NEVER)
    reaching = network.saturate(source, sink)
    return frozenset(node for node in args if vertex[node] + 1 in reaching and vertex[node] not in reaching)


class _Network:
    """Edges in pairs: each edge is next to its reverse edge."""

    def __init__(self, count: int) -> None:
        self._ends: list[int] = []
        self._residual: list[int] = []  # residual capacity of each edge
        self._edges: list[list[int]] = [[] for _ in range(count)]

    def join(self, start: int, end: int, capacity: int) -> None:
        for vertex, target, residual in ((start, end, capacity), (end, start, 0)):
            self._edges[vertex].append(len(self._ends))
            self._ends.append(target)
            self._residual.append(residual)

    def saturate(self, source: int, sink: int) -> set[int]:
        while True:
            distance = self._distances(sink)
            if source not in distance:
                return set(distance)
            self._block(source, sink, distance)

    def _distances(self, sink: int) -> dict[int, int]:
        """Returns the distances to the sink from all vertices that reach it."""
        distance = {sink: 0}
        queue = deque([sink])
        while queue:
            vertex = queue.popleft()
            for edge in self._edges[vertex]:
                target = self._ends[edge]
                if self._residual[edge ^ 1] and target not in distance:
                    distance[target] = distance[vertex] + 1
                    queue.append(target)
        return distance

    def _block(self, source: int, sink: int, distance: Mapping[int, int]) -> None:
        """Sends a blocking flow along shortest paths."""
        next_edge = [0] * len(self._edges)  # earlier edges are dead ends
        path: list[int] = []
        vertex = source
        while True:
            if vertex == sink:
                self._send(path)
                path, vertex = [], source
            elif next_edge[vertex] < len(self._edges[vertex]):
                edge = self._edges[vertex][next_edge[vertex]]
                if self._residual[edge] and distance.get(self._ends[edge], -1) == distance[vertex] - 1:
                    path.append(edge)
                    vertex = self._ends[edge]
                else:
                    next_edge[vertex] += 1
            elif path:
                vertex = self._ends[path.pop() ^ 1]
                next_edge[vertex] += 1
            else:
                return

    def _send(self, path: Sequence[int]) -> None:
        amount = min(self._residual[edge] for edge in path)
        for edge in path:
            self._residual[edge] -= amount
            self._residual[edge ^ 1] += amount
