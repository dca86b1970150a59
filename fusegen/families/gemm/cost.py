"""Expected times of matmuls, in µs: by a generated kernel with a plan, or by the library.

The model: a kernel starts, and then does the slower of two things, moving bytes and multiplying. Tiles are walked in waves of one a
multiprocessor; a tile has a step for every 64 of the depth, and an end, which takes longer for each value an element that the
epilogue reads, and for each that it writes beside the first. What the numbers are was fitted to measurements, which
`docs/costs/h200.json` and `docs/costs/epilogues-h100.json` hold; `tests/unit/test_cost.py` says how good the choice is that follows
from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusegen.families.gemm.plan import ContractionPlan

_STEP_DEPTH = 64
_ALONE = 0.33  # share of what an epilogue takes longer where there is one wave, which does not wait for memory


@dataclass(frozen=True)
class ProductCosts:
    """Figures of a machine; times in µs, rates a µs.

    Attributes:
        processors: multiprocessors of the machine that was measured.
        start: of a kernel.
        bandwidth: bytes from memory.
        steps: of a tile, by warpgroups that multiply and columns that they multiply at once.
        ends: of a tile, likewise: its first operands' way, and its epilogue.
        reads, writes: what an end takes longer for a value of 16 bits an element that the epilogue reads, and for one that it
            writes beside the first, by warpgroups that multiply and columns of a tile.
        ragged: share by which a tile takes longer, of whose rows there are none.
        draws: elements of random bits in an epilogue, where two share a call of the generator.
        library_start, library_bandwidth, library_flops: of the library's kernel.
        library_unaligned: how many times as long it multiplies where rows of a matrix start at no multiples of 16 bytes.
        epilogue_start, epilogue_bandwidth: of a kernel of its own behind it.
    """

    processors: int
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


@dataclass(frozen=True)
class EpilogueSize:
    """The values that an epilogue moves: of 16 bits an element, in the mean of the parts.

    Attributes:
        read: from memory.
        written: beside the first.
    """

    read: float = 0.0
    written: float = 0.0


NO_EPILOGUE = EpilogueSize()

_WIDTHS = [(consumers, width) for consumers in (1, 2) for width in (64, 128, 192, 256)]

H200 = ProductCosts(
    processors=132,
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
)

COSTS: Mapping[str, ProductCosts] = {"sm_90a": H200}
"""By target; of other targets nothing is known."""


@dataclass(frozen=True)
class ProductSize:
    """A product of two matrices of 16-bit floats.

    Attributes:
        rows, columns, depth: of the result, and of what is summed over.
    """

    rows: int
    columns: int
    depth: int

    @property
    def bytes(self) -> int:
        """Bytes of both operands and the result."""
        return 2 * (self.rows * self.depth + self.depth * self.columns + self.rows * self.columns)


def product_time(
    costs: ProductCosts, plan: ContractionPlan, sizes: tuple[ProductSize, ...], epilogue: EpilogueSize, processors: int
) -> float:
    """Time of one generated launch.

    Args:
        plan: what it is laid out by.
        sizes: of the products, which share their first operand: each of a part, or those of a part that meet it at once.
        epilogue: of all parts.
        processors: multiprocessors of the machine.
    """
    first = sizes[0]
    row_tiles = math.ceil(first.rows / plan.tile_m)
    tiles = row_tiles * sum(math.ceil(size.columns / plan.tile_n) for size in sizes[:: plan.products])
    kind = (plan.consumers, plan.tile_n * plan.products)
    by_tile = (plan.consumers, plan.tile_n)
    waves = math.ceil(tiles / processors)
    longer = epilogue.written * costs.writes[by_tile] + epilogue.read * costs.reads[by_tile]
    longer *= _ALONE if waves == 1 else 1.0
    multiplying = waves * (math.ceil(first.depth / _STEP_DEPTH) * costs.steps[kind] + costs.ends[kind] + longer)
    missing = 1 - first.rows / (row_tiles * plan.tile_m)
    moving = sum(size.bytes for size in sizes) / costs.bandwidth
    return costs.start + (1 + costs.ragged * missing) * slower(multiplying, moving)


def drawing_time(costs: ProductCosts, elements: int, processors: int) -> float:
    """Time of random bits in an epilogue, which nothing hides.

    Args:
        processors: multiprocessors of the machine.
    """
    return elements / costs.draws * costs.processors / processors


def library_time(costs: ProductCosts, sizes: tuple[ProductSize, ...], epilogue_bytes: int, processors: int) -> float:
    """Time of the library's matmuls, one after the other, and of a kernel of its own for their epilogue.

    Args:
        sizes: of the products.
        epilogue_bytes: what that kernel reads and writes; 0 where there is none.
        processors: multiprocessors of the machine.
    """
    found, rate = 0.0, costs.library_flops * processors / costs.processors
    for size in sizes:
        rows = 64 * math.ceil(size.rows / 64)
        flops = 2 * rows * size.columns * size.depth
        found += costs.library_start + slower(flops / rate, size.bytes / costs.library_bandwidth)
    return found + (costs.epilogue_start + epilogue_bytes / costs.epilogue_bandwidth if epilogue_bytes else 0.0)


def unaligned_time(costs: ProductCosts, size: ProductSize, processors: int) -> float:
    """Time of a matmul by the library where rows start at no multiples of 16 bytes.

    Args:
        processors: multiprocessors of the machine.
    """
    slow = replace(costs, library_flops=costs.library_flops / costs.library_unaligned)
    return library_time(slow, (size,), 0, processors)


def slower(one: float, other: float) -> float:
    """The time of two things that go on at once: that of the slower, and more where they take about as long."""
    return float((one**4 + other**4) ** 0.25)
