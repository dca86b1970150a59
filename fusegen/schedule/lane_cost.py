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

from fusegen.schedule.plan import Persistence, PointwisePlan, RowPlan

_REGISTERS = 65536  # of a multiprocessor
_MOST_THREADS = 2048  # of a multiprocessor
_MOST_BLOCKS = 32
_OWN_REGISTERS = 48  # of a thread, beside half of those that its part of a row would fill
_BYTES = 1e-6  # megabytes


@dataclass(frozen=True)
class RowPrices:
    """Prices of what a block of a row kernel does, in µs; an access is that of one group of lanes.

    Attributes:
        start: of a launch.
        megabyte: moved to or from memory.
        access: one after the other.
        doubled: more for an access each time that its lanes are twice as many.
        shifted: of a plan whose lanes start at aligned places.
        shifted_access: more for each of its accesses.
        staged: of a plan that stages rows.
        late: of a group of a row's second operand.
        wave_barrier: in a further wave, of a reduction, for each doubling of its warps.
        wave_access, wave_shifted_access, wave_staged: in a further wave, as above.
        wave_looped: in a further wave, of a plan that reads rows again.
    """

    start: float
    megabyte: float
    access: float
    doubled: float
    shifted: float
    shifted_access: float
    staged: float
    late: float
    wave_barrier: float
    wave_access: float
    wave_shifted_access: float
    wave_staged: float
    wave_looped: float


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


H200 = LaneCosts(
    rows=RowPrices(
        start=4.55,
        megabyte=0.237,
        access=0.0616,
        doubled=0.0106,
        shifted=0.43,
        shifted_access=0.0714,
        staged=0.69,
        late=0.197,
        wave_barrier=0.0415,
        wave_access=0.0229,
        wave_shifted_access=0.130,
        wave_staged=0.20,
        wave_looped=0.64,
    ),
    points=PointPrices(start=4.37, megabyte=0.240, access=0.0274, wrapped_access=0.132, wave_access=0.0440),
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
        late: those of a row that it reads beside the first.
        reductions: along the row.
    """

    rows: int
    columns: int
    moved: int
    itemsize: int
    operands: int
    late: int
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
    looped, staged = plan.persistence is Persistence.LOOPED, plan.persistence is Persistence.STAGED
    groups = math.ceil(work.columns / plan.span) if looped else plan.chunks
    accesses = groups * work.operands * (work.reductions + 1 if looped else 1)
    shifted = accesses * plan.shifted
    once = accesses * (prices.access + prices.doubled * math.log2(plan.lanes)) + work.late * groups * prices.late
    once += shifted * prices.shifted_access + plan.shifted * prices.shifted + staged * prices.staged
    wave = work.reductions * math.log2(plan.warps) * prices.wave_barrier + accesses * prices.wave_access
    wave += shifted * prices.wave_shifted_access + staged * prices.wave_staged + looped * prices.wave_looped
    waves = math.ceil(work.rows / plan.rows) / (processors * _resident(plan, work.itemsize))
    return prices.start + work.moved * _BYTES * prices.megabyte + once + max(0.0, waves - 1) * wave


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
    return prices.start + work.moved * _BYTES * prices.megabyte + once + max(0.0, waves - 1) * accesses * prices.wave_access
