"""Plans and cost of kernels that sum columns tile by tile, or combine partial sums."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusegen.families.pointwise.cpu import CHUNK
from fusegen.families.rows.plan import ColumnPlan, Persistence, RowPlan
from fusegen.schedule.kernel import padded
from fusegen.target import Target

_COLUMNS, _ROWS = 32, 8  # threads per block along columns (a warp, for whole memory lines) and along partial rows
_MANY_ROWS = 32
"""Threads along partial rows if blocks leave whole rows: few columns then mean few blocks, which need more threads to hide load
latency."""
_MOST_SUMS = 4  # above it, the scratch of `_MANY_ROWS` may exceed the shared memory of a machine


def column_plan(target: Target, sums: int, *, tiled: bool) -> ColumnPlan:
    """Returns the plan that combines ``sums`` components of partial column sums.

    A kernel of column tiles writes few partial sums per column, so that few threads per column combine them.
    """
    if not target.warp:
        return ColumnPlan(CHUNK, 1)
    return ColumnPlan(_COLUMNS, _ROWS if tiled or sums > _MOST_SUMS else _MANY_ROWS)


# Plans of kernels that sum columns over rows, tile by tile.
#
# A tile is as wide as a warp's vectors, or narrower for narrow rows; the block's other threads are along its rows. For few rows,
# blocks are wide and a thread sums its columns alone. The blocks of a cluster share the rows of a tile and finish its sums: on an
# H200, 16384 rows of 1408 take 22 µs, and 300 rows 6 µs. If each block leaves partial sums for a second kernel, they take 23 and 9
# µs. Only very many rows justify more blocks and the second kernel.
#
# If rows are unaligned, the block has as many thread rows as it takes until the alignment repeats. Each thread then reads whole
# vectors of rows with one alignment.


_IN_REGISTERS = Persistence.REGISTERS
_WARP = 32
_BLOCK = 256
_LARGE_BLOCK = 1024
_WIDE = ((128, 2), (256, 1))  # threads along the columns of a tile, and along its rows
_IN_FLIGHT = 128  # bytes in flight per thread
_SHIFTED_THREADS = (32, 64, 128)  # threads along the columns of a shifted tile
_LARGEST_SHIFTED = 512  # most threads per block of a shifted tile, limited by registers for wide vectors
_REGISTER = 4  # bytes
_SCALARS_IN_FLIGHT = 32  # bytes in flight per thread with scalar loads, each of which takes a register: above it, ptxas spills
_MOST_UNROLLED = 16
_LARGE_BLOCK_REGISTERS = 36  # most registers per thread of a large block, for loads and twice the sums
_CLUSTERS = (1, 2, 4, 8, 16)  # blocks that share the rows of a tile
_BLOCKS_PER_SM = 2  # blocks per SM that share them if a second kernel combines the parts
_PARTS = 32  # parts of a tile's rows if the number of tiles is unknown


def column_tile_plans(columns: int | None, vec: int, read: Sequence[int], sums: float, target: Target) -> tuple[RowPlan, ...]:
    """Returns the candidates of a kernel that sums columns and reduces nothing along rows; the first suits unknown sizes.

    Args:
        columns: columns per row, if known.
        vec: vector width.
        read: bytes per element of each fragment that differs from row to row.
        sums: 32-bit registers per element for column sums.
    """
    unroll = _unroll(vec, read)
    held = sum(unroll * max(1, vec * itemsize // 4) for itemsize in read) + 2 * sums * vec
    shapes = _shapes(columns, vec, has_large=held <= _LARGE_BLOCK_REGISTERS)
    plans = (RowPlan(threads, rows, vec, 1, _IN_REGISTERS, False, 1, tiled=True, unroll=unroll) for threads, rows in shapes)
    return tuple(dict.fromkeys(plan for tile in plans for plan in _shared(tile, columns, target)))


def shifted_tile_plans(
    columns: int | None, vec: int, read: Sequence[int], sums: float, period: int, target: Target
) -> tuple[RowPlan, ...]:
    """Returns candidates whose vectors start at aligned addresses although rows do not. Alignment repeats after ``period`` rows, a
    power of two."""
    shapes = [(threads, max(period, _BLOCK // threads)) for threads in _SHIFTED_THREADS]
    shapes = [(threads, rows) for threads, rows in shapes if threads * rows <= _LARGEST_SHIFTED]
    unroll = _unroll(vec, read)
    plans = (RowPlan(t, r, vec, 1, _IN_REGISTERS, False, 1, tiled=True, unaligned=True, unroll=unroll) for t, r in shapes)
    room = target.shared_bytes // 2  # leaves the other half to a second block
    fitting = (tile for tile in plans if padded(tile.rows * tile.columns_per_step) * sums * _REGISTER <= room)
    return tuple(plan for tile in fitting for plan in _shared(tile, columns, target))


def _unroll(vec: int, read: Sequence[int]) -> int:
    in_flight = _SCALARS_IN_FLIGHT if vec == 1 else _IN_FLIGHT
    return max(1, min(_MOST_UNROLLED, in_flight // (vec * max(1, sum(read)))))


def _shared(tile: RowPlan, columns: int | None, target: Target) -> Iterator[RowPlan]:
    """Yields the plan of a tile for each number of blocks that may share its rows."""
    exact = columns is not None and columns % tile.columns_per_step == 0 and not tile.unaligned
    for parts, cluster in _sharing(None if columns is None else -(-columns // tile.columns_per_step), target):
        if tile.rows > 1 or cluster == 1:
            yield replace(tile, exact=exact, persistent_blocks=parts, cluster=cluster)


def _shapes(columns: int | None, vec: int, *, has_large: bool) -> tuple[tuple[int, int], ...]:
    """Returns the threads along the columns of a tile and along its rows. Large blocks need enough registers."""
    groups = _WARP if columns is None else -(-columns // vec)
    threads = min(_WARP, 1 << (groups - 1).bit_length())
    blocks = (_BLOCK, _LARGE_BLOCK) if has_large else (_BLOCK,)
    usual = tuple((threads, block // threads) for block in blocks)
    return (*usual, *_WIDE) if groups >= _WARP else usual


def _sharing(tiles: int | None, target: Target) -> Iterator[tuple[int, int]]:
    """Yields the number of blocks that share the rows of a tile, and the cluster size."""
    clusters = [cluster for cluster in _CLUSTERS if cluster <= target.cluster]
    parts = _PARTS if tiles is None else -(-target.sms * _BLOCKS_PER_SM // max(1, tiles))
    if parts > clusters[-1]:
        yield parts, 1
    for cluster in reversed(clusters):
        yield cluster, cluster


_REGISTERS = 65536  # per SM
_SM_THREADS = 2048  # per SM
_MOST_BLOCKS = 32
_LARGEST_BLOCK = (
    1024  # threads; neighbouring blocks this large read the rows side by side, so that sectors that they share hit a cache
)
_TILE_REGISTERS = 28  # per thread, besides loads and sums
_LAST_WAVE = 0.5  # share of the SMs that the last wave leaves idle: blocks end at different times
_WIDEST = 16  # bytes per access
_SECTOR = 32  # bytes of a memory sector
_CLUSTER_PROCESSORS = 16  # SMs of a GPC that clusters can use; a cluster never spans two GPCs
_EXCHANGED = 4096  # values
_MILLION = 1e6
_OVERLAP = 4
"""Degree of the norm that adds two overlapping times."""


@dataclass(frozen=True)
class ColumnPrices:
    """Prices of a kernel that sums column tiles, in µs.

    Attributes:
        start: per launch.
        megabyte: per MB to or from memory.
        misaligned: surcharge on the share of sector bytes that a tile does not need.
        batch: per batch of loads that a thread waits for.
        access: per access of a thread in a batch.
        block: per block and SM.
        row: per doubling of the threads along the rows of a block.
        exchanged: per 4096 values that the threads of a block exchange, in each wave.
        cluster: per cluster that exchanges sums.
        doubled: per doubling of the cluster size.
        combine: price of the second kernel.
        partial: per MB of partial sums.
        cache: bytes read up to which repeated reads hit L2.
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
        moved: bytes to and from memory.
        itemsize: bytes per element of the row.
        operands: fragments of the row that it reads.
        row_operands: elements per row that it reads.
        sums: components of column sums.
    """

    rows: int
    columns: int
    moved: int
    itemsize: int
    operands: int
    row_operands: int
    sums: int


def column_time(prices: ColumnPrices, plan: RowPlan, work: ColumnWork, sms: int) -> float:
    """Returns the time of a launch and of the one that combines its partial sums, in µs."""
    if not work.rows or not work.columns:
        return prices.start
    tiles = math.ceil(work.columns / plan.columns_per_step)
    blocks = tiles * plan.persistent_blocks
    waves = blocks / _room(plan, work, sms)
    batches = math.ceil(work.rows / (plan.persistent_blocks * plan.rows * plan.unroll))
    unrolled = min(plan.unroll, math.ceil(work.rows / (plan.persistent_blocks * plan.rows)))
    waiting = batches * (prices.batch + prices.access * unrolled * work.operands) * max(1, math.ceil(waves))
    idle = math.ceil(waves) / waves - 1 if waves > 1 else 0.0
    moving = _moving(prices, plan, work) * (1 + _LAST_WAVE * idle)
    total = prices.start + math.pow(moving**_OVERLAP + waiting**_OVERLAP, 1 / _OVERLAP)
    total += blocks / sms * prices.block + math.log2(plan.rows) * prices.row
    if plan.rows > 1:
        total += prices.exchanged * math.ceil(waves) * plan.rows * plan.columns_per_step * work.sums / _EXCHANGED
    if not plan.finishes:
        return total + prices.combine + plan.persistent_blocks * work.columns * work.sums * 4 / _MILLION * prices.partial
    return total + (plan.cluster > 1) * (prices.cluster + prices.doubled * math.log2(plan.cluster))


def _moving(prices: ColumnPrices, plan: RowPlan, work: ColumnWork) -> float:
    is_misaligned = plan.unaligned or plan.vec * work.itemsize < _WIDEST
    shares_sectors = is_misaligned and (plan.block < _LARGEST_BLOCK or plan.persistent_blocks > 1)
    wasted = 0.0 if not shares_sectors else prices.misaligned * _SECTOR / (plan.columns_per_step * work.itemsize)
    return work.moved * prices.megabyte * (1 + wasted) / _MILLION


def _room(plan: RowPlan, work: ColumnWork, sms: int) -> int:
    """Returns the blocks that run at the same time; a cluster needs neighbouring SMs."""
    loaded = work.operands * max(1.0, plan.vec * work.itemsize / 4) + work.row_operands
    registers = min(_TILE_REGISTERS + plan.unroll * loaded + 2 * work.sums * plan.vec, _REGISTERS / plan.block, 255)
    persistent_blocks = max(1, int(min(_SM_THREADS // plan.block, _REGISTERS / (registers * plan.block), _MOST_BLOCKS)))
    if plan.cluster == 1:
        return sms * persistent_blocks
    clusters = max(1, _CLUSTER_PROCESSORS * persistent_blocks // plan.cluster)
    return max(1, sms // _CLUSTER_PROCESSORS) * clusters * plan.cluster
