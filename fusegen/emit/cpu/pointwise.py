"""Pointwise kernels in C++."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusegen.emit.cpu.assemble import assemble, math_text, names_of
from fusegen.emit.environment import render
from fusegen.emit.offsets import cpu_offsets
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


# Loop nests over axes: chunks run along the last axis, all others are one loop.


@dataclass(frozen=True)
class NestView:
    """Axes as a template loops over them.

    Attributes:
        lane: the last axis.
        extent: its length.
        outer: the variable that numbers all points of the axes before; empty where there are none.
        outer_count: the number of these points.
        decode: statements that find the axes before from their number.
    """

    lane: str
    extent: str
    outer: str
    outer_count: str
    decode: list[str]

    @classmethod
    def of(cls, axes: Axes, outer: str) -> NestView:
        """The view of axes; ``outer`` names the number of a point of several axes before the last."""
        before = Axes(axes.symbols[:-1], axes.extents[:-1])
        several = len(before.symbols) > 1
        return cls(
            lane=axes.symbols[-1].name,
            extent=c_text(axes.extents[-1]),
            outer=outer if several else "".join(s.name for s in before.symbols),
            outer_count=c_text(product(before.extents)),
            decode=decode(before, outer, "Index") if several else [],
        )

    @property
    def flat(self) -> bool:
        """Whether there is only one axis."""
        return not self.outer
