"""CUDA text of row kernels and of the combination of column sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusegen.emit.cuda import assemble, head, math_text
from fusegen.emit.environment import LinearIndex, c_text, offset_of, render
from fusegen.emit.views import Offsets, checks_view, cuda_offsets, decode, fragment, kinds, loaded_in_turn, reduction_functions
from fusegen.families.rows.plan import ColumnBody, Persistence, RowBody, RowPlan, scratch_buffers
from fusegen.families.rows.repeats import rolled
from fusegen.families.rows.views import column_sum, phase_views, row_accesses, row_functions, staged_accesses, write_accesses
from fusegen.ir.symbolic import NamedNumber, literal, product
from fusegen.schedule.access import Access, divisor
from fusegen.schedule.kernel import BANKS, LoweredKernel
from fusegen.schedule.math import Reduction
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target


def emit_cuda(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, RowBody)
    return _emit_column_tiles(kernel, launch, target, body) if body.plan.tiled else _emit_phases(kernel, launch, target, body)


def _emit_column_tiles(kernel: LoweredKernel, launch: Launch, target: Target, body: RowBody) -> Source:
    offsets = cuda_offsets(kernel).with_hoisted(row_accesses(body), body.column_axes.symbols)
    checks = checks_view(body.checks, offsets, body.column_axes)
    (phase,) = phase_views(body, offsets)
    pipeline = render(
        "cuda/column_tiles.cu.jinja",
        **head(launch),
        index_type="i64" if kernel.index64 else "i32",
        rows=c_text(product(body.row_axes.extents)),
        columns=c_text(product(body.column_axes.extents)),
        row_decode=decode(body.row_axes, "row", "Index"),
        indices=[*offsets.indices(row_accesses(body)), *checks.once],
        checks=checks.vec,
        column_decode=decode(body.column_axes, "column", "Index"),
        phase=phase,
        sums=[column_sum(s, offsets, body.column_axes.symbols[-1]) for s in body.sums],
        arrays=dict(zip(_components(s.reduction for s in body.sums), body.shared.sums, strict=False)),
        banks=BANKS,
        plan=body.plan,
        anchor=_anchor(body, offsets),
    )
    math = math_text([*reduction_functions(body.phases[0].column_sums), *row_functions(body)])
    return assemble(launch, target, math, pipeline)


def _emit_phases(kernel: LoweredKernel, launch: Launch, target: Target, whole: RowBody) -> Source:
    repeats = rolled(whole)
    body = replace(whole, phases=repeats.phases)
    touched = [*row_accesses(body), *write_accesses(body)]
    offsets = cuda_offsets(kernel).with_hoisted(touched, body.column_axes.symbols)
    columns = product(body.column_axes.extents)
    number = literal(columns)
    reads_extents = body.plan.warps == 1 or body.plan.persistent_blocks > 0  # for the number of rows
    if reads_extents or all(literal(extent) is not None for extent in body.row_axes.extents[1:]):
        pitches = {number: NamedNumber("COLUMNS", integer=True, positive=True)} if number else {}
        offsets = replace(offsets, linear=LinearIndex(body.row_axes, "row", pitches))
    checks = checks_view(body.checks, offsets, body.column_axes)
    staged = staged_accesses(body)
    lane_axis = body.column_axes.symbols[-1]
    late = [loaded_in_turn(p.late, offsets, lane_axis) for p in body.phases]
    phases = [replace(view, late=fragments) for view, fragments in zip(phase_views(body, offsets), late, strict=True)]
    if not body.plan.unaligned:
        phases = [phase.lane_by_lane() for phase in phases]
    of_segments = [s.reduction for p in body.phases for s in p.segments]
    reductions = [*of_segments, *(r for p in body.phases for r in (*p.reductions, *p.column_sums))]
    pipeline = render(
        f"cuda/rows/{_pipeline(body.plan)}.cu.jinja",
        alignment=f"cuda/rows/{'unaligned' if body.plan.unaligned else 'aligned'}.cuh.jinja",
        sharing=f"cuda/rows/{_sharing(body.plan)}.cuh.jinja",
        **head(launch),
        index_type="i64" if kernel.index64 else "i32",
        rows=c_text(product(body.row_axes.extents)),
        column_number=number or 0,
        columns="COLUMNS" if number else c_text(columns),
        column_count="COLUMNS" if number and body.plan.threads >= 32 else "column_count",
        row_decode=decode(body.row_axes, "row", "Index"),
        indices=[*offsets.indices(a for a in touched if a not in staged), *checks.once],
        staged_indices=offsets.indices(staged),
        checks=checks.vec,
        column_decode=decode(body.column_axes, "column", "Index"),
        phases=phases,
        titles=repeats.titles,
        loops=repeats.loops,
        last_use=max((k for k, phase in enumerate(phases) if phase.uses), default=0),
        kinds=kinds(r for p in body.phases for r in p.reductions),
        segment_kinds=kinds(of_segments),
        segment=body.segment,
        peers=body.peers,
        kept=[fragment(a, offsets, lane_axis) for a in body.cached],
        partials=[fragment(a, offsets, lane_axis) for a in body.partials],
        shared=body.shared,
        arrays=_arrays(body, offsets),
        buffers=scratch_buffers(body.plan, body.phases),
        plan=body.plan,
        anchor=_anchor(body, offsets),
    )
    math = math_text([*reduction_functions(reductions), *row_functions(body)])
    return assemble(launch, target, math, pipeline)


def _components(reductions: Iterable[Reduction]) -> list[str]:
    return [c.name for r in reductions for c in r.components]


def _arrays(body: RowBody, offsets: Offsets) -> dict[str, str]:
    """Returns the offset of each array in shared memory by the name of its values; empty if warps shuffle instead."""
    shared, staged = body.shared, staged_accesses(body)
    arrays = [
        (_components(r for p in body.phases for r in p.reductions), _numbers(shared.scratch)),
        _successive(body.partials, offsets, shared.sums, "CHUNKS * THREADS * LANES"),
        _successive(staged, offsets, shared.staged, "SLOTS * SLOT"),
        (["put_in_order"], _numbers(shared.ordered)),
        (["arrived"], _numbers(shared.barriers)),
    ]
    return {name: offset for names, starts in arrays for name, offset in zip(names, starts, strict=False)}


def _numbers(starts: Iterable[int]) -> list[str]:
    return [str(start) for start in starts]


def _successive(accesses: Sequence[Access], offsets: Offsets, starts: Sequence[int], elements: str) -> tuple[list[str], list[str]]:
    """Returns the names of arrays of equally many elements, and their offsets: each but the first is the previous end."""
    names, types = [a.name for a in accesses], [offsets.pointers[a.buffer].dtype.spelling for a in accesses]
    ends = [f"{offset_of(name)} + {elements} * sizeof({type_})" for name, type_ in zip(names, types, strict=True)]
    return names, [*_numbers(starts[:1]), *ends][: len(starts)]


def _pipeline(plan: RowPlan) -> str:
    held = "summed" if plan.persistent_blocks else "registers"
    return {Persistence.REGISTERS: held, Persistence.STAGED: "shared", Persistence.MULTI_PASS: "multi_pass"}[plan.persistence]


def _sharing(plan: RowPlan) -> str:
    return "cluster" if plan.cluster > 1 else "block" if plan.warps > 1 else "warp"


def _anchor(body: RowBody, offsets: Offsets) -> dict[str, str | bool] | None:
    return None if body.anchor is None else {"start": offsets.text(body.anchor.start), "dense": body.anchor.dense}


def emit_columns(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, ColumnBody)
    offsets = cuda_offsets(kernel)
    lane_axis, columns = body.column_axes.symbols[-1], product(body.column_axes.extents)
    rows = None if body.row_blocks is None else literal(body.row_blocks)
    partials = [partial for s in body.sums for partial in s.partials]
    pipeline = render(
        "cuda/columns.cu.jinja",
        **head(launch),
        index_type="i64" if kernel.index64 else "i32",
        columns=c_text(columns),
        is_exact=divisor(columns, {}) % body.plan.columns == 0,
        decode=decode(body.column_axes, "column", "Index"),
        sums=[column_sum(s, offsets, lane_axis) for s in body.sums],
        parts=body.parts if rows is None else min(rows, body.parts),
        row_blocks=None if body.row_blocks is None or rows is not None else c_text(body.row_blocks),
        arrays=dict(zip(*_successive(partials, offsets, body.shared.scratch, "COLUMNS * ROWS"), strict=True)),
        plan=body.plan,
    )
    math = math_text(reduction_functions(s.reduction for s in body.sums))
    return assemble(launch, target, math, pipeline)
