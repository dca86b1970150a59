"""Expected times of pointwise and row kernels with a plan, in µs.

The model is a sum: a launch starts, moves its bytes, and shows some of what its threads wait for. That is once what a block does
one after the other, and for every further wave of blocks, which the ones before it hide in part, a smaller share of it. Prices were
fitted to measurements by non-negative least squares; `docs/costs/lanes-h200.json` holds them, and `tests/unit/test_lane_cost.py`
says how good the choice is that follows. Rows that are staged have a model of their own (`fusegen/families/rows/cost.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.families.pointwise.plan import PointwisePlan
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.families.rows.tiles import COLUMNS_H200, ColumnPrices

_WIDEST = 16  # bytes of an access
_OVERLAP, _DRAINED_OVERLAP = 2.28, 3.24
"""The degree of the norm by which the longer of two times hides the other: higher where registers take a row at once, and
shared memory is free for the next ones."""


@dataclass(frozen=True)
class StagedPrices:
    """Prices of what a kernel of staged rows does, in µs.

    Attributes:
        start: of a launch.
        megabyte: moved to or from memory, by the blocks that share a row.
        shifted: of what is moved, more where lanes start at aligned places.
        thin: of what is moved, more where a group of lanes is narrower than an access can be.
        uneven: of what is moved, more for as much as blocks could move beside it in the last round.
        fill: of a group of lanes of the first row.
        drained_megabyte: of a multiprocessor's part of the first rows, where registers take them at once.
        reduction: along the row, in each round.
        exchange: more for it, by the blocks that share a row.
        late: of a group of lanes of what all rows share, in each round, where it is not kept.
        late_window: more for it where lanes start at aligned places.
        kept_window: of such a group that is kept, once.
        waiting: megabyte of a multiprocessor's part of a row that stays in shared memory while it is worked on.
    """

    start: float
    megabyte: Mapping[int, float]
    shifted: float
    thin: float
    uneven: float
    fill: float
    drained_megabyte: float
    reduction: float
    exchange: Mapping[int, float]
    late: float
    late_window: float
    kept_window: float
    waiting: float


STAGED_H200 = StagedPrices(
    start=4.04,
    megabyte={1: 0.250, 2: 0.248, 4: 0.261, 8: 0.242, 16: 0.248},
    shifted=0.211,
    thin=0.121,
    uneven=0.294,
    fill=0.0632,
    drained_megabyte=4.83,
    reduction=0.597,
    exchange={1: 0.0, 2: 0.206, 4: 0.221, 8: 0.471, 16: 0.719},
    late=0.0436,
    late_window=0.508,
    kept_window=0.517,
    waiting=10.4,
)


def staged_time(prices: StagedPrices, plan: RowPlan, work: RowWork, processors: int) -> float:
    """Time of a launch with a plan.

    Args:
        processors: multiprocessors of the machine.
    """
    parts = max(1, min(work.rows, plan.resident))
    rounds, busy = max(1, math.ceil(work.rows / parts)), min(processors, parts * plan.cluster / plan.blocks_per_sm)
    own = work.moved / _MILLION / rounds / busy  # megabytes of a multiprocessor in a round
    a_round = _round(prices, plan, work, own)
    first = a_round + prices.fill * plan.chunks + prices.drained_megabyte * own * plan.drains
    if plan.keeps_shared and plan.shifted:
        first += prices.kept_window * work.shared * plan.chunks
    moving = work.moved / _MILLION * prices.megabyte[plan.cluster] * (1 + prices.shifted * plan.shifted)
    moving *= 1 + prices.thin * (plan.lanes * work.itemsize < _WIDEST)
    moving *= 1 + prices.uneven * (rounds * parts / max(1, work.rows) - 1)
    overlap, waiting = _DRAINED_OVERLAP if plan.drains else _OVERLAP, (rounds - 1) * a_round
    return prices.start + first + math.pow(moving**overlap + waiting**overlap, 1 / overlap)


def _round(prices: StagedPrices, plan: RowPlan, work: RowWork, own: float) -> float:
    """Time that blocks wait while they work on a row each."""
    waiting = work.reductions * (prices.reduction + prices.exchange[plan.cluster])
    if not plan.keeps_shared:
        waiting += work.shared * plan.chunks * (prices.late + prices.late_window * plan.shifted)
    return waiting if plan.drains else waiting + prices.waiting * own / plan.blocks_per_sm


# The work of a row kernel, whichever plan it has.


@dataclass(frozen=True)
class RowWork:
    """The work of a row kernel.

    Attributes:
        rows, columns: that it goes through.
        moved: bytes to and from memory.
        itemsize: bytes of an element of the row.
        held: bytes of an element of all that is read of the row.
        operands: fragments along the row that it reads or writes.
        shared: of these, the ones that are the same for all rows.
        reductions: along the row.
    """

    rows: int
    columns: int
    moved: int
    itemsize: int
    held: int
    operands: int
    shared: int
    reductions: int


_REGISTERS = 65536  # of a multiprocessor
_MOST_THREADS = 2048  # of a multiprocessor
_MOST_BLOCKS = 32
_OWN_REGISTERS = 48  # of a thread, beside half of those that its part of a row would fill
_BESIDE_A_ROW = 30  # registers of a thread, at least
_LARGE_BLOCK = 512  # threads
_WARP = 32
_THOUSAND = 1024
_MILLION = 1e6


@dataclass(frozen=True)
class RowPrices:
    """Prices of what a row kernel does whose rows are held in registers or read again, in µs; an access is that of one group of
    lanes by a thread, a window one of what all rows share where lanes start at aligned places.

    Attributes:
        start: of a launch.
        megabyte: moved to or from memory.
        cached_megabyte: of a row that is read again.
        own_megabyte: of a multiprocessor's first blocks.
        million: accesses of all threads.
        million_shifted: more for those of one fragment, where lanes start at aligned places.
        million_spilled: registers that all threads miss.
        million_shuffles: of warps.
        thousand: accesses of the threads of a multiprocessor's first blocks.
        access: of a thread, one after the other.
        shifted: more where lanes start at aligned places.
        window: a thread's.
        kept_window: more for one that is asked for together with the row.
        barrier: of a reduction that several warps share.
        exchange: of a reduction that several blocks share.
        late: a group of lanes of what all rows share, where it is asked for behind the reductions.
        wave_barrier: of a reduction in a further wave, for each time that its warps are twice as many.
        wave_exchange: of a reduction in a further wave that several blocks share.
        wave_window: of a window in a further wave.
        wave_alone: of a further wave of blocks that each have a multiprocessor for themselves.
        cache: bytes that the second-level cache holds beside what is written.
    """

    start: float
    megabyte: float
    cached_megabyte: float
    own_megabyte: float
    million: float
    million_shifted: float
    million_spilled: float
    million_shuffles: float
    thousand: float
    access: float
    shifted: float
    window: float
    kept_window: float
    barrier: float
    exchange: float
    late: float
    wave_barrier: float
    wave_exchange: float
    wave_window: float
    wave_alone: float
    cache: int


@dataclass(frozen=True)
class PointPrices:
    """Prices of what a thread of a pointwise kernel does, in µs.

    Attributes:
        start, megabyte, access, wave_access: as of a `RowPrices`.
        wrapped_access: more for an access that may go on in the next row.
    """

    start: float
    megabyte: float
    access: float
    wrapped_access: float
    wave_access: float


@dataclass(frozen=True)
class LaneCosts:
    """Prices of a machine."""

    rows: RowPrices
    staged: StagedPrices
    points: PointPrices
    columns: ColumnPrices


H200 = LaneCosts(
    rows=RowPrices(
        start=4.21,
        megabyte=0.208,
        cached_megabyte=0.120,
        own_megabyte=10.1,
        million=0.134,
        million_shifted=1.14,
        million_spilled=0.368,
        million_shuffles=6.22,
        thousand=0.0160,
        access=0.0111,
        shifted=0.0657,
        window=0.131,
        kept_window=0.279,
        barrier=0.186,
        exchange=0.353,
        late=0.124,
        wave_barrier=0.0147,
        wave_exchange=0.933,
        wave_window=0.235,
        wave_alone=0.624,
        cache=40_000_000,
    ),
    staged=STAGED_H200,
    points=PointPrices(start=4.30, megabyte=0.251, access=0.0273, wrapped_access=0.124, wave_access=0.0362),
    columns=COLUMNS_H200,
)

LANE_COSTS: Mapping[str, LaneCosts] = {"sm_90a": H200}
"""By target; of other targets nothing is known."""


@dataclass(frozen=True)
class PointWork:
    """The work of a pointwise kernel.

    Attributes:
        points: that it goes through.
        moved: bytes to and from memory.
        operands: that it reads or writes.
    """

    points: int
    moved: int
    operands: int


def row_time(costs: LaneCosts, plan: RowPlan, work: RowWork, processors: int) -> float:
    """Time of a launch with a plan.

    Args:
        processors: multiprocessors of the machine.
    """
    if plan.persistence is Persistence.STAGED:
        return staged_time(costs.staged, plan, work, processors)
    prices, looped = costs.rows, plan.persistence is Persistence.LOOPED
    groups = math.ceil(work.columns / plan.span) if looped else plan.chunks
    accesses = groups * work.operands * (work.reductions + 1 if looped else 1)
    blocks, resident = math.ceil(work.rows / plan.rows) * plan.cluster, _resident(plan, work)
    waves = max(1.0, blocks / processors / resident)
    windows = groups * work.shared * plan.shifted

    once = accesses * (prices.access + prices.shifted * plan.shifted)
    once += windows * (prices.window + prices.kept_window * plan.keeps_shared)
    once += work.reductions * (prices.barrier * (plan.warps > 1) + prices.exchange * (plan.cluster > 1))
    once += prices.late * groups * work.shared * (not plan.keeps_shared)
    once += prices.thousand * accesses * plan.block * min(resident, math.ceil(blocks / processors)) / _THOUSAND
    moved = work.moved + _read_again(prices, plan, work, processors)
    once += prices.own_megabyte * moved / _MILLION / waves / min(processors, max(1, blocks))
    wave = work.reductions * (math.log2(plan.warps) * prices.wave_barrier + prices.wave_exchange * (plan.cluster > 1))
    wave += windows * prices.wave_window + prices.wave_alone * (resident == 1)
    total = moved * prices.megabyte + work.rows * _of_a_row(prices, plan, work, accesses, groups)
    return prices.start + total / _MILLION + once + (waves - 1) * wave


def _of_a_row(prices: RowPrices, plan: RowPlan, work: RowWork, accesses: int, groups: int) -> float:
    """The work of a row's threads, a millionth of a µs each: accesses, what lanes at aligned places take beside
    these, shuffles of warps, and what registers have no room for."""
    price = accesses * prices.million + groups * plan.shifted * prices.million_shifted
    price += work.reductions * math.log2(min(_WARP, plan.threads)) / _WARP * prices.million_shuffles
    if plan.persistence is Persistence.LOOPED:
        return plan.threads * price + work.reductions * work.columns * work.itemsize * prices.cached_megabyte
    needed = plan.chunks * plan.lanes * work.held / 4 + _BESIDE_A_ROW
    return plan.threads * (price + max(0.0, needed - _REGISTERS // (plan.block * plan.blocks_per_sm)) * prices.million_spilled)


def _read_again(prices: RowPrices, plan: RowPlan, work: RowWork, processors: int) -> int:
    """Bytes of rows that are looped over, and of which the second-level cache does not hold all that are under way."""
    under_way = min(work.rows, processors * _resident(plan, work) // plan.cluster) * work.columns * work.itemsize
    if plan.persistence is not Persistence.LOOPED or under_way <= prices.cache:
        return 0
    return work.reductions * work.rows * work.columns * work.itemsize


def _resident(plan: RowPlan, work: RowWork) -> int:
    """Blocks that a multiprocessor has room for; of large ones as many as registers must leave room for."""
    elements, shared = plan.lanes * (plan.chunks or 1), plan.keeps_shared * work.shared * work.itemsize
    registers = min(255, _OWN_REGISTERS + elements * (work.held / 8 + shared / 4))
    room = plan.blocks_per_sm if plan.block > _LARGE_BLOCK else max(_REGISTERS // (registers * plan.block), plan.blocks_per_sm)
    return max(1, int(min(room, _MOST_THREADS // plan.block, _MOST_BLOCKS)))


def point_time(prices: PointPrices, plan: PointwisePlan, work: PointWork, processors: int) -> float:
    """Time of a launch with a plan.

    Args:
        processors: multiprocessors of the machine.
    """
    accesses = plan.unroll * work.operands
    threads = math.ceil(work.points / (plan.lanes * plan.unroll))
    waves = threads / (processors * _MOST_THREADS)
    once = accesses * (prices.access + prices.wrapped_access * plan.wraps)
    return prices.start + work.moved / _MILLION * prices.megabyte + once + max(0.0, waves - 1) * accesses * prices.wave_access
