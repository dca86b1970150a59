"""Searches a graph: for each chain of light work the region around it that saves most, as the fuser itself says."""

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
from fusegen.integrations.find.trace import LAUNCHES, SECONDS, DeviceKernel, ProfilerTrace, replayed
from fusegen.integrations.fx.capture import EPOCH, PLACE, ModelPlace
from fusegen.integrations.fx.cut import (
    CutRegion,
    Kinds,
    NodeCost,
    example_of,
    is_convex,
    is_part,
    region_of,
    regions_of,
)
from fusegen.integrations.fx.function import IMPORTS, RegionFunction, Unwritable, function_name, region_function
from fusegen.target import Target

_IMPORTS = "\n".join([*IMPORTS, "", "import fusegen as fg", "", ""])


def searched(graph: fx.Graph, machine: Target, bandwidth: float) -> Findings:
    """The findings of a graph.

    Args:
        graph: as `regions.capture` makes it.
        machine: launches, bytes and times are of it.
        bandwidth: of its GPU, bytes a second.
    """
    search = Search(graph, machine, bandwidth)
    return Findings(search.findings(), machine.name, (), search.launches(), search.refused())


def searched_trace(trace: ProfilerTrace, machine: Target, bandwidth: float) -> Findings:
    """The findings of a trace.

    Args:
        machine: launches, bytes and times after fusion are of it.
        bandwidth: of its GPU, bytes a second.
    """
    search = Search(replayed(trace.operators), machine, bandwidth)
    observations = list(observed(trace, search.moved(), bandwidth))
    return Findings(search.findings(_OF_TRACE), machine.name, observations, search.launches(), search.refused())


_OF_TRACE = "a trace does not say which tensor an operation reads: the latest of its shape is taken. Compare with the source"


class Search:
    """One search.

    Args:
        graph: as `regions.capture` makes it.
        machine: what fusegen plans for.
        bandwidth: of its GPU, bytes a second.
    """

    def __init__(self, graph: fx.Graph, machine: Target, bandwidth: float) -> None:
        self._graph, self._bandwidth = graph, bandwidth
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._sorter = Kinds(machine)
        self._kinds = self._sorter.of(graph.nodes)
        self._costs = Costs(machine.name)
        self._eager: dict[object, EagerCost | None] = {}

    def findings(self, note: str = "") -> list[Finding]:
        """The findings, each with a note."""
        return [_finding(costs, self._bandwidth, note) for costs in self.best()]

    def best(self) -> list[list[Cost]]:
        """Regions that save something, none of which overlap, with equal ones together."""
        light = self._joined(
            regions_of(self._graph, self._kinds, (NodeCost.LIGHT, NodeCost.FREE), lambda node: node.meta.get(EPOCH))
        )
        taken: set[fx.Node] = set()
        found: dict[object, list[Cost]] = {}
        for region in light:
            candidates = [CutRegion(c.nodes, c.results) for c in self._candidates(region) if not taken & set(c.nodes)]
            cost = self._best_of(candidates)
            if cost is not None:
                taken.update(cost.region.nodes)
                found.setdefault(key_of(cost.region), []).append(cost)
        return list(found.values())

    def _joined(self, regions: Sequence[CutRegion]) -> list[CutRegion]:
        """The regions; those that read one large tensor, of which none waits for the other, as one where that moves fewer bytes."""
        found = {node: region for region in regions for node in region.nodes}
        for node in self._graph.nodes:
            reading = [found[user] for user in node.users if user in found]
            readers = list({id(region): region for region in reading if node not in region.nodes}.values())
            for one, other in itertools.pairwise(readers):
                both = self._both(node, found[one.nodes[0]], found[other.nodes[0]])
                found |= {each: both for each in both.nodes} if both else {}
        return list({id(region): region for region in found.values()}.values())

    def _both(self, read: fx.Node, one: CutRegion, other: CutRegion) -> CutRegion | None:
        """Two regions that read a tensor as one, if it is large and is read once then."""
        nodes = {*one.nodes, *other.nodes}
        if one is other or not all(self._is_large(read, region) for region in (one, other)) or not self._is_one(nodes):
            return None
        both = region_of(sorted(nodes, key=self._order.__getitem__), self._kinds)
        try:
            costs = [self._costs.of(region) for region in (both, one, other)]
        except Unwritable:
            return None
        if any(cost is None for cost in costs):
            return None
        whole, first, second = (cost for cost in costs if cost is not None)
        return both if whole.launches < first.launches + second.launches and whole.moved < first.moved + second.moved else None

    def _is_one(self, nodes: set[fx.Node]) -> bool:
        """True if nodes may be computed at one place: no path leaves them and comes back, and nothing is written between them."""
        return len({node.meta.get(EPOCH) for node in nodes}) == 1 and is_convex(nodes, self._order)

    def _is_large(self, node: fx.Node, region: CutRegion) -> bool:
        """True if a tensor has at least half of the bytes of the largest value of a region."""
        return 2 * _size(node) >= max(map(_size, region.nodes))

    def _best_of(self, candidates: Iterable[CutRegion]) -> Cost | None:
        """The one that saves most, the smallest of equal ones."""
        best, most = None, 0.0
        for region in candidates:
            try:
                function = region_function(region.nodes, region.results)
            except Unwritable:
                continue
            known = self._costs.of(region)
            if known is not None and (saved := known.seconds_saved(self._bandwidth)) > most * 1.001:
                best, most = Cost(region, function, known.eager, known.launches, known.moved), saved
        return best

    def _candidates(self, region: CutRegion) -> Iterator[CutRegion]:
        """A region alone; with the matmuls that it reads; with those that read it, too."""
        yield region
        inside = set(region.nodes)
        before = self._heavy(each for node in region.nodes for each in self._through_views(node, back=True) if each not in inside)
        after = self._heavy(each for node in region.nodes for each in self._through_views(node, back=False) if each not in inside)
        for heavy in (before, [*before, *after]) if before else ():
            nodes = {*region.nodes, *self._with_views(heavy, inside)}
            if heavy and self._is_one(nodes):
                yield region_of(sorted(nodes, key=self._order.__getitem__), self._kinds)

    def _heavy(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in dict.fromkeys(nodes) if self._kinds[node] is NodeCost.HEAVY]

    def _through_views(self, node: fx.Node, *, back: bool) -> Iterator[fx.Node]:
        """The nodes that a node reads, or that read it, and those behind views."""
        for each in node.all_input_nodes if back else node.users:
            yield each
            if self._kinds.get(each) is NodeCost.FREE:
                yield from self._through_views(each, back=back)

    def _with_views(self, heavy: Sequence[fx.Node], inside: set[fx.Node]) -> Iterator[fx.Node]:
        """Matmuls, with the views between them and a region."""
        for node in heavy:
            yield node
            yield from self._views_between(node, inside, back=False)
            yield from self._views_between(node, inside, back=True)

    def _views_between(self, node: fx.Node, inside: set[fx.Node], *, back: bool) -> Iterator[fx.Node]:
        for each in node.all_input_nodes if back else node.users:
            if self._kinds.get(each) is NodeCost.FREE and any(n in inside for n in self._through_views(each, back=back)):
                yield each
                yield from self._views_between(each, inside, back=back)

    def launches(self) -> int:
        """Launches of torch eager in the whole graph: those that a trace has, else as far as they can be counted."""
        calls = [node for node in self._graph.nodes if node.op in ("call_function", "call_method")]
        if measured := sum(node.meta.get(LAUNCHES, 0) for node in calls):
            return int(measured)
        costs = [self._cost_of(node) for node in calls if not is_part(node)]
        return sum(1 if cost is None else cost.launches for cost in costs)

    def moved(self) -> list[tuple[fx.Node, int]]:
        """Light operations, with the bytes that torch eager moves for each."""
        light = [node for node, kind in self._kinds.items() if kind is NodeCost.LIGHT and not is_part(node)]
        costs = [(node, self._cost_of(node)) for node in light]
        return [(node, cost.moved) for node, cost in costs if cost is not None]

    def _cost_of(self, node: fx.Node) -> EagerCost | None:
        try:
            key = key_of(CutRegion((node,), (node,)))
        except Unwritable:
            return None
        if key not in self._eager:
            function = region_function([node], [node])
            values = {name: example_of(each) for each, name in function.parameters.items()}
            self._eager[key] = eager_cost(function.function(), values)
        return self._eager[key]

    def refused(self) -> list[tuple[str, str, int]]:
        """Operations that read tensors and cannot be traced."""
        nodes = [n for n, kind in self._kinds.items() if kind is NodeCost.OPAQUE and n.op.startswith("call") and n.all_input_nodes]
        reasons = [(function_name(node), self._sorter.kind(node)[1]) for node in nodes if function_name(node) != "getitem"]
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
        places=tuple(_place(cost.region) for cost in costs),
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
    """Text that declares a kernel, with its imports."""
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
    """True if values go from each node to some other, so that none is beside the rest."""
    inside, reached = set(nodes), {nodes[0]}
    stack = [nodes[0]]
    while stack:
        node = stack.pop()
        beside = {each for each in (*node.all_input_nodes, *node.users) if each in inside} - reached
        reached |= beside
        stack += beside
    return len(reached) == len(inside)


def _size(node: fx.Node) -> int:
    value = example_of(node)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _place(region: CutRegion) -> ModelPlace:
    """The source line of the last operation other than a matmul."""
    telling = [node for node in region.nodes if function_name(node) not in _PRODUCTS] or region.nodes
    place: ModelPlace = telling[-1].meta.get(PLACE, ModelPlace())
    return place


def _origin(node: fx.Node) -> str:
    value, facts = node.meta.get(PLACE), facts_of([node])[0]
    shape = f"{'×'.join(map(str, facts[0]))} {str(facts[2]).removeprefix('torch.')}" if isinstance(facts, tuple) else str(facts)
    if node.op == "placeholder" and not isinstance(facts, tuple):
        return "a number"
    return f"{shape}, {node.target}" if node.op == "placeholder" else f"{shape}, the {function_name(node)} at {value}"


def _read_again(region: CutRegion) -> int:
    """Bytes of inputs that several operations of a region read, beyond the first time."""
    inside = set(region.nodes)
    readers = Counter(each for node in region.nodes for each in node.all_input_nodes if each not in inside)
    return sum((count - 1) * _size(node) for node, count in readers.items())


def _measured(regions: Sequence[CutRegion]) -> float | None:
    """The mean time of equal regions in a trace; None where nothing was measured."""
    times = [node.meta[SECONDS] for region in regions for node in region.nodes if SECONDS in node.meta]
    return sum(times) / len(regions) if times else None


def _measured_launches(region: CutRegion) -> int:
    return sum(node.meta.get(LAUNCHES, 0) for node in region.nodes)


def _seconds_saved(cost: Cost, measured: float | None, bandwidth: float) -> float:
    """Expected; of a chain that ran on a GPU the measured time less that of fusegen's launches.

    That is also the most that can be saved around a matmul, of which it leaves out the arithmetic.
    """
    if measured is None or not _measured_launches(cost.region):
        return cost.seconds_saved(bandwidth)
    most = measured - cost.seconds_after(bandwidth)
    return most if _pattern(cost) is FindingKind.CHAIN else min(most, cost.seconds_saved(bandwidth))


# The cost of a region: launches and bytes of torch eager, and of the program that fusegen makes of it.


@dataclass(frozen=True)
class Cost:
    """A region's cost, before and after.

    Attributes:
        function: that computes it.
        eager: of torch.
        launches, moved: of fusegen.
    """

    region: CutRegion
    function: RegionFunction
    eager: EagerCost
    launches: int
    moved: int

    def seconds_saved(self, bandwidth: float) -> float:
        """Expected: bytes over a GPU's bandwidth, in bytes a second, and a kernel's start for each launch."""
        return (self.eager.moved - self.moved) / bandwidth + (self.eager.launches - self.launches) * LAUNCH_SECONDS

    def seconds_after(self, bandwidth: float) -> float:
        """Expected, of fusegen's launches."""
        return self.moved / bandwidth + self.launches * LAUNCH_SECONDS


class Costs:
    """The costs of regions; equal ones are lowered once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._known: dict[object, Cost | None] = {}

    def of(self, region: CutRegion) -> Cost | None:
        """The cost of a region; None where fusegen does not compute it whole, or eager cannot be counted."""
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
    """The same for regions that compute the same of tensors of equal shapes, strides and dtypes.

    Raises:
        Unwritable: something in it has no text.
    """
    function = region_function(region.nodes, region.results, "x")
    return (function.text, *facts_of(list(function.parameters)))


def facts_of(nodes: Sequence[fx.Node]) -> list[object]:
    """Shapes, strides and dtypes."""
    values = [example_of(node) for node in nodes]
    return [(tuple(v.shape), v.stride(), v.dtype) if hasattr(v, "stride") else v for v in values]


# Facts about a profile that no single chain shows: memory-bound time, gaps between kernels.


_NEAR_PEAK = 0.6  # share of the peak bandwidth from which memory is the limit
_GAP = 1e-6  # seconds without a kernel that count as a gap
_HOST_BOUND = 0.2  # share of the time without a kernel that says that the host is the limit


def observed(trace: ProfilerTrace, moved: Sequence[tuple[fx.Node, int]], bandwidth: float) -> Iterator[Observation]:
    """The observations about a trace with a GPU.

    Args:
        moved: light operations, with the bytes that each moves.
    """
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
        yield Observation("bound by the host", f"{detail}; fewer launches, or a CUDA graph, shorten that time")
    else:
        yield Observation("gaps between kernels", detail)


def _memory_bound(trace: ProfilerTrace, moved: Sequence[tuple[fx.Node, int]], bandwidth: float) -> Iterator[Observation]:
    """The time of light operations whose bytes come near the peak: SMs wait for memory in it."""
    rates = [(node.meta[SECONDS], size / node.meta[SECONDS] / bandwidth) for node, size in moved if node.meta.get(SECONDS)]
    near = sum(seconds for seconds, rate in rates if rate >= _NEAR_PEAK)
    busy = sum(kernel.seconds for kernel in trace.kernels)
    if near and busy:
        count = sum(rate >= _NEAR_PEAK for _, rate in rates)
        detail = f"{near * 1e3:.2f} of {busy * 1e3:.2f} ms of kernels ({near / busy:.0%}) is in {count} elementwise operations and"
        detail += f" reductions at {_NEAR_PEAK:.0%} of the peak bandwidth or more: only less traffic makes them faster"
        yield Observation("bound by memory", detail)
