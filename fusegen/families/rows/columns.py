"""Column sums (a kernel combines their partial sums in a fixed order), cache-friendly row orders, unaligned rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import mul

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
from fusegen.schedule.indices import CheckedIndex, LoadedIndex
from fusegen.schedule.kernel import arrange_shared_arrays
from fusegen.schedule.memory import Store, total_bytes
from fusegen.schedule.names import Namer
from fusegen.schedule.program import Launch, Traffic
from fusegen.schedule.reductions import component, element_type, reduction_of

PART = axis_symbol("part")
"""The number of a part of the rows, of the block that sums it, and of its row in the workspace."""


@dataclass(frozen=True)
class PartialState:
    """The workspace of partial states of a reduction over rows, one buffer per component, and the stores of the state's nodes."""

    workspace: tuple[int, ...]
    stores: Mapping[int, Sequence[Store]]


def row_blocks(context: Context, plan: RowPlan, row_axes: Axes) -> Dim | None:
    """Returns the number of blocks that the rows can fill; None if all blocks have work: with column tiles, and on the CPU."""
    if plan.tiled or not context.target.warp:
        return None
    rows = product(row_axes.extents)
    return rows if plan.rows == 1 else FloorDiv(rows + (plan.rows - 1), plan.rows)


def parts_of(context: Context, plan: RowPlan, row_axes: Axes) -> Formula:
    """Returns the number of parts of the rows; each is one block's work and has its own partial column sums."""
    blocks = row_blocks(context, plan, row_axes)
    return formula_of(plan.persistent_blocks) if blocks is None else minimum(formula(blocks), plan.persistent_blocks)


def partials_buffers(context: Context, node: int, parts: Formula, column_axes: Axes) -> tuple[int, ...]:
    """Allocates the workspace of a column sum: for each component of its state, a row per part."""
    shape = (parts, formula(product(column_axes.extents)))
    node_of_sum = context.graph.nodes[node]
    components, element = REDUCTIONS[node_of_sum.op].components, element_type(context.graph, node_of_sum)
    stem = f"partial_{statistic_name(context.graph, node, over_rows=True)}"
    names = [stem if len(components) == 1 else f"{stem}_{c.name}" for c in components]
    return tuple(context.memory.add(name, c.dtype(element), shape) for name, c in zip(names, components, strict=True))


def partial_offset(column_axes: Axes) -> Index:
    offset: Index = PART
    for symbol, extent in zip(column_axes.symbols, column_axes.extents, strict=True):
        offset = offset * extent + symbol
    return offset


def combine_partials(context: Context, states: Sequence[PartialState], row_axes: Axes, column_axes: Axes, plan: RowPlan) -> Launch:
    names = Namer()
    sums = tuple(_column_sum(context, state, column_axes, names) for state in states)
    partials = [a for s in sums for a in s.partials]
    writes = [a for s in sums for a in s.writes]
    plan_of_columns = column_plan(context.target, len(partials), tiled=plan.tiled)
    threads = plan_of_columns.columns * plan_of_columns.rows
    shared = arrange_shared_arrays(scratch=[threads * context.dtype(a.buffer).itemsize for a in partials])
    blocks = row_blocks(context, plan, row_axes)
    body = ColumnBody(sums, column_axes, plan.persistent_blocks, blocks, shared, plan_of_columns)
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
    stores = [(components[component(context.graph.nodes[n])], store) for n in nodes for store in state.stores[n]]
    return ColumnSum(
        reduction,
        tuple(context.access(c, w, position, lane, 1) for c, w in zip(components, state.workspace, strict=True)),
        tuple(context.access(c, store.buffer, store.offset, lane, 1) for c, store in stores),
    )


def _traffic(states: Sequence[PartialState], context: Context) -> Traffic:
    partials = [context.memory.spec(key) for state in states for key in state.workspace]
    row_bytes = sum(w.dtype.itemsize for w in partials)  # of a row of each, which have one shape
    read = reduce(mul, partials[0].shape, formula_of(row_bytes))
    nodes = [node for state in states for node, stores in state.stores.items() for _ in stores]
    written = [(product(context.graph.nodes[n].shape), context.memory.dtype(n).itemsize) for n in nodes]
    return Traffic(read, total_bytes(written))


# Order of the row axes for cache reuse.
#
# All sequences of a batch read the same positional embedding. Sequence by sequence, a table larger than the cache is read from
# memory each time; position by position, all sequences read one of its rows while it is in the cache.


_RUN = 1024
"""Fewest bytes of a contiguous run that reordering keeps together: shorter runs cost more bandwidth than the cache saves."""

_CACHE = 16 << 20
"""Bytes moved before a reuse from which on the cache has evicted the data. Symbolic sizes count as `nominal` says.

On an H100, positional embeddings reused after 100 MB cost 29%. A mask reused after 6 MB costs nothing, and reordering the rows
would cost its softmax 4%.
"""

_PART = 4
"""A read counts if it has at least 1/_PART of a run's elements."""


def order_for_reuse(axes: Axes, inner: Axes, reads: Sequence[Index], itemsizes: Sequence[int]) -> Axes:
    """Moves axes along which large reads repeat to the end, if the cache would evict these reads otherwise.

    The last axes, which form a contiguous run with the inner ones, stay in place.

    Args:
        axes, inner: axes that may be reordered, and those inside them.
        reads: offsets of all reads, over both.
        itemsizes: bytes per element of all reads and writes.
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


# Unaligned rows, e.g. of odd lengths: vectors still start at aligned addresses.
#
# One tensor of the kernel, the *anchor*, defines these addresses. Tensors with its alignment are accessed by vectors. Other
# contiguous tensors are accessed through a window, which two aligned accesses cover. In row reductions the first and the last
# vector of a row are partial; without reductions a vector continues in the next row.


_VECTOR_BYTES = 16  # the widest access; its alignment suffices for any vector


def anchor_of(context: Context, touched: Iterable[tuple[int, Index]], rows: Axes, columns: Axes) -> Anchor | None:
    """Returns the first tensor with contiguous rows and aligned memory, as the anchor; None if a row has several axes.

    ``touched`` are buffers with their offsets, the most important first.
    """
    if len(columns.symbols) > 1:
        return None
    (axis,), (length,) = columns.symbols, columns.extents
    start = next((_start(offset, axis) for buffer, offset in touched if _is_aligned(context, buffer, offset, axis)), None)
    if start is None:
        return None
    return Anchor(start, same(start, linearize((*rows.symbols, 0), (*rows.extents, length))))


def has_alignment_of(context: Context, buffer: int, offset: Index, axis: sympy.Symbol, anchor: Anchor) -> bool:
    return _is_aligned(context, buffer, offset, axis) and same(_start(offset, axis), anchor.start)


def unaligned(context: Context, access: Access, axis: sympy.Symbol, anchor: Anchor, vec: int, other: AccessPattern) -> Access:
    """Returns an access whose vectors start at aligned addresses of the anchor, not with the row.

    ``other`` is the pattern for contiguous data of another alignment.
    """
    if any(sympy.sympify(b.index).has(axis) for b in access.conditions):
        return replace(access, pattern=AccessPattern.GATHER, width=1)
    if access.pattern is not AccessPattern.VECTOR:
        return access
    # With a condition, a concatenated part may end inside a vector.
    if has_alignment_of(context, access.buffer, access.offset, axis, anchor) and not access.conditions:
        return replace(access, width=min(vec, _VECTOR_BYTES // context.dtype(access.buffer).itemsize))
    return replace(access, pattern=other, width=1)


def may_wrap(context: Context, touched: Iterable[tuple[int, Index]], written: Iterable[tuple[int, Index]], axes: Axes) -> bool:
    """True if vectors may continue in the next row: writes follow the order of the axes, and no offset depends on an index read."""
    is_plain = not any(sympy.sympify(offset).has(LoadedIndex, CheckedIndex) for _, offset in touched)
    return is_plain and all(_is_flat(context, buffer, offset, axes) for buffer, offset in written)


def wrapped(context: Context, access: Access, axes: Axes, vec: int) -> Access:
    """Returns an access whose vectors start at aligned positions in the order of the axes, and may continue in the next row."""
    indices = [access.offset, *(b.index for b in access.conditions)]
    if not any(sympy.sympify(index).has(*axes.symbols) for index in indices):
        return access
    axis = axes.symbols[-1]
    is_within = access.pattern is AccessPattern.VECTOR and not any(sympy.sympify(index).has(axis) for index in indices[1:])
    if is_within and not access.conditions and _is_flat(context, access.buffer, access.offset, axes):
        return replace(access, width=min(vec, _VECTOR_BYTES // context.dtype(access.buffer).itemsize))
    return replace(access, pattern=AccessPattern.WINDOW if is_within else AccessPattern.GATHER, width=1)


def _is_flat(context: Context, buffer: int, offset: Index, axes: Axes) -> bool:
    return same(offset, linearize(axes.symbols, axes.extents)) and context.alignment(buffer) % _VECTOR_BYTES == 0


def _is_aligned(context: Context, buffer: int, offset: Index, axis: sympy.Symbol) -> bool:
    is_plain = not sympy.sympify(offset).has(LoadedIndex, CheckedIndex)
    return is_plain and pattern_of(offset, axis) is AccessPattern.VECTOR and context.alignment(buffer) % _VECTOR_BYTES == 0


def _start(offset: Index, axis: sympy.Symbol) -> Index:
    return simplify_dim(sympy.expand(sympy.sympify(offset).subs(axis, 0)))
