"""The cost model of matmuls: expected times in µs of a generated kernel with a plan, and of the library.

A kernel's time is its start-up plus the longer of moving bytes and multiplying. Tiles run in waves, one tile per SM. A tile takes a
step for every 64 of the depth, plus an end. The end grows with the math of the epilogue and with the values per element that it
reads and writes. The constants are fitted to measurements (`docs/costs`: `h200.json`, `sizes-h200.json`, and
`epilogues-*.json`). `tests/unit/test_cost.py` bounds the loss by wrong choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusegen.families.gemm.plan import ContractionPlan

_SHORT = 0.3  # share of a tile's end without functions of many instructions


@dataclass(frozen=True)
class MatmulCosts:
    """Constants of a machine; times in µs, rates per µs.

    Attributes:
        sms: SMs of the measured machine.
        start: start-up of a kernel.
        steps: time of a tile's step, by consumer warpgroups and columns multiplied at once.
        ends: time of a tile's end with one function of many instructions per element, likewise.
        turn: the time of the end of a warpgroup's tile in ping-pong, relative to one that two warpgroups share.
        joins: time per column of each further block that shares the depth of a tile.
        reads, writes: extra time of a tile's end per 16-bit value per element that the epilogue reads, or writes besides its first;
            by consumer warpgroups and columns of a tile.
        draws, unshared_draws: random elements per µs in an epilogue whose threads share their random bits, and where they do not.
        library_unaligned: the slowdown where rows of a matrix do not start at multiples of 16 bytes.
        epilogue_start, epilogue_bandwidth: start-up time and bytes per µs of a separate kernel for the epilogue.
        few_rows_start, few_rows_bandwidth: start-up time and bytes per µs of a launch for up to 8 rows.
        few_rows_factors: the time of up to 8, 16, 24 ... 64 rows, without the start-up, relative to that of up to 8.
        whole_heads: extra time of few rows whose tiles hold whole heads, to reduce them.
        few_rows_computed: elements per µs of second operands that are computed on load.
    """

    sms: int
    start: float
    bandwidth: float
    steps: Mapping[tuple[int, int], float]
    ends: Mapping[tuple[int, int], float]
    turn: float
    joins: float
    reads: Mapping[tuple[int, int], float]
    writes: Mapping[tuple[int, int], float]
    draws: float
    unshared_draws: float
    library_start: float
    library_bandwidth: float
    library_flops: float
    library_unaligned: float
    epilogue_start: float
    epilogue_bandwidth: float
    few_rows_start: float
    few_rows_bandwidth: float
    few_rows_factors: tuple[float, ...]
    whole_heads: float
    few_rows_computed: float


@dataclass(frozen=True)
class EpilogueSize:
    """The work of an epilogue per element; the mean over the parts.

    Attributes:
        read, written: 16-bit values that it reads, and that it writes besides its first.
        functions: calls of functions of many instructions, such as erf and sigmoid, per product of the element.
    """

    read: float = 0.0
    written: float = 0.0
    functions: float = 0.0


NO_EPILOGUE = EpilogueSize()

_WIDTHS = [(consumers, width) for consumers in (1, 2) for width in (64, 128, 192, 256)]

H200 = MatmulCosts(
    sms=132,
    start=2.57,
    bandwidth=3.81e6,
    steps=dict(zip(_WIDTHS, (0.167, 0.211, 0.259, 0.339, 0.242, 0.337, 0.490, 0.639), strict=True)),
    ends=dict(zip(_WIDTHS, (1.09, 1.59, 4.07, 4.48, 1.25, 2.57, 4.47, 5.21), strict=True)),
    turn=1.3,
    joins=0.1,  # 24 x 4096 x 4096 takes 21.8 µs, split in two 21.3, though the steps take 5 µs less; one load was in flight then
    reads=dict(zip(_WIDTHS, (1.0, 2.0, 2.0, 2.4, 1.2, 1.8, 2.2, 3.6), strict=True)),
    writes=dict(zip(_WIDTHS, (0.8, 0.6, 0.2, 1.2, 0.8, 1.8, 2.0, 3.8), strict=True)),
    # 16384 x 1024 x 1024 with bias, dropout and a residual took 83.2 µs, without dropout 64.4; before threads shared random bits,
    # 4096 x 4096 x 4096 with dropout and a residual took 259.5 µs, without dropout 198.2.
    draws=8.9e5,
    unshared_draws=2.74e5,
    library_start=3.42,
    library_bandwidth=4.03e6,
    library_flops=769e6,
    library_unaligned=2.8,  # 8192 x 1024 with 30522 columns takes 1966 µs, padded 701; odd columns cost 3.6 to 7.4 times as much
    epilogue_start=2.19,
    epilogue_bandwidth=3.0e6,
    few_rows_start=2.9,
    few_rows_bandwidth=4.05e6,
    # 4096 x 4096 takes 12.1 µs at 16 rows and 14.0 at 24; 7040 x 2368 12.8 at 24
    few_rows_factors=(1.0, 1.06, 1.251, 1.326, 1.405, 1.49, 1.579, 1.674),
    whole_heads=1.5,  # norms and rotations of Qwen3's queries and keys: 2560 channels took 14.9 µs at one row, 12.8 were expected
    few_rows_computed=3e6,  # int8 and int4, up to 16 rows: 14336 x 4096 elements take 22 to 28 us
)

H100 = replace(
    H200,
    bandwidth=2.72e6,
    steps=dict(zip(_WIDTHS, (0.168, 0.231, 0.292, 0.370, 0.341, 0.350, 0.507, 0.712), strict=True)),
    reads=dict(zip(_WIDTHS, (0.6, 1.4, 1.4, 0.0, 0.0, 2.2, 1.4, 1.4), strict=True)),
    writes=dict(zip(_WIDTHS, (0.0, 0.0, 0.0, 11.2, 1.0, 1.2, 0.4, 8.4), strict=True)),
    library_bandwidth=2.81e6,
    library_flops=807e6,
    epilogue_bandwidth=3.2e6,
    few_rows_bandwidth=2.81e6,
)
"""Steps, reads, writes and the library's rate are fitted to `docs/costs/epilogues-h100.json`, so that choices lose little. The
bandwidths are an H200's, times the ratio of both copy rates, 2.98 to 4.29 TB/s (`docs/bench/h100.json`, `docs/bench/h200.json`).
All else is an H200's."""

COSTS: Mapping[str, MatmulCosts] = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
"""Constants by the card of a target; targets without a card have no cost model."""


@dataclass(frozen=True)
class MatmulSize:
    """The sizes of a matmul of 16-bit floats; `weight` is the bytes per stored element of the second operand."""

    rows: int
    columns: int
    depth: int
    weight: float = 2

    @property
    def bytes(self) -> float:
        return 2 * (self.rows * self.depth + self.rows * self.columns) + self.weight * self.depth * self.columns


def matmul_time(
    costs: MatmulCosts, plan: ContractionPlan, sizes: tuple[MatmulSize, ...], epilogue: EpilogueSize, sms: int
) -> float:
    """Returns the time of one generated launch, given the sizes of all its matmuls."""
    first = sizes[0]
    row_tiles = math.ceil(first.rows / plan.tile_m)
    tiles = row_tiles * sum(math.ceil(size.columns / plan.tile_n) for size in sizes[:: plan.products])
    kind = (plan.consumers, plan.tile_n * plan.products)
    by_tile = (plan.consumers, plan.tile_n)
    waves = math.ceil(tiles * plan.splits / sms)
    steps = math.ceil(first.depth / plan.tile_k / plan.splits)
    longer = epilogue.written * _at(costs.writes, by_tile) + epilogue.read * _at(costs.reads, by_tile)
    end = _at(costs.ends, kind) * (_SHORT + (1 - _SHORT) * epilogue.functions) + longer
    step_time = steps * _at(costs.steps, kind)
    if plan.ping_pong:  # the end of all tiles but the last overlaps with the steps of the next one
        end *= costs.turn
        multiplying = step_time + (waves - 1) * max(step_time, (step_time + end) / 2) + end
    else:
        multiplying = waves * (step_time + costs.joins * (plan.splits - 1) * kind[1] + end)
    moving = sum(size.bytes for size in sizes) / costs.bandwidth
    return costs.start + overlapped_time(multiplying, moving)


def _at(values: Mapping[tuple[int, int], float], kind: tuple[int, int]) -> float:
    """Returns the value of a kind of tile; between two widths, a value between theirs."""
    consumers, width = kind
    narrower = width // 64 * 64
    if width == narrower:
        return values[kind]
    share = (width - narrower) / 64
    return (1 - share) * values[consumers, narrower] + share * values[consumers, narrower + 64]


def few_rows_time(costs: MatmulCosts, sizes: tuple[MatmulSize, ...], *, computes: bool = False) -> float:
    """Returns the time of one launch for few rows, which is bound by moving all matrices once, or by computing the second one. More
    than 64 rows move them again."""
    octets, most = math.ceil(sizes[0].rows / 8), len(costs.few_rows_factors)
    factor = costs.few_rows_factors[min(octets, most) - 1] * math.ceil(octets / most)
    moving = sum(size.bytes for size in sizes) / costs.few_rows_bandwidth
    computing = sum(size.depth * size.columns for size in sizes) / costs.few_rows_computed if computes else 0.0
    return costs.few_rows_start + factor * max(moving, computing)


def writing_time(costs: MatmulCosts, size: MatmulSize) -> float:
    """Returns the time of a kernel that writes a second operand from its stored elements."""
    return costs.epilogue_start + (size.weight + 2) * size.depth * size.columns / costs.epilogue_bandwidth


def drawing_time(costs: MatmulCosts, elements: int, sms: int, *, is_shared: bool) -> float:
    """Returns the time of random bits in an epilogue, which does not overlap with other work; threads can share them."""
    return elements / (costs.draws if is_shared else costs.unshared_draws) * costs.sms / sms


def library_time(costs: MatmulCosts, sizes: tuple[MatmulSize, ...], epilogue_bytes: int, sms: int) -> float:
    """Returns the time of the library's matmuls in sequence, and of a separate epilogue kernel if it moves bytes."""
    time, rate = 0.0, costs.library_flops * sms / costs.sms
    for size in sizes:
        rows = 64 * math.ceil(size.rows / 64)
        flops = 2 * rows * size.columns * size.depth
        time += costs.library_start + overlapped_time(flops / rate, replace(size, weight=2).bytes / costs.library_bandwidth)
    return time + (costs.epilogue_start + epilogue_bytes / costs.epilogue_bandwidth if epilogue_bytes else 0.0)


def unaligned_time(costs: MatmulCosts, size: MatmulSize, sms: int) -> float:
    """Returns the time of a library matmul whose rows do not start at multiples of 16 bytes."""
    slow = replace(costs, library_flops=costs.library_flops / costs.library_unaligned)
    return library_time(slow, (size,), 0, sms)


def overlapped_time(first: float, second: float) -> float:
    """Returns the time of two overlapping tasks: the slower one's, and more if both take about equally long."""
    return float((first**4 + second**4) ** 0.25)
