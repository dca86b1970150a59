"""The phases of row kernels as templates see them, for CUDA and the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusegen.emit.views import CallView, FragmentView, Offsets, ReductionView, argument_text, call_view, fragment, view
from fusegen.families.rows.plan import ColumnSum, Persistence, Phase, RowBody, Segments
from fusegen.schedule.access import Access
from fusegen.schedule.indices import CheckedIndex, LoadedIndex
from fusegen.schedule.math import CallArgument, Copy, MathCall, MathFunction, MathParameter, Origin


@dataclass(frozen=True)
class SegmentsView:
    """A reduction over segments as a template sees it. See `Segments`."""

    call: CallView | None
    copies: tuple[tuple[str, str, str], ...]
    reduction: ReductionView
    after: CallView | None


@dataclass(frozen=True)
class PhaseView:
    """A phase as a template sees it.

    Attributes:
        row_reads: one element per row, read at the start.
        row_call: math on the row's statistics.
        loads: fragments loaded at the start of this phase.
        late: fragments loaded right before their use.
        prefetchable: the fragments in `late` without conditions, whose offset depends on no index that is read.
        uses: fragments of the row that the math uses, loaded in this or an earlier phase.
        cached: fragments that the math uses and that are held over all rows.
        earlier_values: values computed in earlier phases, with their types.
        segments: reductions over segments before the math on each element.
        call: math on each element.
        copies: results that need no math, with their types and text.
        elements: maps each reduced component to the expression of lane `v`.
        orders: names of the held rows to sort.
        segment_writes: results stored once per segment.
        row_writes: stores of one element per row, each with its variable.
        purpose: the purpose of the phase, as a comment.
        scalars: results of the math that are reduced lane by lane, so that they need no array.
    """

    row_reads: tuple[FragmentView, ...]
    row_call: CallView | None
    loads: tuple[FragmentView, ...]
    late: tuple[FragmentView, ...]
    prefetchable: tuple[FragmentView, ...]
    uses: tuple[FragmentView, ...]
    cached: tuple[FragmentView, ...]
    earlier_values: tuple[tuple[str, str], ...]
    segments: tuple[SegmentsView, ...]
    call: CallView | None
    copies: tuple[tuple[str, str, str], ...]
    elements: Mapping[str, str]
    reductions: tuple[ReductionView, ...]
    column_sums: tuple[ReductionView, ...]
    orders: tuple[str, ...]
    held: tuple[tuple[str, str], ...]
    writes: tuple[FragmentView, ...]
    segment_writes: tuple[FragmentView, ...]
    row_writes: tuple[tuple[FragmentView, str], ...]
    purpose: str
    scalars: tuple[tuple[str, str], ...] = ()

    @property
    def results(self) -> tuple[tuple[str, str], ...]:
        """The results in arrays, with their types."""
        called = [result for result in (self.call.results if self.call else ()) if result not in self.scalars]
        return (*called, *((name, type_) for name, type_, _ in self.copies))

    def type_of(self, result: str) -> str:
        return dict(self.results)[result]

    @property
    def works_on_elements(self) -> bool:
        """True if the phase processes elements, not only the row's statistics."""
        return bool(self.call or self.elements or self.copies)

    def lane_by_lane(self) -> PhaseView:
        """Returns the phase with scalars for what single values and column sums take from each lane."""
        alone = [r for r in (*self.reductions, *self.column_sums) if r in self.column_sums or r.summed]
        parts = {f"{name}_part": name for r in alone for name, _ in r.components}
        scalars = tuple((name, type_) for name, type_ in (self.call.results if self.call else ()) if name in parts)
        return replace(self, scalars=scalars, elements={**self.elements, **{parts[name]: name for name, _ in scalars}})

    def combined(self, reduction: ReductionView, into: str = "{}") -> str:
        return reduction.combined([self.elements[name] for name, _ in reduction.components], into)


def phase_views(body: RowBody, offsets: Offsets) -> list[PhaseView]:
    lane_axis = body.column_axes.symbols[-1]
    reads = {name: a for phase in body.phases for a in phase.reads for name in a.variables}
    kept = {name: a for a in body.cached for name in a.variables}
    held = {p.name: p for phase in body.phases for p in phase.held}
    return [_phase(phase, offsets, reads, kept, held, lane_axis) for phase in body.phases]


def _phase(
    phase: Phase,
    offsets: Offsets,
    reads: Mapping[str, Access],
    kept: Mapping[str, Access],
    held: Mapping[str, MathParameter],
    lane_axis: sympy.Symbol,
) -> PhaseView:
    of_segments = [argument for s in phase.segments for argument in _arguments(s.call, s.copies)]
    arguments = [*of_segments, *_arguments(phase.call, phase.copies)]
    computed = {result.name for result in phase.call.function.results} if phase.call else set()
    arrays = list(dict.fromkeys(a.name for a in arguments if a.origin is Origin.LANES and a.name not in computed))
    copies = {c.name: argument_text(c.value, offsets, lane_axis) for c in phase.copies}
    elements = _elements(phase, copies)
    in_arrays = [c for c in phase.copies if elements.get(c.name.removesuffix("_part")) != copies[c.name]]
    writes = tuple(fragment(a, offsets, lane_axis) for a in phase.writes)
    segment_writes = tuple(fragment(a, offsets, lane_axis) for a in phase.segment_writes)
    row_writes = tuple((fragment(a, offsets, None), name) for a, name in phase.row_writes)
    return PhaseView(
        row_reads=tuple(fragment(a, offsets, None) for a in phase.row_reads),
        row_call=call_view(phase.row_call, offsets, None) if phase.row_call else None,
        loads=tuple(fragment(a, offsets, lane_axis) for a in phase.reads),
        late=tuple(fragment(a, offsets, lane_axis) for a in phase.late),
        prefetchable=tuple(fragment(a, offsets, lane_axis) for a in phase.late if _is_steady(a, offsets)),
        uses=tuple(fragment(a, offsets, lane_axis) for a in dict.fromkeys(reads[name] for name in arrays if name in reads)),
        cached=tuple(fragment(a, offsets, lane_axis) for a in dict.fromkeys(kept[name] for name in arrays if name in kept)),
        earlier_values=tuple((name, held[name].dtype.spelling) for name in arrays if name in held),
        segments=tuple(_segments(s, offsets, lane_axis) for s in phase.segments),
        call=call_view(phase.call, offsets, lane_axis) if phase.call else None,
        copies=tuple((c.name, c.dtype.spelling, copies[c.name]) for c in in_arrays),
        elements=elements,
        reductions=tuple(map(view, phase.reductions)),
        column_sums=tuple(map(view, phase.column_sums)),
        orders=tuple(p.name for p in phase.orders),
        held=tuple((p.name, p.dtype.spelling) for p in phase.held),
        writes=writes,
        segment_writes=segment_writes,
        row_writes=row_writes,
        purpose=_purpose(phase, [*(w.pointer for w in (*writes, *segment_writes)), *(w.pointer for w, _ in row_writes)]),
    )


def _arguments(call: MathCall | None, copies: Sequence[Copy]) -> list[CallArgument]:
    return [*(call.arguments if call else ()), *(c.value for c in copies)]


def _segments(segments: Segments, offsets: Offsets, lane_axis: sympy.Symbol) -> SegmentsView:
    copies = tuple((c.name, c.dtype.spelling, argument_text(c.value, offsets, lane_axis)) for c in segments.copies)
    call = call_view(segments.call, offsets, lane_axis) if segments.call else None
    after = call_view(segments.after, offsets, lane_axis) if segments.after else None
    return SegmentsView(call, copies, view(segments.reduction), after)


def _is_steady(late: Access, offsets: Offsets) -> bool:
    is_plain = not late.conditions and not sympy.sympify(late.offset).has(LoadedIndex, CheckedIndex)
    return is_plain and offsets.pointers[late.buffer].stream is None


def _elements(phase: Phase, copies: Mapping[str, str]) -> dict[str, str]:
    """Maps each reduced component to the expression of lane `v`: an input of the math if the state is a copy of it, else an
    array element."""
    elements: dict[str, str] = {}
    for reduction in (*phase.reductions, *phase.column_sums):
        is_alone = len(reduction.lifted) == 1
        for component in reduction.lifted:
            part = f"{component.name}_part"
            elements[component.name] = copies[part] if is_alone and part in copies else f"{part}[v]"
    return elements


def _purpose(phase: Phase, written: Sequence[str]) -> str:
    computed = [r.name for r in phase.row_call.function.results] if phase.row_call else []
    of_segments = [c.name for s in phase.segments for c in s.reduction.components]
    along = [c.name for r in phase.reductions for c in r.components]
    over = [c.name for r in phase.column_sums for c in r.components]
    parts = {
        "computes {}": computed,
        "reduces each segment to {}": of_segments,
        "reduces the row to {}": along,
        "accumulates {} of each column": over,
        "sorts {}": [p.name for p in phase.orders],
        "stores {} for later phases": [p.name for p in phase.held if p not in phase.orders],
        "writes {}": [name.removesuffix("_ptr") for name in written],
    }
    return "; ".join(text.format(", ".join(dict.fromkeys(names))) for text, names in parts.items() if names)


def row_accesses(body: RowBody) -> list[Access]:
    return [*body.cached, *(a for phase in body.phases for a in (*phase.row_reads, *phase.reads, *phase.late))]


def write_accesses(body: RowBody) -> list[Access]:
    """Returns the writes of a row kernel that store element by element."""
    return [a for phase in body.phases for a in (*phase.writes, *phase.segment_writes)]


def staged_accesses(body: RowBody) -> tuple[Access, ...]:
    """Returns the reads that are staged in shared memory while an earlier row is processed."""
    return body.phases[0].reads if body.plan.persistence is Persistence.STAGED else ()


@dataclass(frozen=True)
class ColumnSumView:
    """A reduction over rows as a template sees it.

    Attributes:
        partials: accesses of the workspace, one per component of the state.
        writes: stores of results.
    """

    reduction: ReductionView
    partials: tuple[FragmentView, ...]
    writes: tuple[FragmentView, ...]


def column_sum(total: ColumnSum, offsets: Offsets, lane_axis: sympy.Symbol) -> ColumnSumView:
    partials, writes = (tuple(fragment(a, offsets, lane_axis) for a in accesses) for accesses in (total.partials, total.writes))
    return ColumnSumView(view(total.reduction), partials, writes)


def row_functions(body: RowBody) -> list[MathFunction]:
    """Returns the user's math functions in execution order."""
    calls = [c for p in body.phases for c in (p.row_call, *(c for s in p.segments for c in (s.call, s.after)), p.call)]
    return list(dict.fromkeys(c.function for c in calls if c is not None))
