"""Plans of products on tensor cores by warpgroups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusegen.ir.symbolic import Dim, literal
from fusegen.passes.fuse.skeletons import WGMMA
from fusegen.schedule.plan import ContractionPlan
from fusegen.target import Target

_EFFICIENCY = {256: 1.0, 192: 0.95, 128: 0.85, 64: 0.6}
"""Share of the speed of the widest product: a narrow one reads its rows of A more often for each column."""
_LAUNCH = 0.1  # of a full tile's time: what starting and ending a tile costs whatever its size
MANY_ROWS = 4096
"""Taken for a number of rows that is not known."""
_MOST_STAGES = 8
_GROUP = 8
_MOST_WORDS = 128  # registers of a thread for the results of a tile, beside those that accumulate


@dataclass(frozen=True)
class ProductShape:
    """What a plan goes by.

    Attributes:
        rows: of all results; they may be unknown, and are taken as a few thousand then.
        columns: of each part's results.
        a_major, b_major: which index of an operand is contiguous.
        products: matrices that meet the first operand at once.
        head: columns that a tile must hold together.
        words: registers that the results of a pair of columns take.
    """

    rows: Dim
    columns: Sequence[int]
    a_major: str = "k"
    b_major: str = "k"
    products: int = 1
    head: int = 1
    words: int = 1


def contraction_plan(shape: ProductShape, target: Target) -> ContractionPlan:
    """The plan of products of one first operand."""
    known = literal(shape.rows)
    consumers = 1 if known is not None and known <= 64 else 2
    allowed = WGMMA.tile_widths(shape.head, shape.products)
    widths = [w for w in allowed if w // 4 * shape.words <= _MOST_WORDS] or allowed[-1:]
    tile_n = min(widths, key=lambda width: _time(shape, consumers, width, target.processors))
    plan = ContractionPlan(consumers, tile_n, 1, _GROUP, shape.a_major, shape.b_major, shape.products)
    return replace(plan, stages=_stages(plan, target))


def _stages(plan: ContractionPlan, target: Target) -> int:
    """As many as shared memory holds."""
    one, two = (replace(plan, stages=stages).shared_bytes for stages in (1, 2))
    return min(_MOST_STAGES, 1 + (target.shared_bytes - one) // (two - one))


def _time(shape: ProductShape, consumers: int, tile_n: int, processors: int) -> float:
    """Time of the busiest multiprocessor, in full tiles of one consumer."""
    width = tile_n * shape.products
    work = consumers * (width / 256 / _EFFICIENCY[width] + _LAUNCH)
    tiles = sum(-(-columns // tile_n) for columns in shape.columns) * -(-(literal(shape.rows) or MANY_ROWS) // (64 * consumers))
    return -(-tiles // processors) * work
