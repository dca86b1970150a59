"""Plans of kernels over points, straight or by tiles, and what such kernels do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy

from fusegen.ir.symbolic import Axes, FloorDiv, Index, axis_symbol
from fusegen.schedule.access import Access
from fusegen.schedule.indices import IndexCheck
from fusegen.schedule.kernel import Body, Plan, SharedArrays
from fusegen.schedule.math import MathCall

_WORD = 4  # bytes of a bank of shared memory


@dataclass(frozen=True)
class PointwisePlan(Plan):
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

    fixes_threads = False

    @property
    def words(self) -> str:
        """As of every plan."""
        across = f", {self.rows} rows in turn" if self.rows > 1 else ", across rows" if self.wraps else ""
        repeated = f", {self.repeats} times" if self.repeats > 1 else ""
        return f"{self.threads} threads, {self.unroll} x {self.lanes} elements each{across}{repeated}"

    @property
    def traits(self) -> tuple[str, tuple[float, ...]]:
        """As of every plan."""
        return "pointwise", tuple(map(math.log2, (self.lanes, self.unroll, self.threads, self.rows, self.repeats)))


@dataclass(frozen=True)
class TilePlan(Plan):
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
        """As of every plan."""
        return "tiles", tuple(map(math.log2, (self.lanes, self.threads, self.rows, self.columns)))

    @property
    def words(self) -> str:
        """As of every plan."""
        return f"tiles of {self.rows} x {self.columns}: {self.threads} threads, {self.unroll} x {self.lanes} elements each"

    @property
    def unroll(self) -> int:
        """Groups of lanes of a thread."""
        return self.rows * self.columns // (self.threads * self.lanes)

    def pitch(self, itemsize: int) -> int:
        """Elements from one column of a tile to the next in shared memory: a word more than its rows take, so that neighbouring
        columns lie in different banks."""
        return self.rows + max(1, _WORD // itemsize)

    def tile_bytes(self, itemsize: int) -> int:
        """Bytes of an operand's tile in shared memory."""
        return self.columns * self.pitch(itemsize) * itemsize


@dataclass(frozen=True)
class Hoisted:
    """The values that a thread reads and computes once for all points along an axis.

    Attributes:
        axis: the first of the kernel's.
        reads: as of a `PointwiseBody`.
        call: the math; None where there is none.
    """

    axis: sympy.Symbol
    reads: tuple[Access, ...]
    call: MathCall | None


@dataclass(frozen=True)
class PointwiseBody(Body):
    """One pass over an iteration space.

    Attributes:
        axes: the merged axes.
        reads, writes: accesses along the last axis; a write is named after the function's result.
        checks: indices that must be in range, and which no access mentions.
        call: the math.
        hoisted: what is neither read nor computed at each point, where a thread goes along an axis.
    """

    axes: Axes
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    checks: tuple[IndexCheck, ...]
    call: MathCall
    plan: PointwisePlan
    hoisted: Hoisted | None = None

    can_be_part = True

    @property
    def chosen(self) -> Plan:
        """As of every body."""
        return self.plan

    @property
    def blocks_per_sm(self) -> int:
        """As of every body."""
        return self.plan.blocks_per_sm

    def words(self, kind: str) -> str:
        """As of every body."""
        along = f", {self.plan.repeats} times along {self.hoisted.axis}" if self.hoisted is not None else ""
        return f"{kind}, {self.plan.lanes} elements a thread at a time{along}"

    @property
    def threads(self) -> Axes:
        """The axes that threads divide among them: the first one in chunks where each thread goes along it."""
        if self.hoisted is None:
            return self.axes
        chunks = FloorDiv(self.axes.extents[0] + sympy.Integer(self.plan.repeats - 1), sympy.Integer(self.plan.repeats))
        chunk = axis_symbol(f"{self.hoisted.axis.name}_chunk")
        return Axes((chunk, *self.axes.symbols[1:]), (chunks, *self.axes.extents[1:]))


@dataclass(frozen=True)
class TileBody(Body):
    """One pass over an iteration space, tile by tile, where some operands lie across the results.

    Attributes:
        axes: the merged axes.
        row_axis: along which the operands lie that go through shared memory.
        column_axis: along which results lie.
        tiles: what the grid numbers: the other axes, tiles of columns, tiles of rows.
        crossing: accesses of those operands, along the axis of rows.
        reads, writes: as of a `PointwiseBody`, along the axis of columns.
        multiples: sizes that must be multiples of the plan's lanes for groups of lanes to be whole and at aligned places; where
            one is not, points are handled one by one.
        call: the math.
        shared: a tile of each operand that goes through shared memory is staged.
    """

    axes: Axes
    row_axis: sympy.Symbol
    column_axis: sympy.Symbol
    tiles: Axes
    crossing: tuple[Access, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    multiples: tuple[Index, ...]
    call: MathCall
    shared: SharedArrays
    plan: TilePlan

    can_be_part = True

    @property
    def chosen(self) -> Plan:
        """As of every body."""
        return self.plan

    def words(self, kind: str) -> str:
        """As of every body."""
        return f"{kind}, tiles of {self.plan.rows} x {self.plan.columns} through shared memory"
