"""Specializations of a graph to the sizes of a call: the rewritten graph, its fusion groups, and the plan of each launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from threading import RLock
from typing import TypeAlias, cast

from fusegen import families
from fusegen.compiler.decision import FusedGraph, MatmulDecision, MatmulKey
from fusegen.compiler.lower import Specialization, kernel_names, lower, names_of, with_equal_blocks
from fusegen.compiler.marks import MatmulWays
from fusegen.compiler.pipeline import Rules, Stage, run
from fusegen.families import cuts_are_faster, measured_plans, preferred
from fusegen.families.attention import matmuls_of_attention
from fusegen.families.attention.cost import attention_choice, attentions_of, takes_library
from fusegen.families.attention.match import extents_of_attention
from fusegen.families.gemm.choice import (
    MatmulChoice,
    choose,
    choose_for_any_rows,
    measured_choice,
)
from fusegen.families.gemm.deep import measured_fusions, with_fusions
from fusegen.families.gemm.heuristics import CLASSES, ExpectedSizes, class_of, rows_and_depth
from fusegen.families.gemm.pipelines import MatmulMarks, computes_on_load
from fusegen.families.gemm.weights import supported_weights
from fusegen.families.rows import is_faster_split
from fusegen.families.rows.match import split_rows_and_columns
from fusegen.fusion.driver import fuse
from fusegen.fusion.groups import Group, matmuls_of
from fusegen.ir.blocks import Blocks
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, literal, product, same
from fusegen.passes.blocks import BlockwiseGraph, with_block_loops
from fusegen.passes.full_reductions import RowSplits, reduce_in_two_steps, reduced_lengths, row_splits
from fusegen.program.call import MAX_BLOCK_BYTES, Role, rows_of_block
from fusegen.program.formula import Formula
from fusegen.schedule.choices import DeclaredPlans, Measured
from fusegen.schedule.context import Bodies, Pins
from fusegen.schedule.kernel import LIBRARY, Plan
from fusegen.schedule.program import Program, row_bytes, sum_bytes
from fusegen.target import Target
from fusegen.threads import cached_property, new_lock

Split: TypeAlias = frozenset[tuple[int, ...]]
"""Groups that run as two kernels, by their outputs."""
_NO_PINS: Pins = {}
_NO_SPLIT: Split = frozenset()
RowRanges: TypeAlias = Mapping[Dim, range]
BodiesAt: TypeAlias = Callable[[Mapping[str, int]], Bodies]
MatmulChoices: TypeAlias = dict[tuple[object, ...], MatmulChoice]
Choose: TypeAlias = Callable[[Graph, Group, Target, ExpectedSizes], MatmulChoice]


# One graph: the library or a generated kernel for each matmul, and the plan of each launch.


class GraphPlanner:
    """Fuses and plans one graph. Threads share it: the lock lets one of them plan at a time.

    Args:
        graph: in primitives.
        index64: whether indices need 64 bits.
        choose: selects the implementation of a matmul launch.
        bodies: returns the programs of loop bodies for some sizes.
        lock: the lock of the `Specializer` that owns this planner.
    """

    def __init__(
        self,
        graph: Graph,
        target: Target,
        *,
        index64: bool,
        choose: Choose = choose,
        bodies: BodiesAt = lambda _: {},
        lock: RLock | None = None,
    ) -> None:
        self._lock = lock or new_lock()
        self.graph, self._target, self._index64, self._choose, self._bodies = graph, target, index64, choose, bodies
        self._specializations: dict[tuple[object, ...], Specialization] = {}
        self._decisions: dict[tuple[int, ...], MatmulDecision] = {}
        self._matmuls = matmuls_of(graph)
        self._weights = supported_weights(graph, target)
        self._marks = MatmulWays(graph, target, self._fuse, self._choice)
        self._fused: dict[MatmulMarks, FusedGraph] = {}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._choices: MatmulChoices = {}

    def at(self, sizes: Mapping[str, int], measured: Measured | None = None) -> Specialization:
        """The specialization for some sizes.

        Each choice takes its measured candidate, else the one with the lowest expected time, else the first.

        Args:
            measured: returns measured or pinned candidates.
        """
        with self._lock:
            return self._planned(self._classes(sizes), sizes, measured)

    def choices(self, sizes: Mapping[str, int], measured: Measured | None) -> dict[int, MatmulChoice]:
        """Maps each matmul that a generated kernel could compute to the choice made for these sizes; positions are those of the
        fused graph."""
        with self._lock:
            decision = self._decided(self._classes(sizes), sizes, measured)
        origins = self._marks.origins(decision.marks, decision.fused)
        return {fused: decision.choices[matmul] for fused, matmul in origins.items() if matmul in decision.choices}

    def all(
        self, sizes: Mapping[str, int], declared: DeclaredPlans | None
    ) -> Iterator[tuple[RowRanges, Specialization, DeclaredPlans | None]]:
        """One specialization for each way to compute the matmuls, without deep fusion, the ranges of rows that select it, and the
        declared plans that it takes. The last range includes all larger numbers. The sizes plan all other launches."""
        all_ranges = self._ranges(sizes, declared and copy(declared))
        several = [dim for dim, ranges in zip(self._rows, all_ranges, strict=True) if dim in self._always or len(ranges) > 1]
        for ranges in itertools.product(*all_ranges):
            own = declared and copy(declared)
            planned = self._planned(tuple(r[-1] for r in ranges), sizes, own, deep=False)
            yield {dim: r for dim, r in zip(self._rows, ranges, strict=True) if dim in several}, planned, own

    # Plans of launches.

    def _planned(
        self, classes: tuple[int, ...], sizes: Mapping[str, int], measured: Measured | None = None, *, deep: bool = True
    ) -> Specialization:
        bodies, decision = self._bodies(sizes), self._decided(classes, sizes, measured)
        fused = self._specialization(decision, _NO_SPLIT, bodies).program.launches
        split = frozenset(launch.group.outputs for launch in fused if is_faster_split(launch, sizes, self._target))
        plans: dict[tuple[int, ...], Plan] = {}
        for launch in self._specialization(decision, split, bodies).program.launches:
            plan = preferred(launch, sizes, self._target)
            if plan is not None and plan != launch.plan:
                plans[launch.group.outputs] = plan
        planned = self._with_pins(decision, split, bodies, plans, _NO_PINS)
        pins = {} if measured is None else dict(measured_plans(planned.program, sizes, measured))
        planned = self._with_pins(decision, split, bodies, plans, pins) if pins else planned
        if measured is None or not deep:
            return planned
        fusions = frozenset(measured_fusions(planned.program, self._expected(classes), sizes, measured))
        return self._with_pins(replace(decision, deep=fusions), split, bodies, plans, pins) if fusions else planned

    def _with_pins(self, decision: MatmulDecision, split: Split, bodies: Bodies, plans: Pins, pins: Pins) -> Specialization:
        """The specialization with some plans. Those that are not pinned may change for horizontal fusion."""
        specialization = self._specialization(decision, split, bodies, {**plans, **pins})
        equal = with_equal_blocks(specialization.program.steps, self._target)
        unpinned = {outputs: plan for outputs, plan in equal.items() if outputs not in pins}
        return self._specialization(decision, split, bodies, {**plans, **pins, **unpinned}) if unpinned else specialization

    def _specialization(self, decision: MatmulDecision, split: Split, bodies: Bodies, pins: Pins = _NO_PINS) -> Specialization:
        key = decision.key, split, frozenset(pins.items()), tuple(id(program) for program, _ in bodies.values())
        if key not in self._specializations:
            self._specializations[key] = self._lowered(decision, split, bodies, pins)
        return self._specializations[key]

    def _lowered(self, decision: MatmulDecision, split: Split, bodies: Bodies, pins: Pins) -> Specialization:
        graph = decision.fused.graph
        parts = (split_rows_and_columns(graph, group) if group.outputs in split else (group,) for group in decision.fused.groups)
        groups = with_fusions(itertools.chain.from_iterable(parts), decision.deep)
        names = kernel_names(graph, groups, decision.default)
        index64, plans, deep = self._index64, decision.plans, decision.deep
        program = lower(graph, groups, self._target, plans, deep, names=names, index64=index64, pins=pins, bodies=bodies)
        return Specialization(graph, groups, program)

    # Implementations of matmuls.

    @property
    def matmul_launches(self) -> tuple[Group, ...]:
        """The matmul launches before any matmul is left to the library."""
        return self._fuse(MatmulMarks()).matmul_launches

    def expected(self, sizes: Mapping[str, int]) -> ExpectedSizes:
        """The size classes that choices of matmuls depend on."""
        return self._expected(self._classes(sizes))

    def _decided(
        self, classes: tuple[int, ...], sizes: Mapping[str, int], measured: Measured | None, known: MatmulChoices | None = None
    ) -> MatmulDecision:
        """The decision for some classes; ``known`` has measured choices of the same sizes, and gets those of this decision."""
        if measured is not None:
            default = self._planned(classes, sizes)
            return self._decision(self._expected(classes), sizes, measured, {} if known is None else known, default)
        if classes not in self._decisions:
            self._decisions[classes] = self._decision(self._expected(classes), {}, None, {}, None)
        return self._decisions[classes]

    def _decision(
        self,
        expected: ExpectedSizes,
        sizes: Mapping[str, int],
        measured: Measured | None,
        known: MatmulChoices,
        default: Specialization | None,
    ) -> MatmulDecision:
        """Leaves matmuls to the library, and heads to other kernels, until each remaining launch is expected or measured to be
        faster than that. Norms are deferred, and first operands are computed on load, only if that is measured to be faster or
        declared."""
        marks, in_memory = MatmulMarks(on_load=self._weights.of_few_rows(expected.size_of, frozenset())), frozenset[int]()
        choices: dict[int, MatmulChoice] = {}
        default_names = () if default is None else names_of(default)
        fused = self._fuse(marks)
        names = dict(zip(fused.groups, kernel_names(fused.graph, fused.groups, default_names), strict=True))
        marks = self._marks.with_sums(marks, names, expected, sizes, measured)
        while True:
            marks = replace(marks, on_load=self._weights.of_few_rows(expected.size_of, marks.library | in_memory))
            fused = self._fuse(marks)
            origin = self._marks.origins(marks, fused)
            launches = {group: self._choice(fused, group, expected) for group in fused.matmul_launches}
            unplanned = [group for group, choice in launches.items() if choice.plan is None and not choice.takes_apart]
            if refused := {origin[p] for group in unplanned for p in group.core_nodes if computes_on_load(fused.graph, p)}:
                in_memory |= refused
                marks = replace(marks, rows=marks.rows - refused)
                continue
            if measured is not None:
                names = dict(zip(fused.groups, kernel_names(fused.graph, fused.groups, default_names), strict=True))
                marked = self._marks.measured(marks, in_memory, fused, names, expected, sizes, measured)
                if marked != marks:
                    marks = marked
                    continue
                for group, choice in launches.items():
                    key = names[group], *fused.key(group, expected)
                    if key not in known:
                        known[key] = measured_choice(
                            names[group], fused.graph, group, self._target, expected, sizes, choice, measured
                        )
                    launches[group] = known[key]
            by_matmul = {origin[p]: choice for group, choice in launches.items() for p in group.core_nodes}
            choices |= {p: choice.after(choices.get(p)) for p, choice in by_matmul.items()}
            slower = {p for p, choice in by_matmul.items() if choice.takes_library}
            apart = {p for p, choice in by_matmul.items() if choice.takes_apart}
            if not slower and not apart:
                plans = {group.core_nodes: choice.plan for group, choice in launches.items() if choice.plan is not None}
                has_others = default is not None and default.graph is not fused.graph
                others = default_names if has_others else ()
                return MatmulDecision(marks, fused, plans, choices, default=others)
            marks = replace(marks, library=marks.library | slower, apart=marks.apart | apart)

    def _fuse(self, marks: MatmulMarks) -> FusedGraph:
        if marks not in self._fused:
            graph = run(marks.marked(self._weights.marked(marks.on_load)), Rules(self._target), Stage.FUSION)
            kind = self._kinds.setdefault(tuple((node.op, node.args) for node in graph.nodes), len(self._kinds))
            self._fused[marks] = FusedGraph(graph, fuse(graph, self._target, families.FAMILIES), self._target, kind)
        return self._fused[marks]

    def _choice(self, fused: FusedGraph, group: Group, expected: ExpectedSizes) -> MatmulChoice:
        key = fused.key(group, expected)
        if key not in self._choices:
            self._choices[key] = self._choose(fused.graph, group, self._target, expected)
        return self._choices[key]

    # Choices of matmuls depend on the classes of their rows and depths.

    @cached_property
    def _rows(self) -> dict[Dim, Formula]:
        """Symbolic rows and depths of matmul launches, and of matmuls that could be one, each as a formula."""
        fused = self._fuse(MatmulMarks())
        possible = (rows_and_depth(fused.graph, launch.core_nodes[0]) for launch in fused.row_launches.values())
        dims = dict.fromkeys((*self._always, *itertools.chain.from_iterable(possible)))
        return {dim: formula(dim) for dim in dims if literal(dim) is None}

    @cached_property
    def _always(self) -> tuple[Dim, ...]:
        """Rows and depths of matmul launches."""
        graph = self._fuse(MatmulMarks()).graph
        launches = [(graph, group.core_nodes[0]) for group in self.matmul_launches]
        on_load = [(self.graph, m) for m in self._weights.weights]
        return tuple(dim for each in (*launches, *on_load) for dim in rows_and_depth(*each))

    def _classes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(class_of(rows(sizes)) for rows in self._rows.values()) if self._matmuls else ()

    def _expected(self, classes: tuple[int, ...]) -> ExpectedSizes:
        return ExpectedSizes(dict(zip(self._rows, classes, strict=True)) if classes else {})

    def _ranges(self, sizes: Mapping[str, int], measured: Measured | None) -> list[list[range]]:
        """For each of these sizes, the ranges within which all choices stay the same."""
        known: MatmulChoices = {}
        keys = {c: self._decided(c, sizes, measured, known).key for c in itertools.product(CLASSES, repeat=len(self._rows))}
        return [self._merged(axis, keys) for axis in range(len(self._rows))]

    def _merged(self, axis: int, keys: Mapping[tuple[int, ...], MatmulKey]) -> list[range]:
        """Ranges of size classes along one axis; neighbours with equal choices are merged."""
        ranges, previous = list[range](), list[MatmulKey]()
        for first, last in zip((1, *(c + 1 for c in CLASSES)), CLASSES, strict=False):
            current = [key for classes, key in keys.items() if classes[axis] == last]
            if current == previous:
                ranges[-1] = range(ranges[-1].start, last + 1)
            else:
                ranges.append(range(first, last + 1))
            previous = current
        return ranges


# Equivalent graphs: torch's attention or generated kernels, loops over blocks of rows, reductions cut into rows, facts about sizes.


SizeValues: TypeAlias = Mapping[str, int]
SizeFacts: TypeAlias = tuple[tuple[str, int, int], ...]  # as in `Graph.with_facts`

_LARGE = 64 << 20  # bytes of a value from which a loop computes it in blocks
_TRIAL_ROWS = 1024  # rows of the block for which a loop body is planned before its memory per row is known
_DIVISORS: tuple[int, ...] = (16, 8, 4, 2, 1)


class Specializer:
    """All specializations of a graph for a machine. It rewrites the graph as the sizes of a call require, and plans the result.

    The rewrites: torch computes attention, loops compute values that are too large to be materialized, reductions are cut into
    rows, and some sizes get a bound and a divisor. Kernels of equal graphs share a specializer; the lock lets one thread
    plan at a time.

    Args:
        graph: in primitives, ready for fusion.
        index64: whether indices need 64 bits.
        depth: for a loop body, the number of loops around it.
        library: the graph with attention computed by torch; None if there is no choice.
        lock: the lock of the outer specializer.

    Attributes:
        base: plans the graph as it is, for all sizes.
    """

    def __init__(
        self,
        graph: Graph,
        target: Target,
        *,
        index64: bool,
        depth: int = 0,
        library: Graph | None = None,
        lock: RLock | None = None,
    ) -> None:
        self._lock = lock or new_lock()
        self._target, self._index64, self._depth = target, index64, depth
        self._lengths = dict.fromkeys(reduced_lengths(graph), _DIVISORS) | extents_of_attention(graph, target)
        self._plans = graph.plans
        self._loops = with_block_loops(graph, matmuls_of_attention(graph, target), depth)
        self._planners: dict[tuple[bool, SizeFacts | None, RowSplits], GraphPlanner] = {}
        self._bodies: dict[Blocks, Specializer] = {}
        self._graphs = (graph, graph if self._loops is None else self._loops.graph)  # without and with loops
        self._attentions = () if library is None else attentions_of(library)
        self._library = None
        if library is not None and self._attentions:
            self._library = Specializer(library, target, index64=index64, lock=self._lock)
        self.base = self._planner(None, (), with_loops=False)

    def at(self, sizes: SizeValues, measured: Measured | None = None) -> Specialization:
        """The specialization for some sizes; for `measured`, see `GraphPlanner.at`. Declared plans come before measured ones.

        Raises:
            ArgumentError: a declared plan is no candidate.
        """
        declared = DeclaredPlans(self._plans, measured) if self._plans else None

        def planned(by: Measured | None) -> Specialization:
            return self.planner(sizes, by).at(sizes, by)

        specialization = planned(declared or measured)
        if declared is not None:
            error = declared.error(specialization.program, lambda others: planned(others).program)
            if error is not None:
                raise error
        return specialization

    def all(self, sizes: SizeValues, *, is_general: bool = False) -> Iterator[tuple[RowRanges, Specialization]]:
        """The specializations for all rows of matmuls (`GraphPlanner.all`).

        Args:
            is_general: as for `planner`; then each specialization must take the declared plans. Otherwise those that do not are
                left out.

        Raises:
            ArgumentError: a declared plan is no candidate.
        """
        declared = DeclaredPlans(self._plans) if self._plans else None
        for rows, planned, own in self.planner(sizes, declared, is_general=is_general).all(sizes, declared):
            error = None if own is None else own.error(planned.program)
            if error is None:
                yield rows, planned
            elif is_general:
                raise error

    def choices(self, sizes: SizeValues) -> dict[int, MatmulChoice]:
        """The choices of matmuls (`GraphPlanner.choices`)."""
        declared = DeclaredPlans(self._plans) if self._plans else None
        return self.planner(sizes, declared).choices(sizes, declared)

    def planner(self, sizes: SizeValues, measured: Measured | None = None, *, is_general: bool = False) -> GraphPlanner:
        """The planner for some sizes, and for all others with the same bounds and divisors.

        Args:
            is_general: True for a planner whose specializations serve all sizes, with loops if these sizes need them.
        """
        with self._lock:
            if self._library is not None and self._takes_library(self._library.base.graph, sizes, measured):
                return self._library.planner(sizes, measured, is_general=is_general)
            without = self._cut_or_whole(sizes, is_general=is_general, with_loops=False)
            if self._loops is None or not self._needs_loops(self._loops, without.at(sizes).program, sizes):
                return without
            return self._cut_or_whole(sizes, is_general=is_general, with_loops=True)

    def _takes_library(self, library: Graph, sizes: SizeValues, measured: Measured | None) -> bool:
        """True if torch is measured or expected to compute the attentions faster."""
        attentions = [size(sizes) for size in self._attentions]
        is_expected = takes_library(attentions, self._target)
        plan = None if measured is None else measured(attention_choice(library, attentions, by_library=is_expected))
        return is_expected if plan is None else plan == LIBRARY

    def _needs_loops(self, loops: BlockwiseGraph, program: Program, sizes: SizeValues) -> bool:
        """True if a program materializes a value that is too large, and that the loops would compute in blocks."""
        large, limit = {formula(elements)(sizes) for elements in loops.large}, MAX_BLOCK_BYTES if self._depth else _LARGE
        stored = ((program.graph.nodes[b.node], b) for b in program.buffers if b.role is Role.TEMPORARY and b.node is not None)
        values = ((formula(product(node.shape))(sizes), b.dtype) for node, b in stored)
        return any(count in large and count * dtype.itemsize > limit for count, dtype in values)

    def _cut_or_whole(self, sizes: SizeValues, *, is_general: bool, with_loops: bool) -> GraphPlanner:
        """The planner whose reductions are cut into rows if that is expected to be faster: few results leave most SMs idle."""
        graph = self._graphs[with_loops]
        cuts = row_splits(graph, sizes, self._target.sms)

        def planner(cuts: RowSplits) -> GraphPlanner:
            lengths = self._lengths | dict.fromkeys((extent for _, cut in cuts for extent in cut.extents), _DIVISORS)
            facts = None if is_general else tuple(_fact(extent, sizes, divisors) for extent, divisors in lengths.items())
            return self._planner(facts, cuts, with_loops=with_loops)

        if not cuts or any(same(product(graph.nodes[position].shape), 1) for position, _ in cuts):
            return planner(cuts)  # a single result would leave most of the machine idle
        whole, cut = planner(()), planner(cuts)
        return cut if cuts_are_faster(cut.at(sizes).program, whole.at(sizes).program, sizes, self._target) else whole

    def _planner(self, facts: SizeFacts | None, cuts: RowSplits, *, with_loops: bool) -> GraphPlanner:
        graph, key = self._graphs[with_loops], (with_loops, facts, cuts)
        if key not in self._planners:
            loops = dict.fromkeys(cast(Blocks, node.attr("blocks")) for node in graph.nodes if node.op is Op.BLOCKS)

            def bodies(sizes: SizeValues) -> Bodies:
                return {blocks: self._body(blocks, sizes, is_general=facts is None) for blocks in loops}

            graph = reduce_in_two_steps(graph.with_facts(facts or ()), cuts)
            plan = choose_for_any_rows if facts is None and self._depth else choose  # a body for all sizes has no ranges of rows
            new = GraphPlanner(graph, self._target, index64=self._index64, choose=plan, bodies=bodies, lock=self._lock)
            self._planners[key] = new
        return self._planners[key]

    def _body(self, blocks: Blocks, sizes: SizeValues, *, is_general: bool) -> tuple[Program, Formula]:
        """The program of a loop body, planned for the first block, and the bytes that it needs for a row."""
        if blocks not in self._bodies:
            body = run(blocks.body, Rules(self._target), Stage.READY)
            self._bodies[blocks] = Specializer(body, self._target, index64=self._index64, depth=self._depth + 1, lock=self._lock)
        loop, extent = self._bodies[blocks], formula(blocks.extent)(sizes)
        trial = loop.base.at({**sizes, **blocks.first(min(extent, _TRIAL_ROWS))})
        bytes_of_row = row_bytes(trial.program, blocks)
        first = {**sizes, **blocks.first(rows_of_block(extent, bytes_of_row(sizes), sum_bytes(blocks)(sizes)))}
        return loop.planner(first, is_general=is_general).at(first).program, bytes_of_row


def _fact(extent: Dim, sizes: SizeValues, divisors: Sequence[int]) -> tuple[str, int, int]:
    """An extent with the next power of two, and its largest divisor of some (1 for an expression)."""
    size, name = formula(extent)(sizes), str(extent)
    return name, 1 << (size - 1).bit_length(), next(d for d in divisors if size % d == 0) if name.isidentifier() else 1
