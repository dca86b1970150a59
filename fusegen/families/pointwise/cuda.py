"""CUDA text of pointwise kernels."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy

from fusegen.emit.cuda import assemble, head, math_text
from fusegen.emit.environment import LinearIndex, c_text, render
from fusegen.emit.views import LANE, FragmentView, Offsets, call_view, checks_view, cuda_offsets, decode, fragment, read_by
from fusegen.families.pointwise.plan import HoistedMath, PointwiseBody, TileBody
from fusegen.ir.symbolic import Axes, Index, Modulo, literal, product
from fusegen.schedule.access import Access
from fusegen.schedule.indices import CheckedIndex, LoadedIndex
from fusegen.schedule.kernel import LoweredKernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target

_AT = sympy.Symbol("at", integer=True, nonnegative=True)
"""The offset of the first read in a loop, from which others are at a fixed distance."""


def emit_cuda(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, PointwiseBody)
    pipeline = _vectorized(kernel, body, launch) if body.hoisted is None else _repeated(kernel, body, body.hoisted, launch)
    once = (body.common_call, None if body.hoisted is None else body.hoisted.call)
    return assemble(launch, target, math_text([c.function for c in (*once, body.call) if c]), pipeline)


def _vectorized(kernel: LoweredKernel, body: PointwiseBody, launch: Launch) -> str:
    lane_axis = body.axes.symbols[-1]
    offsets = cuda_offsets(kernel).with_hoisted((*body.reads, *body.writes), [lane_axis])
    if not body.plan.wraps:  # otherwise elements of the next row have indices of their own
        offsets = _with_common(replace(offsets, linear=LinearIndex(body.axes, "position")), [*body.reads, *body.writes])
    checks = checks_view(body.checks, offsets, Axes((lane_axis,), body.axes.extents[-1:]))
    return render(
        "cuda/pointwise.cu.jinja",
        **head(launch),
        index_type="i64" if kernel.index64 else "i32",
        count=c_text(product(body.axes.extents)),
        decode=decode(body.axes, "position", "Index"),
        indices=[*offsets.lines.values()],
        once=checks.once,
        checks=checks.vec,
        reads=[fragment(a, offsets, lane_axis) for a in body.reads],
        writes=[fragment(a, offsets, lane_axis) for a in body.writes],
        common_call=None if body.common_call is None else call_view(body.common_call, offsets, None),
        call=None if body.call is None else call_view(body.call, offsets, None if body.plan.wraps else lane_axis),
        copies=dict(body.copies),
        computed=read_by(body.call, body.common_call),
        plan=body.plan,
        is_exact=body.is_exact,
        extent=c_text(body.axes.extents[-1]),
        lane_axis=lane_axis.name,
        lane_decode=decode(body.axes, "(position + v)", "Index"),
    )


def _with_common(offsets: Offsets, accesses: Sequence[Access]) -> Offsets:
    """Names the offsets that several accesses have, besides a number."""
    positions = [(a, sympy.expand(offsets.linear(a.offset)).as_coeff_Add()[1]) for a in accesses]
    count, named, names = Counter(place for _, place in positions), dict[sympy.Expr, sympy.Symbol](), set[str]()
    for access, place in positions:
        if count[place] > 1 and place not in named and not place.is_Atom and not place.has(LoadedIndex, CheckedIndex):
            stem = offsets.pointers[access.buffer].name.removesuffix("_ptr")
            name = next(n for n in (f"{stem}{k if k > 1 else ''}_offset" for k in itertools.count(1)) if n not in names)
            names.add(name)
            named[place] = sympy.Symbol(name, integer=True, nonnegative=True)

    def near(index: Index) -> Index:
        """Returns an offset in elements from a named one, if it is a number besides the lane's."""
        written = sympy.expand(offsets.linear(index))
        distances = ((symbol, sympy.expand(written - place)) for place, symbol in named.items())
        return next((symbol + distance for symbol, distance in distances if distance.free_symbols <= {LANE}), written)

    lines = {symbol.name: f"const Index {symbol} = {offsets.text(place)};" for place, symbol in named.items()}
    return replace(offsets, linear=near, lines={**offsets.lines, **lines})


def _repeated(kernel: LoweredKernel, body: PointwiseBody, hoisted: HoistedMath, launch: Launch) -> str:
    lane_axis = body.axes.symbols[-1]
    offsets = cuda_offsets(kernel)
    threads, accesses = body.threads, [*body.reads, *body.writes]
    base = sympy.sympify(accesses[0].offset)

    def near(index: Index) -> Index:
        """Returns an offset in elements from the first read, if it is a number besides the lane's."""
        distance = sympy.expand(sympy.sympify(index) - base)
        return _AT + distance if distance.free_symbols <= {LANE} else index

    in_turn = [near(access.offset) for access in accesses]
    is_shared = sum(sympy.sympify(offset).has(_AT) for offset in in_turn) > 1 and not base.has(LoadedIndex, CheckedIndex)
    local = replace(offsets, linear=near) if is_shared else offsets
    return render(
        "cuda/pointwise_repeated.cu.jinja",
        **head(launch),
        index_type="i64" if kernel.index64 else "i32",
        count=c_text(product(threads.extents)),
        decode=decode(threads, "position", "Index"),
        axis=hoisted.axis.name,
        chunk=threads.symbols[0].name,
        extent=c_text(body.axes.extents[0]),
        at=f"const Index {_AT} = {offsets.text(base)};",
        first_reads=[fragment(a, offsets, lane_axis) for a in hoisted.reads],
        first_call=None if hoisted.call is None else call_view(hoisted.call, offsets, lane_axis),
        reads=[fragment(a, local, lane_axis) for a in body.reads],
        writes=[fragment(a, local, lane_axis) for a in body.writes],
        call=None if body.call is None else call_view(body.call, offsets, lane_axis),
        plan=body.plan,
        is_exact=body.is_exact,
    )


# CUDA text of pointwise kernels with transposed operands.


@dataclass(frozen=True)
class TileView:
    """A transposed operand that goes through shared memory, as the template sees it.

    Attributes:
        fragment: its read, along the axis of rows.
        groups: accesses per thread.
        exact: whether no access extends past the last row.
        pitch: elements between columns of the tile.
    """

    fragment: FragmentView
    groups: int
    exact: bool
    pitch: int


def emit_tiles(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, TileBody)
    offsets = cuda_offsets(kernel)
    extents = dict(zip(body.axes.symbols, body.axes.extents, strict=True))
    pipeline = render(
        "cuda/tiles.cu.jinja",
        **head(launch),
        index_type="i64" if kernel.index64 else "i32",
        row_axis=body.row_axis.name,
        column_axis=body.column_axis.name,
        row_count=c_text(extents[body.row_axis]),
        column_count=c_text(extents[body.column_axis]),
        decode=decode(body.tiles, "tile", "Index"),
        transposed=[_tile(a, body, offsets) for a in body.transposed],
        arrays=dict(zip((a.name for a in body.transposed), body.shared.staged, strict=True)),
        reads=[fragment(a, offsets, body.column_axis) for a in body.reads],
        writes=[fragment(a, offsets, body.column_axis) for a in body.writes],
        whole=" && ".join(f"{c_text(Modulo(size, body.plan.vec))} == 0" for size in body.multiples),
        call=None if body.call is None else call_view(body.call, offsets, body.column_axis),
        copies=dict(body.copies),
        computed=read_by(body.call),
        plan=body.plan,
    )
    return assemble(launch, target, math_text([] if body.call is None else [body.call.function]), pipeline)


def _tile(access: Access, body: TileBody, offsets: Offsets) -> TileView:
    plan, itemsize = body.plan, offsets.pointers[access.buffer].dtype.itemsize
    rows = literal(body.axes.extents[body.axes.symbols.index(body.row_axis)])
    groups = plan.rows * plan.columns // (plan.threads * access.width)
    exact = rows is not None and rows % access.width == 0
    return TileView(fragment(access, offsets, body.row_axis), groups, exact, plan.pitch(itemsize))
