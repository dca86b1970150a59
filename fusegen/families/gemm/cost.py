"""The cost model of matmuls: expected times in µs of a generated kernel with a plan, and of the library.

A kernel's time is its start-up plus the longer of moving bytes and multiplying. Tiles run in waves, one tile per SM. A tile takes a
step for every 64 of the depth, plus an end. The end grows with the values per element that the epilogue reads and writes. The
constants are fitted to measurements (`docs/costs/h200.json`, `docs/costs/epilogues-h100.json`). `tests/unit/test_cost.py` bounds
the loss by wrong choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusegen.families.gemm.plan import ContractionPlan

_STEP_DEPTH = 64
_ALONE = 0.33  # share of the epilogue's extra time in a single wave, which does not wait for memory


@dataclass(frozen=True)
class MatmulCosts:
    """Constants of a machine; times in µs, rates per µs.

    Attributes:
        sms: SMs of the measured machine.
        start: start-up of a kernel.
        steps, ends: time of a tile's step and end, by consumer warpgroups and columns multiplied at once.
        reads, writes: extra time of a tile's end per 16-bit value per element that the epilogue reads, or writes besides its first;
            by consumer warpgroups and columns of a tile.
        ragged: relative extra time of a tile without valid rows.
        draws: random elements per µs in an epilogue; two elements share a call of the generator.
        library_unaligned: the slowdown where rows of a matrix do not start at multiples of 16 bytes.
        epilogue_start, epilogue_bandwidth: start-up time and bytes per µs of a separate kernel for the epilogue.
        few_rows_start, few_rows_bandwidth: start-up time and bytes per µs of a launch for up to 8 rows.
        few_rows_more: the factor of the time for each further 8 rows.
        few_rows_computed: elements per µs of second operands that are computed on load.
    """

    sms: int
    start: float
    bandwidth: float
    steps: Mapping[tuple[int, int], float]
    ends: Mapping[tuple[int, int], float]
    reads: Mapping[tuple[int, int], float]
    writes: Mapping[tuple[int, int], float]
    ragged: float
    draws: float
    library_start: float
    library_bandwidth: float
    library_flops: float
    library_unaligned: float
    epilogue_start: float
    epilogue_bandwidth: float
    few_rows_start: float
    few_rows_bandwidth: float
    few_rows_more: float
    few_rows_computed: float


@dataclass(frozen=True)
class EpilogueSize:
    """The 16-bit values per element that an epilogue reads, and that it writes besides its first; the mean over the parts."""

    read: float = 0.0
    written: float = 0.0


NO_EPILOGUE = EpilogueSize()

_WIDTHS = [(consumers, width) for consumers in (1, 2) for width in (64, 128, 192, 256)]

H200 = MatmulCosts(
    sms=132,
    start=2.84,
    bandwidth=3.91e6,
    steps=dict(zip(_WIDTHS, (0.166, 0.217, 0.268, 0.330, 0.261, 0.344, 0.470, 0.632), strict=True)),
    ends=dict(zip(_WIDTHS, (0.95, 0.80, 4.23, 3.82, 0.80, 1.06, 4.73, 2.68), strict=True)),
    reads=dict(zip(_WIDTHS, (0.4, 4.2, 2.9, 2.2, 5.3, 4.7, 1.7, 4.7), strict=True)),
    writes=dict(zip(_WIDTHS, (0.4, 1.9, 0.3, 15.1, 5.2, 3.5, 1.5, 13.2), strict=True)),
    ragged=0.174,
    draws=2.74e5,  # 4096 x 4096 x 4096 with dropout and a residual takes 259.5 µs, and without dropout 198.2
    library_start=3.08,
    library_bandwidth=4.05e6,
    library_flops=793e6,
    library_unaligned=2.8,  # 8192 x 1024 with 30522 columns takes 1966 µs, padded 701; odd columns cost 3.6 to 7.4 times as much
    epilogue_start=3.05,
    epilogue_bandwidth=2.87e6,
    few_rows_start=2.9,
    few_rows_bandwidth=4.05e6,
    few_rows_more=1.06,
    few_rows_computed=5e6,
)

COSTS: Mapping[str, MatmulCosts] = {"sm_90a": H200}
"""Constants by target; other targets have no cost model."""


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
    waves = math.ceil(tiles / sms)
    longer = epilogue.written * costs.writes[by_tile] + epilogue.read * costs.reads[by_tile]
    longer *= _ALONE if waves == 1 else 1.0
    multiplying = waves * (math.ceil(first.depth / _STEP_DEPTH) * costs.steps[kind] + costs.ends[kind] + longer)
    missing = 1 - first.rows / (row_tiles * plan.tile_m)
    moving = sum(size.bytes for size in sizes) / costs.bandwidth
    return costs.start + (1 + costs.ragged * missing) * overlapped_time(multiplying, moving)


def few_rows_time(costs: MatmulCosts, sizes: tuple[MatmulSize, ...], *, computes: bool = False) -> float:
    """Returns the time of one launch for few rows, which is bound by moving all matrices once, or by computing the second one."""
    more = costs.few_rows_more ** (math.ceil(sizes[0].rows / 8) - 1)
    moving = sum(size.bytes for size in sizes) / costs.few_rows_bandwidth
    computing = sum(size.depth * size.columns for size in sizes) / costs.few_rows_computed if computes else 0.0
    return costs.few_rows_start + more * max(moving, computing)


def writing_time(costs: MatmulCosts, size: MatmulSize) -> float:
    """Returns the time of a kernel that writes a second operand from its stored elements."""
    return costs.epilogue_start + (size.weight + 2) * size.depth * size.columns / costs.epilogue_bandwidth


def drawing_time(costs: MatmulCosts, elements: int, sms: int) -> float:
    """Returns the time of random bits in an epilogue; it does not overlap with other work."""
    return elements / costs.draws * costs.sms / sms


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
