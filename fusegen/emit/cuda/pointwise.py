"""Pointwise kernels in CUDA."""

from __future__ import annotations

from fusegen.emit.cuda.assemble import assemble, head, math_text
from fusegen.emit.environment import render
from fusegen.emit.offsets import cuda_offsets
from fusegen.emit.text import c_text
from fusegen.emit.views import call_view, checks_view, decode, fragment
from fusegen.ir.symbolic import Axes, product
from fusegen.schedule.bodies import Hoisted, PointwiseBody
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target


def emit_pointwise(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of a pointwise kernel."""
    body = kernel.body
    assert isinstance(body, PointwiseBody)
    pipeline = _straight(kernel, body, launch) if body.hoisted is None else _repeated(kernel, body, body.hoisted, launch)
    once = [] if body.hoisted is None or body.hoisted.call is None else [body.hoisted.call.function]
    return assemble(launch, target, math_text([*once, body.call.function]), pipeline)


def _straight(kernel: Kernel, body: PointwiseBody, launch: Launch) -> str:
    """The pipeline in which a thread takes groups of lanes that are far apart."""
    lane_axis = body.axes.symbols[-1]
    offsets = cuda_offsets(kernel).found_first((*body.reads, *body.writes), [lane_axis])
    checks = checks_view(body.checks, offsets, Axes((lane_axis,), body.axes.extents[-1:]))
    return render(
        "cuda/pointwise.cu.jinja",
        **head(launch),
        index_type="i64" if kernel.wide else "i32",
        count=c_text(product(body.axes.extents)),
        decode=decode(body.axes, "position", "Index"),
        indices=[*offsets.lines.values()],
        once=checks.once,
        checks=checks.lanes,
        reads=[fragment(a, offsets, lane_axis) for a in body.reads],
        writes=[fragment(a, offsets, lane_axis) for a in body.writes],
        call=call_view(body.call, offsets, None if body.plan.wraps else lane_axis),
        plan=body.plan,
        extent=c_text(body.axes.extents[-1]),
        lane_axis=lane_axis.name,
        lane_decode=decode(body.axes, "(position + v)", "Index"),
    )


def _repeated(kernel: Kernel, body: PointwiseBody, hoisted: Hoisted, launch: Launch) -> str:
    """The pipeline in which a thread goes along an axis."""
    lane_axis = body.axes.symbols[-1]
    offsets = cuda_offsets(kernel)
    threads = body.threads
    return render(
        "cuda/pointwise_repeated.cu.jinja",
        **head(launch),
        index_type="i64" if kernel.wide else "i32",
        count=c_text(product(threads.extents)),
        decode=decode(threads, "position", "Index"),
        axis=hoisted.axis.name,
        chunk=threads.symbols[0].name,
        extent=c_text(body.axes.extents[0]),
        first_reads=[fragment(a, offsets, lane_axis) for a in hoisted.reads],
        first_call=None if hoisted.call is None else call_view(hoisted.call, offsets, lane_axis),
        reads=[fragment(a, offsets, lane_axis) for a in body.reads],
        writes=[fragment(a, offsets, lane_axis) for a in body.writes],
        call=call_view(body.call, offsets, lane_axis),
        plan=body.plan,
    )
