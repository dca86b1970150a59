"""Plans of kernels that reduce rows, columns or both, and what such kernels do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from fusegen.ir.symbolic import Axes, Dim, product
from fusegen.schedule.access import Access, Anchor
from fusegen.schedule.indices import IndexCheck
from fusegen.schedule.kernel import Body, Plan, SharedArrays
from fusegen.schedule.math import Copy, MathCall, MathParameter, Reduction

_SUMS = 4  # additions that take as long as one, in turn
_AT_ALIGNED_PLACES = ", at aligned places"


class Persistence(Enum):
    """The memory that holds a row between the phases of a row kernel."""

    REGISTERS = "registers"  # read once; each thread keeps its part
    STAGED = "staged"  # read once into shared memory; the next rows are under way while this one is worked on
    LOOPED = "looped"  # read again in each phase


_KEPT = {
    Persistence.REGISTERS: "read once, held in registers",
    Persistence.STAGED: "read once, staged in shared memory",
    Persistence.LOOPED: "read again in each phase",
}


@dataclass(frozen=True)
class RowPlan(Plan):
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
        """True if sums of columns are complete when the kernel ends: one block has all rows of a tile, or a cluster."""
        return self.tiled and self.resident == self.cluster

    @property
    def traits(self) -> tuple[str, tuple[float, ...]]:
        """As of every plan: longer rows take more threads that hold as much each. Staged rows of blocks that share a
        multiprocessor count as under way at the same time."""
        rows = self.rows * self.blocks_per_sm if self.slots else self.rows
        numbers = (max(1, self.chunks) * self.lanes, self.lanes, rows, self.cluster)
        return self.persistence.value, (*map(math.log2, numbers), float(self.keeps_shared), float(self.drains))

    @property
    def words(self) -> str:
        """As of every plan."""
        if self.tiled:
            blocks = f"{self.cluster} blocks together" if self.finishes else f"{self.resident} blocks"
            each = f"{self.threads} x {self.rows} threads, {self.unroll} x {self.lanes} elements each"
            return f"tiles of {self.span} columns: {blocks}, {each}" + _AT_ALIGNED_PLACES * self.shifted
        groups = f"{self.chunks} x {self.lanes}" if self.chunks else f"{self.lanes} at a time"
        rows = f", {self.rows} rows" if self.rows > 1 else ""
        rows = f", {self.blocks_per_sm} blocks a multiprocessor" if self.slots and self.blocks_per_sm > 1 else rows
        threads = f"{self.cluster} blocks of {self.block}" if self.cluster > 1 else str(self.threads)
        shared = ", what rows share at once" if self.keeps_shared and not self.resident else ""
        how = f"{self.persistence.value}: {threads} threads"
        return f"{how}, {groups} elements each{rows}{shared}" + _AT_ALIGNED_PLACES * self.shifted

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


@dataclass(frozen=True)
class ColumnPlan(Plan):
    """A kernel that combines partial sums of columns: a block has ``columns`` by ``rows`` threads."""

    columns: int
    rows: int


@dataclass(frozen=True)
class Segments:
    """A reduction over segments of a row, neighbours that the threads of a part of a warp hold: its result is a variable that the
    elements of a segment share.

    Attributes:
        call: math on each element whose results are combined; None where there is none.
        copies: what is combined beside those.
        after: math on the result that is the same for all of a segment; None where there is none.
    """

    call: MathCall | None
    copies: tuple[Copy, ...]
    reduction: Reduction
    after: MathCall | None


@dataclass(frozen=True)
class Phase:
    """The work between two reductions along a row.

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
    row_call: MathCall | None
    reads: tuple[Access, ...]
    late: tuple[Access, ...]
    segments: tuple[Segments, ...]
    call: MathCall | None
    copies: tuple[Copy, ...]
    reductions: tuple[Reduction, ...]
    column_sums: tuple[Reduction, ...]
    orders: tuple[MathParameter, ...]
    held: tuple[MathParameter, ...]
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
class RowBody(Body):
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
    checks: tuple[IndexCheck, ...]
    kept: tuple[Access, ...]
    partials: tuple[Access, ...]
    shared: SharedArrays
    plan: RowPlan
    sums: tuple[ColumnSum, ...] = ()
    anchor: Anchor | None = None
    segment: int = 0

    can_be_part = True

    @property
    def chosen(self) -> Plan:
        """As of every body."""
        return self.plan

    @property
    def cluster(self) -> int:
        """As of every body."""
        return self.plan.cluster

    @property
    def blocks_per_sm(self) -> int:
        """As of every body."""
        return self.plan.blocks_per_sm

    @property
    def counts(self) -> tuple[Dim, ...]:
        """As of every body."""
        return product(self.row_axes.extents), product(self.column_axes.extents)

    def words(self, kind: str) -> str:
        """As of every body."""
        sharing = f" by {self.plan.cluster} blocks" if self.plan.cluster > 1 else ""
        return f"{kind}, {len(self.phases)} phases, rows {_KEPT[self.plan.persistence]}{sharing}"

    @property
    def reason(self) -> str:
        """As of every body."""
        plan = self.plan
        elements = plan.chunks * plan.lanes
        if plan.tiled:
            return "nothing is reduced along a row: tiles of columns are summed over rows by several blocks"
        if plan.persistence is Persistence.STAGED and self.partials:
            return "the next rows come to shared memory while the columns of this one are added up in registers"
        sharing = f"{plan.cluster} blocks" if plan.cluster > 1 else "a block"
        if plan.persistence is Persistence.STAGED:
            return f"a row lies in the shared memory of {sharing} while the next ones come"
        if plan.persistence is Persistence.LOOPED:
            return f"a row is too long for {sharing} to keep, or may be"
        threads = f"{plan.threads} threads" + (f" of {sharing}" if plan.cluster > 1 else "")
        return f"a row fits the registers of {threads}, {elements} element{'s' if elements > 1 else ''} each"

    @property
    def peers(self) -> int:
        """Threads that share a segment: neighbours in a warp."""
        return self.segment // self.plan.lanes


@dataclass(frozen=True)
class ColumnBody(Body):
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

    def words(self, kind: str) -> str:
        """As of every body."""
        return "combination of the column sums"
