"""What kernels that stage rows in shared memory are expected to take, in µs.

The model: blocks go through rows in rounds. A launch starts and works on the first ones; in the rounds behind that, the longer of
what is moved and what blocks wait for hides some of the other. Blocks that share a row wait for each other, and leave some
multiprocessors idle, since those of a cluster run in one group of these: both have prices by the size of a cluster. Prices were
fitted as `fusegen/families/rows/cost.py` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.families.rows.plan import RowPlan

_MILLION = 1e6
_WIDEST = 16  # bytes of an access
_OVERLAP, _DRAINED_OVERLAP = 2.28, 3.24
"""How sharply the longer of two times hides the other, their norm of this degree: more where registers take a row at once, and
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


H200 = StagedPrices(
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
    """Of a launch with a plan.

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
    """What blocks wait for while they work on a row each."""
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
