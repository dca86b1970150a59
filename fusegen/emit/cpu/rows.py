"""Row kernels and the combination of column sums in C++."""

from __future__ import annotations

import math

from fusegen.emit.cpu.assemble import assemble, math_text, names_of
from fusegen.emit.cpu.pointwise import NestView
from fusegen.emit.environment import render
from fusegen.emit.offsets import cpu_offsets
from fusegen.emit.reductions import kinds, reduction_functions, view
from fusegen.emit.row_views import column_sum, phase_views, placed_accesses, row_accesses, row_functions
from fusegen.emit.text import c_text
from fusegen.emit.views import checks_view, decode, fragment
from fusegen.ir.symbolic import literal, product
from fusegen.schedule.bodies import ColumnBody, RowBody
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.plan import RowPlan
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target

_CHUNKS = 32  # one after the other: so few that sums are as near as torch's, so many that pairs cost nothing


def emit_rows(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of a row kernel."""
    body = kernel.body
    assert isinstance(body, RowBody)
    offsets = cpu_offsets(kernel).found_first([*row_accesses(body), *placed_accesses(body)], body.column_axes.symbols)
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
        checks=checks.lanes,
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


def _pipeline(plan: RowPlan) -> str:
    """The template of a plan."""
    return "tiles" if plan.tiled else "parts" if plan.resident else "rows"


def _pairwise(body: RowBody) -> int:
    """Chunks after which what lanes have gathered is put aside, to be combined by pairs; 0 where rows are known to be no longer."""
    *outer, last = (literal(extent) for extent in body.column_axes.extents)
    if last is None or any(extent is None for extent in outer):
        return _CHUNKS
    chunks = -(-last // body.plan.lanes) * math.prod(extent for extent in outer if extent is not None)
    return _CHUNKS if chunks > _CHUNKS else 0


def emit_columns(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of the kernel that combines column sums."""
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
