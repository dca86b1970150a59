"""Scans in CUDA."""

from __future__ import annotations

from fusegen.emit.cuda.assemble import assemble, math_text
from fusegen.emit.environment import render
from fusegen.emit.offsets import cuda_offsets
from fusegen.emit.reductions import kinds, reduction_functions, view
from fusegen.emit.text import c_text
from fusegen.emit.views import call_view, checks_view, decode, entry, fragment, kernel_parameters
from fusegen.ir.symbolic import product
from fusegen.schedule.bodies import ScanBody
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target


def _scratch(body: ScanBody) -> list[list[int]]:
    """For each scan, where its components' scratch is; nothing where a warp works alone."""
    places = iter(body.shared.scratch)
    return [[next(places) for _ in scan.components] if body.shared.scratch else [] for scan in body.scans]


def emit_scan(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of a scan's kernel."""
    body = kernel.body
    assert isinstance(body, ScanBody)
    offsets = cuda_offsets(kernel).found_first(body.reads, body.column_axes.symbols)
    checks = checks_view(body.checks, offsets, body.column_axes)
    lane_axis = body.column_axes.symbols[-1]
    reads = [fragment(a, offsets, lane_axis) for a in body.reads]
    pipeline = render(
        "cuda/scan.cu.jinja",
        entry=entry(kernel),
        overlaps=launch.overlaps,
        parameters=kernel_parameters(kernel),
        index_type="i64" if kernel.wide else "i32",
        rows=c_text(product(body.row_axes.extents)),
        columns=c_text(product(body.column_axes.extents)),
        row_decode=decode(body.row_axes, "row", "Index"),
        indices=[*offsets.lines.values(), *checks.once],
        checks=checks.lanes,
        reads=reads,
        writes=[fragment(a, offsets, lane_axis) for a in body.writes],
        scans=[view(r) for r in body.scans],
        kinds=kinds(body.scans),
        lift=call_view(body.lift, offsets, lane_axis),
        finish=call_view(body.finish, offsets, lane_axis),
        scratch=_scratch(body),
        shared=body.shared,
        plan=body.plan,
    )
    math = math_text([*reduction_functions(body.scans), body.lift.function, body.finish.function])
    return assemble(launch, target, math, pipeline)
