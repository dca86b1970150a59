"""Pointwise kernels in C++."""

from __future__ import annotations

from dataclasses import replace

from fusegen.emit.cpu.assemble import assemble, math_text, names_of
from fusegen.emit.cpu.axes import NestView
from fusegen.emit.environment import render
from fusegen.emit.offsets import cpu_offsets
from fusegen.emit.views import call_view, checks_view, fragment
from fusegen.ir.symbolic import Axes
from fusegen.schedule.bodies import PointwiseBody
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target


def emit_pointwise(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of a pointwise kernel."""
    body = kernel.body
    assert isinstance(body, PointwiseBody)
    lane_axis = body.axes.symbols[-1]
    offsets = cpu_offsets(kernel).found_first(body.reads, [lane_axis])
    placed = cpu_offsets(kernel).found_first(body.writes, [lane_axis])
    checks = checks_view(body.checks, offsets, Axes((lane_axis,), body.axes.extents[-1:]))
    reads = [fragment(a, offsets, lane_axis) for a in body.reads]
    pipeline = render(
        "cpu/pointwise.cpp.jinja",
        names=names_of(kernel),
        nest=NestView.of(body.axes, "row"),
        indices=[*offsets.lines.values(), *checks.once],
        checks=checks.lanes,
        reads=reads,
        places=[*placed.lines.values()],
        writes=[replace(fragment(a, placed, lane_axis), checked=kernel.checks) for a in body.writes],
        call=call_view(body.call, offsets, lane_axis),
        plan=body.plan,
    )
    return assemble(launch, target, math_text([body.call.function]), pipeline)
