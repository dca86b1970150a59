"""CPU pointwise kernels: their plans and text.

Plans do not depend on the number of cores, so that results are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import sympy

from fusegen.emit.cpu import NestView, assemble, math_text, names_of
from fusegen.emit.environment import render
from fusegen.emit.views import call_view, checks_view, cpu_offsets, fragment, read_by
from fusegen.families.pointwise.plan import PointwiseBody, PointwisePlan
from fusegen.ir.symbolic import Axes, Index, literal
from fusegen.schedule.access import AccessPattern, pattern_of
from fusegen.schedule.kernel import LoweredKernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target

CHUNK = 128  # elements per chunk: eight vectors of 32-bit floats hide latencies; measured: 3 to 15% over 64
_FEWEST_LANES = 16  # a vector of 32-bit floats
_SPAN = 32  # chunks per task of a pointwise kernel
_LANES_ACROSS = (_FEWEST_LANES, 2 * _FEWEST_LANES)  # with transposed operands
_ROWS = 128  # rows per task with transposed operands, chunk by chunk, so that their cache lines are reused


def cpu_plans(axes: Axes, offsets: Iterable[Index]) -> tuple[PointwisePlan, ...]:
    """Returns the candidates of a pointwise kernel, the fastest expected first. ``offsets`` are those of all reads and writes."""
    if any(_is_transposed(offset, axes) for offset in offsets):
        return tuple(PointwisePlan(threads=1, vec=vec, unroll=1, tail=True, rows=_ROWS) for vec in _LANES_ACROSS)
    return tuple(PointwisePlan(threads=1, vec=vec, unroll=_SPAN * CHUNK // vec, tail=True) for vec in chunk_lanes(axes))


def _is_transposed(offset: Index, axes: Axes) -> bool:
    """True if an offset is contiguous along another axis than the last one."""
    if pattern_of(offset, axes.symbols[-1]) is not AccessPattern.GATHER:
        return False
    expanded = sympy.expand(offset)
    return any(expanded.coeff(axis) == 1 for axis in axes.symbols[:-1])


def chunk_lanes(axes: Axes) -> tuple[int, ...]:
    """Returns the candidates for elements per chunk, the best first. Short last axes get short chunks, since a partial chunk at the
    end of a row costs as much as a whole one."""
    extent = literal(axes.extents[-1])
    vec = CHUNK
    while extent is not None and vec > _FEWEST_LANES and vec // 2 >= extent:
        vec //= 2
    return (vec, vec // 2, 2 * vec) if vec == CHUNK else (vec,)


def emit_cpp(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, PointwiseBody)
    lane_axis = body.axes.symbols[-1]
    offsets = cpu_offsets(kernel).with_hoisted(body.reads, [lane_axis])
    placed = cpu_offsets(kernel).with_hoisted(body.writes, [lane_axis])
    checks = checks_view(body.checks, offsets, Axes((lane_axis,), body.axes.extents[-1:]))
    reads = [fragment(a, offsets, lane_axis) for a in body.reads]
    pipeline = render(
        "cpu/pointwise.cpp.jinja",
        names=names_of(kernel),
        nest=NestView.of(body.axes, "row"),
        indices=[*offsets.lines.values(), *checks.once],
        checks=checks.vec,
        reads=reads,
        places=[*placed.lines.values()],
        writes=[replace(fragment(a, placed, lane_axis), checked=kernel.checks) for a in body.writes],
        call=None if body.call is None else call_view(body.call, offsets, lane_axis),
        copies=dict(body.copies),
        computed=read_by(body.call),
        plan=body.plan,
    )
    return assemble(launch, target, math_text([] if body.call is None else [body.call.function]), pipeline)
