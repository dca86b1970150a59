"""Plans of kernels that sum columns, combine partial sums, or transpose tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusegen.families.pointwise.cpu import CHUNK
from fusegen.families.rows.plan import ColumnPlan, Persistence, RowPlan
from fusegen.schedule.shared import padded
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
