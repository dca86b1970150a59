"""Plans of kernels that sum columns, combine partial sums, or transpose tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusegen.families.pointwise.cpu import CHUNK
from fusegen.families.rows.plan import ColumnPlan, Persistence, RowPlan
from fusegen.schedule.kernel import padded
from fusegen.target import Target

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
    if not target.warp:
        return ColumnPlan(CHUNK, 1)
    return ColumnPlan(_COLUMNS, _ROWS if tiled or sums > _MOST_SUMS else _MANY_ROWS)


# Plans of kernels that sum columns over rows, tile by tile.
#
# A tile is as wide as a warp's groups of lanes, or narrower where rows are; a block's other threads lie along its rows, more of
# them where there are more rows. Of few rows a thread sums its columns alone, and blocks are wide. Blocks of a cluster share
# the rows of a tile and finish its sums: on an H200 16384 rows of 1408 take 22 µs so, and 23 where each block leaves a row of
# partial sums that a second kernel adds up; 300 rows 6 and 9. Only of very many rows more blocks are worth that kernel.
#
# Where rows do not start at aligned places, threads along the rows of a block can be as many as it takes until one does as the
# first did. Each of them reads whole groups of lanes of rows that lie alike then, wherever among its columns these groups
# start.


_KEPT = Persistence.REGISTERS
_WARP = 32
_BLOCK = 256
_LARGE_BLOCK = 1024
_WIDE = ((128, 2), (256, 1))  # threads along the columns of a tile, and along its rows
_UNDER_WAY = 128  # bytes that a thread asks for before it adds up the first
_SHIFTED_THREADS = (32, 64, 128)  # along the columns, where groups of lanes start at aligned places
_LARGEST_SHIFTED = 512  # threads of a block of these, which have the registers of wide groups
_REGISTER = 4  # bytes
_SINGLE_UNDER_WAY = 32  # the same of single elements, each of which takes a register: with more, ptxas spills
_MOST_UNROLLED = 16
_LARGE_BLOCK_REGISTERS = 36  # of a thread of a large block, for what it loads and twice what it adds up
_CLUSTERS = (1, 2, 4, 8, 16)  # blocks that share the rows of a tile
_BLOCKS_PER_SM = 2  # that share them where a second kernel combines the parts
_PARTS = 32  # of the rows of a tile where nobody knows how many tiles there are


def column_tile_plans(columns: int | None, lanes: int, read: Sequence[int], sums: float, target: Target) -> tuple[RowPlan, ...]:
    """The plans of a kernel that sums columns and reduces nothing along rows; the first one is for no sizes in particular.

    Args:
        columns: of a row, if known.
        lanes: that one access moves.
        read: bytes of an element of each fragment that is read of the row itself.
        sums: 32-bit registers that each element of a row takes for sums of its column.
    """
    unroll = _unroll(lanes, read)
    held = sum(unroll * max(1, lanes * itemsize // 4) for itemsize in read) + 2 * sums * lanes
    shapes = _shapes(columns, lanes, has_large=held <= _LARGE_BLOCK_REGISTERS)
    plans = (RowPlan(threads, rows, lanes, 1, _KEPT, False, 1, tiled=True, unroll=unroll) for threads, rows in shapes)
    return tuple(dict.fromkeys(plan for tile in plans for plan in _shared(tile, columns, target)))


def shifted_tile_plans(
    columns: int | None, lanes: int, read: Sequence[int], sums: float, period: int, target: Target
) -> tuple[RowPlan, ...]:
    """Further plans, whose groups of lanes start at aligned places, where rows do not.

    Args:
        columns, lanes, read, sums: as above.
        period: rows after which groups of lanes start where they did; a power of two.
    """
    shapes = [(threads, max(period, _BLOCK // threads)) for threads in _SHIFTED_THREADS]
    shapes = [(threads, rows) for threads, rows in shapes if threads * rows <= _LARGEST_SHIFTED]
    unroll = _unroll(lanes, read)
    plans = (RowPlan(t, r, lanes, 1, _KEPT, False, 1, tiled=True, shifted=True, unroll=unroll) for t, r in shapes)
    room = target.shared_bytes // 2  # another block may have the other half
    fitting = (tile for tile in plans if padded(tile.rows * tile.span) * sums * _REGISTER <= room)
    return tuple(plan for tile in fitting for plan in _shared(tile, columns, target))


def _unroll(lanes: int, read: Sequence[int]) -> int:
    """Rows that a thread asks for at once."""
    under_way = _SINGLE_UNDER_WAY if lanes == 1 else _UNDER_WAY
    return max(1, min(_MOST_UNROLLED, under_way // (lanes * max(1, sum(read)))))


def _shared(tile: RowPlan, columns: int | None, target: Target) -> Iterator[RowPlan]:
    """The plan of a tile, with each number of blocks that may share its rows."""
    exact = columns is not None and columns % tile.span == 0 and not tile.shifted
    for parts, cluster in _sharing(None if columns is None else -(-columns // tile.span), target):
        if tile.rows > 1 or cluster == 1:
            yield replace(tile, exact=exact, resident=parts, cluster=cluster)


def _shapes(columns: int | None, lanes: int, *, has_large: bool) -> tuple[tuple[int, int], ...]:
    """Threads along the columns of a tile and along its rows.

    Args:
        has_large: whether the largest block's threads have the registers that it takes.
    """
    groups = _WARP if columns is None else -(-columns // lanes)
    threads = min(_WARP, 1 << (groups - 1).bit_length())
    blocks = (_BLOCK, _LARGE_BLOCK) if has_large else (_BLOCK,)
    usual = tuple((threads, block // threads) for block in blocks)
    return (*usual, *_WIDE) if groups >= _WARP else usual


def _sharing(tiles: int | None, target: Target) -> Iterator[tuple[int, int]]:
    """Blocks that share the rows of a tile, and those of them that are a cluster."""
    clusters = [cluster for cluster in _CLUSTERS if cluster <= target.cluster]
    parts = _PARTS if tiles is None else -(-target.processors * _BLOCKS_PER_SM // max(1, tiles))
    if parts > clusters[-1]:
        yield parts, 1
    for cluster in reversed(clusters):
        yield cluster, cluster


_REGISTERS = 65536  # of a multiprocessor
_SM_THREADS = 2048  # of a multiprocessor
_MOST_BLOCKS = 32
_LARGEST_BLOCK = (
    1024  # threads; such blocks that neighbour each other go through the rows side by side, and find shared sectors in a cache
)
_TILE_REGISTERS = 28  # of a thread, beside what it loads and what it adds up
_LAST_WAVE = 0.5  # of the processors that the last wave of blocks leaves idle: the others end at different times
_WIDEST = 16  # bytes of an access
_SECTOR = 32  # bytes that memory is read in
_CLUSTER_PROCESSORS = 16  # multiprocessors of which a cluster takes some
_EXCHANGED = 4096  # values
_MILLION = 1e6
_OVERLAP = 4
"""The degree of the norm by which the longer of two times hides the other."""


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


COLUMNS_H200 = ColumnPrices(
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
    """The work of a kernel that sums columns.

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
    """Time of a launch with a plan, and of that which combines its partial sums.

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
    """Time of memory and the load units, if they always have something to do."""
    is_misaligned = plan.shifted or plan.lanes * work.itemsize < _WIDEST
    shares_sectors = is_misaligned and (plan.block < _LARGEST_BLOCK or plan.resident > 1)
    wasted = 0.0 if not shares_sectors else prices.misaligned * _SECTOR / (plan.span * work.itemsize)
    return work.moved * prices.megabyte * (1 + wasted) / _MILLION


def _room(plan: RowPlan, work: ColumnWork, processors: int) -> int:
    """Blocks that run at the same time; those of a cluster on neighbouring multiprocessors."""
    loaded = work.operands * max(1.0, plan.lanes * work.itemsize / 4) + work.row_operands
    registers = min(_TILE_REGISTERS + plan.unroll * loaded + 2 * work.sums * plan.lanes, _REGISTERS / plan.block, 255)
    resident = max(1, int(min(_SM_THREADS // plan.block, _REGISTERS / (registers * plan.block), _MOST_BLOCKS)))
    if plan.cluster == 1:
        return processors * resident
    clusters = max(1, _CLUSTER_PROCESSORS * resident // plan.cluster)
    return max(1, processors // _CLUSTER_PROCESSORS) * clusters * plan.cluster
