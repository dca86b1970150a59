"""Plans of pointwise kernels whose operands lie across their results."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.ir.symbolic import Dim, literal
from fusegen.schedule.plan import TilePlan
from fusegen.target import Backend, Target

FEWEST = 32
"""Points along both axes from which on tiles pay: there is no smaller tile."""
_TILES = ((64, 64, 128), (128, 64, 256), (128, 64, 128), (64, 64, 256), (32, 64, 128), (32, 32, 128))
"""Rows and columns of a tile, and threads of its block. On an H200 a transposed copy of 16384 x 4096 takes 74 to 79 µs with each of
them, and 67 where nothing is transposed. Of 300 x 500 the first takes 6.8 µs and the last, which has more blocks, 5.3."""
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
    found = [TilePlan(threads, lanes, *sides) for *sides, threads in _TILES if _fits(sides, rows, columns)]
    fitting = (plan for plan in found if plan.unroll and _room(plan, itemsizes) * _BLOCKS <= target.shared_bytes)
    return tuple(sorted(fitting, key=lambda plan: plan.rows * plan.columns * sum(itemsizes) < _LEAST_BYTES * plan.threads))


def is_long(extent: Dim) -> bool:
    """Whether there may be so many points along an axis that tiles pay."""
    known = literal(extent)
    return known is None or known >= FEWEST


def _fits(sides: Sequence[int], rows: Dim, columns: Dim) -> bool:
    """Whether no axis is known to fill less than half a tile, or just that."""
    return all(known is None or known > side // 2 for side, known in zip(sides, (literal(rows), literal(columns)), strict=True))


def _room(plan: TilePlan, itemsizes: Sequence[int]) -> int:
    return sum(map(plan.tile_bytes, itemsizes))
