"""Plans of products on tensor cores by warps."""

from __future__ import annotations

from dataclasses import replace

from fusegen.passes.fuse.skeletons import MMA_SYNC
from fusegen.schedule.heuristics.contraction import ProductShape
from fusegen.schedule.plan import MmaPlan
from fusegen.target import Target

# Warps of a block along rows and columns, and what each of them accumulates.
_TILES = (
    (2, 2, 64, 64), (4, 1, 32, 128), (4, 1, 32, 96), (4, 1, 32, 64), (2, 2, 64, 32), (2, 2, 32, 64),
    (2, 2, 32, 32), (1, 4, 32, 32), (1, 4, 32, 64),
)  # fmt: skip
_MOST_ACCUMULATED = 64 * 64  # by a warp: half of a thread's registers
_MOST_STAGES = 4
_GROUP = 8
_SHARED_READS, _GLOBAL_READS = 8, 16  # time of reading a line from shared memory and of bringing it there, in columns of products


def mma_plan(shape: ProductShape, a_width: int, b_width: int, target: Target) -> MmaPlan:
    """The plan of products of one first operand.

    Args:
        a_width, b_width: elements of an operand that can be copied at once: a power of two up to eight.
    """
    allowed = MMA_SYNC.tile_widths(shape.head, shape.products)
    plans = [
        MmaPlan(*tile, 2, _GROUP, shape.a_major, shape.b_major, a_width, b_width, shape.products)
        for tile in _TILES
        if tile[3] in allowed and tile[2] * tile[3] * shape.products <= _MOST_ACCUMULATED
    ]
    plan = min((plan for plan in plans if plan.copies_evenly), key=lambda plan: _time(shape, plan, target.processors))
    return replace(plan, stages=_stages(plan, target))


def _stages(plan: MmaPlan, target: Target) -> int:
    """As many as the blocks of a multiprocessor have room for, at least two."""
    one = replace(plan, stages=1).shared_bytes
    return min(_MOST_STAGES, max(2, target.shared_bytes // plan.blocks_per_sm // one))


def _time(shape: ProductShape, plan: MmaPlan, processors: int) -> float:
    """Time of the busiest multiprocessor: products, and what its warps and the block read for them."""
    columns = plan.tile_n * shape.products
    reads = _SHARED_READS * (1 / plan.warp_m + 1 / (plan.warp_n * shape.products))
    reads += _GLOBAL_READS * (1 / plan.tile_m + 1 / columns)
    tiles = sum(-(-c // plan.tile_n) for c in shape.columns) * -(-shape.rows // plan.tile_m)
    return -(-tiles // processors) * plan.tile_m * columns * (1 + reads)
