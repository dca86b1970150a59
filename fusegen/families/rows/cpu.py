"""CPU row kernels: their plans and text. Rows are read again in each phase; tasks split the rows of column sums.

Plans do not depend on the number of cores, so that results are the same everywhere.
"""

from __future__ import annotations

import math

from fusegen.emit.cpu import NestView, assemble, math_text, names_of
from fusegen.emit.environment import c_text, render
from fusegen.emit.views import checks_view, cpu_offsets, decode, fragment, kinds, reduction_functions, view
from fusegen.families.pointwise.cpu import CHUNK, chunk_lanes
from fusegen.families.rows.plan import ColumnBody, Persistence, RowBody, RowPlan
from fusegen.families.rows.views import column_sum, phase_views, row_accesses, row_functions, write_accesses
from fusegen.ir.symbolic import Axes, literal, product
from fusegen.schedule.kernel import LoweredKernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target

_TILE = 16  # vectors of columns per task: accumulators of several sums fit L1
_MOST_KEPT = 128 << 10  # most bytes of a row's computed values kept for later phases: threads may have a stack of 256 KiB
_PARTS = 32  # tasks for the rows of column sums: enough for a large machine
_CHUNKS = 32  # vectors summed in sequence: few enough for torch's accuracy, many enough that pairwise sums cost nothing


def cpu_plans(axes: Axes, reductions: int, column_sums: float, computed: int, segment: int) -> tuple[RowPlan, ...]:
    """Returns the candidates of a row kernel, the fastest expected first.

    Args:
        reductions, column_sums: numbers of reductions along rows and over rows.
        computed: bytes per element of values that later phases could reuse.
        segment: columns per segment, the least vector width; 0 without segments.
    """
    every, parts = [vec for vec in chunk_lanes(axes) if vec >= segment], _PARTS if column_sums else 0
    if column_sums and not reductions:
        return tuple(_plan(vec, _TILE * CHUNK // vec, Persistence.REGISTERS, parts, tiled=True) for vec in every)
    columns = literal(axes.extents[0]) if len(axes.symbols) == 1 else None
    looped = [_plan(vec, 0, Persistence.MULTI_PASS, parts) for vec in every]
    if not computed or columns is None or columns * computed > _MOST_KEPT:
        return tuple(looped)
    return (*(_plan(vec, max(1, -(-columns // vec)), Persistence.REGISTERS, parts) for vec in every), *looped)


def _plan(vec: int, vectors_per_thread: int, persistence: Persistence, parts: int, *, tiled: bool = False) -> RowPlan:
    return RowPlan(
        threads=1,
        rows=1,
        vec=vec,
        vectors_per_thread=vectors_per_thread,
        persistence=persistence,
        exact=False,
        persistent_blocks=parts,
        tiled=tiled,
    )


def emit_cpp(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, RowBody)
    offsets = cpu_offsets(kernel).with_hoisted([*row_accesses(body), *write_accesses(body)], body.column_axes.symbols)
    checks = checks_view(body.checks, offsets, body.column_axes)
    lane_axis = body.column_axes.symbols[-1]
    partials = {a.name: fragment(a, offsets, lane_axis) for a in body.partials}
    columns = [view(r) for p in body.phases for r in p.column_sums]
    extent = product(body.column_axes.extents)
    pipeline = render(
        f"cpu/rows/{_pipeline(body.plan)}.cpp.jinja",
        names=names_of(kernel),
        rows=c_text(product(body.row_axes.extents)),
        columns=c_text(extent),
        columns_known=literal(extent) is not None,
        row_decode=[*decode(body.row_axes, "row", "Index"), *offsets.lines.values(), *checks.once],
        checks=checks.vec,
        nest=NestView.of(body.column_axes, "column_outer"),
        phases=phase_views(body, offsets),
        kinds=kinds(r for p in body.phases for r in (*(s.reduction for s in p.segments), *p.reductions)),
        sum_arrays=[component for r in columns for component in r.components],
        sums=[(r, [partials[name] for name, _ in r.components]) for r in columns],
        plan=body.plan,
        pairwise=_pairwise(body),
    )
    reductions = [r for p in body.phases for r in (*(s.reduction for s in p.segments), *p.reductions, *p.column_sums)]
    math = math_text([*reduction_functions(reductions), *row_functions(body)])
    return assemble(launch, target, math, pipeline)


def _pairwise(body: RowBody) -> int:
    """Returns the number of vectors per accumulator before a pairwise sum; 0 if all rows are known to be at most that long."""
    *outer, last = (literal(extent) for extent in body.column_axes.extents)
    if last is None or any(extent is None for extent in outer):
        return _CHUNKS
    vectors_per_thread = -(-last // body.plan.vec) * math.prod(extent for extent in outer if extent is not None)
    return _CHUNKS if vectors_per_thread > _CHUNKS else 0


def _pipeline(plan: RowPlan) -> str:
    return "tiles" if plan.tiled else "parts" if plan.persistent_blocks else "rows"


def emit_columns(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, ColumnBody)
    offsets = cpu_offsets(kernel)
    lane_axis = body.column_axes.symbols[-1]
    pipeline = render(
        "cpu/columns.cpp.jinja",
        names=names_of(kernel),
        nest=NestView.of(body.column_axes, "row"),
        sums=[column_sum(s, offsets, lane_axis) for s in body.sums],
        parts=body.parts,
        plan=body.plan,
    )
    math = math_text(reduction_functions(s.reduction for s in body.sums))
    return assemble(launch, target, math, pipeline)
