"""Plans and bodies of pointwise kernels, by vectors or by tiles."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from fusegen.ir.symbolic import Axes, FloorDiv, Index, axis_symbol, exact_quotient, product
from fusegen.schedule.access import Access
from fusegen.schedule.indices import IndexCheck
from fusegen.schedule.kernel import Body, Plan, SharedArrays
from fusegen.schedule.math import MathCall
from fusegen.units import counted

_WORD = 4  # bytes of a bank of shared memory


@dataclass(frozen=True)
class PointwisePlan(Plan):
    """The plan of a pointwise kernel.

    Attributes:
        threads: threads per block.
        vec: vector width: neighbouring elements that a thread handles together.
        unroll: vectors that a thread loads before it computes the first.
        tail: whether the last vector can be partial.
        rows: on the CPU, indices of the outer axes that a task handles before it advances along the last axis.
        wraps: whether a vector may continue in the next row of the last axis.
        repeats: vectors along another axis that a thread loops over, ``unroll`` at a time; math that does not depend on the axis
            is hoisted out of the loop.
        blocks_per_sm: blocks per SM that registers must leave room for.
    """

    threads: int
    vec: int
    unroll: int
    tail: bool
    rows: int = 1
    wraps: bool = False
    repeats: int = 1
    blocks_per_sm: int = 1

    fixes_threads = False

    @property
    def description(self) -> str:
        across = f", {self.rows} rows in turn" if self.rows > 1 else ", across rows" if self.wraps else ""
        repeated = f", looped {self.repeats} times" if self.repeats > 1 else ""
        return f"{self.threads} threads, {self.unroll} x {self.vec} elements per thread{across}{repeated}"


@dataclass(frozen=True)
class TilePlan(Plan):
    """The plan of a pointwise kernel with transposed operands: their tiles go through shared memory.

    Attributes:
        threads: threads per block; a block works on one tile.
        vec: vector width of results.
        rows: elements of a tile along the axis in which the transposed operands are contiguous.
        columns: elements of a tile along the axis in which results are contiguous.
    """

    threads: int
    vec: int
    rows: int
    columns: int

    @property
    def description(self) -> str:
        return f"tiles of {self.rows} x {self.columns}: {self.threads} threads, {self.unroll} x {self.vec} elements per thread"

    @property
    def unroll(self) -> int:
        return self.rows * self.columns // (self.threads * self.vec)

    def pitch(self, itemsize: int) -> int:
        """Returns the elements between columns of a tile in shared memory, padded by a word against bank conflicts."""
        return self.rows + max(1, _WORD // itemsize)

    def tile_bytes(self, itemsize: int) -> int:
        return self.columns * self.pitch(itemsize) * itemsize


@dataclass(frozen=True)
class HoistedMath:
    """Reads and math that a thread performs once for all elements along the first axis."""

    axis: sympy.Symbol
    reads: tuple[Access, ...]
    call: MathCall | None


@dataclass(frozen=True)
class PointwiseBody(Body):
    """One pass over an iteration space.

    Attributes:
        axes: the merged axes.
        reads, writes: accesses along the last axis; a write is named after the function's result.
        checks: indices to check against their range that no access mentions.
        call: the math; None if all writes are copies.
        copies: names of writes, each with the read whose elements it stores. No bits are converted, so those of a NaN stay.
        hoisted: reads and math hoisted out of a thread's loop along an axis.
        common_call: functions of values that all lanes of a vector have in common, once per vector.
    """

    axes: Axes
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    checks: tuple[IndexCheck, ...]
    call: MathCall | None
    plan: PointwisePlan
    hoisted: HoistedMath | None = None
    common_call: MathCall | None = None
    copies: tuple[tuple[str, str], ...] = ()

    can_be_part = True

    @property
    def chosen_plan(self) -> Plan:
        return self.plan

    @property
    def blocks_per_sm(self) -> int:
        return self.plan.blocks_per_sm

    def describe(self, kind: str) -> str:
        along = f", {self.plan.repeats} accesses per thread along {self.hoisted.axis}" if self.hoisted is not None else ""
        return f"{kind}, {counted(self.plan.vec, 'element')} per access{along}"

    @property
    def is_exact(self) -> bool:
        """True if the threads of all blocks have elements, for all sizes."""
        return exact_quotient(product(self.threads.extents), self.elements_per_block) is not None

    @property
    def elements_per_block(self) -> int:
        """The elements along `threads` of a block."""
        return self.plan.threads * self.plan.vec * (self.plan.unroll if self.hoisted is None else 1)

    @property
    def threads(self) -> Axes:
        """The axes that threads divide among themselves. If each thread loops along the first one, it is divided into chunks."""
        if self.hoisted is None:
            return self.axes
        chunks = FloorDiv(self.axes.extents[0] + sympy.Integer(self.plan.repeats - 1), sympy.Integer(self.plan.repeats))
        chunk = axis_symbol(f"{self.hoisted.axis.name}_chunk")
        return Axes((chunk, *self.axes.symbols[1:]), (chunks, *self.axes.extents[1:]))


@dataclass(frozen=True)
class TileBody(Body):
    """One pass over an iteration space by tiles, with transposed operands.

    Attributes:
        axes: the merged axes.
        row_axis: the axis in which transposed operands are contiguous.
        column_axis: the axis in which results are contiguous.
        tiles: the axes of the grid: outer axes, tiles of columns, tiles of rows.
        transposed: accesses of the transposed operands, along `row_axis`.
        reads, writes: accesses along `column_axis`.
        multiples: sizes that must be multiples of the vector width for whole, aligned vectors; otherwise accesses are scalar.
        call: the math; None if all writes are copies.
        copies: names of writes, each with the read whose elements it stores. No bits are converted, so those of a NaN stay.
        shared: a tile for each transposed operand.
    """

    axes: Axes
    row_axis: sympy.Symbol
    column_axis: sympy.Symbol
    tiles: Axes
    transposed: tuple[Access, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    multiples: tuple[Index, ...]
    call: MathCall | None
    shared: SharedArrays
    plan: TilePlan
    copies: tuple[tuple[str, str], ...] = ()

    can_be_part = True

    @property
    def chosen_plan(self) -> Plan:
        return self.plan

    def describe(self, kind: str) -> str:
        return f"{kind}, transposed through shared memory in tiles of {self.plan.rows} x {self.plan.columns}"
