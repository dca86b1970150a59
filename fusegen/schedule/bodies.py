"""What a kernel of each kind does: its functions, how operands are touched, and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import sympy

from fusegen.dtypes import DType
from fusegen.ir.symbolic import Axes, Dim, FloorDiv, Index, axis_symbol
from fusegen.schedule.access import Access, Anchor
from fusegen.schedule.indices import Check
from fusegen.schedule.math import Call, Copy, Function, LaneFunction, Parameter, Reduction
from fusegen.schedule.plan import AttentionPlan, ColumnPlan, ContractionPlan, MmaPlan, PointwisePlan, RowPlan, ScanPlan, TilePlan

# Arrays in the shared memory of a block, one behind the other.


SCRATCH_BYTES = 8
"""Of an element of a state that threads exchange: the widest type."""
BARRIER_BYTES = 8
BANKS = 32  # of 4 bytes
_MULTIPLE = 8  # elements of an array, so that the next one is aligned


@dataclass(frozen=True)
class SharedArrays:
    """Where arrays begin, in bytes.

    Attributes:
        scratch: by which threads exchange components of states.
        ordered: by which threads exchange rows that they put in order.
        sums: to which the row groups of a block add components of column sums.
        staged: fragments of rows.
        barriers: each of which counts what other blocks send for one reduction.
        bytes: of all arrays.
    """

    scratch: tuple[int, ...]
    ordered: tuple[int, ...]
    sums: tuple[int, ...]
    staged: tuple[int, ...]
    barriers: tuple[int, ...]
    bytes: int


def padded(elements: int) -> int:
    """The room for elements of which those behind each turn of the banks lie one further: threads that store neighbours each, one
    after the other, meet in no bank then."""
    room = elements + elements // BANKS
    return -(-room // _MULTIPLE) * _MULTIPLE


def arranged(
    scratch: Sequence[int] = (),
    sums: Sequence[int] = (),
    staged: Sequence[int] = (),
    barriers: Sequence[int] = (),
    ordered: Sequence[int] = (),
) -> SharedArrays:
    """Arrays of some bytes each, in the order of `SharedArrays`."""
    ends = tuple(accumulate((0, *scratch, *ordered, *sums, *staged, *barriers)))
    first, behind = len(scratch), len(scratch) + len(ordered)
    last = behind + len(sums)
    above = last + len(staged)
    return SharedArrays(ends[:first], ends[first:behind], ends[behind:last], ends[last:above], ends[above:-1], ends[-1])


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
    call: Call | None


@dataclass(frozen=True)
class PointwiseBody:
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
    checks: tuple[Check, ...]
    call: Call
    plan: PointwisePlan
    hoisted: Hoisted | None = None

    @property
    def threads(self) -> Axes:
        """The axes that threads divide among them: the first one in chunks where each thread goes along it."""
        if self.hoisted is None:
            return self.axes
        chunks = FloorDiv(self.axes.extents[0] + sympy.Integer(self.plan.repeats - 1), sympy.Integer(self.plan.repeats))
        chunk = axis_symbol(f"{self.hoisted.axis.name}_chunk")
        return Axes((chunk, *self.axes.symbols[1:]), (chunks, *self.axes.extents[1:]))


@dataclass(frozen=True)
class TileBody:
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
    call: Call
    shared: SharedArrays
    plan: TilePlan


@dataclass(frozen=True)
class Segments:
    """A reduction over segments of a row, neighbours that the threads of a part of a warp hold: its result is a variable that the
    elements of a segment share.

    Attributes:
        call: math on each element whose results are combined; None where there is none.
        copies: what is combined beside those.
        after: math on the result that is the same for all of a segment; None where there is none.
    """

    call: Call | None
    copies: tuple[Copy, ...]
    reduction: Reduction
    after: Call | None


@dataclass(frozen=True)
class Phase:
    """What happens between two reductions along a row.

    Attributes:
        row_reads: accesses of one element a row that are first needed here.
        row_call: math on the row's statistics, done once a row; None where there is nothing to do.
        reads: fragments of the row that are loaded here, all at once.
        late: fragments that are loaded group by group, right before they are used.
        segments: what is reduced over segments, in order: each may use those before.
        call: math on each element of the row; None where there is none.
        copies: results of the phase beside those of the call.
        reductions: results that are combined along the row; named as statistics.
        column_sums: results that are combined over rows.
        orders: of what is held, the rows that are put in order when the phase ends.
        held: results that are kept in registers for later phases.
        writes: results that are stored.
        segment_writes: results of which one a segment is stored.
        row_writes: variables of the row that are stored once.
    """

    row_reads: tuple[Access, ...]
    row_call: Call | None
    reads: tuple[Access, ...]
    late: tuple[Access, ...]
    segments: tuple[Segments, ...]
    call: Call | None
    copies: tuple[Copy, ...]
    reductions: tuple[Reduction, ...]
    column_sums: tuple[Reduction, ...]
    orders: tuple[Parameter, ...]
    held: tuple[Parameter, ...]
    writes: tuple[Access, ...]
    segment_writes: tuple[Access, ...]
    row_writes: tuple[tuple[Access, str], ...]


@dataclass(frozen=True)
class ColumnSum:
    """A reduction over rows.

    Attributes:
        partials: accesses of the workspace along the column axis, one a component; none where no workspace is read.
        writes: where components of the state go, named after these.
    """

    reduction: Reduction
    partials: tuple[Access, ...]
    writes: tuple[Access, ...]


@dataclass(frozen=True)
class RowBody:
    """Rows one after another, each in phases that end in reductions.

    Attributes:
        row_axes, column_axes: merged axes.
        phases: in order.
        checks: indices that must be in range, and which no access mentions.
        kept: fragments that all rows share, loaded before the first one.
        partials: for column sums: the accesses of the workspace, whose row is the number of the block.
        shared: scratch of each component that is reduced along the row, in the order of the phases; sums of each partial; each
            fragment of the first phase that is staged; a barrier of each reduction along a row that blocks share.
        sums: of a tile of columns: what a block, or a cluster, makes of its rows, and where it goes.
        anchor: what is accessed at aligned places where groups of lanes do not start with the row; else None.
        segment: columns of a segment, the extent of the last axis; 0 where nothing goes by segments.
    """

    row_axes: Axes
    column_axes: Axes
    phases: tuple[Phase, ...]
    checks: tuple[Check, ...]
    kept: tuple[Access, ...]
    partials: tuple[Access, ...]
    shared: SharedArrays
    plan: RowPlan
    sums: tuple[ColumnSum, ...] = ()
    anchor: Anchor | None = None
    segment: int = 0

    @property
    def peers(self) -> int:
        """Threads that share a segment: neighbours in a warp."""
        return self.segment // self.plan.lanes


@dataclass(frozen=True)
class ColumnBody:
    """Partial sums of columns combined, in a fixed order.

    Attributes:
        sums: what is combined.
        column_axes: merged axes of the columns.
        parts: rows in the workspace, at most.
        row_blocks: blocks that the rows make: where they are fewer, so are the rows in the workspace. None where these are as many
            as there can be, whatever the rows are.
        shared: scratch of each component.
    """

    sums: tuple[ColumnSum, ...]
    column_axes: Axes
    parts: int
    row_blocks: Dim | None
    shared: SharedArrays
    plan: ColumnPlan


@dataclass(frozen=True)
class ScanBody:
    """Rows along which states are carried.

    Attributes:
        row_axes, column_axes: merged axes; the latter is one.
        reads, writes: accesses along the column axis; a write is named after the result of ``finish``.
        checks: indices that must be in range, and which no access mentions.
        scans: what is carried: its components' variables are results of ``lift``, and what ``finish`` takes.
        lift: math on each element that gives what is scanned.
        finish: math on each element and what was scanned up to it.
        shared: scratch of each component of each scan.
    """

    row_axes: Axes
    column_axes: Axes
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    checks: tuple[Check, ...]
    scans: tuple[Reduction, ...]
    lift: Call
    finish: Call
    shared: SharedArrays
    plan: ScanPlan


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
    """What an epilogue takes of whole heads: a state that is combined over the columns of each, in each row.

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
        """Of the only component of the state."""
        return self.reduction.components[0].name


@dataclass(frozen=True)
class PartResult:
    """Where a result of an epilogue goes.

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
class ContractionBody:
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


@dataclass(frozen=True)
class AttentionBody:
    """Streaming attention: the recurrence's functions around two products.

    Attributes:
        input_dtype, output_dtype: element types.
        score: from the product of a query with two neighbouring keys; axes are batch, head, query and pairs of keys.
        finish: from two neighbouring channels of the weighted sum; axes end in pairs of channels.
        weights: ``anchor``, ``weight`` and ``carry``.
        peak, mass: the reductions of scores and of weights.
        has_sink: whether ``finish`` also needs the peak of the scores.
        out_offset: of a query's first channel in the output, over the axes of ``finish``.
        seen: how many keys a query sees at most, over the axes of ``score``; None where they may be all.
    """

    input_dtype: DType
    output_dtype: DType
    score: LaneFunction
    finish: LaneFunction
    weights: tuple[Function, ...]
    peak: Reduction
    mass: Reduction
    has_sink: bool
    out_offset: Index
    seen: Index | None
    plan: AttentionPlan


Body: TypeAlias = PointwiseBody | TileBody | RowBody | ColumnBody | ScanBody | ContractionBody | AttentionBody
