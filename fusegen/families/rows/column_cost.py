"""What sums of columns are expected to take with a plan of tiles, in µs.

The model: a launch starts, and takes as long as its bytes or as its threads' loads one after the other, whichever is longer; the
last wave of blocks may leave processors without work. Then the rows of a block, the blocks of a cluster, or a second kernel add up
what is left. Prices were fitted to measurements by least squares; `docs/costs/columns-h200.json` holds some, and
`tests/unit/test_column_cost.py` says how good the choice is that follows. Plans whose groups of lanes start at aligned places are
still to be measured: they are expected to take what others of wide groups do, and for the sectors at the ends of a tile what those
take whose tiles share them with their neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusegen.families.rows.plan import RowPlan

_REGISTERS = 65536  # of a multiprocessor
_MOST_THREADS = 2048  # of a multiprocessor
_MOST_BLOCKS = 32
_LARGEST_BLOCK = (
    1024  # threads; such blocks that neighbour each other go through the rows side by side, and find shared sectors in a cache
)
_OWN_REGISTERS = 28  # of a thread, beside what it loads and what it adds up
_LAST_WAVE = 0.5  # of the processors that the last wave of blocks leaves idle: the others end at different times
_WIDEST = 16  # bytes of an access
_SECTOR = 32  # bytes that memory is read in
_CLUSTER_PROCESSORS = 16  # multiprocessors of which a cluster takes some
_EXCHANGED = 4096  # values
_MILLION = 1e6
_OVERLAP = 4
"""How sharply the longer of two times hides the other: their norm of this degree."""


@dataclass(frozen=True)
class ColumnPrices:
    """Prices of what a kernel that sums tiles of columns does, in µs.

    Attributes:
        start: of a launch.
        megabyte: moved to or from memory.
        misaligned: more for bytes of sectors that a tile shares with its neighbour, over those that it needs.
        batch: of loads that a thread waits for at once.
        access: of a thread in a batch.
        block: for a multiprocessor.
        row: of threads along the rows of a block, for each time that they are twice as many.
        exchanged: of 4096 values that the threads of a block exchange, in each wave of blocks.
        cluster: whose blocks exchange sums.
        doubled: more for each time that its blocks are twice as many.
        combine: of a second kernel.
        partial: megabyte of partial sums.
        cache: bytes that are read up to which what is read again comes from a cache.
    """

    start: float
    megabyte: float
    misaligned: float
    batch: float
    access: float
    block: float
    row: float
    exchanged: float
    cluster: float
    doubled: float
    combine: float
    partial: float
    cache: int


H200 = ColumnPrices(
    start=3.51,
    megabyte=0.279,
    misaligned=0.790,
    batch=0.517,
    access=0.0397,
    block=0.344,
    row=0.109,
    exchanged=1.51,
    cluster=0.972,
    doubled=0.0302,
    combine=2.53,
    partial=0.591,
    cache=28_000_000,
)


@dataclass(frozen=True)
class ColumnWork:
    """What a kernel that sums columns has to do.

    Attributes:
        rows, columns: that it goes through.
        moved: bytes to and from memory.
        itemsize: bytes of an element of the row.
        operands: fragments of the row that it reads.
        row_operands: elements a row that it reads.
        sums: components that it adds up.
    """

    rows: int
    columns: int
    moved: int
    itemsize: int
    operands: int
    row_operands: int
    sums: int


def column_time(prices: ColumnPrices, plan: RowPlan, work: ColumnWork, processors: int) -> float:
    """Of a launch with a plan, and of that which combines its partial sums.

    Args:
        processors: multiprocessors of the machine.
    """
    if not work.rows or not work.columns:
        return prices.start
    tiles = math.ceil(work.columns / plan.span)
    blocks = tiles * plan.resident
    waves = blocks / _room(plan, work, processors)
    batches = math.ceil(work.rows / (plan.resident * plan.rows * plan.unroll))
    unrolled = min(plan.unroll, math.ceil(work.rows / (plan.resident * plan.rows)))
    waiting = batches * (prices.batch + prices.access * unrolled * work.operands) * max(1, math.ceil(waves))
    idle = math.ceil(waves) / waves - 1 if waves > 1 else 0.0
    moving = _moving(prices, plan, work) * (1 + _LAST_WAVE * idle)
    total = prices.start + math.pow(moving**_OVERLAP + waiting**_OVERLAP, 1 / _OVERLAP)
    total += blocks / processors * prices.block + math.log2(plan.rows) * prices.row
    if plan.rows > 1:
        total += prices.exchanged * math.ceil(waves) * plan.rows * plan.span * work.sums / _EXCHANGED
    if not plan.finishes:
        return total + prices.combine + plan.resident * work.columns * work.sums * 4 / _MILLION * prices.partial
    return total + (plan.cluster > 1) * (prices.cluster + prices.doubled * math.log2(plan.cluster))


def _moving(prices: ColumnPrices, plan: RowPlan, work: ColumnWork) -> float:
    """What memory and the load units take, if they always have something to do."""
    is_misaligned = plan.shifted or plan.lanes * work.itemsize < _WIDEST
    shares_sectors = is_misaligned and (plan.block < _LARGEST_BLOCK or plan.resident > 1)
    wasted = 0.0 if not shares_sectors else prices.misaligned * _SECTOR / (plan.span * work.itemsize)
    return work.moved * prices.megabyte * (1 + wasted) / _MILLION


def _room(plan: RowPlan, work: ColumnWork, processors: int) -> int:
    """Blocks that run at the same time; those of a cluster on neighbouring multiprocessors."""
    loaded = work.operands * max(1.0, plan.lanes * work.itemsize / 4) + work.row_operands
    registers = min(_OWN_REGISTERS + plan.unroll * loaded + 2 * work.sums * plan.lanes, _REGISTERS / plan.block, 255)
    resident = max(1, int(min(_MOST_THREADS // plan.block, _REGISTERS / (registers * plan.block), _MOST_BLOCKS)))
    if plan.cluster == 1:
        return processors * resident
    clusters = max(1, _CLUSTER_PROCESSORS * resident // plan.cluster)
    return max(1, processors // _CLUSTER_PROCESSORS) * clusters * plan.cluster
