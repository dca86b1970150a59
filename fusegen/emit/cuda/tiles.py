"""Pointwise kernels in CUDA whose operands lie across their results."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.emit.cuda.assemble import assemble, head, math_text
from fusegen.emit.environment import render
from fusegen.emit.offsets import Offsets, cuda_offsets
from fusegen.emit.text import c_text
from fusegen.emit.views import FragmentView, call_view, decode, fragment
from fusegen.ir.symbolic import Modulo, literal
from fusegen.schedule.access import Access
from fusegen.schedule.bodies import TileBody
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target


@dataclass(frozen=True)
class TileView:
    """An operand that goes through shared memory, as the template sees it.

    Attributes:
        fragment: how it is read, along the axis of rows.
        groups: accesses of a thread.
        exact: whether none of them goes on behind the last row.
        staged: where its tile lies in shared memory, in bytes.
        pitch: elements from one column of the tile to the next.
    """

    fragment: FragmentView
    groups: int
    exact: bool
    staged: int
    pitch: int


def emit_tiles(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of a pointwise kernel that works tile by tile."""
    body = kernel.body
    assert isinstance(body, TileBody)
    offsets = cuda_offsets(kernel)
    extents = dict(zip(body.axes.symbols, body.axes.extents, strict=True))
    pipeline = render(
        "cuda/tiles.cu.jinja",
        **head(launch),
        index_type="i64" if kernel.wide else "i32",
        row_axis=body.row_axis.name,
        column_axis=body.column_axis.name,
        row_count=c_text(extents[body.row_axis]),
        column_count=c_text(extents[body.column_axis]),
        decode=decode(body.tiles, "tile", "Index"),
        crossing=[_tile(a, at, body, offsets) for a, at in zip(body.crossing, body.shared.staged, strict=True)],
        reads=[fragment(a, offsets, body.column_axis) for a in body.reads],
        writes=[fragment(a, offsets, body.column_axis) for a in body.writes],
        whole=" && ".join(f"{c_text(Modulo(size, body.plan.lanes))} == 0" for size in body.multiples),
        call=call_view(body.call, offsets, body.column_axis),
        plan=body.plan,
    )
    return assemble(launch, target, math_text([body.call.function]), pipeline)


def _tile(access: Access, staged: int, body: TileBody, offsets: Offsets) -> TileView:
    """The view of an operand whose tile lies at some byte of shared memory."""
    plan, itemsize = body.plan, offsets.pointers[access.buffer].dtype.itemsize
    rows = literal(body.axes.extents[body.axes.symbols.index(body.row_axis)])
    groups = plan.rows * plan.columns // (plan.threads * access.width)
    exact = rows is not None and rows % access.width == 0
    return TileView(fragment(access, offsets, body.row_axis), groups, exact, staged, plan.pitch(itemsize))
