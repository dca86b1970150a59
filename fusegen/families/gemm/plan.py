"""Plans of products on tensor cores, and what such kernels do."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.ir.symbolic import Index
from fusegen.schedule.kernel import Body, Plan
from fusegen.schedule.math import LaneFunction, Reduction


@dataclass(frozen=True)
class ContractionPlan(Plan):
    """A product on tensor cores, warpgroup by warpgroup.

    Attributes:
        consumers: warpgroups that multiply, 64 rows of a tile each.
        tile_n: columns of a tile.
        stages: of the ring through which tiles of the operands come.
        group: rows of tiles that are walked together.
        a_major, b_major: which index of an operand is contiguous: ``k``, or ``m`` and ``n``.
        products: matrices that meet the same first operand.
        blocks_per_sm: blocks that share a multiprocessor.
        producer_registers, consumer_registers: of a thread, once the warpgroups have traded them.
    """

    consumers: int
    tile_n: int
    stages: int
    group: int
    a_major: str = "k"
    b_major: str = "k"
    products: int = 1
    blocks_per_sm: int = 1
    producer_registers: int = 24
    consumer_registers: int = 240

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and a warpgroup that brings tiles in."""
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """The ring (lines of 128 bytes and two barriers a stage) and two chunks of results a consumer."""
        ring = self.stages * ((self.tile_m + self.tile_n * self.products) * 128 + 16)
        return ring + self.consumers * 2 * 8192


@dataclass(frozen=True)
class MmaPlan(Plan):
    """A product on tensor cores, warp by warp.

    Attributes:
        warps_m, warps_n: of a block, along the rows and the columns of a tile.
        warp_m, warp_n: rows, and columns of each product, that a warp accumulates.
        stages: of the ring through which tiles of the operands come.
        group: rows of tiles that are walked together.
        a_major, b_major: which index of an operand is contiguous: ``k``, or ``m`` and ``n``.
        a_width, b_width: elements that are copied at once.
        products: matrices that meet the same first operand.
        blocks_per_sm: blocks that share a multiprocessor.
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
    def tile_m(self) -> int:
        """Rows of a tile."""
        return self.warps_m * self.warp_m

    @property
    def tile_n(self) -> int:
        """Columns of a tile, of each product."""
        return self.warps_n * self.warp_n

    @property
    def tile_k(self) -> int:
        """Elements of the depth in a stage."""
        return 32

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_m * self.warps_n

    @property
    def copies_evenly(self) -> bool:
        """True if all threads copy equally much of a stage, each in lines that are swizzled alike."""
        return self._is_even(self.tile_m, self.a_major) and self._is_even(self.tile_n, self.b_major)

    def _is_even(self, side: int, major: str) -> bool:
        lines, length = (side, self.tile_k) if major == "k" else (self.tile_k, side)
        units = (1 << (length - 1).bit_length()) // 8  # of 16 bytes, for which a line has room
        step = self.threads // units
        return step % 8 == 0 and lines % step == 0

    @property
    def a_bytes(self) -> int:
        """Bytes of the first operand in a stage."""
        return self._tile_bytes(self.tile_m, self.a_major)

    @property
    def b_bytes(self) -> int:
        """Bytes of one matrix that meets it, in a stage."""
        return self._tile_bytes(self.tile_n, self.b_major)

    @property
    def shared_bytes(self) -> int:
        """The ring."""
        return self.stages * (self.a_bytes + self.products * self.b_bytes)

    def _tile_bytes(self, extent: int, major: str) -> int:
        """16-bit values; lines along the extent are a power of two long, as the swizzle needs."""
        return 2 * self.tile_k * (extent if major == "k" else 1 << (extent - 1).bit_length())


@dataclass(frozen=True)
class Accumulated:
    """Two neighbouring columns of a product, as an epilogue takes them.

    Attributes:
        name: of the array of two.
        product: the number of the matrix, among those of the part that meet the first operand.
        shift: how many columns they lie to the right of the epilogue's own.
    """

    name: str
    product: int
    shift: int


@dataclass(frozen=True)
class HeadStatistic:
    """A statistic of whole heads: a state that is combined over the columns of each, in each row.

    Attributes:
        reduction: how, and the name of the result.
        columns: of a head.
        accumulated: what the math takes.
        lift: the math on two neighbouring columns whose results are combined; it may take statistics that come before.
    """

    reduction: Reduction
    columns: int
    accumulated: tuple[Accumulated, ...]
    lift: LaneFunction

    @property
    def name(self) -> str:
        """The name of the only component of the state."""
        return self.reduction.components[0].name


@dataclass(frozen=True)
class PartResult:
    """The storage of a result of an epilogue.

    Attributes:
        buffer: the key.
        offset: of an element, over the epilogue's axes; None when whole tiles leave by a tensor map.
        octets: whether eight neighbouring columns lie side by side, aligned.
        head: columns of a head, where there is an element a head; 0 where there is one a column.
    """

    buffer: int
    dtype: DType
    offset: Index | None
    octets: bool = True
    head: int = 0


@dataclass(frozen=True)
class ProductPart:
    """Columns of a launch's results that have an epilogue.

    Attributes:
        columns: how many.
        head: columns of a head, by which the epilogue numbers them; all columns where it does not.
        rows: how many of the epilogue's axes number rows; those that follow number heads, the last one pairs of columns.
        products: matrices that meet the first operand.
        accumulated: what the epilogue takes.
        epilogue: math on two neighbouring columns.
        results: one a result of the epilogue.
        statistics: of heads, in the order in which they are found before.
    """

    columns: int
    head: int
    rows: int
    products: int
    accumulated: tuple[Accumulated, ...]
    epilogue: LaneFunction
    results: tuple[PartResult, ...]
    statistics: tuple[HeadStatistic, ...] = ()

    @property
    def functions(self) -> tuple[LaneFunction, ...]:
        """All math of the part, in the order in which it runs."""
        return (*(s.lift for s in self.statistics), self.epilogue)


@dataclass(frozen=True)
class ContractionBody(Body):
    """Products of one first operand, each with an epilogue; the parts lie side by side.

    Attributes:
        input_dtype: the element type of the operands.
        parts: at least one.
        matrices: buffers of operands that are read by address: the first one's, then of each part those that meet it; empty where
            they come by tensor maps.
    """

    input_dtype: DType
    parts: tuple[ProductPart, ...]
    plan: ContractionPlan | MmaPlan
    matrices: tuple[int, ...] = ()

    @property
    def tile_dtypes(self) -> frozenset[DType]:
        """As of every body."""
        return frozenset({self.input_dtype, *(r.dtype for part in self.parts for r in part.results)})

    def words(self, kind: str) -> str:
        """As of every body; what is computed at once, if that is more than one thing."""
        columns = " + ".join(str(part.columns) for part in self.parts)
        results = sum(len(part.results) for part in self.parts)
        several = {
            f"{columns} columns": len(self.parts),
            "two products at a time": self.plan.products,
            f"{results} results": results,
        }
        how = [f"{kind} by mma.sync" if isinstance(self.plan, MmaPlan) else kind]
        return ", ".join([*how, *(words for words, count in several.items() if count > 1)])
