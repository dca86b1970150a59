"""Plans for the CPU: chunks of lanes in the first-level cache, rows that are read again in each phase, parts of the rows for
column sums. They do not depend on the machine's number of cores, so that results are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from fusegen.ir.symbolic import Axes, Index, literal
from fusegen.schedule.access import Pattern, pattern_of
from fusegen.schedule.plan import Persistence, PointwisePlan, RowPlan

LANES = 128  # of a chunk: eight vectors of 32-bit floats, enough to hide latencies; measured: 3 to 15% over 64
_FEWEST_LANES = 16  # a vector of 32-bit floats
_SPAN = 32  # chunks of a task of a pointwise kernel
_ROWS = 128  # that a task of a pointwise kernel takes chunk by chunk where an operand lies across, so that its cache lines are used
_TILE = 16  # chunks of columns that a task sums: accumulators of several sums fit the first-level cache
_MOST_KEPT = 65536  # computed values of a row that are kept for later phases, on a stack of 512 KiB at least
_PARTS = 32  # of the rows, when columns are summed: tasks for the cores of a large machine


def pointwise_plan(axes: Axes, offsets: Iterable[Index]) -> PointwisePlan:
    """The plan of a pointwise kernel.

    Args:
        axes: merged; chunks run along the last one.
        offsets: of everything that is read or written.
    """
    if any(_lies_across(offset, axes) for offset in offsets):
        return PointwisePlan(threads=1, lanes=_FEWEST_LANES, unroll=1, tail=True, rows=_ROWS)
    return PointwisePlan(threads=1, lanes=_lanes(axes), unroll=_SPAN, tail=True)


def _lies_across(offset: Index, axes: Axes) -> bool:
    """Whether neighbours in memory differ in another axis than the last, as in a transposed operand."""
    if pattern_of(offset, axes.symbols[-1]) is not Pattern.GATHER:
        return False
    expanded = sympy.expand(offset)
    return any(expanded.coeff(axis) == 1 for axis in axes.symbols[:-1])


def row_plan(axes: Axes, reductions: int, column_sums: int, computed: int) -> RowPlan:
    """The plan of a row kernel.

    Args:
        axes: the column axes, merged.
        reductions: along the row.
        column_sums: over rows.
        computed: values of each element that later phases could use again.
    """
    lanes = _lanes(axes)
    parts = _PARTS if column_sums else 0
    if column_sums and not reductions:
        return _plan(lanes, _TILE, Persistence.REGISTERS, parts, tiled=True)
    columns = literal(axes.extents[0]) if len(axes.symbols) == 1 else None
    if computed and columns is not None and columns * computed <= _MOST_KEPT:
        return _plan(lanes, max(1, -(-columns // lanes)), Persistence.REGISTERS, parts)
    return _plan(lanes, 0, Persistence.LOOPED, parts)


def _plan(lanes: int, chunks: int, persistence: Persistence, parts: int, *, tiled: bool = False) -> RowPlan:
    return RowPlan(threads=1, rows=1, lanes=lanes, chunks=chunks, persistence=persistence, exact=False, resident=parts, tiled=tiled)


def _lanes(axes: Axes) -> int:
    """Few lanes where the last axis is known to be short, since all of them take part in what ends a row."""
    extent = literal(axes.extents[-1])
    lanes = LANES
    while extent is not None and lanes > _FEWEST_LANES and lanes // 2 >= extent:
        lanes //= 2
    return lanes
