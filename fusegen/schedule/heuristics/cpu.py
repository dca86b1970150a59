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
_LANES_ACROSS = (_FEWEST_LANES, 2 * _FEWEST_LANES)  # where an operand lies across
_ROWS = 128  # that a task of a pointwise kernel takes chunk by chunk where an operand lies across, so that its cache lines are used
_TILE = 16  # chunks of columns that a task sums: accumulators of several sums fit the first-level cache
_MOST_KEPT = 128 << 10  # bytes of a row's computed values that are kept for later phases: threads may have a stack of 256 KiB
_PARTS = 32  # of the rows, when columns are summed: tasks for the cores of a large machine


def pointwise_plans(axes: Axes, offsets: Iterable[Index]) -> tuple[PointwisePlan, ...]:
    """The plans that a pointwise kernel can have; what is expected to be fastest comes first.

    Args:
        axes: merged; chunks run along the last one.
        offsets: of everything that is read or written.
    """
    if any(_lies_across(offset, axes) for offset in offsets):
        return tuple(PointwisePlan(threads=1, lanes=lanes, unroll=1, tail=True, rows=_ROWS) for lanes in _LANES_ACROSS)
    return tuple(PointwisePlan(threads=1, lanes=lanes, unroll=_SPAN * LANES // lanes, tail=True) for lanes in _all_lanes(axes))


def _lies_across(offset: Index, axes: Axes) -> bool:
    """Whether neighbours in memory differ in another axis than the last, as in a transposed operand."""
    if pattern_of(offset, axes.symbols[-1]) is not Pattern.GATHER:
        return False
    expanded = sympy.expand(offset)
    return any(expanded.coeff(axis) == 1 for axis in axes.symbols[:-1])


def row_plans(axes: Axes, reductions: int, column_sums: float, computed: int, segment: int) -> tuple[RowPlan, ...]:
    """The plans that a row kernel can have; what is expected to be fastest comes first.

    Args:
        axes: the column axes, merged.
        reductions: along the row.
        column_sums: over rows.
        computed: bytes of each element's values that later phases could use again.
        segment: columns of a segment, the last axis's extent, each of which is a chunk; 0 where nothing goes by segments.
    """
    every, parts = [lanes for lanes in _all_lanes(axes) if lanes >= segment], _PARTS if column_sums else 0
    if column_sums and not reductions:
        return tuple(_plan(lanes, _TILE * LANES // lanes, Persistence.REGISTERS, parts, tiled=True) for lanes in every)
    columns = literal(axes.extents[0]) if len(axes.symbols) == 1 else None
    looped = [_plan(lanes, 0, Persistence.LOOPED, parts) for lanes in every]
    if not computed or columns is None or columns * computed > _MOST_KEPT:
        return tuple(looped)
    return (*(_plan(lanes, max(1, -(-columns // lanes)), Persistence.REGISTERS, parts) for lanes in every), *looped)


def _plan(lanes: int, chunks: int, persistence: Persistence, parts: int, *, tiled: bool = False) -> RowPlan:
    return RowPlan(threads=1, rows=1, lanes=lanes, chunks=chunks, persistence=persistence, exact=False, resident=parts, tiled=tiled)


def _all_lanes(axes: Axes) -> tuple[int, ...]:
    """Few lanes where the last axis is known to be short, since all of them take part in what ends a row; else the measured number,
    then its neighbours."""
    extent = literal(axes.extents[-1])
    lanes = LANES
    while extent is not None and lanes > _FEWEST_LANES and lanes // 2 >= extent:
        lanes //= 2
    return (lanes, lanes // 2, 2 * lanes) if lanes == LANES else (lanes,)
