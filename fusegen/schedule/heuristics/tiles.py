"""Plans of pointwise kernels whose operands lie across their results."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.ir.symbolic import Dim, literal
from fusegen.schedule.plan import TilePlan
from fusegen.target import Backend, Target

FEWEST = 32
"""Points along both axes from which on tiles pay: there is no smaller tile."""
_SIDES = ((64, 64), (128, 64), (64, 32), (32, 64), (32, 32))
_THREADS = (256, 128, 512)
_BLOCKS = 8  # whose tiles a multiprocessor has room for
_LEAST_BYTES = 32  # that a thread has under way, so that a multiprocessor full of threads waits for memory alone


def tile_plans(rows: Dim, columns: Dim, lanes: int, itemsizes: Sequence[int], target: Target) -> tuple[TilePlan, ...]:
    """The plans for an iteration space; what is expected to be fastest comes first.

    Args:
        rows: points along the axis along which operands lie that lie across the results.
        columns: points along the axis along which results lie.
        lanes: neighbours of a result that a thread handles together.
        itemsizes: of the operands that lie across.
        target: the machine.
    """
    if target.backend is Backend.CPU or not all(is_long(extent) for extent in (rows, columns)):
        return ()
    found = [TilePlan(threads, lanes, *sides) for sides in _SIDES if _fits(sides, rows, columns) for threads in _THREADS]
    fitting = (plan for plan in found if plan.unroll and _room(plan, itemsizes) * _BLOCKS <= target.shared_bytes)
    return tuple(sorted(fitting, key=lambda plan: plan.rows * plan.columns * sum(itemsizes) < _LEAST_BYTES * plan.threads))


def is_long(extent: Dim) -> bool:
    """Whether there may be so many points along an axis that tiles pay."""
    known = literal(extent)
    return known is None or known >= FEWEST


def _fits(sides: tuple[int, int], rows: Dim, columns: Dim) -> bool:
    """Whether no axis is known to fill less than half a tile, or just that."""
    return all(known is None or known > side // 2 for side, known in zip(sides, (literal(rows), literal(columns)), strict=True))


def _room(plan: TilePlan, itemsizes: Sequence[int]) -> int:
    return sum(map(plan.tile_bytes, itemsizes))
