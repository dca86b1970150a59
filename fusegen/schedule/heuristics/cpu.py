"""Plans for the CPU: chunks of lanes in the first-level cache, rows that are read again in each phase, parts of rows for column
sums. They do not depend on the machine's number of cores, so that results are the same everywhere."""

from __future__ import annotations

from fusegen.ir.symbolic import Axes, literal
from fusegen.schedule.plan import Persistence, PointwisePlan, RowPlan

LANES = 64  # of a chunk: four vectors of 32-bit floats, enough to hide latencies; measured
_FEWEST_LANES = 16  # a vector of 32-bit floats
_SPAN = 64  # chunks of a task of a pointwise kernel
_TILE = 32  # chunks of columns that a task sums: accumulators of several sums fit the first-level cache
_PARTS = 32  # of the rows, when columns are summed: tasks for the cores of a large machine


def pointwise_plan(axes: Axes) -> PointwisePlan:
    """The plan of a pointwise kernel over merged axes; chunks run along the last one."""
    return PointwisePlan(threads=1, lanes=_lanes(axes), unroll=_SPAN, tail=True)


def row_plan(axes: Axes, *, reductions: int, column_sums: int) -> RowPlan:
    """The plan of a row kernel.

    Args:
        axes: the column axes, merged.
        reductions: along the row.
        column_sums: over rows.
    """
    lanes = _lanes(axes)
    if column_sums and not reductions:
        return RowPlan(1, 1, 1, lanes, _TILE, Persistence.REGISTERS, False, _PARTS, tiled=True)
    return RowPlan(1, 1, 1, lanes, 0, Persistence.LOOPED, False, _PARTS if column_sums else 0)


def _lanes(axes: Axes) -> int:
    """Few lanes where the last axis is known to be short, since all of them take part in what ends a row."""
    extent = literal(axes.extents[-1])
    lanes = LANES
    while extent is not None and lanes > _FEWEST_LANES and lanes // 2 >= extent:
        lanes //= 2
    return lanes
