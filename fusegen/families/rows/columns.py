"""Column sums, whose partial sums a kernel combines in a fixed order; rows in an order of reuse, and rows that start unaligned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, mul

import sympy

from fusegen.families.rows.phases import statistic_name
from fusegen.families.rows.plan import ColumnBody, ColumnSum, RowPlan
from fusegen.families.rows.tiles import column_plan
from fusegen.ir.formula import ceil_div, formula
from fusegen.ir.reductions import REDUCTIONS
from fusegen.ir.symbolic import Axes, Dim, FloorDiv, Index, axis_symbol, linearize, literal, nominal, product, same, simplify_dim
from fusegen.program.formula import Formula, formula_of, minimum
from fusegen.schedule.access import Access, AccessPattern, Anchor, pattern_of
from fusegen.schedule.context import Context, assemble, uses_of
from fusegen.schedule.indices import Checked, Loaded
from fusegen.schedule.kernel import SCRATCH_BYTES, arranged
from fusegen.schedule.memory import Store, total_bytes
from fusegen.schedule.names import Namer
from fusegen.schedule.program import Launch, Traffic
from fusegen.schedule.reductions import component, element_type, reduction_of

PART = axis_symbol("part")
"""The number of a part of the rows, and of the block that works on it: its row of the workspace."""


@dataclass(frozen=True)
class PartialState:
    """A reduction over rows of which every part of the rows has left its state.

    Attributes:
        workspace: the buffers of the partial states, one a component.
        stores: for each node that is a part of the state, where it goes, over the column axes.
    """

    workspace: tuple[int, ...]
    stores: Mapping[int, Sequence[Store]]


def row_blocks(context: Context, plan: RowPlan, row_axes: Axes) -> Dim | None:
    """Blocks that the rows make, where no others have work; None where all of the plan's have: of tiles of columns, which start
    whatever the rows are, and on the CPU."""
    if plan.tiled or not context.target.warp:
        return None
    rows = product(row_axes.extents)
    return rows if plan.rows == 1 else FloorDiv(rows + (plan.rows - 1), plan.rows)


def parts_of(context: Context, plan: RowPlan, row_axes: Axes) -> Formula:
    """Parts of the rows, each the work of a block, which leaves its column sums."""
    blocks = row_blocks(context, plan, row_axes)
    return formula_of(plan.resident) if blocks is None else minimum(formula(blocks), plan.resident)


def partials_buffers(context: Context, node: int, parts: Formula, column_axes: Axes) -> tuple[int, ...]:
    """The workspace of a column sum: for each component of its state, a row for each part of the rows."""
    shape = (parts, formula(product(column_axes.extents)))
    found = context.graph.nodes[node]
    components, element = REDUCTIONS[found.op].components, element_type(context.graph, found)
    names = [f"partial_{node}" if len(components) == 1 else f"partial_{node}_{c.name}" for c in components]
    return tuple(context.memory.add(name, c.dtype(element), shape) for name, c in zip(names, components, strict=True))


def partial_offset(column_axes: Axes) -> Index:
    """The offset in the workspace of a component of a part's state, over the part's number and the column axes."""
    position: Index = PART
    for symbol, extent in zip(column_axes.symbols, column_axes.extents, strict=True):
        position = position * extent + symbol
    return position


def combine_partials(context: Context, states: Sequence[PartialState], row_axes: Axes, column_axes: Axes, plan: RowPlan) -> Launch:
    """The launch that combines partial sums into the results."""
    names = Namer()
    sums = tuple(_column_sum(context, state, column_axes, names) for state in states)
    partials = [a for s in sums for a in s.partials]
    writes = [a for s in sums for a in s.writes]
    plan_of_columns = column_plan(context.target, len(partials), tiled=plan.tiled)
    threads = plan_of_columns.columns * plan_of_columns.rows
    shared = arranged(scratch=[threads * SCRATCH_BYTES for _ in partials])
    blocks = row_blocks(context, plan, row_axes)
    body = ColumnBody(sums, column_axes, plan.resident, blocks, shared, plan_of_columns)
    extents = column_axes.extents if blocks is None else (*column_axes.extents, blocks)
    uses = uses_of([(a.offset, ()) for a in (*partials, *writes)], (), (), extents)
    pointers = context.pointers((a.buffer for a in partials), (a.buffer for a in writes))
    kernel = assemble(context, body, [uses], pointers, axes=(*column_axes.symbols, PART))
    kernel = replace(kernel, name=f"{context.name}_combine")
    grid = ceil_div(product(column_axes.extents), plan_of_columns.columns)
    return Launch(kernel, context.group, (), grid, threads, shared.bytes, _traffic(states, context))


def _column_sum(context: Context, state: PartialState, column_axes: Axes, names: Namer) -> ColumnSum:
    nodes, lane = tuple(state.stores), column_axes.symbols[-1]
    name = statistic_name(context.graph, nodes[0], over_rows=True)
    reduction = reduction_of(context.graph, nodes[0], names.take, fast=context.fast, name=name)
    position = partial_offset(column_axes)
    components = [c.name for c in reduction.components]
    places = [(components[component(context.graph.nodes[n])], store) for n in nodes for store in state.stores[n]]
    return ColumnSum(
        reduction,
        tuple(context.access(c, w, position, lane, 1) for c, w in zip(components, state.workspace, strict=True)),
        tuple(context.access(c, store.buffer, store.offset, lane, 1) for c, store in places),
    )


def _traffic(states: Sequence[PartialState], context: Context) -> Traffic:
    partials = [context.memory.spec(key) for state in states for key in state.workspace]
    read = [reduce(mul, w.shape, formula_of(w.dtype.itemsize)) for w in partials]
    nodes = [node for state in states for node, stores in state.stores.items() for _ in stores]
    written = [(product(context.graph.nodes[n].shape), context.memory.dtype(n).itemsize) for n in nodes]
    return Traffic(reduce(add, read), total_bytes(written))


# The order of an iteration space in which what is read again is read soon.
#
# The positions of an embedding are the same for each sequence of a batch. Sequence by sequence, a table that the cache does not
# hold until the next one comes from memory each time. Position by position, all sequences read a row of it while the cache has
# it.


_RUN = 1024
"""Bytes that are moved one behind the other in any order, at least: shorter ones cost memory more than a cache saves."""

_CACHE = 16 << 20
"""Bytes that are moved before something is read again, from which on a cache has lost it. Symbolic sizes count as `nominal` says.

On an H100 positions that come again behind 100 MB cost an embedding 29%. A mask that comes again behind 6 MB costs nothing, and
rows in another order would cost its softmax 4%.
"""

_PART = 4
"""A read counts that has at least one of so many of the elements of a run: others are few bytes."""


def reused_soon(axes: Axes, inner: Axes, reads: Sequence[Index], itemsizes: Sequence[int]) -> Axes:
    """The axes, of which those come last along which large reads are the same, if a cache would have lost these otherwise.

    The last axes, which make a run of memory with the inner ones, stay where they are.

    Args:
        axes: that may change places.
        inner: those within them.
        reads: offsets of all that is read, over both.
        itemsizes: bytes of an element of all that is read or written.
    """
    extents = dict(zip((*axes.symbols, *inner.symbols), (*axes.extents, *inner.extents), strict=True))
    run, outer = list(inner.symbols), list(axes.symbols)
    while outer and _volume(run, extents) * min(itemsizes, default=1) < _RUN:
        run.insert(0, outer.pop())
    long = [axis for axis in outer if literal(extents[axis]) != 1]
    again: list[set[sympy.Symbol]] = []
    for along in (sympy.sympify(read).free_symbols for read in reads):
        same = [number for number, axis in enumerate(long) if axis not in along]
        is_large = _PART * _volume(along.intersection(run), extents) >= _volume(run, extents)
        if not is_large or not 0 < len(same) < len(long):
            continue
        if _volume((*long[same[-1] + 1 :], *run), extents) * sum(itemsizes) >= _CACHE:
            again.append(along)
    if not again:
        return axes
    of_all = set(long).intersection(*again)
    symbols = (*sorted(outer, key=lambda axis: axis not in of_all), *axes.symbols[len(outer) :])
    return Axes(symbols, tuple(extents[axis] for axis in symbols))


def _volume(symbols: Iterable[sympy.Symbol], extents: Mapping[sympy.Symbol, Dim]) -> int:
    return math.prod(nominal(extents[axis]) for axis in symbols)


# Rows that do not start where an access is aligned, as those of odd lengths: groups of lanes start at aligned places all the
# same.
#
# One of the tensors that a kernel touches, the *anchor*, says where these are. What lies like it is accessed group by group;
# other neighbours are brought as a window, which two aligned accesses hold. Where something is reduced along rows, the first
# and the last group of a row are partial; where nothing is, a group goes on in the next row.


_VECTOR_BYTES = 16  # of the widest access, whose alignment suffices for any group of lanes


def anchor_of(context: Context, touched: Iterable[tuple[int, Index]], rows: Axes, columns: Axes) -> Anchor | None:
    """The first tensor of some whose rows are of neighbours, and whose memory is aligned.

    Args:
        touched: buffers and the offsets at which they are accessed, those that matter most first.
        rows, columns: axes that number rows, and those along which a row runs; where these are several, there is no anchor.
    """
    if len(columns.symbols) > 1:
        return None
    (axis,), (length,) = columns.symbols, columns.extents
    start = next((_start(offset, axis) for buffer, offset in touched if _is_aligned(context, buffer, offset, axis)), None)
    if start is None:
        return None
    return Anchor(start, same(start, linearize((*rows.symbols, 0), (*rows.extents, length))))


def is_alike(context: Context, buffer: int, offset: Index, axis: sympy.Symbol, anchor: Anchor) -> bool:
    """True if a tensor's rows lie in memory as those of the anchor."""
    return _is_aligned(context, buffer, offset, axis) and same(_start(offset, axis), anchor.start)


def shifted(context: Context, access: Access, axis: sympy.Symbol, anchor: Anchor, lanes: int, other: AccessPattern) -> Access:
    """An access of lanes whose first one is at an aligned place of the anchor.

    Args:
        access: as it is where groups of lanes start with the row.
        other: the pattern of neighbours that lie otherwise than the anchor.
    """
    if any(sympy.sympify(b.index).has(axis) for b in access.conditions):
        return replace(access, pattern=AccessPattern.GATHER, width=1)
    if access.pattern is not AccessPattern.VECTOR:
        return access
    if is_alike(context, access.buffer, access.offset, axis, anchor) and not access.conditions:  # as of a part, which ends before
        return replace(access, width=min(lanes, _VECTOR_BYTES // context.dtype(access.buffer).itemsize))
    return replace(access, pattern=other, width=1)


def may_wrap(context: Context, touched: Iterable[tuple[int, Index]], written: Iterable[tuple[int, Index]], axes: Axes) -> bool:
    """True if groups of lanes may go on in the next row: what is written lies in the order of the axes, and no place depends on an
    index that is read."""
    is_plain = not any(sympy.sympify(offset).has(Loaded, Checked) for _, offset in touched)
    return is_plain and all(_is_flat(context, buffer, offset, axes) for buffer, offset in written)


def wrapped(context: Context, access: Access, axes: Axes, lanes: int) -> Access:
    """An access of lanes that may go on in the next row.

    Args:
        access: as it is where they do not.
        axes: of the iteration space, in whose order groups of lanes start at aligned places.
    """
    indices = [access.offset, *(b.index for b in access.conditions)]
    if not any(sympy.sympify(index).has(*axes.symbols) for index in indices):
        return access
    axis = axes.symbols[-1]
    is_within = access.pattern is AccessPattern.VECTOR and not any(sympy.sympify(index).has(axis) for index in indices[1:])
    if is_within and not access.conditions and _is_flat(context, access.buffer, access.offset, axes):
        return replace(access, width=min(lanes, _VECTOR_BYTES // context.dtype(access.buffer).itemsize))
    return replace(access, pattern=AccessPattern.WINDOW if is_within else AccessPattern.GATHER, width=1)


def _is_flat(context: Context, buffer: int, offset: Index, axes: Axes) -> bool:
    return same(offset, linearize(axes.symbols, axes.extents)) and context.alignment(buffer) % _VECTOR_BYTES == 0


def _is_aligned(context: Context, buffer: int, offset: Index, axis: sympy.Symbol) -> bool:
    is_plain = not sympy.sympify(offset).has(Loaded, Checked)
    return is_plain and pattern_of(offset, axis) is AccessPattern.VECTOR and context.alignment(buffer) % _VECTOR_BYTES == 0


def _start(offset: Index, axis: sympy.Symbol) -> Index:
    return simplify_dim(sympy.expand(sympy.sympify(offset).subs(axis, 0)))
