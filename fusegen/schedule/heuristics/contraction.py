"""Plans of products on tensor cores."""

from __future__ import annotations

from dataclasses import replace

from fusegen.ir.symbolic import Dim, literal
from fusegen.schedule.plan import ContractionPlan
from fusegen.target import Target

_EFFICIENCY = {256: 1.0, 192: 0.95, 128: 0.85, 64: 0.6}
"""Share of the speed of the widest tile: a narrow tile reads its rows of A more often for each column."""
_LAUNCH = 0.1  # of a full tile's time: what starting and ending a tile costs whatever its size
_MANY_ROWS = 4096
_MOST_STAGES = 8
_GROUP = 8


def contraction_plan(rows: Dim, columns: int, a_major: str, b_major: str, target: Target) -> ContractionPlan:
    """The plan of a product.

    Args:
        rows, columns: of the result; rows may be unknown, and are taken as a few thousand then.
        a_major, b_major: which index of an operand is contiguous.
    """
    known = literal(rows)
    consumers = 1 if known is not None and known <= 64 else 2
    tile_n = min(_EFFICIENCY, key=lambda width: _time(known, columns, consumers, width, target.processors))
    return replace(ContractionPlan(consumers, tile_n, _stages(consumers, tile_n, target), _GROUP), a_major=a_major, b_major=b_major)


def _stages(consumers: int, tile_n: int, target: Target) -> int:
    """As many as shared memory holds."""
    one, two = (ContractionPlan(consumers, tile_n, stages, _GROUP).shared_bytes for stages in (1, 2))
    return min(_MOST_STAGES, 1 + (target.shared_bytes - one) // (two - one))


def _time(rows: int | None, columns: int, consumers: int, tile_n: int, processors: int) -> float:
    """Time of the busiest multiprocessor, in full tiles of one consumer."""
    work = consumers * (tile_n / 256 / _EFFICIENCY[tile_n] + _LAUNCH)
    tiles = -(-columns // tile_n) * -(-(rows or _MANY_ROWS) // (64 * consumers))
    return -(-tiles // processors) * work
