"""Plans and kernel bodies of matmuls on tensor cores."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeAlias

from fusegen.dtypes import DType
from fusegen.ir.symbolic import Index
from fusegen.schedule.kernel import Body, Plan
from fusegen.schedule.math import LaneFunction, Reduction
from fusegen.schedule.terms import ByteBits
from fusegen.units import counted


@dataclass(frozen=True)
class ContractionPlan(Plan):
    """A matmul on tensor cores by warpgroups, with TMA.

    Attributes:
        consumers: warpgroups that multiply; each computes 64 rows of a tile, or whole tiles in ping-pong.
        stages: pipeline stages of operand tiles.
        group: rows of tiles, or of clusters' tiles, that are traversed together.
        a_major, b_major: the contiguous index of an operand: ``k``, or ``m`` and ``n``.
        products: matrices that are multiplied with the same first operand.
        splits: blocks of a cluster, which share the depth of a tile.
        loaded_rows: rows of a tile that TMA loads, a multiple of 8, if the first operand has no more; 0 for all of the tile.
        ping_pong: each warpgroup multiplies tiles of its own, and applies the epilogue while the other one multiplies.
    """

    consumers: int
    tile_n: int
    stages: int
    group: int
    a_major: str = "k"
    b_major: str = "k"
    products: int = 1
    splits: int = 1
    loaded_rows: int = 0
    ping_pong: bool = False
    blocks_per_sm: int = 1
    producer_registers: int = 24
    consumer_registers: int = 240

    @property
    def description(self) -> str:
        turns = " in turns" if self.ping_pong else ""
        split = f", depth split over a cluster of {self.splits} blocks" if self.splits > 1 else ""
        layout = f"{self.consumers + 1} warpgroups{turns}, {self.stages} stages{split}"
        return f"tiles of {self.tile_m} x {self.tile_n}: {layout}"

    @property
    def tile_m(self) -> int:
        return 64 * self.consumers

    @property
    def tile_k(self) -> int:
        return 64

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the pipeline stages (128-byte lines, two barriers a stage), of two result buffers of 64 rows of 128 bytes
        per consumer, and of the barriers of turns."""
        ring = self.stages * ((self.tile_m + self.tile_n * self.products) * 128 + 16)
        return ring + self.consumers * (2 * 8192 + 8 * self.ping_pong)


@dataclass(frozen=True)
class MmaPlan(Plan):
    """A matmul on tensor cores by warps (`mma.sync`).

    Attributes:
        warps_m, warps_n: warps of a block along the rows and the columns of a tile.
        warp_m, warp_n: rows, and columns of each matmul, that a warp accumulates.
        a_width, b_width: elements per asynchronous copy.
        stages, group, a_major, b_major, products: as in `ContractionPlan`.
    """

    warps_m: int
    warps_n: int
    warp_m: int
    warp_n: int
    stages: int
    group: int
    a_major: str = "k"
    b_major: str = "k"
    a_width: int = 8
    b_width: int = 8
    products: int = 1
    blocks_per_sm: int = 2

    @property
    def description(self) -> str:
        warps = f"{self.warps_m} x {self.warps_n} warps"
        return f"tiles of {self.tile_m} x {self.tile_n}: {warps}, {self.stages} stages, copies of {self.a_width} and {self.b_width}"

    @property
    def tile_m(self) -> int:
        return self.warps_m * self.warp_m

    @property
    def tile_n(self) -> int:
        return self.warps_n * self.warp_n

    @property
    def tile_k(self) -> int:
        return 32

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def copies_evenly(self) -> bool:
        """True if each thread copies equally many 16-byte units per stage, all to shared-memory lines with the same swizzle."""
        return self._is_even(self.tile_m, self.a_major) and self._is_even(self.tile_n, self.b_major)

    def _is_even(self, side: int, major: str) -> bool:
        lines, length = (side, self.tile_k) if major == "k" else (self.tile_k, side)
        units = (1 << (length - 1).bit_length()) // 8  # 16-byte units of a line
        step = self.threads // units
        return step % 8 == 0 and lines % step == 0

    @property
    def a_bytes(self) -> int:
        """Bytes of the first operand per stage."""
        return self._tile_bytes(self.tile_m, self.a_major)

    @property
    def b_bytes(self) -> int:
        return self._tile_bytes(self.tile_n, self.b_major)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.a_bytes + self.products * self.b_bytes)

    def _tile_bytes(self, extent: int, major: str) -> int:
        """Bytes of a 16-bit tile; lines along the extent are padded to a power of two for the swizzle."""
        return 2 * self.tile_k * (extent if major == "k" else 1 << (extent - 1).bit_length())


@dataclass(frozen=True)
class FewRowsPlan(Plan):
    """A matmul of few rows on tensor cores (`mma.sync`), bound by the bandwidth of reading the second operand.

    The instruction multiplies 16 columns of the result by 8 rows, so that few rows leave little of it idle. Each warp reads a part
    of the depth of all operands, 16 bytes a thread, straight into the registers of the instruction; the warps of a block then add
    their results in a fixed order.

    Attributes:
        tile_m: rows of a tile, a multiple of 8.
        tile_n: columns of each matmul in a tile, a multiple of 16.
        warps: warps of a block, which divide the depth.
        stages: chunks of the depth that a warp has in flight.
        blocks_per_sm: blocks per SM that registers must leave room for.
        products: matrices that are multiplied with the same first operand.
        shift: the distance between the two slabs of 16 columns of a tile, if the epilogue combines them; 0 for adjacent columns.
        b_major: the contiguous index of the second operand, as in `ContractionPlan`.
        unit: neighbouring elements of the depth that a thread multiplies at once.
        units: of a column in a chunk, for each thread.
        ahead: in deep fusion, the chunks of a warp that the second part requests for L2 while the last blocks of the first run.
    """

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    blocks_per_sm: int
    products: int = 1
    shift: int = 0
    b_major: str = "k"
    unit: int = 8
    units: int = 2
    ahead: int = 0

    @property
    def description(self) -> str:
        layout = (
            f"{self.warps} warps share the depth, {counted(self.blocks_per_sm, 'block')} per SM, {counted(self.stages, 'stage')}"
        )
        return f"few rows, tiles of {self.tile_m} x {self.tile_n}: {layout}"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Bytes of the warps' results; columns are padded against bank conflicts."""
        return 4 * self.warps * self.tile_m * (self.products * self.tile_n + 2)


@dataclass(frozen=True)
class DeepPlan(Plan):
    """Two matmuls of few rows in one launch, the second of the first's result (deep fusion). Blocks of the second request their
    weights, then wait for the blocks of the first. Both plans have equally many warps and blocks per SM."""

    first: FewRowsPlan
    second: FewRowsPlan

    @property
    def description(self) -> str:
        tiles = " and ".join(f"{plan.tile_m} x {plan.tile_n}" for plan in (self.first, self.second))
        stages = " and ".join(str(plan.stages) for plan in (self.first, self.second))
        layout = f"{self.first.warps} warps, {counted(self.first.blocks_per_sm, 'block')} per SM"
        return f"one launch, few rows, tiles of {tiles}: {layout}, {stages} chunks in flight, {self.second.ahead} ahead"


@dataclass(frozen=True)
class AccumulatorPair:
    """Two neighbouring accumulator columns, which an epilogue reads as an array of two.

    Attributes:
        product: the number of the matmul within the part.
        shift: the distance, in columns, from the pair that the thread computes.
    """

    name: str
    product: int
    shift: int


@dataclass(frozen=True)
class HeadStatistic:
    """A reduction over the columns of each head, per row. Its `lift` computes the values of two columns that are reduced, and may
    read earlier statistics."""

    reduction: Reduction
    columns: int
    accumulated: tuple[AccumulatorPair, ...]
    lift: LaneFunction

    @property
    def name(self) -> str:
        return self.reduction.components[0].name


@dataclass(frozen=True)
class PartResult:
    """The storage of an epilogue's result.

    Attributes:
        offset: the element's offset over the epilogue's axes; None if whole tiles are stored by a tensor map.
        octets: True if eight neighbouring columns are contiguous and aligned.
        head: columns of a head for a result with one element per head; 0 for one element per column.
    """

    buffer: int
    dtype: DType
    offset: Index | None
    octets: bool = True
    head: int = 0


@dataclass(frozen=True)
class Window:
    """Neighbouring stored elements that a unit of a second operand is computed from.

    Attributes:
        offset: the first element's offset, over columns and units.
        count: the number of elements.
        aligned: bytes that divide the first element's address.
    """

    name: str
    buffer: int
    dtype: DType
    offset: Index
    count: int
    aligned: int


@dataclass(frozen=True)
class StoredRead:
    """The element of a window that a pair reads: one index for both lanes, or one per lane."""

    window: int
    indices: tuple[Index, ...]


@dataclass(frozen=True)
class PackedNumbers:
    """Integers that a pair reads, one of each lane, as the ends of two 16-bit floats.

    Attributes:
        bits: those of each lane; only their shifts may differ.
        in_word: True if both lanes read the same bits of bytes of one word.
        is_byte: True for whole bytes as bfloat16, whose bits do not all fit behind a float: they are converted as signed bytes.
        less: the number that is subtracted from both floats, or signed bytes.
    """

    read: StoredRead
    bits: tuple[ByteBits, ByteBits]
    in_word: bool
    is_byte: bool
    less: int


@dataclass(frozen=True)
class PackedMath:
    """Math on a pair that has the same result in words of two 16-bit floats as in float32: an integer, less another one, times an
    element of the result's type."""

    number: PackedNumbers
    zero: PackedNumbers | None
    scale: StoredRead | None


@dataclass(frozen=True)
class ComputedOperand:
    """An operand that is computed on load, or values of rows that are reduced.

    Attributes:
        function: the math on two neighbouring elements of the depth; its axes are columns, units, and pairs of a unit.
        windows: the stored elements of a unit.
        reads: the elements for the reads of `function`.
        packed: the same math on words of two elements, which takes its place; None if the result may differ.
    """

    dtype: DType
    function: LaneFunction
    windows: tuple[Window, ...]
    reads: tuple[StoredRead, ...]
    packed: PackedMath | None


@dataclass(frozen=True)
class RowStatistic:
    """A reduction of each row of a first operand. `element` computes the reduced values; it may read earlier statistics."""

    reduction: Reduction
    element: ComputedOperand

    @property
    def name(self) -> str:
        return self.reduction.components[0].name


@dataclass(frozen=True)
class ComputedRows:
    """A first operand that is computed on load: its axes are rows, units, and pairs of a unit."""

    operand: ComputedOperand
    statistics: tuple[RowStatistic, ...]

    @property
    def functions(self) -> tuple[LaneFunction, ...]:
        """All math in the order of execution."""
        return (*(s.element.function for s in self.statistics), self.operand.function)


@dataclass(frozen=True)
class MatmulPart:
    """A range of a launch's columns with its epilogue.

    Attributes:
        head: columns of a head, if the epilogue indexes heads; else all columns.
        rows: the number of leading axes of the epilogue that index rows. The others index heads, the last one pairs of columns.
        names: the matrices that are multiplied with the first operand, as the text names them.
        epilogue: the math on two neighbouring columns.
        weights: the second operands that are computed on load; empty if they are in memory.
    """

    columns: int
    head: int
    rows: int
    names: tuple[str, ...]
    accumulated: tuple[AccumulatorPair, ...]
    epilogue: LaneFunction
    results: tuple[PartResult, ...]
    statistics: tuple[HeadStatistic, ...] = ()
    weights: tuple[ComputedOperand, ...] = ()

    @property
    def functions(self) -> tuple[LaneFunction, ...]:
        """All math of the part in the order of execution."""
        return (*(w.function for w in self.weights), *(s.lift for s in self.statistics), self.epilogue)


CostedPlan: TypeAlias = ContractionPlan | FewRowsPlan
"""Plans with a cost model."""

MatmulPlan: TypeAlias = CostedPlan | MmaPlan


@dataclass(frozen=True)
class ContractionBody(Body):
    """Matmuls that share the first operand; the parts are adjacent ranges of columns, each with an epilogue.

    Attributes:
        matrices: the operands that are read by address: the first one, unless it is computed on load (`rows`), those of each
            part, and further pairs.
        depths: of the pairs of operands whose products are added, of one matmul; empty if there is one pair.
    """

    input_dtype: DType
    parts: tuple[MatmulPart, ...]
    plan: MatmulPlan
    matrices: tuple[int, ...] = ()
    rows: ComputedRows | None = None
    depths: tuple[int, ...] = ()

    @property
    def functions(self) -> tuple[LaneFunction, ...]:
        """All math in the order of execution."""
        return (*(() if self.rows is None else self.rows.functions), *(f for part in self.parts for f in part.functions))

    @property
    def begins(self) -> tuple[int, ...]:
        """The first element of each pair's depth, at a multiple of a step, and the end of all."""
        assert not isinstance(self.plan, FewRowsPlan)  # it has one pair
        step = self.plan.tile_k
        return tuple(itertools.accumulate((-(-depth // step) * step for depth in self.depths), initial=0))

    @property
    def second_matrices(self) -> tuple[int, ...]:
        return self.matrices if self.rows is not None else self.matrices[1:]

    @property
    def chosen_plan(self) -> Plan:
        return self.plan

    @property
    def cluster(self) -> int:
        return self.plan.splits if isinstance(self.plan, ContractionPlan) else 1

    @property
    def blocks_per_sm(self) -> int:
        return self.plan.blocks_per_sm

    @property
    def tile_dtypes(self) -> frozenset[DType]:
        return frozenset({self.input_dtype, *(r.dtype for part in self.parts for r in part.results)})

    def describe(self, kind: str) -> str:
        """Describes the kernel; counts parts, matmuls and results where there are several."""
        columns = " + ".join(str(part.columns) for part in self.parts)
        results = sum(len(part.results) for part in self.parts)
        several = {
            f"{columns} columns": len(self.parts),
            "two matmuls per tile": self.plan.products,
            f"{results} results": results,
        }
        by_plan = {MmaPlan: " by mma.sync", FewRowsPlan: ", few rows"}
        names = [kind + by_plan.get(type(self.plan), "")]
        names += [f"sum of {len(self.depths)} matmuls"] if self.depths else []
        names += ["first operand computed on load"] if self.rows is not None else []
        names += ["weights computed on load"] if any(part.weights for part in self.parts) else []
        return ", ".join([*names, *(description for description, count in several.items() if count > 1)])
