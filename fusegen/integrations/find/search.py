"""Searches a graph for the regions around pointwise and reduction chains that save most when fusegen computes them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from fusegen.api import Kernel
from fusegen.eager_cost import EagerCost, eager_cost
from fusegen.errors import FusegenError
from fusegen.families.roofline import LAUNCH_SECONDS
from fusegen.integrations.find.finding import Finding, FindingKind, Findings, Observation
from fusegen.integrations.find.trace import LAUNCHES, SECONDS, DeviceKernel, ProfilerTrace, replay
from fusegen.integrations.fx.capture import EPOCH, LOCATION, SourceLocation
from fusegen.integrations.fx.cut import (
    CutRegion,
    NodeCost,
    NodeCosts,
    example_of,
    is_convex,
    region_of,
    regions_of,
    selects_result,
)
from fusegen.integrations.fx.function import IMPORTS, NoSourceText, RegionFunction, function_name, region_function
from fusegen.target import Target

_IMPORTS = "\n".join([*IMPORTS, "", "import fusegen as fg", "", ""])


def search_graph(graph: fx.Graph, machine: Target, bandwidth: float) -> Findings:
    """The findings of a captured graph.

    Args:
        machine: the GPU to count launches and to estimate times for.
        bandwidth: memory bandwidth of this GPU, in bytes per second.
    """
    search = Search(graph, machine, bandwidth)
    return Findings(search.findings(), machine.name, (), search.launches(), search.refused())


def search_trace(trace: ProfilerTrace, machine: Target, bandwidth: float) -> Findings:
    """The findings of a profiler's trace; the arguments are those of `search_graph`."""
    search = Search(replay(trace.operators), machine, bandwidth)
    observations = list(observe(trace, search.moved(), bandwidth))
    return Findings(search.findings(_TRACE_NOTE), machine.name, observations, search.launches(), search.refused())


_TRACE_NOTE = "a trace does not record which tensor an operation reads; the latest of its shape is assumed. Compare with the source"


class Search:
    """A search in one graph; the arguments are those of `search_graph`."""

    def __init__(self, graph: fx.Graph, machine: Target, bandwidth: float) -> None:
        self._graph, self._bandwidth = graph, bandwidth
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._node_costs = NodeCosts(machine)
        self._kinds = self._node_costs.of(graph.nodes)
        self._costs = Costs(machine.name)
        self._eager: dict[object, EagerCost | None] = {}

    def findings(self, note: str = "") -> list[Finding]:
        return [_finding(costs, self._bandwidth, note) for costs in self.best()]

    def best(self) -> list[list[Cost]]:
        """Selects disjoint regions that save time; equal regions form one group."""
        light = self._joined(
            regions_of(self._graph, self._kinds, (NodeCost.LIGHT, NodeCost.FREE), lambda node: node.meta.get(EPOCH))
        )
        covered: set[fx.Node] = set()
        groups: dict[object, list[Cost]] = {}
        for region in light:
            candidates = [CutRegion(c.nodes, c.results) for c in self._candidates(region) if not covered & set(c.nodes)]
            cost = self._best_of(candidates)
            if cost is not None:
                covered.update(cost.region.nodes)
                groups.setdefault(key_of(cost.region), []).append(cost)
        return list(groups.values())

    def _joined(self, regions: Sequence[CutRegion]) -> list[CutRegion]:
        """Joins independent regions that read the same large tensor, where the union moves fewer bytes."""
        regions_by_node = {node: region for region in regions for node in region.nodes}
        for node in self._graph.nodes:
            reading = [regions_by_node[user] for user in node.users if user in regions_by_node]
            readers = list({id(region): region for region in reading if node not in region.nodes}.values())
            for first, second in itertools.pairwise(readers):
                union = self._union(node, regions_by_node[first.nodes[0]], regions_by_node[second.nodes[0]])
                regions_by_node |= {member: union for member in union.nodes} if union else {}
        return list({id(region): region for region in regions_by_node.values()}.values())

    def _union(self, read: fx.Node, first: CutRegion, second: CutRegion) -> CutRegion | None:
        """Joins two regions that read the same tensor; None unless the tensor is large and the union moves fewer bytes."""
        nodes = {*first.nodes, *second.nodes}
        if first is second or not all(self._is_large(read, region) for region in (first, second)) or not self._is_fusible(nodes):
            return None
        union = region_of(sorted(nodes, key=self._order.__getitem__), self._kinds)
        try:
            costs = [self._costs.of(region) for region in (union, first, second)]
        except NoSourceText:
            return None
        if any(cost is None for cost in costs):
            return None
        joined, one, two = (cost for cost in costs if cost is not None)
        return union if joined.launches < one.launches + two.launches and joined.moved < one.moved + two.moved else None

    def _is_fusible(self, nodes: set[fx.Node]) -> bool:
        """True if one function can compute the nodes: they are convex, and nothing is written between them."""
        return len({node.meta.get(EPOCH) for node in nodes}) == 1 and is_convex(nodes, self._order)

    def _is_large(self, node: fx.Node, region: CutRegion) -> bool:
        return 2 * _size(node) >= max(map(_size, region.nodes))

    def _best_of(self, candidates: Iterable[CutRegion]) -> Cost | None:
        """Returns the region that saves most; if several save as much, the first, which is the smallest."""
        best, most = None, 0.0
        for region in candidates:
            try:
                function = region_function(region.nodes, region.results)
            except NoSourceText:
                continue
            cost = self._costs.of(region)
            if cost is not None and (saved := cost.seconds_saved(self._bandwidth)) > most * 1.001:
                best, most = Cost(region, function, cost.eager, cost.launches, cost.moved), saved
        return best

    def _candidates(self, region: CutRegion) -> Iterator[CutRegion]:
        """Yields the region alone, then with the matmuls that it reads, then also with the matmuls that read it."""
        yield region
        inside = set(region.nodes)
        before = self._heavy(n for node in region.nodes for n in self._through_views(node, back=True) if n not in inside)
        after = self._heavy(n for node in region.nodes for n in self._through_views(node, back=False) if n not in inside)
        for heavy in (before, [*before, *after]) if before else ():
            nodes = {*region.nodes, *self._with_views(heavy, inside)}
            if heavy and self._is_fusible(nodes):
                yield region_of(sorted(nodes, key=self._order.__getitem__), self._kinds)

    def _heavy(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in dict.fromkeys(nodes) if self._kinds[node] is NodeCost.HEAVY]

    def _through_views(self, node: fx.Node, *, back: bool) -> Iterator[fx.Node]:
        """Yields the inputs (`back`) or users of a node; for views among these, also their inputs or users, and so on."""
        for neighbor in node.all_input_nodes if back else node.users:
            yield neighbor
            if self._kinds.get(neighbor) is NodeCost.FREE:
                yield from self._through_views(neighbor, back=back)

    def _with_views(self, heavy: Sequence[fx.Node], inside: set[fx.Node]) -> Iterator[fx.Node]:
        for node in heavy:
            yield node
            yield from self._views_between(node, inside, back=False)
            yield from self._views_between(node, inside, back=True)

    def _views_between(self, node: fx.Node, inside: set[fx.Node], *, back: bool) -> Iterator[fx.Node]:
        for neighbor in node.all_input_nodes if back else node.users:
            if self._kinds.get(neighbor) is NodeCost.FREE and any(n in inside for n in self._through_views(neighbor, back=back)):
                yield neighbor
                yield from self._views_between(neighbor, inside, back=back)

    def launches(self) -> int:
        """Launches of torch eager in the whole graph: measured if the trace has kernels, else those that can be counted."""
        calls = [node for node in self._graph.nodes if node.op in ("call_function", "call_method")]
        if measured := sum(node.meta.get(LAUNCHES, 0) for node in calls):
            return int(measured)
        costs = [self._cost_of(node) for node in calls if not selects_result(node)]
        return sum(1 if cost is None else cost.launches for cost in costs)

    def moved(self) -> list[tuple[fx.Node, int]]:
        """Pointwise and reduction operations, with the bytes that torch eager moves for each."""
        light = [node for node, kind in self._kinds.items() if kind is NodeCost.LIGHT and not selects_result(node)]
        costs = [(node, self._cost_of(node)) for node in light]
        return [(node, cost.moved) for node, cost in costs if cost is not None]

    def _cost_of(self, node: fx.Node) -> EagerCost | None:
        try:
            key = key_of(CutRegion((node,), (node,)))
        except NoSourceText:
            return None
        if key not in self._eager:
            function = region_function([node], [node])
            values = {name: example_of(parameter) for parameter, name in function.parameters.items()}
            self._eager[key] = eager_cost(function.function(), values)
        return self._eager[key]

    def refused(self) -> list[tuple[str, str, int]]:
        """Operations that read tensors and cannot be traced, with the reason and the number of occurrences."""
        nodes = [n for n, kind in self._kinds.items() if kind is NodeCost.OPAQUE and n.op.startswith("call") and n.all_input_nodes]
        reasons = [(function_name(node), self._node_costs.kind(node)[1]) for node in nodes if function_name(node) != "getitem"]
        return [(name, reason, count) for (name, reason), count in Counter(reasons).items()]


def _finding(costs: Sequence[Cost], bandwidth: float, note: str) -> Finding:
    first = costs[0]
    function = first.function
    names = list(function.parameters.values())
    measured = _measured([cost.region for cost in costs])
    return Finding(
        pattern=_pattern(first),
        name=function.name,
        operations=first.eager.operations,
        locations=tuple(_location(cost.region) for cost in costs),
        launches_before=_measured_launches(first.region) or first.eager.launches,
        launches_after=first.launches,
        bytes_before=first.eager.moved,
        bytes_after=first.moved,
        read_again=_read_again(first.region),
        seconds_before=measured,
        seconds_saved=_seconds_saved(first, measured, bandwidth),
        declaration=declaration(function),
        call=f"{_results(function)} = {function.name}({', '.join(names)})",
        arguments=tuple((name, _origin(node)) for node, name in function.parameters.items()),
        note=note,
    )


def declaration(function: RegionFunction) -> str:
    return f"{_IMPORTS}@fg.kernel\n{function.text}\n"


def _results(function: RegionFunction) -> str:
    return ", ".join(
        f"{function.names[node]}_out" if function.names[node] in function.parameters.values() else function.names[node]
        for node in function.results
    )


def _pattern(cost: Cost) -> FindingKind:
    names = {function_name(node) for node in cost.region.nodes}
    products = [name for name in (function_name(n) for n in cost.region.nodes) if name in _PRODUCTS]
    if "softmax" in names and len(products) > 1:
        return FindingKind.ATTENTION
    if not products and not _is_connected(cost.region.nodes):
        return FindingKind.SHARED
    return FindingKind.EPILOGUE if products else FindingKind.CHAIN


_PRODUCTS = ("linear", "matmul", "addmm", "mm", "bmm", "baddbmm", "einsum")


def _is_connected(nodes: Sequence[fx.Node]) -> bool:
    inside, reached = set(nodes), {nodes[0]}
    stack = [nodes[0]]
    while stack:
        node = stack.pop()
        neighbors = {neighbor for neighbor in (*node.all_input_nodes, *node.users) if neighbor in inside} - reached
        reached |= neighbors
        stack += neighbors
    return len(reached) == len(inside)


def _size(node: fx.Node) -> int:
    value = example_of(node)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _location(region: CutRegion) -> SourceLocation:
    """The source line of the last operation other than a matmul."""
    candidates = [node for node in region.nodes if function_name(node) not in _PRODUCTS] or region.nodes
    location: SourceLocation = candidates[-1].meta.get(LOCATION, SourceLocation())
    return location


def _origin(node: fx.Node) -> str:
    location, facts = node.meta.get(LOCATION), facts_of([node])[0]
    shape = f"{'×'.join(map(str, facts[0]))} {str(facts[2]).removeprefix('torch.')}" if isinstance(facts, tuple) else str(facts)
    if node.op == "placeholder" and not isinstance(facts, tuple):
        return "a number"
    return f"{shape}, {node.target}" if node.op == "placeholder" else f"{shape}, the {function_name(node)} at {location}"


def _read_again(region: CutRegion) -> int:
    """Bytes of repeated reads of a region's inputs."""
    inside = set(region.nodes)
    readers = Counter(operand for node in region.nodes for operand in node.all_input_nodes if operand not in inside)
    return sum((count - 1) * _size(node) for node, count in readers.items())


def _measured(regions: Sequence[CutRegion]) -> float | None:
    """The mean time of equal regions in a trace, in seconds; None if they were not measured."""
    times = [node.meta[SECONDS] for region in regions for node in region.nodes if SECONDS in node.meta]
    return sum(times) / len(regions) if times else None


def _measured_launches(region: CutRegion) -> int:
    return sum(node.meta.get(LAUNCHES, 0) for node in region.nodes)


def _seconds_saved(cost: Cost, measured: float | None, bandwidth: float) -> float:
    """The expected saving; for a chain measured on a GPU, the measured time minus that of fusegen's launches.

    Around a matmul, that difference is an upper bound, because fusegen's time leaves out the arithmetic.
    """
    if measured is None or not _measured_launches(cost.region):
        return cost.seconds_saved(bandwidth)
    most = measured - cost.seconds_after(bandwidth)
    return most if _pattern(cost) is FindingKind.CHAIN else min(most, cost.seconds_saved(bandwidth))


# The cost of a region: launches and bytes of torch eager and of fusegen's program.


@dataclass(frozen=True)
class Cost:
    """The cost of a region: ``eager`` is that of torch; ``launches`` and ``moved`` (bytes) are fusegen's."""

    region: CutRegion
    function: RegionFunction
    eager: EagerCost
    launches: int
    moved: int

    def seconds_saved(self, bandwidth: float) -> float:
        """Expected saving: saved bytes over ``bandwidth`` (bytes per second), plus a fixed time per saved launch."""
        return (self.eager.moved - self.moved) / bandwidth + (self.eager.launches - self.launches) * LAUNCH_SECONDS

    def seconds_after(self, bandwidth: float) -> float:
        return self.moved / bandwidth + self.launches * LAUNCH_SECONDS


class Costs:
    """The costs of regions; equal regions are lowered once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._known: dict[object, Cost | None] = {}

    def of(self, region: CutRegion) -> Cost | None:
        """The cost of a region; None if fusegen cannot compute all of it, or if the launches of eager cannot be counted."""
        key = key_of(region)
        if key not in self._known:
            self._known[key] = self._lowered(region, region_function(region.nodes, region.results))
        return self._known[key]

    def _lowered(self, region: CutRegion, function: RegionFunction) -> Cost | None:
        python = function.function()
        values = [example_of(node) for node in function.parameters]
        eager = eager_cost(python, dict(zip(function.parameters.values(), values, strict=True)))
        if eager is None:
            return None
        try:
            low = Kernel(python, name=function.name).lower(*values, target=self.target)
        except FusegenError:
            return None
        return Cost(
            region, function, eager, len(low.program.steps), sum(step.traffic.moved(low.sizes) for step in low.program.steps)
        )


def key_of(region: CutRegion) -> tuple[object, ...]:
    """A key that is equal for regions with the same text and inputs of equal shapes, strides and dtypes.

    Raises:
        NoSourceText: a node has no source text.
    """
    function = region_function(region.nodes, region.results, "x")
    return (function.text, *facts_of(list(function.parameters)))


def facts_of(nodes: Sequence[fx.Node]) -> list[object]:
    values = [example_of(node) for node in nodes]
    return [(tuple(v.shape), v.stride(), v.dtype) if hasattr(v, "stride") else v for v in values]


# Observations about a profile: memory-bound time, and gaps between kernels.


_NEAR_PEAK = 0.6  # fraction of the peak bandwidth from which an operation counts as bound by memory
_GAP = 1e-6  # seconds without a kernel that count as a gap
_HOST_BOUND = 0.2  # fraction of idle time from which the GPU counts as waiting for the host


def observe(trace: ProfilerTrace, moved: Sequence[tuple[fx.Node, int]], bandwidth: float) -> Iterator[Observation]:
    """Observations about a GPU trace; ``moved`` has the bytes of each light operation."""
    if not trace.kernels:
        return
    yield from _gaps(trace.kernels)
    yield from _memory_bound(trace, moved, bandwidth)


def _gaps(kernels: Sequence[DeviceKernel]) -> Iterator[Observation]:
    end, idle, gaps = kernels[0].start, 0.0, 0
    for kernel in kernels:
        gap = kernel.start - end
        idle, gaps = (idle + gap, gaps + 1) if gap > _GAP else (idle, gaps)
        end = max(end, kernel.start + kernel.seconds)
    span = end - kernels[0].start
    share = idle / span if span else 0.0
    detail = f"the GPU is idle for {idle * 1e3:.2f} of {span * 1e3:.2f} ms ({share:.0%}), in {gaps} gaps"
    detail += f" between {len(kernels)} kernels"
    if share > _HOST_BOUND:
        yield Observation("bound by the host", f"{detail}; fewer launches or a CUDA graph shorten it")
    else:
        yield Observation("gaps between kernels", detail)


def _memory_bound(trace: ProfilerTrace, moved: Sequence[tuple[fx.Node, int]], bandwidth: float) -> Iterator[Observation]:
    """The time of light operations near the peak bandwidth, where SMs wait for memory."""
    rates = [(node.meta[SECONDS], size / node.meta[SECONDS] / bandwidth) for node, size in moved if node.meta.get(SECONDS)]
    near = sum(seconds for seconds, rate in rates if rate >= _NEAR_PEAK)
    busy = sum(kernel.seconds for kernel in trace.kernels)
    if near and busy:
        count = sum(rate >= _NEAR_PEAK for _, rate in rates)
        detail = f"{near * 1e3:.2f} of {busy * 1e3:.2f} ms of kernels ({near / busy:.0%}) is in {count} pointwise operations and"
        detail += f" reductions at {_NEAR_PEAK:.0%} of the peak bandwidth or more: only less traffic makes them faster"
        yield Observation("bound by memory", detail)
