"""Pointwise kernels in CUDA."""

from __future__ import annotations

from fusegen.emit.cuda.assemble import assemble, math_text
from fusegen.emit.cuda.head import head
from fusegen.emit.environment import render
from fusegen.emit.offsets import cuda_offsets
from fusegen.emit.text import c_text
from fusegen.emit.views import call_view, checks_view, decode, fragment
from fusegen.ir.symbolic import Axes, product
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
    offsets = cuda_offsets(kernel).found_first((*body.reads, *body.writes), [lane_axis])
    checks = checks_view(body.checks, offsets, Axes((lane_axis,), body.axes.extents[-1:]))
    reads = [fragment(a, offsets, lane_axis) for a in body.reads]
    pipeline = render(
        "cuda/pointwise.cu.jinja",
        **head(launch),
        index_type="i64" if kernel.wide else "i32",
        count=c_text(product(body.axes.extents)),
        decode=decode(body.axes, "position", "Index"),
        indices=[*offsets.lines.values()],
        once=checks.once,
        checks=checks.lanes,
        reads=reads,
        writes=[fragment(a, offsets, lane_axis) for a in body.writes],
        call=call_view(body.call, offsets, None if body.plan.wraps else lane_axis),
        plan=body.plan,
        extent=c_text(body.axes.extents[-1]),
        lane_axis=lane_axis.name,
        lane_decode=decode(body.axes, "(position + v)", "Index"),
    )
    return assemble(launch, target, math_text([body.call.function]), pipeline)
