"""Plans: how a kernel is laid out on the machine. Frozen, chosen by pure heuristics, one class a kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

_WORD = 4  # bytes of a bank of shared memory
_SUMS = 4  # additions that take as long as one, in turn


class Persistence(Enum):
    """Where a row lives between the phases of a row kernel."""

    REGISTERS = "registers"  # read once; each thread keeps its part
    STAGED = "staged"  # read once into shared memory; the next rows are under way while this one is worked on
    LOOPED = "looped"  # read again in each phase


@dataclass(frozen=True)
class PointwisePlan:
    """A pointwise kernel.

    Attributes:
        threads: of a block.
        lanes: neighbouring elements that a thread handles together.
        unroll: groups of lanes that a thread loads before it computes the first.
        tail: whether the last group can be partial.
        rows: on the CPU, points of all axes but the last that a task takes before it goes on along the last axis.
        wraps: whether a group of lanes may go on in the next row of the last axis.
        repeats: groups of lanes along another axis that a thread goes through, ``unroll`` at a time; what is the same for all of
            them is read and computed once.
        blocks_per_sm: blocks that registers must leave room for on a multiprocessor.
    """

    threads: int
    lanes: int
    unroll: int
    tail: bool
    rows: int = 1
    wraps: bool = False
    repeats: int = 1
    blocks_per_sm: int = 1

    @property
    def traits(self) -> tuple[str, tuple[float, ...]]:
        """What it has in common with plans for other sizes: a kind, and numbers of which a factor of two counts as one."""
        return "pointwise", tuple(map(math.log2, (self.lanes, self.unroll, self.threads, self.rows, self.repeats)))


@dataclass(frozen=True)
class TilePlan:
    """A pointwise kernel some of whose operands lie across its results: tiles of these go through shared memory.

    Attributes:
        threads: of a block, which works on one tile.
        lanes: neighbouring elements of a result that a thread handles together.
        rows: points of a tile along the axis along which those operands lie.
        columns: points of a tile along the axis along which results lie.
    """

    threads: int
    lanes: int
    rows: int
    columns: int

    @property
    def traits(self) -> tuple[str, tuple[float, ...]]:
        """As of a `PointwisePlan`."""
        return "tiles", tuple(map(math.log2, (self.lanes, self.threads, self.rows, self.columns)))

    @property
    def unroll(self) -> int:
        """Groups of lanes of a thread."""
        return self.rows * self.columns // (self.threads * self.lanes)

    def pitch(self, itemsize: int) -> int:
        """Elements from one column of a tile to the next in shared memory: a word more than its rows take, so that neighbouring
        columns lie in different banks."""
        return self.rows + max(1, _WORD // itemsize)

    def tile_bytes(self, itemsize: int) -> int:
        """Of an operand's tile in shared memory."""
        return self.columns * self.pitch(itemsize) * itemsize


@dataclass(frozen=True)
class RowPlan:
    """A row kernel.

    Attributes:
        threads: that share a row, of all blocks that do.
        rows: rows that a block works on at the same time (more than one only when a row takes a warp or less).
        lanes: neighbouring elements that a thread handles together.
        chunks: groups of lanes of a row that a thread holds or stages; 0 when the row is looped over.
        slots: groups of lanes that a thread has room for in shared memory, of this row and the next ones; 0 unless staged.
        persistence: where the row lives between phases.
        exact: whether the row fills all chunks, so that no bound is checked.
        resident: blocks that share the rows, each working on many; 0 when there is a block for every few rows.
        blocks_per_sm: blocks that registers must leave room for on a multiprocessor, so that one loads while another reduces.
        tiled: whether the grid also runs over tiles of columns, as it can when nothing is reduced along a row: ``threads`` lie
            along the columns of a tile, ``rows`` times as many along its rows, and ``resident`` blocks share these.
        shifted: whether groups of lanes start where an access is aligned, though rows do not: the first and the last group of a row
            are partial then; or those of a tile, in which ``rows`` are so many that after them groups start where they did.
        cluster: blocks that share a row, and send each other their parts of what is reduced along it; or that share a tile, and
            finish its sums.
        unroll: rows of a tile that a thread asks for before it works on the first.
        keeps_shared: whether what all rows share is kept in registers: asked for before a block's first row, or together with its
            only one.
        drains: whether threads take a staged row into registers at once, which makes room for the next ones.
        foresees: groups of lanes of what a phase reads late that a thread asks for before it uses the first.
        defers: whether what only the last phase needs of the row is read late as well, and not staged.
    """

    threads: int
    rows: int
    lanes: int
    chunks: int
    persistence: Persistence
    exact: bool
    resident: int
    blocks_per_sm: int = 1
    slots: int = 0
    tiled: bool = False
    shifted: bool = False
    cluster: int = 1
    unroll: int = 1
    keeps_shared: bool = False
    foresees: int = 0
    defers: bool = False
    drains: bool = False

    @property
    def finishes(self) -> bool:
        """Whether sums of columns are complete when the kernel ends: one block has all rows of a tile, or a cluster."""
        return self.tiled and self.resident == self.cluster

    @property
    def traits(self) -> tuple[str, tuple[float, ...]]:
        """As of a `PointwisePlan`: longer rows take more threads that hold as much each. Staged rows of blocks that share a
        multiprocessor count as under way at the same time."""
        rows = self.rows * self.blocks_per_sm if self.slots else self.rows
        numbers = (max(1, self.chunks) * self.lanes, self.lanes, rows, self.cluster)
        return self.persistence.value, (*map(math.log2, numbers), float(self.keeps_shared), float(self.drains))

    @property
    def sums(self) -> int:
        """Parts that a thread has under way of what it reduces along a row: an addition need not wait for the one before."""
        return min(self.lanes, _SUMS)

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.rows // (1 if self.tiled else self.cluster)

    @property
    def warps(self) -> int:
        """Warps that share a row."""
        return max(1, self.threads // 32)

    @property
    def meeting(self) -> int:
        """Lanes that hold a part of each of these warps: a power of two, so that halves combine with each other."""
        return 1 << (self.warps - 1).bit_length()

    @property
    def span(self) -> int:
        """Columns that the threads of a row cover with one group of lanes each; those of a tile, wherever within the first group it
        starts."""
        return (self.threads - (self.tiled and self.shifted)) * self.lanes


LanePlan: TypeAlias = PointwisePlan | TilePlan | RowPlan
"""Of kernels that have several plans, all of which are right."""


@dataclass(frozen=True)
class ColumnPlan:
    """A kernel that combines partial sums of columns: a block has ``columns`` by ``rows`` threads."""

    columns: int
    rows: int


@dataclass(frozen=True)
class ScanPlan:
    """A kernel that goes along rows and carries a state from one group of columns to the next.

    Attributes:
        threads: that share a row.
        rows: rows that a block works on at the same time (more than one only when a row takes a warp).
        lanes: neighbouring elements that a thread handles together.
    """

    threads: int
    rows: int
    lanes: int

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.rows

    @property
    def warps(self) -> int:
        """Warps that share a row."""
        return max(1, self.threads // 32)


@dataclass(frozen=True)
class ContractionPlan:
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
class MmaPlan:
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
        """Whether all threads copy equally much of a stage, each in lines that are swizzled alike."""
        return self._is_even(self.tile_m, self.a_major) and self._is_even(self.tile_n, self.b_major)

    def _is_even(self, side: int, major: str) -> bool:
        lines, length = (side, self.tile_k) if major == "k" else (self.tile_k, side)
        units = (1 << (length - 1).bit_length()) // 8  # of 16 bytes, for which a line has room
        step = self.threads // units
        return step % 8 == 0 and lines % step == 0

    @property
    def a_bytes(self) -> int:
        """Of the first operand in a stage."""
        return self._tile_bytes(self.tile_m, self.a_major)

    @property
    def b_bytes(self) -> int:
        """Of one matrix that meets it."""
        return self._tile_bytes(self.tile_n, self.b_major)

    @property
    def shared_bytes(self) -> int:
        """The ring."""
        return self.stages * (self.a_bytes + self.products * self.b_bytes)

    def _tile_bytes(self, extent: int, major: str) -> int:
        """16-bit values; lines along the extent are a power of two long, as the swizzle needs."""
        return 2 * self.tile_k * (extent if major == "k" else 1 << (extent - 1).bit_length())


_LINE = 64  # 16-bit values in the 128 bytes that the swizzle works on


@dataclass(frozen=True)
class AttentionPlan:
    """Streaming attention on tensor cores.

    Attributes:
        head_dim: channels of a head of queries and keys.
        value_dim: channels of a head of values, and of the result.
        tile_k: keys of a tile.
        stages: tiles of keys, and as many of values, that are under way.
        q_stages: tiles of queries, likewise.
        sharing: heads of queries that read one head of keys and values.
        consumers: warpgroups that compute, 64 queries each.
        producer_registers, consumer_registers: of a thread, once the warpgroups have traded them.
    """

    head_dim: int
    value_dim: int
    tile_k: int
    stages: int
    q_stages: int = 2
    sharing: int = 1
    consumers: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240

    @property
    def tile_q(self) -> int:
        """Queries of a tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and a warpgroup that brings tiles in."""
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Tiles of 16-bit values in whole lines, two barriers a tile, aligned as the swizzle needs."""
        keys, values = (2 * -(-width // _LINE) * _LINE for width in (self.head_dim, self.value_dim))
        tiles = keys * self.q_stages * self.tile_q + (keys + values) * self.stages * self.tile_k
        barriers = 8 * (2 * self.q_stages + 4 * self.stages)
        return -(-(tiles + barriers) // 1024) * 1024
