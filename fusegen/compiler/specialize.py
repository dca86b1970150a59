"""The programs of one graph: which a call runs depends on how many rows its products have, and on what is faster at its sizes; each
is made when it is first wanted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, TypeAlias, cast

from fusegen import families
from fusegen.compiler.lower import agreed, emit, lower
from fusegen.compiler.pipeline import Rules, Stage, run
from fusegen.families import preferred, program_time
from fusegen.families.attention import products_of_attention
from fusegen.families.attention.cost import attentions_of, takes_library
from fusegen.families.gemm.heuristics import CLASSES, Expected, ProductChoice, choose, class_of, depth_of, rows_of
from fusegen.families.gemm.pipelines import WGMMA, leave_to_library
from fusegen.families.gemm.plan import ContractionPlan
from fusegen.families.rows import is_faster_apart
from fusegen.families.rows.match import apart
from fusegen.families.rows.plan import RowPlan
from fusegen.fusion.driver import fuse
from fusegen.fusion.groups import Group, products_of
from fusegen.ir.blocks import Blocks
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, literal, product, same
from fusegen.passes.blocks import InBlocks, in_blocks
from fusegen.passes.full_reductions import Cuts, by_rows, cuts_of
from fusegen.program.call import ROOM, LaunchPlan, Role, rows_of_block
from fusegen.program.formula import Formula
from fusegen.schedule.context import Bodies, Pins
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Program, row_bytes, sum_bytes
from fusegen.source import Source
from fusegen.target import Target
from fusegen.threads import cached_property, new_lock

ProductsKey: TypeAlias = tuple[frozenset[int], tuple[ContractionPlan, ...]]
Split: TypeAlias = frozenset[tuple[int, ...]]
"""Groups that are two kernels, by their outputs."""
_NO_PINS: Pins = {}
_NONE: Split = frozenset()
Rows: TypeAlias = Mapping[Dim, range]
BodiesAt: TypeAlias = Callable[[Mapping[str, int]], Bodies]
Choose: TypeAlias = Callable[[Graph, Group, Target, Expected], ProductChoice]


@dataclass(frozen=True)
class _Fused:
    """The result of fusion of a graph of which some products are left to the library.

    Attributes:
        graph: the graph; its products are those of the one that it was made of, in their order.
        groups: what runs.
        kind: a number that graphs share whose nodes stand at the same places.
    """

    graph: Graph
    groups: tuple[Group, ...]
    kind: int

    @cached_property
    def products(self) -> tuple[int, ...]:
        """All products of the graph."""
        return products_of(self.graph)


@dataclass(frozen=True)
class _Decision:
    """The facts that fusion and lowering go by.

    Attributes:
        by_library: products that the library computes, by choice.
        fused: what fusion makes of the rest.
        plans: of the launches of products, by their products in the graph that was fused.
        choices: for these products, and for those that were left to the library before.
    """

    by_library: frozenset[int]
    fused: _Fused
    plans: Mapping[tuple[int, ...], ContractionPlan]
    choices: Mapping[int, ProductChoice]

    @property
    def key(self) -> ProductsKey:
        """The part that makes a difference to the program."""
        return self.by_library, tuple(self.plans.values())


@dataclass(frozen=True)
class Specialization:
    """One way to compute a graph.

    Attributes:
        graph: in primitives; products that the library computes by choice say so.
        groups: what fusion decided.
        program: the steps of a call.
    """

    graph: Graph
    groups: tuple[Group, ...]
    program: Program

    @cached_property
    def bound(self) -> dict[object, Any]:
        """Calls that were bound to exact sizes, by what they depend on (`compiler.backends`)."""
        return {}

    @property
    def call(self) -> LaunchPlan:
        """The steps of a call, as data."""
        return self.program.call

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The text of each launch, which takes longer than all that comes before."""
        return tuple(emit(parts, self.program.target) for parts in self.program.kernels)


class Specializer:
    """All forms of a graph for a machine. Threads may share them: one at a time makes a form.

    Args:
        graph: in primitives.
        wide: whether indices need 64 bits.
        choose: says who computes a launch of products, and by which plan.
        bodies: the programs of loops for some sizes.
        lock: that of the alternatives that these are of.
    """

    def __init__(
        self,
        graph: Graph,
        target: Target,
        *,
        wide: bool,
        choose: Choose = choose,
        bodies: BodiesAt = lambda _: {},
        lock: RLock | None = None,
    ) -> None:
        self._lock = lock or new_lock()
        self.graph, self._target, self._wide, self._choose = graph, target, wide, choose
        self._made: dict[tuple[object, ...], Specialization] = {}
        self._first: dict[tuple[object, ...], Specialization] = {}  # with the first plan of each launch
        self._products = products_of(graph)
        self._fused: dict[frozenset[int], _Fused] = {}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._chosen: dict[tuple[int, Group, int, int], ProductChoice] = {}
        self._bodies = bodies

    def at(self, sizes: Mapping[str, int], pins: Pins = _NO_PINS) -> Specialization:
        """The form for some sizes: of its candidates, a launch has the one that was measured or asked for, else the one that is
        expected to be fastest, else the first.

        Args:
            pins: candidates of launches that were measured or asked for, by the outputs of their groups.
        """
        with self._lock:
            return self._laid_out(self._classes(sizes), sizes, pins)

    def _laid_out(self, classes: tuple[int, ...], sizes: Mapping[str, int], pins: Pins) -> Specialization:
        """The form of some classes, with the kernels and the plans that launches should have at some sizes."""
        bodies = self._bodies(sizes)
        fused = self._with_first_plans(classes, _NONE, bodies).program.launches
        split = frozenset(launch.group.outputs for launch in fused if is_faster_apart(launch, sizes, self._target))
        plans: dict[tuple[int, ...], Plan] = {}
        for launch in self._with_first_plans(classes, split, bodies).program.launches:
            wanted = pins.get(launch.group.outputs) or preferred(launch, sizes, self._target)
            if wanted is not None and wanted != launch.plan:
                plans[launch.group.outputs] = wanted
        form = self._form(classes, split, bodies, plans)
        beside = {outputs: plan for outputs, plan in agreed(form.program.steps, self._target).items() if outputs not in pins}
        return self._form(classes, split, bodies, plans | beside) if beside else form

    def _with_first_plans(self, classes: tuple[int, ...], split: Split, bodies: Bodies) -> Specialization:
        key = classes, split, tuple(id(program) for program, _ in bodies.values())
        if key not in self._first:
            self._first[key] = self._form(classes, split, bodies)
        return self._first[key]

    def expected(self, sizes: Mapping[str, int]) -> Expected:
        """The expectation of some sizes."""
        return self._expected(self._classes(sizes))

    def choices(self, sizes: Mapping[str, int]) -> dict[int, ProductChoice]:
        """For products that a kernel of ours could compute, by their places in the graph of the form, what is chosen for some
        sizes."""
        with self._lock:
            decision = self._decision(self.expected(sizes))
        places = zip(self._products, decision.fused.products, strict=True)
        return {place: decision.choices[product] for product, place in places if product in decision.choices}

    def all(self, sizes: Mapping[str, int]) -> Iterator[tuple[Rows, Specialization]]:
        """A form for every choice of who computes products, and by which plan, with the numbers of rows that make it; what is above
        all classes counts as the last.

        Args:
            sizes: for which launches of rows and points are laid out.
        """
        for parts in itertools.product(*self._ranges()):
            yield dict(zip(self._rows, parts, strict=True)), self._laid_out(tuple(part[-1] for part in parts), sizes, _NO_PINS)

    @property
    def products(self) -> tuple[Group, ...]:
        """Launches of products by the pipeline of which something is known to choose by."""
        return _priced(self._fuse(frozenset()).groups)

    def _fuse(self, by_library: frozenset[int]) -> _Fused:
        """The decision of fusion where some products are left to the library."""
        if by_library not in self._fused:
            graph = run(leave_to_library(self.graph, by_library), Rules(self._target), Stage.FUSION)
            kind = self._kinds.setdefault(tuple((node.op, node.args) for node in graph.nodes), len(self._kinds))
            self._fused[by_library] = _Fused(graph, fuse(graph, self._target, families.FAMILIES), kind)
        return self._fused[by_library]

    @cached_property
    def _rows(self) -> dict[Dim, Formula]:
        """Sizes that choices go by and that are known at the call only: rows, and what is summed over; each as a formula."""
        fused = self._fuse(frozenset())
        rows = dict.fromkeys(dim for group in _priced(fused.groups) for dim in _dims(fused.graph, group.anchors[0]))
        return {dim: formula(dim) for dim in rows if literal(dim) is None}

    def _classes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(class_of(rows(sizes)) for rows in self._rows.values()) if self._products else ()

    def _expected(self, classes: tuple[int, ...]) -> Expected:
        return Expected(dict(zip(self._rows, classes, strict=True)) if classes else {})

    def _ranges(self) -> list[list[range]]:
        """For each of these sizes, numbers that make the same choices, whatever the others are."""
        keys = {c: self._decision(self._expected(c)).key for c in itertools.product(CLASSES, repeat=len(self._rows))}
        return [self._merged(place, keys) for place in range(len(self._rows))]

    def _merged(self, place: int, keys: Mapping[tuple[int, ...], ProductsKey]) -> list[range]:
        found: list[range] = []
        before: list[ProductsKey] = []
        for first, last in zip((1, *(c + 1 for c in CLASSES)), CLASSES, strict=False):
            now = [key for classes, key in keys.items() if classes[place] == last]
            if now == before:
                found[-1] = range(found[-1].start, last + 1)
            else:
                found.append(range(first, last + 1))
            before = now
        return found

    def _decision(self, expected: Expected) -> _Decision:
        """Leaves products to the library until fusion makes no launch any more that it is expected to be faster than."""
        by_library: frozenset[int] = frozenset()
        choices: dict[int, ProductChoice] = {}
        while True:
            fused = self._fuse(by_library)
            place = dict(zip(fused.products, self._products, strict=True))
            chosen = {group: self._choice(fused, group, expected) for group in _priced(fused.groups)}
            choices |= {place[p]: choice for group, choice in chosen.items() for p in group.anchors}
            left = {place[p] for group, choice in chosen.items() if choice.takes_library for p in group.anchors}
            if not left:
                plans = {group.anchors: choice.plan for group, choice in chosen.items()}
                return _Decision(by_library, fused, plans, choices)
            by_library |= left

    def _choice(self, fused: _Fused, group: Group, expected: Expected) -> ProductChoice:
        """The choice for a launch of products, which goes by their own rows and depth alone."""
        rows, depth = _dims(fused.graph, group.anchors[0])
        key = (fused.kind, group, expected.of(rows), expected.of(depth))
        if key not in self._chosen:
            self._chosen[key] = self._choose(fused.graph, group, self._target, expected)
        return self._chosen[key]

    def _form(self, classes: tuple[int, ...], split: Split, bodies: Bodies, pins: Pins = _NO_PINS) -> Specialization:
        decision = self._decision(self._expected(classes))
        key = decision.key, split, frozenset(pins.items()), tuple(id(program) for program, _ in bodies.values())
        if key not in self._made:
            self._made[key] = self._lowered(decision, split, bodies, pins)
        return self._made[key]

    def _lowered(self, decision: _Decision, split: Split, bodies: Bodies, pins: Pins) -> Specialization:
        graph, fused = decision.fused.graph, decision.fused.groups
        parts = (apart(graph, group) if group.outputs in split else (group,) for group in fused)
        groups = tuple(itertools.chain.from_iterable(parts))
        return Specialization(
            graph, groups, lower(graph, groups, self._target, decision.plans, wide=self._wide, pins=pins, bodies=bodies)
        )


def _priced(groups: Sequence[Group]) -> tuple[Group, ...]:
    return tuple(group for group in groups if group.pipeline == WGMMA.name)


def _dims(graph: Graph, product: int) -> tuple[Dim, Dim]:
    """The rows of a product, and what it sums over."""
    return rows_of(graph, product), depth_of(graph, product)


# The graphs that compute one thing: which a call runs is known when its sizes are.


SizeValues: TypeAlias = Mapping[str, int]
SizeFacts: TypeAlias = tuple[tuple[str, int, int], ...]
"""Sizes, or what is computed of them, each with a bound and a divisor."""

_WHOLE = 64 << 20  # bytes up to which a value may lie in memory whole, though a loop could compute it in blocks
_TRIED = 1024  # rows of a block for which a loop is laid out before it is known how many there is room for
_DIVISORS = (16, 8, 4, 2, 1)


class GraphChoices:
    """A graph, the same with torch's attention in place of ours, and with loops in place of values that are too large to lie in
    memory whole; each also for sizes of which a bound and a divisor are known. Kernels of equal graphs share it: one thread at a
    time makes a form.

    Args:
        graph: in primitives, ready for fusion.
        wide: whether indices need 64 bits.
        depth: how many loops it is the body of.
        library: the graph with attention by torch.
        lock: of the alternatives that these are a part of.

    Attributes:
        whole: the forms of the graph as it is, for all sizes.
    """

    def __init__(
        self,
        graph: Graph,
        target: Target,
        *,
        wide: bool,
        depth: int = 0,
        library: Graph | None = None,
        lock: RLock | None = None,
    ) -> None:
        self._lock = lock or new_lock()
        self._target, self._wide, self._depth = target, wide, depth
        self._lengths = _lengths(graph)
        self._looped = in_blocks(graph, products_of_attention(graph, target), depth)
        self._known: dict[tuple[bool, SizeFacts | None, Cuts], Specializer] = {}
        self._bodies: dict[Blocks, GraphChoices] = {}
        self._graphs = (graph, graph if self._looped is None else self._looped.graph)  # and with loops
        self._attentions = () if library is None else attentions_of(library)
        self._library = None
        if library is not None and self._attentions:
            self._library = GraphChoices(library, target, wide=wide, lock=self._lock)
        self.whole = self._forms(None, (), is_looped=False)

    def of(self, sizes: SizeValues) -> Specializer:
        """The forms for some sizes, and for others with the same bounds and divisors."""
        with self._lock:
            return self._chosen(sizes, is_general=False)

    def general(self, sizes: SizeValues) -> Specializer:
        """Forms for all sizes, with loops if these sizes need them."""
        with self._lock:
            return self._chosen(sizes, is_general=True)

    def _chosen(self, sizes: SizeValues, *, is_general: bool) -> Specializer:
        if self._library is not None and takes_library([size(sizes) for size in self._attentions], self._target.processors):
            return self._library._chosen(sizes, is_general=is_general)
        whole = self._in_rows(sizes, is_general=is_general, is_looped=False)
        is_looped = self._looped is not None and self._is_stored(self._looped, whole.at(sizes).program, sizes)
        return self._in_rows(sizes, is_general=is_general, is_looped=True) if is_looped else whole

    def _is_stored(self, looped: InBlocks, program: Program, sizes: SizeValues) -> bool:
        """True if a program keeps a value, of those that loops would compute in blocks, that is too large."""
        large, most = {formula(elements)(sizes) for elements in looped.large}, ROOM if self._depth else _WHOLE
        kept = ((program.graph.nodes[b.node], b) for b in program.buffers if b.role is Role.TEMPORARY and b.node is not None)
        values = ((formula(product(node.shape))(sizes), b.dtype) for node, b in kept)
        return any(count in large and count * dtype.itemsize > most for count, dtype in values)

    def _in_rows(self, sizes: SizeValues, *, is_general: bool, is_looped: bool) -> Specializer:
        """The forms, in which reductions go by rows that would leave most of the machine idle otherwise."""
        graph = self._graphs[is_looped]
        cuts = cuts_of(graph, sizes, self._target.processors)

        def forms(cuts: Cuts) -> Specializer:
            lengths = dict.fromkeys((*self._lengths, *(extent for _, cut in cuts for extent in cut.extents)))
            facts = None if is_general else tuple(_fact(extent, sizes) for extent in lengths)
            return self._forms(facts, cuts, is_looped=is_looped)

        if not cuts or any(same(product(graph.nodes[position].shape), 1) for position, _ in cuts):
            return forms(cuts)  # there is no other way to keep a machine busy with one result
        whole, apart = forms(()), forms(cuts)
        return apart if _is_faster(apart.at(sizes).program, whole.at(sizes).program, sizes, self._target) else whole

    def _forms(self, facts: SizeFacts | None, cuts: Cuts, *, is_looped: bool) -> Specializer:
        graph, key = self._graphs[is_looped], (is_looped, facts, cuts)
        if key not in self._known:
            loops = dict.fromkeys(cast(Blocks, node.attr("blocks")) for node in graph.nodes if node.op is Op.BLOCKS)

            def bodies(sizes: SizeValues) -> Bodies:
                return {blocks: self._program(blocks, sizes, is_general=facts is None) for blocks in loops}

            known = by_rows(_knowing(graph, facts or ()), cuts)
            self._known[key] = Specializer(known, self._target, wide=self._wide, bodies=bodies, lock=self._lock)
        return self._known[key]

    def _program(self, blocks: Blocks, sizes: SizeValues, *, is_general: bool) -> tuple[Program, Formula]:
        """The program of a loop's body, laid out for the first block at some sizes, and the bytes of a row."""
        if blocks not in self._bodies:
            body = run(blocks.body, Rules(self._target), Stage.READY)
            self._bodies[blocks] = GraphChoices(body, self._target, wide=self._wide, depth=self._depth + 1, lock=self._lock)
        loop, extent = self._bodies[blocks], formula(blocks.extent)(sizes)
        tried = loop.whole.at({**sizes, **blocks.first(min(extent, _TRIED))})
        taken = row_bytes(tried.program, blocks)
        first = {**sizes, **blocks.first(rows_of_block(extent, taken(sizes), sum_bytes(blocks)(sizes)))}
        forms = loop.general(first) if is_general else loop.of(first)
        return forms.at(first).program, taken


def _lengths(graph: Graph) -> tuple[Dim, ...]:
    """Extents along which rows are reduced, that are known at the call only."""
    reduced = ((node, graph.nodes[node.args[0]].shape) for node in graph.nodes if node.family is Family.REDUCTION)
    extents = (shape[dim] for node, shape in reduced for dim in cast(tuple[int, ...], node.attr("dims")))
    return tuple(sorted({extent for extent in extents if literal(extent) is None}, key=str))


def _is_faster(apart: Program, whole: Program, sizes: SizeValues, target: Target) -> bool:
    """True if reductions by rows are expected to take less time; where nothing is known of it, if they were few blocks."""
    time, other = program_time(apart, sizes, target), program_time(whole, sizes, target)
    if time is not None and other is not None:
        return time < other
    rows = (launch for launch in whole.launches if isinstance(launch.plan, RowPlan) and not launch.plan.tiled)
    return any(launch.cluster == 1 and launch.grid(sizes) < target.processors for launch in rows)


def _fact(extent: Dim, sizes: SizeValues) -> tuple[str, int, int]:
    """An extent with the next power of two, and the largest of some divisors; what is computed of sizes has those of these."""
    size, name = formula(extent)(sizes), str(extent)
    return name, 1 << (size - 1).bit_length(), next(d for d in _DIVISORS if size % d == 0) if name.isidentifier() else 1


def _knowing(graph: Graph, facts: SizeFacts) -> Graph:
    """A graph of which bounds and divisors of some sizes are known."""
    bounds, multiples = dict(graph.bounds), dict(graph.multiples)
    for name, bound, divisor in facts:
        bounds[name] = min(bounds.get(name, bound), bound)
        multiples[name] = math.lcm(multiples.get(name, 1), divisor)
    known = {name: divisor for name, divisor in multiples.items() if divisor > 1}
    return replace(graph, bounds=tuple(bounds.items()), multiples=tuple(known.items()))
