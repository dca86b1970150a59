"""Plans of kernels that combine partial sums of columns."""

from __future__ import annotations

from fusegen.schedule.heuristics import cpu
from fusegen.schedule.plan import ColumnPlan
from fusegen.target import Backend, Target

_COLUMNS, _ROWS = 32, 8  # threads of a block along columns (a warp's width, for whole memory lines) and along partial rows
_MANY_ROWS = 32
"""The latter where blocks leave whole rows, which are as many however few columns there are: a block for every 32 columns hides
what loads take by its threads alone."""
_MOST_SUMS = 4  # for which so many threads exchange what they have, in the shared memory that every machine has


def column_plan(target: Target, sums: int, *, tiled: bool) -> ColumnPlan:
    """The plan for a target.

    Args:
        sums: components of all states that are combined.
        tiled: whether the partial sums are those of tiles of columns, of which fewer rows are left the more columns there are.
    """
    if target.backend is Backend.CPU:
        return ColumnPlan(cpu.LANES, 1)
    return ColumnPlan(_COLUMNS, _ROWS if tiled or sums > _MOST_SUMS else _MANY_ROWS)
