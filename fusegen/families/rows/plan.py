"""Plans and bodies of kernels that reduce rows, columns or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fusegen.ir.symbolic import Axes, Dim, product
from fusegen.schedule.access import Access, Anchor
from fusegen.schedule.indices import IndexCheck
from fusegen.schedule.kernel import Body, Plan, SharedArrays
from fusegen.schedule.math import Copy, MathCall, MathParameter, Reduction
from fusegen.units import counted

_SUMS = 4  # independent accumulators that hide the latency of an addition
_ALIGNED_VECTORS = ", aligned vectors of unaligned rows"


class Persistence(Enum):
    """The memory that holds a row between the phases of a kernel."""

    REGISTERS = "registers"  # read once; each thread keeps its part
    STAGED = "staged"  # read once into shared memory, while the next rows are prefetched
    MULTI_PASS = "multi-pass"  # read again in each phase


_PERSISTENCE_TEXT = {
    Persistence.REGISTERS: "rows read once into registers",
    Persistence.STAGED: "rows read once into shared memory",
    Persistence.MULTI_PASS: "rows read again in each phase",
}


@dataclass(frozen=True)
class RowPlan(Plan):
    """The plan of a row kernel.

    Attributes:
        threads: threads that share a row, over all blocks of a cluster.
        rows: rows per block at a time; above 1 only if a row takes a warp or less.
        vec: vector width: neighbouring elements that a thread handles together.
        vectors_per_thread: vectors of a row per thread; 0 if the row is read in several passes.
        stage_vectors: vectors per thread that shared memory holds, of this row and of prefetched rows; 0 unless staged.
        persistence: the memory that holds the row between phases.
        exact: whether the row fills all vectors, so that bounds checks are dropped.
        persistent_blocks: persistent blocks that loop over the rows; 0 if each block has its own.
        blocks_per_sm: blocks per SM that registers must leave room for, so that one loads while another reduces.
        tiled: whether the grid covers tiles of columns, for kernels that reduce nothing along rows. A tile has ``threads`` along
            its columns and ``rows`` times as many along its rows, which ``persistent_blocks`` blocks share.
        unaligned: whether vectors start at aligned addresses although rows do not, so that the first and last vector of a row are
            partial. In a tile, ``rows`` is a multiple of the rows after which the alignment repeats.
        cluster: blocks of a cluster, which share a row and exchange partial reductions, or share a tile and finish its sums.
        unroll: rows of a tile that a thread loads ahead.
        cache_weights: whether values shared by all rows stay in registers, loaded before a block's first row or with its only one.
        stage_to_registers: whether threads move a staged row to registers at once, which frees its stage for the next row.
        prefetch: vectors of late reads that a thread prefetches before it uses the first.
        late_loads: whether row data that only the last phase needs is read late instead of staged.
        once: whether one phase alone reads a long row, and nothing holds it.
    """

    threads: int
    rows: int
    vec: int
    vectors_per_thread: int
    persistence: Persistence
    exact: bool
    persistent_blocks: int
    blocks_per_sm: int = 1
    stage_vectors: int = 0
    tiled: bool = False
    unaligned: bool = False
    cluster: int = 1
    unroll: int = 1
    cache_weights: bool = False
    prefetch: int = 0
    late_loads: bool = False
    stage_to_registers: bool = False
    once: bool = False

    @property
    def finishes(self) -> bool:
        """True if the kernel writes final column sums: one block or cluster handles all rows of a tile."""
        return self.tiled and self.persistent_blocks == self.cluster

    @property
    def description(self) -> str:
        if self.tiled:
            blocks = counted(self.persistent_blocks, "block") + (" of one cluster" if self.finishes and self.cluster > 1 else "")
            each = f"{self.threads} x {self.rows} threads, {self.unroll} x {self.vec} elements per thread"
            return f"tiles of {self.columns_per_step} columns: {blocks}, {each}" + _ALIGNED_VECTORS * self.unaligned
        elements = f"{self.vectors_per_thread} x {self.vec}" if self.vectors_per_thread else f"passes of {self.vec}"
        rows = f", {self.rows} rows per block" if self.rows > 1 else ""
        rows = f", {self.blocks_per_sm} blocks per SM" if self.stage_vectors and self.blocks_per_sm > 1 else rows
        threads = f"cluster of {self.cluster} blocks of {self.block}" if self.cluster > 1 else str(self.threads)
        weights = ", weights loaded with the row" if self.cache_weights and not self.persistent_blocks else ""
        if self.once:
            return f"single-pass: {threads} threads per row, {self.vec} elements per access" + _ALIGNED_VECTORS * self.unaligned
        layout = f"{self.persistence.value}: {threads} threads per row"
        return f"{layout}, {elements} elements per thread{rows}{weights}" + _ALIGNED_VECTORS * self.unaligned

    @property
    def sums(self) -> int:
        """Independent accumulators per thread for reductions along a row."""
        return min(self.vec, _SUMS)

    @property
    def block(self) -> int:
        return self.threads * self.rows // (1 if self.tiled else self.cluster)

    @property
    def warps(self) -> int:
        return max(1, self.threads // 32)

    @property
    def combining_lanes(self) -> int:
        """The number of lanes that combine the warps' partial results: `warps` rounded up to a power of two."""
        return 1 << (self.warps - 1).bit_length()

    @property
    def columns_per_step(self) -> int:
        """Columns that the threads of a row cover with one vector each. A shifted tile covers one vector less, at any alignment."""
        return (self.threads - (self.tiled and self.unaligned)) * self.vec


@dataclass(frozen=True)
class ColumnPlan(Plan):
    """The plan of a kernel that combines partial column sums with ``columns`` by ``rows`` threads per block."""

    columns: int
    rows: int


@dataclass(frozen=True)
class Segments:
    """A reduction over segments of a row, held by neighbouring threads of a warp. All elements of a segment share the result.

    ``call`` computes the values to reduce, ``copies`` are values that need no math, ``after`` is math once per segment.
    """

    call: MathCall | None
    copies: tuple[Copy, ...]
    reduction: Reduction
    after: MathCall | None


@dataclass(frozen=True)
class Phase:
    """The work between two reductions along a row.

    Attributes:
        row_reads: accesses of one element per row, first needed here.
        row_call: math on the row's statistics, once per row, or None.
        reads: fragments of the row loaded at the start.
        late: fragments loaded vector by vector, right before their use.
        segments: reductions over segments, in dependency order.
        call: math on each element of the row, or None.
        copies: results of the phase that equal an input, so that nothing computes them.
        reductions: reductions along the row.
        column_sums: reductions over rows.
        orders: held rows that are sorted at the end of the phase.
        held: results kept in registers for later phases.
        segment_writes: results stored once per segment.
        row_writes: stores of one element per row, each with its variable.
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
    """A reduction over rows: its accesses of the workspace, one per component (empty without one), and the stores of its state."""

    reduction: Reduction
    partials: tuple[Access, ...]
    writes: tuple[Access, ...]


def scratch_buffers(plan: RowPlan, phases: Sequence[Phase]) -> int:
    """Returns how many scratch buffers each reduction along a row has.

    One is enough for a block with one row, and for a persistent one with several barriers per row: between a read of the buffer and
    the write of the next row lies the barrier of another phase.
    """
    if not plan.persistent_blocks:
        return 1
    return 2 if plan.cluster > 1 or sum(bool(phase.reductions) for phase in phases) == 1 else 1


@dataclass(frozen=True)
class RowBody(Body):
    """A kernel that processes rows one after another, in phases that end in reductions.

    Attributes:
        row_axes, column_axes: the merged axes.
        checks: indices to check against their range that no access mentions.
        cached: fragments shared by all rows, loaded before the first one.
        partials: accesses of the column sums' workspace, whose row is the block number.
        shared: scratch of each row reduction's component; column sums; stages of the first phase's fragments; a barrier for each
            reduction across a cluster.
        sums: the column sums of a tile, for a block or a cluster.
        anchor: the tensor whose alignment shifted vectors follow, or None.
        segment: columns per segment, the last axis's extent; 0 without segments.
    """

    row_axes: Axes
    column_axes: Axes
    phases: tuple[Phase, ...]
    checks: tuple[IndexCheck, ...]
    cached: tuple[Access, ...]
    partials: tuple[Access, ...]
    shared: SharedArrays
    plan: RowPlan
    sums: tuple[ColumnSum, ...] = ()
    anchor: Anchor | None = None
    segment: int = 0

    can_be_part = True

    @property
    def chosen_plan(self) -> Plan:
        return self.plan

    @property
    def cluster(self) -> int:
        return self.plan.cluster

    @property
    def blocks_per_sm(self) -> int:
        return self.plan.blocks_per_sm

    @property
    def counts(self) -> tuple[Dim, ...]:
        return product(self.row_axes.extents), product(self.column_axes.extents)

    def describe(self, kind: str) -> str:
        if self.plan.tiled:
            return f"{kind}, tiles of {self.plan.columns_per_step} columns"
        split = f", each split over a cluster of {self.plan.cluster} blocks" if self.plan.cluster > 1 else ""
        reads = "rows read once, nothing of them held" if self._reads_once else _PERSISTENCE_TEXT[self.plan.persistence]
        return f"{kind}, {counted(len(self.phases), 'phase')}, {reads}{split}"

    @property
    def _reads_once(self) -> bool:
        reading = [phase for phase in self.phases if phase.reads or phase.late]
        return self.plan.once or (self.plan.persistence is Persistence.MULTI_PASS and len(reading) == 1)

    @property
    def reason(self) -> str:
        plan = self.plan
        elements = plan.vectors_per_thread * plan.vec
        if plan.tiled:
            return "no reduction runs along rows: several blocks sum a tile of columns over the rows"
        if plan.persistence is Persistence.STAGED and self.partials:
            return "prefetches the next rows into shared memory; registers hold the column sums"
        owner = f"a cluster of {plan.cluster} blocks" if plan.cluster > 1 else "a block"
        if plan.persistence is Persistence.STAGED:
            return f"the shared memory of {owner} holds a row and the next ones, which are prefetched"
        if self._reads_once:
            return "one phase alone needs the elements of a row, so that nothing holds them"
        if plan.persistence is Persistence.MULTI_PASS:
            return f"a row is, or may be, too long for the registers and shared memory of {owner}"
        threads = f"{plan.threads} threads" + (f" of {owner}" if plan.cluster > 1 else "")
        return f"a row fits the registers of {threads}, {counted(elements, 'element')} per thread"

    @property
    def peers(self) -> int:
        """The number of neighbouring threads that share a segment."""
        return self.segment // self.plan.vec


@dataclass(frozen=True)
class ColumnBody(Body):
    """A kernel that combines partial column sums in a fixed order.

    Attributes:
        column_axes: the merged column axes.
        parts: the maximum number of partial sums per column. Each one is a row of the workspace.
        row_blocks: the number of blocks that the rows fill. If it is below `parts`, there are only that many partial sums. None
            if there are always `parts`.
        shared: scratch of each component.
    """

    sums: tuple[ColumnSum, ...]
    column_axes: Axes
    parts: int
    row_blocks: Dim | None
    shared: SharedArrays
    plan: ColumnPlan

    def describe(self, kind: str) -> str:
        return "adds the partial column sums of all blocks"
