"""Cost model of pointwise and row kernels, in µs.

The time is the sum of a launch's start, its traffic, and the exposed part of its threads' latency. The latency of the first wave of
blocks is exposed once; that of each further wave counts less, since earlier waves hide a part of it. Prices were fitted to
measurements by non-negative least squares, those of staged rows by a random search; `docs/costs/lanes-h200.json` holds the
measurements, and `tests/unit/test_lane_cost.py` checks the resulting choices. Rows staged in shared memory have a separate model
(`staged_time`), and so have rows that are read once and not held (`streamed_time`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusegen.families.pointwise.plan import PointwisePlan
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.families.rows.tiles import COLUMNS_H200, ColumnPrices
from fusegen.target import Target

_WIDEST = 16  # bytes per access
_OVERLAP, _DRAINED_OVERLAP = 2.13, 2.85
"""Degrees of the p-norm that combines two overlapping times; higher if registers take a row at once, which frees shared memory."""


@dataclass(frozen=True)
class StagedPrices:
    """Prices of a kernel with staged rows, in µs.

    Attributes:
        start: per launch.
        megabyte: per MB to or from memory, by cluster size.
        unaligned: surcharge on traffic for vectors at aligned addresses of unaligned rows.
        thin: surcharge on traffic for vectors below the widest access.
        uneven: surcharge on traffic for blocks that idle in the last round.
        fill: per vector of the first row.
        drained_megabyte: per MB of an SM's first rows, if registers take them at once.
        element: per element of a thread, in each round.
        element_function: surcharge on `element` for each elementary function.
        thousand: per 1024 elements of an SM, in each round.
        thousand_functions: surcharge on `thousand` for each elementary function.
        reduction: per row reduction and round.
        thousand_threads: surcharge per reduction and round for each 1024 threads of an SM.
        exchange: surcharge per reduction and round, by cluster size.
        late: per vector shared by all rows and not kept, in each round.
        late_window: surcharge on `late` for shifted vectors.
        kept_window: per kept vector shared by all rows, once, if shifted.
        waiting: per MB of an SM's part of a row that stays in shared memory while it is processed.
        ahead: the part of `waiting` that is saved where shared memory holds the next row, too.
    """

    start: float
    megabyte: Mapping[int, float]
    unaligned: float
    thin: float
    uneven: float
    fill: float
    drained_megabyte: float
    element: float
    element_function: float
    thousand: float
    thousand_functions: float
    reduction: float
    thousand_threads: float
    exchange: Mapping[int, float]
    late: float
    late_window: float
    kept_window: float
    waiting: float
    ahead: float


STAGED_H200 = StagedPrices(
    start=4.04,
    megabyte={1: 0.237, 2: 0.257, 4: 0.268, 8: 0.234, 16: 0.256},
    unaligned=0.298,
    thin=0.281,
    uneven=0.261,
    fill=0.0914,
    drained_megabyte=1.12,
    element=0.00719,
    element_function=0.295,
    thousand=0.00423,
    thousand_functions=2.13,
    reduction=0.452,
    thousand_threads=0.0402,
    exchange={1: 0.0, 2: 0.0633, 4: 0.0349, 8: 0.328, 16: 0.397},
    late=0.11,
    late_window=0.53,
    kept_window=0.498,
    waiting=8.01,
    ahead=0.305,
)


def staged_time(prices: StagedPrices, plan: RowPlan, work: RowWork, sms: int) -> float:
    """Returns the time of a launch with staged rows, in µs."""
    parts = max(1, min(work.rows, plan.persistent_blocks))
    rounds, busy = max(1, math.ceil(work.rows / parts)), min(sms, parts * plan.cluster / plan.blocks_per_sm)
    own = work.moved / _MILLION / rounds / busy  # MB per SM and round
    a_round = _round(prices, plan, work, own)
    first = a_round + prices.fill * plan.vectors_per_thread + prices.drained_megabyte * own * plan.stage_to_registers
    if plan.cache_weights and plan.unaligned:
        first += prices.kept_window * work.shared * plan.vectors_per_thread
    moving = work.moved / _MILLION * prices.megabyte[plan.cluster] * (1 + prices.unaligned * plan.unaligned)
    moving *= 1 + prices.thin * (plan.vec * work.itemsize < _WIDEST)
    moving *= 1 + prices.uneven * (rounds * parts / max(1, work.rows) - 1)
    overlap, waiting = _DRAINED_OVERLAP if plan.stage_to_registers else _OVERLAP, (rounds - 1) * a_round
    return prices.start + first + math.pow(moving**overlap + waiting**overlap, 1 / overlap)


def _round(prices: StagedPrices, plan: RowPlan, work: RowWork, own: float) -> float:
    elements, threads = plan.vectors_per_thread * plan.vec, plan.block * plan.blocks_per_sm / _THOUSAND
    waiting = work.reductions * (prices.reduction + prices.thousand_threads * threads + prices.exchange[plan.cluster])
    waiting += elements * prices.element * (1 + prices.element_function * work.functions)
    waiting += elements * threads * prices.thousand * (1 + prices.thousand_functions * work.functions)
    if not plan.cache_weights:
        waiting += work.shared * plan.vectors_per_thread * (prices.late + prices.late_window * plan.unaligned)
    if plan.stage_to_registers:
        return waiting
    ahead = plan.stage_vectors / plan.vectors_per_thread - 1  # rows
    return waiting + prices.waiting * own / plan.blocks_per_sm * max(0.0, 1 - prices.ahead * ahead)


@dataclass(frozen=True)
class StreamedPrices:
    """Prices of a kernel that reads each row once and holds nothing of it, in µs.

    Attributes:
        start: per launch.
        megabyte: per MB to or from memory.
        unaligned: surcharge on traffic for shifted vectors.
        unaligned_states: surcharge on it if a reduction has several components.
        narrow: surcharge on traffic for accesses of one element.
        uneven: surcharge on traffic for SMs that idle in the last round.
        access: per access of one thread, in sequence.
        own_megabyte: per MB of an SM's first rows.
        warp: per warp of an SM that reduces, for the first component.
        further_component: surcharge on `warp` for each further component.
        overlap: degree of the p-norm that combines the traffic and a block's own time.
    """

    start: float
    megabyte: float
    unaligned: float
    unaligned_states: float
    narrow: float
    uneven: float
    access: float
    own_megabyte: float
    warp: float
    further_component: float
    overlap: float


STREAMED_H200 = StreamedPrices(
    start=5.86,
    megabyte=0.204,
    unaligned=0.269,
    unaligned_states=0.743,
    narrow=0.336,
    uneven=0.319,
    access=0.0957,
    own_megabyte=10.2,
    warp=0.0273,
    further_component=0.0434,
    overlap=1.57,
)


def streamed_time(prices: StreamedPrices, plan: RowPlan, work: RowWork, sms: int) -> float:
    """Returns the time of a launch that reads each row once and holds nothing of it, in µs."""
    at_once = min(_MOST_THREADS // plan.block, math.ceil(work.rows / sms))  # rows of an SM
    surcharge = plan.unaligned * (prices.unaligned + prices.unaligned_states * (work.components > 1))
    surcharge += prices.narrow * (plan.vec == 1) + prices.uneven * _idle(work.rows, at_once * sms)
    moving = work.moved / _MILLION * prices.megabyte * (1 + surcharge)
    own = math.ceil(work.columns / plan.columns_per_step) * prices.access
    own += at_once * work.columns * work.held / _MILLION * prices.own_megabyte
    reducing = work.rows * plan.threads / _WARP / sms * (prices.warp + prices.further_component * (work.components - 1))
    return prices.start + math.pow(moving**prices.overlap + own**prices.overlap, 1 / prices.overlap) + reducing


def _idle(rows: int, at_once: int) -> float:
    """Returns the share of idle turns; 0 if all rows run at a time."""
    return math.ceil(rows / at_once) * at_once / rows - 1 if rows > at_once else 0.0


# The work of a row kernel, for any plan.


@dataclass(frozen=True)
class RowWork:
    """The work of a row kernel.

    Attributes:
        moved: bytes to and from memory.
        itemsize: bytes per element of the row.
        held: bytes per element of all reads of the row.
        operands: fragments along the row that it reads or writes.
        shared: the operands that are the same for all rows.
        reductions: reductions along the row.
        components: components of their states.
        functions: elementary functions of each element.
    """

    rows: int
    columns: int
    moved: int
    itemsize: int
    held: int
    operands: int
    shared: int
    reductions: int
    components: int
    functions: int


_REGISTERS = 65536  # per SM
_MOST_THREADS = 2048  # per SM
_MOST_BLOCKS = 32
_OWN_REGISTERS = 48  # per thread, besides half of its part of the row
_BESIDE_A_ROW = 30  # fewest registers per thread besides the row
_LARGE_BLOCK = 512  # threads
_WARP = 32
_THOUSAND = 1024
_MILLION = 1e6


@dataclass(frozen=True)
class RowPrices:
    """Prices of a row kernel with rows in registers or read in several passes, in µs. An access is one vector of one thread; a
    window is an access to values shared by all rows with shifted vectors.

    Attributes:
        start: per launch.
        megabyte: per MB to or from memory.
        cached_megabyte: per MB of a row that is read again.
        own_megabyte: per MB of an SM's first blocks.
        million: per million accesses of all threads.
        million_shifted: surcharge per million vectors of one fragment, if shifted.
        million_spilled: per million registers that all threads together need beyond the available ones.
        million_shuffles: per million warp shuffles.
        thousand: per 1024 accesses of the threads of an SM's first blocks.
        access: per access of one thread, in sequence.
        unaligned: surcharge on `access` for shifted vectors.
        window: per window of a thread.
        kept_window: surcharge on a window loaded together with the row.
        barrier: per reduction that several warps share.
        exchange: per reduction that several blocks share.
        late: per vector shared by all rows and loaded after the reductions.
        wave_barrier: per reduction in a further wave, for each doubling of its warps.
        wave_exchange: per reduction in a further wave that several blocks share.
        wave_window: per window in a further wave.
        wave_alone: per further wave with one block per SM.
        cache: bytes of L2 that remain for reads.
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
    unaligned: float
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
class PointwisePrices:
    """Prices of a pointwise kernel, in µs; see `RowPrices`. ``wrapped_access`` is a surcharge for wrapping vectors, ``wave_access``
    the price of an access in a further wave."""

    start: float
    megabyte: float
    access: float
    wrapped_access: float
    wave_access: float


@dataclass(frozen=True)
class RowKernelCosts:
    rows: RowPrices
    staged: StagedPrices
    streamed: StreamedPrices
    points: PointwisePrices
    columns: ColumnPrices


H200 = RowKernelCosts(
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
        unaligned=0.0657,
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
    streamed=STREAMED_H200,
    points=PointwisePrices(start=4.30, megabyte=0.251, access=0.0273, wrapped_access=0.124, wave_access=0.0362),
    columns=COLUMNS_H200,
)

_SLOWER_COPY = 4.29 / 2.98
"""The copy rates of an H200 and an H100 (`docs/bench/h200.json`, `docs/bench/h100.json`)."""

H100 = RowKernelCosts(
    rows=replace(H200.rows, megabyte=_SLOWER_COPY * H200.rows.megabyte),
    staged=replace(H200.staged, megabyte={cluster: _SLOWER_COPY * price for cluster, price in H200.staged.megabyte.items()}),
    streamed=replace(H200.streamed, megabyte=_SLOWER_COPY * H200.streamed.megabyte),
    points=replace(H200.points, megabyte=_SLOWER_COPY * H200.points.megabyte),
    columns=replace(H200.columns, megabyte=_SLOWER_COPY * H200.columns.megabyte, partial=_SLOWER_COPY * H200.columns.partial),
)
"""The prices of an H200 with the memory of an H100."""

LANE_COSTS: Mapping[str, RowKernelCosts] = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
"""Cost models by the card of a target; targets without a card have none."""


@dataclass(frozen=True)
class PointwiseWork:
    """The number of elements of a pointwise kernel, the bytes that it moves, and the tensors that it reads or writes."""

    points: int
    moved: int
    operands: int


def row_time(costs: RowKernelCosts, plan: RowPlan, work: RowWork, target: Target) -> float:
    """Returns the time of a row kernel's launch, in µs."""
    sms = target.sms
    if plan.persistence is Persistence.STAGED:
        return staged_time(costs.staged, plan, work, sms)
    if plan.once:
        return streamed_time(costs.streamed, plan, work, sms)
    prices, looped = costs.rows, plan.persistence is Persistence.MULTI_PASS
    groups = math.ceil(work.columns / plan.columns_per_step) if looped else plan.vectors_per_thread
    accesses = groups * work.operands * (work.reductions + 1 if looped else 1)
    blocks, persistent_blocks = math.ceil(work.rows / plan.rows) * plan.cluster, _resident_blocks(plan, work)
    in_clusters = target.clusters(plan.cluster) * plan.cluster  # SMs: larger clusters leave some idle
    waves = max(1.0, blocks / in_clusters / persistent_blocks)
    windows = groups * work.shared * plan.unaligned

    once = accesses * (prices.access + prices.unaligned * plan.unaligned)
    once += windows * (prices.window + prices.kept_window * plan.cache_weights)
    once += work.reductions * (prices.barrier * (plan.warps > 1) + prices.exchange * (plan.cluster > 1))
    once += prices.late * groups * work.shared * (not plan.cache_weights)
    once += prices.thousand * accesses * plan.block * min(persistent_blocks, math.ceil(blocks / in_clusters)) / _THOUSAND
    moved = work.moved + _read_again(prices, plan, work, sms)
    once += prices.own_megabyte * moved / _MILLION / waves / min(in_clusters, max(1, blocks))
    wave = work.reductions * (math.log2(plan.warps) * prices.wave_barrier + prices.wave_exchange * (plan.cluster > 1))
    wave += windows * prices.wave_window + prices.wave_alone * (persistent_blocks == 1)
    total = moved * prices.megabyte + work.rows * _row_throughput(prices, plan, work, accesses, groups)
    # A state of several components costs each warp as much as in a kernel that holds nothing.
    states = costs.streamed.further_component * (work.components - work.reductions) * work.rows * plan.threads / _WARP / sms
    return prices.start + total / _MILLION + once + (waves - 1) * wave + states


def _row_throughput(prices: RowPrices, plan: RowPlan, work: RowWork, accesses: int, groups: int) -> float:
    """Returns the throughput cost of a row in millionths of a µs: accesses, shifted vectors, shuffles and missing registers."""
    price = accesses * prices.million + groups * plan.unaligned * prices.million_shifted
    price += work.reductions * math.log2(min(_WARP, plan.threads)) / _WARP * prices.million_shuffles
    if plan.persistence is Persistence.MULTI_PASS:
        return plan.threads * price + work.reductions * work.columns * work.itemsize * prices.cached_megabyte
    needed = plan.vectors_per_thread * plan.vec * work.held / 4 + _BESIDE_A_ROW
    return plan.threads * (price + max(0.0, needed - _REGISTERS // (plan.block * plan.blocks_per_sm)) * prices.million_spilled)


def _read_again(prices: RowPrices, plan: RowPlan, work: RowWork, sms: int) -> int:
    """Returns the bytes of multi-pass rows that are read from memory again, since L2 does not hold all rows in flight."""
    in_flight = min(work.rows, sms * _resident_blocks(plan, work) // plan.cluster) * work.columns * work.itemsize
    if plan.persistence is not Persistence.MULTI_PASS or in_flight <= prices.cache:
        return 0
    return work.reductions * work.rows * work.columns * work.itemsize


def _resident_blocks(plan: RowPlan, work: RowWork) -> int:
    """Returns the number of blocks that an SM runs at a time; of large blocks, as many as the plan's `blocks_per_sm`.

    ptxas takes the registers that these leave. With 64 elements per thread of a block of 512, norms and softmax take 80 to 95, so
    that a second block does not fit.
    """
    elements, shared = plan.vec * (plan.vectors_per_thread or 1), plan.cache_weights * work.shared * work.itemsize
    registers = min(255, _OWN_REGISTERS + elements * (work.held / 8 + shared / 4))
    room = plan.blocks_per_sm if plan.block >= _LARGE_BLOCK else max(_REGISTERS // (registers * plan.block), plan.blocks_per_sm)
    return max(1, int(min(room, _MOST_THREADS // plan.block, _MOST_BLOCKS)))


def pointwise_time(prices: PointwisePrices, plan: PointwisePlan, work: PointwiseWork, sms: int) -> float:
    """Returns the time of a pointwise kernel's launch, in µs."""
    accesses = plan.unroll * work.operands
    threads = math.ceil(work.points / (plan.vec * plan.unroll))
    waves = threads / (sms * _MOST_THREADS)
    once = accesses * (prices.access + prices.wrapped_access * plan.wraps)
    return prices.start + work.moved / _MILLION * prices.megabyte + once + max(0.0, waves - 1) * accesses * prices.wave_access
