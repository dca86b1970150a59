"""What kernels of points and of rows are expected to take with a plan, in µs.

The model is a sum: a launch starts, moves its bytes, and shows some of what its threads wait for. That is once what a block does
one after the other, and for every further wave of blocks, which the ones before it hide in part, a smaller share of it. Prices were
fitted to measurements by non-negative least squares; `docs/costs/lanes-h200.json` holds them, and `tests/unit/test_lane_cost.py`
says how good the choice is that follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.schedule import column_cost
from fusegen.schedule.column_cost import ColumnPrices
from fusegen.schedule.plan import Persistence, PointwisePlan, RowPlan

_REGISTERS = 65536  # of a multiprocessor
_MOST_THREADS = 2048  # of a multiprocessor
_MOST_BLOCKS = 32
_OWN_REGISTERS = 48  # of a thread, beside half of those that its part of a row would fill
_MILLION = 1e6


@dataclass(frozen=True)
class RowPrices:
    """Prices of what a row kernel does, in µs; an access is that of one group of lanes by a thread.

    Attributes:
        start: of a launch.
        megabyte: moved to or from memory.
        million: accesses of all threads.
        block: for a multiprocessor.
        access: of a thread, one after the other.
        doubled: more for each time that its lanes are twice as many.
        shifted: more where lanes start at aligned places.
        staged: of a plan that stages rows.
        barrier: of a reduction that several warps share.
        exchange: of a reduction that several blocks share.
        wave_barrier: of a reduction in a further wave, for each time that its warps are twice as many.
        wave_shifted: of an access in a further wave, where lanes start at aligned places.
        cache: bytes that the second-level cache holds beside what is written.
    """

    start: float
    megabyte: float
    million: float
    block: float
    access: float
    doubled: float
    shifted: float
    staged: float
    barrier: float
    exchange: float
    wave_barrier: float
    wave_shifted: float
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
    points: PointPrices
    columns: ColumnPrices


H200 = LaneCosts(
    rows=RowPrices(
        start=4.09,
        megabyte=0.235,
        million=0.142,
        block=0.0075,
        access=0.0773,
        doubled=0.011,
        shifted=0.117,
        staged=0.583,
        barrier=0.194,
        exchange=0.667,
        wave_barrier=0.0637,
        wave_shifted=0.157,
        cache=40_000_000,
    ),
    points=PointPrices(start=4.30, megabyte=0.251, access=0.0273, wrapped_access=0.124, wave_access=0.0362),
    columns=column_cost.H200,
)

LANE_COSTS: Mapping[str, LaneCosts] = {"sm_90a": H200}
"""By target; of other targets nothing is known."""


@dataclass(frozen=True)
class RowWork:
    """What a row kernel has to do.

    Attributes:
        rows, columns: that it goes through.
        moved: bytes to and from memory.
        itemsize: bytes of an element of the row.
        operands: fragments along the row that it reads or writes.
        reductions: along the row.
    """

    rows: int
    columns: int
    moved: int
    itemsize: int
    operands: int
    reductions: int


@dataclass(frozen=True)
class PointWork:
    """What a pointwise kernel has to do.

    Attributes:
        points: that it goes through.
        moved: bytes to and from memory.
        operands: that it reads or writes.
    """

    points: int
    moved: int
    operands: int


def row_time(prices: RowPrices, plan: RowPlan, work: RowWork, processors: int) -> float:
    """Of a launch with a plan.

    Args:
        processors: multiprocessors of the machine.
    """
    looped = plan.persistence is Persistence.LOOPED
    groups = math.ceil(work.columns / plan.span) if looped else plan.chunks
    accesses = groups * work.operands * (work.reductions + 1 if looped else 1)
    blocks = math.ceil(work.rows / plan.rows) * plan.cluster / processors
    waves = blocks / _resident(plan, work.itemsize)

    once = accesses * (prices.access + prices.doubled * math.log2(plan.lanes) + prices.shifted * plan.shifted)
    once += prices.staged * (plan.persistence is Persistence.STAGED)
    once += work.reductions * (prices.barrier * (plan.warps > 1) + prices.exchange * (plan.cluster > 1))
    wave = work.reductions * math.log2(plan.warps) * prices.wave_barrier + accesses * prices.wave_shifted * plan.shifted
    wave += _waited(plan, work) * processors * prices.megabyte / _MILLION
    moved = work.moved + _read_again(prices, plan, work, processors)
    total = moved * prices.megabyte + work.rows * plan.threads * accesses * prices.million
    return prices.start + total / _MILLION + blocks * prices.block + once + max(0.0, waves - 1) * wave


def _waited(plan: RowPlan, work: RowWork) -> float:
    """Bytes of a staged row for which there is no room while the one before it is worked on: nothing hides how long they take."""
    if plan.persistence is not Persistence.STAGED:
        return 0.0
    return max(0, 2 * plan.chunks - plan.slots) / plan.chunks * work.columns * work.itemsize


def _read_again(prices: RowPrices, plan: RowPlan, work: RowWork, processors: int) -> int:
    """Bytes of rows that are looped over, and of which the second-level cache does not hold all that are under way."""
    under_way = min(work.rows, processors * _resident(plan, work.itemsize) // plan.cluster) * work.columns * work.itemsize
    if plan.persistence is not Persistence.LOOPED or under_way <= prices.cache:
        return 0
    return work.reductions * work.rows * work.columns * work.itemsize


def _resident(plan: RowPlan, itemsize: int) -> int:
    """Blocks that a multiprocessor has room for."""
    if plan.persistence is Persistence.STAGED:
        return 1
    held = plan.lanes * (plan.chunks or 1)
    registers = min(255, _OWN_REGISTERS + held * itemsize / 8)
    room = max(_REGISTERS // (registers * plan.block), plan.blocks_per_sm)
    return int(min(room, _MOST_THREADS // plan.block, _MOST_BLOCKS))


def point_time(prices: PointPrices, plan: PointwisePlan, work: PointWork, processors: int) -> float:
    """Of a launch with a plan.

    Args:
        processors: multiprocessors of the machine.
    """
    accesses = plan.unroll * work.operands
    threads = math.ceil(work.points / (plan.lanes * plan.unroll))
    waves = threads / (processors * _MOST_THREADS)
    once = accesses * (prices.access + prices.wrapped_access * plan.wraps)
    return prices.start + work.moved / _MILLION * prices.megabyte + once + max(0.0, waves - 1) * accesses * prices.wave_access
