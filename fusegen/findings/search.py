"""Searches a graph: for each chain of light work the region around it that saves most, as the fuser itself says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from fusegen.eager_cost import eager_cost
from fusegen.findings.cost import Cost, Costs, facts_of, key_of
from fusegen.findings.finding import Finding, Findings, Pattern
from fusegen.regions.capture import EPOCH, PLACE
from fusegen.regions.cut import Region, is_convex, region_of, regions_of
from fusegen.regions.expressions import Unwritable, function_name
from fusegen.regions.function import IMPORTS, RegionFunction, region_function
from fusegen.regions.kinds import Kind, Kinds, example_of, is_part
from fusegen.regions.places import Place
from fusegen.target import Target

_IMPORTS = "\n".join([*IMPORTS, "", "import fusegen as fg", "", ""])


def searched(graph: fx.Graph, machine: Target, note: str = "") -> Findings:
    """The findings of a graph.

    Args:
        graph: as `regions.capture` makes it.
        machine: launches, bytes and times are of it.
        note: of each finding.
    """
    search = _Search(graph, machine)
    found = [_finding(costs, search.costs.target, note) for costs in search.best()]
    return Findings(found, machine.name, (), search.launches(), search.refused())


class _Search:
    """One search."""

    def __init__(self, graph: fx.Graph, machine: Target) -> None:
        self._graph = graph
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._sorter = Kinds(machine)
        self._kinds = self._sorter.of(graph.nodes)
        self.costs = Costs(machine.name)

    def best(self) -> list[list[Cost]]:
        """Regions that save something, none of which overlap, with equal ones together."""
        light = regions_of(self._graph, self._kinds, (Kind.LIGHT, Kind.FREE), lambda node: node.meta.get(EPOCH))
        taken: set[fx.Node] = set()
        found: dict[object, list[Cost]] = {}
        for region in light:
            candidates = [Region(c.nodes, c.results) for c in self._candidates(region) if not taken & set(c.nodes)]
            cost = self._best_of(candidates)
            if cost is not None:
                taken.update(cost.region.nodes)
                found.setdefault(key_of(cost.function), []).append(cost)
        return list(found.values())

    def _best_of(self, candidates: Iterable[Region]) -> Cost | None:
        """The one that saves most, the smallest of equal ones."""
        best, most = None, 0.0
        for region in candidates:
            try:
                function = region_function(region.nodes, region.results)
            except Unwritable:
                continue
            known = self.costs.of(region)
            if known is not None and (saved := known.seconds_saved(self.costs.target)) > most * 1.001:
                best, most = Cost(region, function, known.eager, known.launches, known.moved), saved
        return best

    def _candidates(self, region: Region) -> Iterator[Region]:
        """A region alone; with the matmuls that it reads; with those that read it, too."""
        yield region
        inside = set(region.nodes)
        before = self._heavy(each for node in region.nodes for each in self._through_views(node, back=True) if each not in inside)
        after = self._heavy(each for node in region.nodes for each in self._through_views(node, back=False) if each not in inside)
        for heavy in (before, [*before, *after]) if before else ():
            nodes = {*region.nodes, *self._with_views(heavy, inside)}
            if heavy and is_convex(nodes, self._order):
                yield region_of(sorted(nodes, key=self._order.__getitem__), self._kinds)

    def _heavy(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in dict.fromkeys(nodes) if self._kinds[node] is Kind.HEAVY]

    def _through_views(self, node: fx.Node, *, back: bool) -> Iterator[fx.Node]:
        """The nodes that a node reads, or that read it, and those behind views."""
        for each in node.all_input_nodes if back else node.users:
            yield each
            if self._kinds.get(each) is Kind.FREE:
                yield from self._through_views(each, back=back)

    def _with_views(self, heavy: Sequence[fx.Node], inside: set[fx.Node]) -> Iterator[fx.Node]:
        """Matmuls, with the views between them and a region."""
        for node in heavy:
            yield node
            yield from self._views_between(node, inside, back=False)
            yield from self._views_between(node, inside, back=True)

    def _views_between(self, node: fx.Node, inside: set[fx.Node], *, back: bool) -> Iterator[fx.Node]:
        for each in node.all_input_nodes if back else node.users:
            if self._kinds.get(each) is Kind.FREE and any(n in inside for n in self._through_views(each, back=back)):
                yield each
                yield from self._views_between(each, inside, back=back)

    def launches(self) -> int:
        """Launches of torch eager in the whole graph, as far as they can be counted."""
        known = dict[object, int]()
        return sum(self._launches(node, known) for node in self._graph.nodes if node.op in ("call_function", "call_method"))

    def _launches(self, node: fx.Node, known: dict[object, int]) -> int:
        if is_part(node):
            return 0
        try:
            function = region_function([node], [node])
        except Unwritable:
            return 1
        key = key_of(function)
        if key not in known:
            values = {name: example_of(each) for each, name in function.parameters.items()}
            cost = eager_cost(function.function(), values)
            known[key] = 1 if cost is None else cost.launches
        return known[key]

    def refused(self) -> list[tuple[str, str, int]]:
        """Operations that read tensors and cannot be traced."""
        nodes = [n for n, kind in self._kinds.items() if kind is Kind.OPAQUE and n.op.startswith("call") and n.all_input_nodes]
        reasons = [(function_name(node), self._sorter.kind(node)[1]) for node in nodes if function_name(node) != "getitem"]
        return [(name, reason, count) for (name, reason), count in Counter(reasons).items()]


def _finding(costs: Sequence[Cost], machine: str, note: str) -> Finding:
    """The finding of equal regions."""
    first = costs[0]
    function = first.function
    names = list(function.parameters.values())
    return Finding(
        pattern=_pattern(first),
        name=function.name,
        operations=first.eager.operations,
        places=tuple(_place(cost.region) for cost in costs),
        launches_before=first.eager.launches,
        launches_after=first.launches,
        bytes_before=first.eager.moved,
        bytes_after=first.moved,
        read_again=_read_again(first.region),
        seconds_before=None,
        seconds_saved=first.seconds_saved(machine),
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


def _pattern(cost: Cost) -> Pattern:
    names = {function_name(node) for node in cost.region.nodes}
    products = [name for name in (function_name(n) for n in cost.region.nodes) if name in _PRODUCTS]
    if "softmax" in names and len(products) > 1:
        return Pattern.ATTENTION
    return Pattern.EPILOGUE if products else Pattern.CHAIN


_PRODUCTS = ("linear", "matmul", "addmm", "mm", "bmm", "baddbmm", "einsum")


def _place(region: Region) -> Place:
    """That of the last operation that is no matmul."""
    telling = [node for node in region.nodes if function_name(node) not in _PRODUCTS] or region.nodes
    place: Place = telling[-1].meta.get(PLACE, Place())
    return place


def _origin(node: fx.Node) -> str:
    value, facts = node.meta.get(PLACE), facts_of([node])[0]
    shape = f"{'×'.join(map(str, facts[0]))} {str(facts[2]).removeprefix('torch.')}" if isinstance(facts, tuple) else str(facts)
    return f"{shape}, {node.target}" if node.op == "placeholder" else f"{shape}, the {function_name(node)} at {value}"


def _read_again(region: Region) -> int:
    """Bytes of inputs that several operations of a region read, beyond the first time."""
    inside = set(region.nodes)
    readers = Counter(each for node in region.nodes for each in node.all_input_nodes if each not in inside)
    sizes = {node: example_of(node) for node in readers}
    return sum((count - 1) * v.numel() * v.element_size() for node, count in readers.items() if hasattr(v := sizes[node], "numel"))
