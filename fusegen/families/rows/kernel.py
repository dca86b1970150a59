"""Builds the kernel of a row group from its phases: names, accesses, math functions."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import sympy

from fusegen.dtypes import DType
from fusegen.emit.cuda import CUDA
from fusegen.families.rows.columns import PART, partial_offset, parts_of, unaligned
from fusegen.families.rows.phases import PhaseTerms, Root, ValueNames, statistic_name
from fusegen.families.rows.plan import ColumnSum, Persistence, Phase, RowBody, RowPlan, Segments, scratch_buffers
from fusegen.ir.formula import ceil_div, formula
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Axes, Index, product
from fusegen.passes.moments import has_16_bits
from fusegen.program.formula import Formula
from fusegen.program.names import ascii_name
from fusegen.schedule.access import Access, AccessPattern, Anchor
from fusegen.schedule.column_pairs import Fragments, interleaved
from fusegen.schedule.context import Context, Leaves
from fusegen.schedule.indices import CheckedIndex, LoadedIndex
from fusegen.schedule.kernel import BARRIER_BYTES, SharedArrays, arrange_shared_arrays, padded
from fusegen.schedule.math import CallArgument, Copy, MathCall, MathParameter, Origin, Reduction
from fusegen.schedule.memory import Store
from fusegen.schedule.program import Launch
from fusegen.schedule.reductions import component, reduction_of
from fusegen.schedule.terms import BufferRead, FusedOp, Leaf, Term, Terms, as_number

_FEW_NAMES = 2  # values that a function is named after
_PLAIN = re.compile(r"normalized|square|squared_deviation|elements_of_phase_\d+")
"""Names of functions that need no ``_of``: no function of a library has them."""
_NORMALIZING = (Op.ADD, Op.SUB, Op.MUL, Op.RSQRT, Op.CAST, FusedOp.MULTIPLY_ADD)


@dataclass(frozen=True)
class RowMath:
    """The terms of a row kernel.

    Attributes:
        terms: all terms; their payloads are over the domain's axes.
        roots: terms that must be produced.
        states: maps the first node of each reduction to all nodes that are components of its state.
        statistics: maps each of these nodes to the terms that the reduction combines, one per component.
        stores: destinations of written roots, over merged axes.
        leaves: reads and coordinates, over merged axes.
        rows, columns: the domain's axes.
        axis_map: maps the domain's axes to merged axes.
        anchor: the tensor whose alignment shifted vectors follow, or None.
        segments: maps nodes of states reduced over segments to the first node of their state.
        segment: columns per segment, the last axis's extent; 0 without segments.
    """

    terms: Terms
    roots: tuple[Root, ...]
    states: Mapping[int, tuple[int, ...]]
    statistics: Mapping[int, tuple[int, ...]]
    stores: tuple[Store, ...]
    leaves: Leaves
    row_axes: Axes
    column_axes: Axes
    rows: frozenset[sympy.Symbol]
    columns: frozenset[sympy.Symbol]
    axis_map: Mapping[object, Index]
    anchor: Anchor | None
    segments: Mapping[int, int]
    segment: int


def is_shared(math: RowMath, term: int) -> bool:
    """True if a term reads the same fragments in all rows, without conditions and not through an index."""
    read = math.leaves.reads[term]
    if read.drawn or read.conditions or isinstance(read.offset, int) or read.offset.has(LoadedIndex, CheckedIndex):
        return False
    along = read.offset.free_symbols
    return along.isdisjoint(math.row_axes.symbols) and not along.isdisjoint(math.column_axes.symbols)


class RowKernelBuilder:
    """Builds one row kernel.

    Args:
        workspace: maps each column sum's node to the buffers of its partial sums, one per component; empty if the kernel finishes
            the sums.
        totals: maps each column sum's node to the stores of the nodes of its state.
    """

    def __init__(
        self,
        context: Context,
        math: RowMath,
        plan: RowPlan,
        phases: Sequence[PhaseTerms],
        workspace: Mapping[int, tuple[int, ...]],
        totals: Mapping[int, Mapping[int, Sequence[Store]]],
    ) -> None:
        self.context, self.math, self.plan, self.phases = context, math, plan, phases
        self.workspace, self.totals = workspace, totals
        self.lane_axis = math.column_axes.symbols[-1]
        self.fragments = Fragments(context, math.terms, math.leaves, self._read, [store.offset for store in math.stores])
        self.reads = self._joined_reads()
        self.reductions = {node: self._reduction(node) for node in math.states}
        summed = [part for parts in math.states.values() for part in parts if self._is_total(part)]
        self.namer = ValueNames(math.terms, summed, product(math.column_axes.extents))
        self.functions = {name for reduction in self.reductions.values() for name in _partial_results(reduction)}
        self.fragments.values |= self._values()
        self.written = {r.key: context.names.take("result") for r in math.roots if r.kind in ("write", "segment_write")}
        self.kept = self._kept() if plan.cache_weights else ()
        self.prefetched: set[int] = set()

    def launch(self) -> Launch:
        phases = tuple(self._phase(number, phase) for number, phase in enumerate(self.phases))
        partials = tuple(access for node in self.workspace for access in self._partials(node, self.plan.vec))
        sums = self._sums() if self.plan.tiled else ()
        body = RowBody(
            row_axes=self.math.row_axes,
            column_axes=self.math.column_axes,
            phases=phases,
            checks=self.fragments.checks,
            cached=self._accesses(self.kept),
            partials=partials,
            shared=self._shared(phases),
            plan=self.plan,
            sums=sums,
            anchor=self.math.anchor if self.plan.unaligned else None,
            segment=self.math.segment,
        )
        writes = [a for p in phases for a in (*p.writes, *p.segment_writes, *(w for w, _ in p.row_writes))]
        axes = [self._rows_in_text(), self.math.column_axes]
        kernel = self.fragments.kernel(body, [*writes, *partials, *(w for s in sums for w in s.writes)], axes, [PART])
        context, layout = self.context, (self._grid(), self.plan.block, body.shared.bytes)
        return Launch(kernel, context.group, (), *layout, context.traffic(), candidates=context.candidates)

    def _rows_in_text(self) -> Axes:
        """Returns the row axes with the extents that the text mentions: without the first one if the grid has one team per row."""
        rows, plan = self.math.row_axes, self.plan
        counts = not self.context.target.warp or plan.warps == 1 or plan.persistent_blocks or plan.unaligned or plan.tiled
        return rows if counts else Axes(rows.symbols, (1, *rows.extents[1:]))

    # Names and accesses.

    def _read(self, name: str, read: BufferRead) -> Access:
        along = self._is_along(read.offset, *(b.index for b in read.conditions))
        axis = self.lane_axis if along else None
        access = self.context.access(name, read.buffer, read.offset, axis, self.plan.vec, read.conditions)
        if along and access.pattern is AccessPattern.UNIFORM:
            # An element that the lanes of a vector share, but that differs from vector to vector, is a fragment too.
            return replace(access, pattern=AccessPattern.GATHER)
        return self._shifted(access, AccessPattern.VECTOR if read.drawn else AccessPattern.WINDOW) if along else access

    def _joined_reads(self) -> dict[int, Access]:
        """Returns the access of each read term; interleaved terms that the same phases use share one access."""
        accesses = dict(self.fragments.reads)
        uses: dict[tuple[object, ...], list[int]] = {}
        for term in accesses:
            uses.setdefault(tuple((term in p.reads, term in p.held, term in p.earlier) for p in self.phases), []).append(term)
        for terms in uses.values():
            of_part = {name: access for access in self._joined([accesses[t] for t in terms]) for name in access.parts}
            accesses |= {t: of_part[accesses[t].name] for t in terms if accesses[t].name in of_part}
        return accesses

    def _joined(self, accesses: Sequence[Access]) -> tuple[Access, ...]:
        """Merges interleaved accesses along the row into one."""
        if not self.context.target.warp or self.plan.unaligned or self.plan.tiled:
            return tuple(accesses)
        return interleaved(self.context, accesses, self.lane_axis, self.plan.vec)

    def _accesses(self, terms: Iterable[int]) -> tuple[Access, ...]:
        return tuple(dict.fromkeys(self.reads[t] for t in terms))

    def _shifted(self, access: Access, other: AccessPattern) -> Access:
        anchor = self.math.anchor if self.plan.unaligned else None
        return access if anchor is None else unaligned(self.context, access, self.lane_axis, anchor, self.plan.vec, other)

    def _reduction(self, node: int) -> Reduction:
        graph, over_rows = self.context.graph, any(r.kind == "column" and r.key == node for r in self.math.roots)
        name = statistic_name(graph, node, over_rows=over_rows)
        has_warps = self.context.target.warp > 0
        is_over_row = not over_rows and node not in self.math.segments
        gathers = has_warps and is_over_row and has_16_bits(graph, graph.nodes[node].args[0])
        return reduction_of(graph, node, self.context.names.take, fast=self.context.fast, name=name, gathers=gathers)

    def _is_along(self, *indices: Index) -> bool:
        axes = set(self.math.column_axes.symbols)
        return any(not isinstance(i, int) and i.free_symbols & axes for i in indices)

    def _values(self) -> dict[int, CallArgument]:
        """Returns a variable for each term, other than a read, that crosses from one function to another."""
        terms, names = self.math.terms, self._statistic_names()
        statistics = [t for t, term in enumerate(terms.items) if term.op is Leaf.STATISTIC]
        arguments = {t: CallArgument(Origin.VALUE, names[cast(int, terms.items[t].payload)]) for t in statistics}
        for phase in self.phases:
            for position in (*phase.row_terms, *phase.held):
                if position not in arguments and position not in self.fragments.values:
                    is_of_row = position in phase.row_terms
                    origin, name_of = (Origin.VALUE, self.namer.of_row) if is_of_row else (Origin.LANES, self.math.terms.name)
                    arguments[position] = CallArgument(origin, self.context.names.take(name_of(position)))
            for position in phase.segment_terms:
                if position not in arguments:
                    arguments[position] = CallArgument(Origin.VALUE, self.context.names.take(self.math.terms.name(position)))
        return arguments

    def _is_total(self, part: int) -> bool:
        """True for a sum of elements or of squares about their mean."""
        node = self.context.graph.nodes[part]
        return node.op is Op.SUM or (node.op is Op.MOMENTS and node.attr("part") == "m2")

    def _statistic_names(self) -> dict[int, str]:
        nodes = self.context.graph.nodes
        return {
            part: self.reductions[node].components[component(nodes[part])].name
            for node, parts in self.math.states.items()
            for part in parts
        }

    def _partials(self, node: int, vec: int) -> list[Access]:
        position = partial_offset(self.math.column_axes)
        components = zip(self.reductions[node].components, self.workspace[node], strict=True)
        return [self.context.access(c.name, key, position, self.lane_axis, vec) for c, key in components]

    def _sums(self) -> tuple[ColumnSum, ...]:
        """Returns the column sums of a tile. Threads store whole vectors if no other thread or block adds to them."""
        vec = self.plan.vec if self.plan.block == self.plan.threads and self.plan.cluster == 1 else 1
        return tuple(ColumnSum(self.reductions[node], (), tuple(self._totals(node, vec))) for node in self.totals)

    def _totals(self, node: int, vec: int) -> list[Access]:
        if node in self.workspace:
            return self._partials(node, vec)
        nodes, names = self.context.graph.nodes, [c.name for c in self.reductions[node].components]
        targets = [(names[component(nodes[part])], s) for part, stores in self.totals[node].items() for s in stores]
        return [self.context.access(name, s.buffer, s.offset, self.lane_axis, vec) for name, s in targets]

    # Phases.

    def _phase(self, number: int, phase: PhaseTerms) -> Phase:
        row_call = self._row_call(number, phase)
        call, copies = self._elements(phase)
        writes = [r for r in phase.roots if r.kind == "write"]
        segment_writes = [r for r in phase.roots if r.kind == "segment_write"]
        row_writes = [r for r in phase.roots if r.kind == "row_write"]
        return Phase(
            row_reads=tuple(self.reads[t] for t in phase.row_terms if t in self.reads),
            row_call=row_call,
            reads=self._loads(number, phase),
            late=self._accesses(t for t in phase.reads if self._is_late(t, phase)),
            segments=tuple(self._segments(phase, node) for node in phase.segments),
            call=call,
            copies=copies,
            reductions=tuple(self.reductions[r.key] for r in phase.roots if r.kind == "reduce"),
            column_sums=tuple(self.reductions[r.key] for r in phase.roots if r.kind == "column"),
            orders=tuple(self._ordered(r) for r in phase.roots if r.kind == "order"),
            held=tuple(self.fragments.parameter(t) for t in phase.held if t not in self.reads),
            writes=self._joined([self._write(r, name, self.lane_axis) for r in writes for name, _ in self._results(r)]),
            segment_writes=tuple(self._write(r, name, None) for r in segment_writes for name, _ in self._results(r)),
            row_writes=tuple((self._write(r, name, None), name) for r in row_writes for name in map(self._row_value, r.terms)),
        )

    def _loads(self, number: int, phase: PhaseTerms) -> tuple[Access, ...]:
        """Returns the accesses loaded at the start of a phase. A held row is loaded at once in the first phase, so that loads
        overlap."""
        if self.plan.persistence is Persistence.MULTI_PASS:
            return ()
        later = [(t, p) for p in self.phases[1:] for t in p.reads] if number == 0 else []
        early = [t for t, p in later if self._is_of_row(t) and not self._is_late(t, p)]
        now = [t for t in phase.reads if t not in (*self.prefetched, *self.kept) and not self._is_late(t, phase)]
        self.prefetched |= set(early)
        return self._accesses((*now, *early))

    def _is_late(self, term: int, phase: PhaseTerms) -> bool:
        """True if a fragment is loaded at its use: e.g. weights shared by all rows, which would take too many registers."""
        if self.plan.persistence is Persistence.MULTI_PASS:
            return True
        if self.plan.late_loads and phase is self.phases[-1] and len(self.phases) > 1 and self._is_of_row(term):
            return all(term not in before.reads for before in self.phases[:-1])
        return not self._is_of_row(term) and term not in phase.held and term not in self.kept

    def _kept(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(t for phase in self.phases for t in phase.reads if is_shared(self.math, t)))

    def _is_of_row(self, term: int) -> bool:
        read = self.math.leaves.reads[term]
        if read.drawn or isinstance(read.offset, int):  # random bits are generated at their use
            return False
        return bool(read.offset.free_symbols & set(self.math.row_axes.symbols))

    def _write(self, root: Root, name: str, axis: sympy.Symbol | None) -> Access:
        store = self.math.stores[root.key]
        access = self.context.access(name, store.buffer, store.offset, axis, self.plan.vec)
        return access if axis is None else self._shifted(access, AccessPattern.GATHER)

    def _row_value(self, term: int) -> str:
        return self.fragments.values[term].name

    def _results(self, root: Root) -> list[tuple[str, int]]:
        if root.kind in ("write", "segment_write"):
            return [(self.written[root.key], term) for term in root.terms]
        if root.kind == "order":
            return [(self._ordered(root).name, root.terms[0])]
        reduction = self.reductions[root.key]
        pairs = zip(reduction.components, root.terms, strict=True)
        return [(f"{c.name}_part", term) for c, term in pairs if c in reduction.lifted]

    def _is_ordered(self, term: int) -> bool:
        return self.math.terms.items[term].op is Leaf.ORDERED

    def _ordered(self, root: Root) -> MathParameter:
        (term,) = (t for t, item in enumerate(self.math.terms.items) if item.op is Leaf.ORDERED and item.payload == root.key)
        return self.fragments.parameter(term)

    def _row_call(self, number: int, phase: PhaseTerms) -> MathCall | None:
        ops = {t: self.math.terms.items[t].op for t in phase.row_terms}
        roots = [t for t, op in ops.items() if op is Leaf.CONSTANT or not isinstance(op, Leaf)]
        if not roots:
            return None
        earlier = [t for p in self.phases[:number] for t in p.row_terms]
        inputs = [t for t in (*earlier, *self._row_leaves()) if t not in roots]
        names = [self.fragments.values[t].name for t in roots]
        function = self._function("_and_".join(names) if len(names) <= _FEW_NAMES else "values_of_row")
        return self.fragments.call(function, [*zip(names, roots, strict=True)], inputs)

    def _row_leaves(self) -> list[int]:
        kinds, known = (Leaf.STATISTIC, Leaf.SCALAR, Leaf.READ, Leaf.COORDINATE, Leaf.CONDITION), self.fragments.values
        return [t for t, term in enumerate(self.math.terms.items) if term.op in kinds and t in known]  # others are unused

    def _elements(self, phase: PhaseTerms) -> tuple[MathCall | None, tuple[Copy, ...]]:
        """Returns the math on each element, and the results that need none."""
        results = [r for r in phase.roots if r.kind != "row_write"]
        roots = [pair for r in results for pair in self._results(r)]
        held = [t for t in phase.held if t not in self.reads and not self._is_ordered(t)]
        roots += [(self.fragments.values[t].name, t) for t in held]
        return self._computed(self._function(self._element_word(phase, results, held)), phase, roots)

    def _segments(self, phase: PhaseTerms, node: int) -> Segments:
        """Returns a reduction over segments, with the math on elements before it and on segments after it."""
        reduction = self.reductions[node]
        parts = zip(reduction.components, self.math.statistics[node], strict=True)
        roots = [(f"{c.name}_part", t) for c, t in parts]
        call, copies = self._computed(self._function(f"{reduction.components[0].name}_part"), phase, roots)
        later = [(self.fragments.values[t].name, t) for t in phase.segment_terms if self._last_segments(phase, t) == node]
        after, _ = self._computed(self._function("values_of_segment"), phase, later, dict(later).values())
        return Segments(call, copies, reduction, after)

    def _last_segments(self, phase: PhaseTerms, term: int) -> int:
        below = (self.math.terms.items[t] for t in self.math.terms.producers((term,)))
        nodes = [cast(int, t.payload) for t in below if t.op is Leaf.STATISTIC]
        return max(self.math.segments[node] for node in nodes if node in self.math.segments)

    def _element_word(self, phase: PhaseTerms, results: Sequence[Root], held: Sequence[int]) -> str:
        """Returns a word for the values that a phase computes for each element, of which later phases use those that are held."""
        if all(root.kind == "write" for root in results) and not held:
            return "results" if len(results) != 1 else "normalized" if self._is_normalized(phase, results[0]) else "result"
        names, words = {t: self.fragments.values[t].name for t in held}, dict[int, str]()
        for root in results:
            for t in (t for t in root.terms if not isinstance(self.math.terms.items[t].op, Leaf)):
                words[t] = names.get(t) or ("result" if root.kind == "write" else self.namer.of_summand(t))
        words |= names
        is_clear = 0 < len(words) == len(set(words.values())) <= _FEW_NAMES
        return "_and_".join(words.values()) if is_clear else f"elements_of_phase_{self.phases.index(phase) + 1}"

    def _is_normalized(self, phase: PhaseTerms, result: Root) -> bool:
        """True for a linear function of elements minus the mean and times the reciprocal deviation of the row."""
        words = {self.namer.of_row(term) for term in phase.row_earlier}
        ops = {self.math.terms.items[term].op for term in self.math.terms.producers(result.terms)}
        return "rstd" in words <= {"mean", "rstd"} and all(isinstance(op, Leaf) or op in _NORMALIZING for op in ops)

    def _function(self, word: str) -> str:
        """Returns a new name for a function of the kernel, after the values that it computes. No name of the user's ends in
        ``_of``; those of independent partial results of reductions do."""
        if len(self.phases) == 1 and word in ("result", "results", "elements_of_phase_1"):
            return self.context.name
        if _PLAIN.fullmatch(word):
            return self.context.names.take(word)
        words = (word if number == 1 else f"{word}_{number}" for number in itertools.count(1))
        name = next(name for name in (ascii_name(f"{word}_of") for word in words) if name not in self.functions)
        self.functions.add(name)
        return name

    def _computed(
        self, name: str, phase: PhaseTerms, roots: Sequence[tuple[str, int]], missing: Collection[int] = ()
    ) -> tuple[MathCall | None, tuple[Copy, ...]]:
        """Returns the math that computes named terms, and the terms that need none. ``missing`` are terms not computed yet."""
        computed_here = {t for _, t in roots}
        known = dict.fromkeys((*phase.earlier, *phase.row_earlier, *phase.segment_terms, *self._row_leaves()))
        available = [t for t in known if t not in missing and (t not in computed_here or self._is_available(t, phase))]
        numbers = {t: number for _, t in roots if (number := _number(self.math.terms.items[t]))}
        absent = [(result, t) for result, t in roots if t not in available and t not in numbers]
        results = {t: result for result, t in absent if not result.endswith("_part")}  # reductions take them, too
        computed = [(result, t) for result, t in absent if results.get(t, result) == result]
        call = self.fragments.call(name, computed, available) if computed else None
        shared = {t: CallArgument(Origin.LANES, result) for t, result in results.items()}
        return call, tuple(self._copy(result, t, numbers, shared) for result, t in roots if (result, t) not in computed)

    def _copy(self, name: str, term: int, numbers: Mapping[int, str], shared: Mapping[int, CallArgument]) -> Copy:
        value = CallArgument(Origin.VALUE, numbers[term]) if term in numbers else shared.get(term) or self.fragments.values[term]
        return Copy(name, self.math.terms.items[term].dtype, value)

    def _is_available(self, term: int, phase: PhaseTerms) -> bool:
        """True for a leaf, a value of the row or of a segment, or a value held from an earlier phase."""
        groups = (phase.row_earlier, phase.segment_terms, phase.earlier)
        return isinstance(self.math.terms.items[term].op, Leaf) or any(term in terms for terms in groups)

    # The launch.

    def _grid(self) -> Formula:
        rows = product(self.math.row_axes.extents)
        if self.plan.tiled:
            tiles = ceil_div(product(self.math.column_axes.extents), self.plan.columns_per_step)
            return tiles * self.plan.persistent_blocks
        if self.plan.persistent_blocks:
            return parts_of(self.context, self.plan, self.math.row_axes) * self.plan.cluster
        if self.plan.cluster > 1:
            return formula(rows) * self.plan.cluster
        return ceil_div(rows, self.plan.rows)

    def _shared(self, phases: Sequence[Phase]) -> SharedArrays:
        """Returns the shared memory: scratch buffers per component, with an element per warp, room for column sums, and stages. A
        cluster has one barrier per buffer."""
        plan, reductions = self.plan, [r for p in phases for r in p.reductions]
        components, buffers = [c for r in reductions for c in r.components], scratch_buffers(plan, phases)
        row_elements = plan.columns_per_step * max(1, plan.vectors_per_thread)
        staged = [self.context.dtype(a.buffer).itemsize for p in phases for a in p.reads]
        return arrange_shared_arrays(
            scratch=[plan.warps * buffers * c.dtype.itemsize for c in components if plan.warps > 1],
            ordered=[row_elements * DType.INT64.itemsize for p in phases if p.orders and plan.warps > 1][:1],
            sums=self._shared_sums(row_elements),
            staged=[
                plan.stage_vectors * plan.columns_per_step // plan.cluster * size
                for size in staged
                if plan.persistence is Persistence.STAGED
            ],
            barriers=[BARRIER_BYTES for _ in reductions for _ in range(buffers) if plan.cluster > 1],
        )

    def _shared_sums(self, row_elements: int) -> list[int]:
        """Returns the bytes of each column sum component: a row per thread row of a tile, or one row per block."""
        plan = self.plan
        sizes = [c.dtype.itemsize for node in self.totals for c in self.reductions[node].components]
        if plan.tiled:
            return [padded(plan.rows * plan.columns_per_step) * size for size in sizes if plan.rows > 1 or plan.cluster > 1]
        return [row_elements * size for size in sizes if plan.rows > 1]


def _partial_results(reduction: Reduction) -> list[str]:
    """Returns the names of the variables of independent partial results."""
    names, rule = [c.name for c in reduction.components], reduction.pivot_sums
    return [f"{name}_of" for name in (*names, *(f"{name}_{part}" for name in names for part in (rule.sums if rule else ())))]


def _number(term: Term) -> str:
    """Returns a finite number as it is written in all languages; empty for other terms."""
    text = as_number(term.payload, term.dtype) if term.op is Leaf.CONSTANT and term.dtype.is_float else "nan"
    return CUDA.constant(text, term.dtype).text if math.isfinite(float(text)) else ""
