"""Plans of kernels that combine partial sums of columns."""

from __future__ import annotations

from fusegen.schedule.heuristics import cpu
from fusegen.schedule.plan import ColumnPlan
from fusegen.target import Backend, Target

_COLUMNS, _ROWS = 32, 8  # threads of a block along columns (a warp's width, for whole memory lines) and along partial rows


def column_plan(target: Target) -> ColumnPlan:
    """The plan for a target."""
    return ColumnPlan(cpu.LANES, 1) if target.backend is Backend.CPU else ColumnPlan(_COLUMNS, _ROWS)
