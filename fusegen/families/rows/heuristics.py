"""Candidates of row kernels.

A row is read from memory once and held in the registers of as many threads as it needs: part of a warp for short rows, a block for
longer ones. Longer rows are staged in shared memory: a block loops over many rows and prefetches the next ones. The longest are
read in several passes. With column sums, shorter rows are staged too.

The blocks of a cluster can share a longer row; each holds or stages its part. Each warp sends its part of a reduction to all blocks
and continues when the others' parts have arrived; the only cluster barrier is at the start. Staged this way, one read of memory is
enough for rows of up to a million elements. On an H200, layer_norm of 2048 rows of 65536 takes 142 µs with clusters of 8 blocks of
128 threads, two per SM. It takes 179 µs with the row in a cluster's registers, and 188 with a single block that stages it. Softmax
of 512 rows of 262144 takes 151 instead of 283.

Values shared by all rows stay in registers if there is room. Otherwise each thread prefetches a few vectors of them before the
preceding reduction. Without the prefetch, each vector would wait for the previous store, because loads cannot move above stores.
Kernels that hold rows in registers gained nothing from it. Blocks that read each other's parts between two cluster barriers were
slower than blocks that send them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import sympy

from fusegen.families.rows.cpu import cpu_plans
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.families.rows.tiles import column_tile_plans, shifted_tile_plans
from fusegen.ir.symbolic import Axes, Dim, literal
from fusegen.schedule.access import Multiples, divisor
from fusegen.schedule.kernel import SCRATCH_BYTES
from fusegen.target import Target

_VECTOR_BYTES = 16
_MOST_LANES = 8
_WARP = 32
_MOST_THREADS = 1024
_BLOCK = 256  # threads of a block with several short rows
_MOST_ELEMENTS = 32
"""Most elements of a row per thread while more threads can share it. With 4096 to 16384 columns on an H200, layer_norm reaches 88%
of a copy's speed with this limit, 84% with 64 and 76% with 8."""
_MOST_REGISTERS = 64
"""Most registers per thread for a row, besides the arithmetic."""
_THREADS_PER_SM = 1024
"""Threads per SM that registers must leave room for, so that one row is loaded while another is reduced."""
_REGISTERS = 65536  # per SM
_OWN_REGISTERS = 27
"""Registers per thread besides its part of the row. If two blocks of more than 512 threads fit with this many, the compiler does
not spill, but recomputes values that later phases use, e.g. a softmax's exponentials. For layer_norm over 18432 columns, each of
768 threads takes 40 instead of 48 registers."""
_FEW_RESULTS = 8
"""Registers of results that count for nothing beside a row's elements. Those of a router, which finds one maximum after another,
spill if four blocks of 256 threads have to fit."""
_MOST_STAGED = 64  # elements of a row that a thread stages
_LEAST_AHEAD = (5, 4)  # ratio of stages to vectors per row from which on staging is worth its barriers
_LEAST_BYTES = 4  # bytes of the smallest vector in a window
_LONG = 1024
"""Vectors per row from which on wider vectors at aligned addresses pay despite partial ones at the row's ends. On an H200, rows of
1001 elements take equally long with scalars, rows of 3001 a third longer with scalars, and rows of 1002 less time with pairs."""
_LEAST_SUMMING = 128  # threads of a block that stages rows and sums columns
_SUMMING_THREADS = range(256, 1024 + 1)  # per SM, for such blocks
_SUMMING_BYTES = 1 << 15
"""Bytes of rows that an SM works on at a time, in blocks of the fewest threads: each warp adds to the cost of a phase's end. On an
H200, a norm's backward pass takes 120 µs for 16384 rows of 4096 with two blocks of 128 threads, 131 with two of 256 and 147 with
four of 128. For 8192 rows of 8192, it takes 125 µs with one block of 256 and 138 with one of 512."""
_SUMMING_BLOCKS = (2, 4, 1)  # per SM
_SUMMING_CHUNKS = (1, 2, 4, 8)
_SUMMING_ROWS = 4  # most rows in shared memory
_SUMMING_REGISTERS = 41, 3
"""Registers of a thread that stages rows, besides those held over all rows: a fixed number, and a number per vector. With fewer,
ptxas spills."""
_SPARE = 16
"""Registers that must remain per thread when it takes a staged row at once. With none left, layer_norm_gelu_add of 4096 rows of
18432 spilled 36 bytes and took 134 µs instead of 118."""
_REGISTER_LIMIT = 255  # per thread
_SCRATCH = 4096  # least bytes of shared memory besides stages: scratch of reductions, and the system's reserve
_SYSTEM = 1024  # the system's reserve
_NARROW = (4, 8, 16)  # threads per short row, several of which share a warp
_STAGING = ((8, 2), (8, 4), (4, 1), (2, 4), (16, 4), (8, 1), (2, 1), (16, 1), (1, 2), (1, 1), (1, 4))
"""Blocks that share a staged row, and blocks per SM. More blocks per SM hide waiting, above all for short rows and clusters."""
_STAGING_CHUNKS = (8, 6, 4, 3)
_STAGED_GROUPS = 256  # fewest vectors of a staged row: shorter rows are faster in registers
_STAGED_SHARE = 640  # fewest vectors of a row per block of a cluster
_STAGING_THREADS = range(256, 1024 + 1)  # per SM
_STAGING_ROWS = 3  # most rows in shared memory
_FORESEEN = 4  # vectors that only the last phase of a staged row needs and that a thread prefetches
_EARLY_REGISTERS = 16  # registers for values shared by all rows that a thread loads at the start
_THREADS = (32, 64, 128, 256, 512, _MOST_THREADS)
_LONGEST_HELD = 20480  # columns of a row in the registers of one block, 32 for each of 640 threads
_STREAMING = (_MOST_THREADS, 512, 256, 128)
"""Threads of a block that reads a row once and holds nothing of it. On an H200, the normalizer of 8192 rows of 32000 takes 128 µs
with 128 threads and 204 with 1024; that of 64 rows of 128256 takes 24.4 and 10.4."""
_BLOCK_OF_ORDER = 512  # threads of a block that sorts the longest rows
_CLUSTERS = (2, 4, 8, 16)  # blocks that share a row
_CLUSTER_BLOCKS = (512, _MOST_THREADS)  # most threads per block of a cluster: two ways to share a row
_CLUSTER_REGISTERS = 32
"""Registers per thread for the row, of the 64 that 1024 threads per SM have: with more, ptxas spills."""


@dataclass(frozen=True)
class RowFeatures:
    """The properties that the plan of a row kernel depends on.

    Attributes:
        axes: the column axes, merged.
        itemsizes: bytes per element of fragments read or written along the row.
        held: most 32-bit registers per element between phases.
        column_sums: 32-bit registers per element for column sums.
        reductions: components reduced along the row.
        row_registers: 32-bit registers for the results of these reductions.
        stage_bytes: bytes per element in shared memory if the row is staged; 0 if it cannot be.
        read: bytes per element of each fragment that differs from row to row.
        shared: 32-bit registers per element for values shared by all rows.
        computed: bytes per element of values computed in one phase and used in later ones.
        shifted_stage_bytes: `stage_bytes` with vectors at aligned addresses; None if vectors cannot shift.
        late_bytes: the part of `stage_bytes` that only the last phase needs.
        row_step: a divisor of the elements between rows; None if fragments differ in alignment or rows are not equidistant.
        orders: whether rows are sorted.
        segment: columns per segment, whose threads must be neighbours in a warp; 0 without segments.
        interleaved_bytes: bytes per lane of the widest interleaved access; 0 if there is none.
        indexed: whether row addresses depend on an index that is read.
        may_exchange: whether the blocks of a cluster may exchange partial reductions.
        streamable: whether a long row may be read once and not held.
    """

    axes: Axes
    itemsizes: Sequence[int]
    held: float
    column_sums: float
    reductions: int
    stage_bytes: int
    row_registers: int = 0
    read: Sequence[int] = ()
    shared: float = 0
    computed: int = 0
    shifted_stage_bytes: int | None = None
    row_step: int | None = None
    may_exchange: bool = False
    late_bytes: int = 0
    orders: bool = False
    segment: int = 0
    interleaved_bytes: int = 0
    indexed: bool = False
    streamable: bool = False


def row_plans(features: RowFeatures, target: Target, multiples: Multiples, bounds: Mapping[str, int]) -> tuple[RowPlan, ...]:
    """Returns the candidates of a row kernel, the fastest expected first, given known divisors and bounds of sizes."""
    if not target.warp:
        return cpu_plans(features.axes, features.reductions, features.column_sums, features.computed, features.segment)
    if features.segment:
        return _segmented(features, target, multiples, bounds)
    vec, widest = _lanes(features, multiples), _widest(features)
    columns, known = _columns(features.axes, bounds)
    if features.column_sums and not features.reductions:
        return _tiles(columns if known else None, vec, widest, features, target)
    plans = _plans(columns, known, vec, features, target)
    if features.orders:
        return _ordering(columns or 1, vec, plans, features, target)
    if vec == widest or not _may_be_shifted(features, columns, widest):
        return (*plans, *_shared(plans, columns, known, vec, features, target))
    unaligned = _shifted(columns, known, widest, features, target)
    return (*unaligned, *plans) if columns is None or columns >= _LONG * vec else (*plans, *unaligned)


def _ordering(columns: int, vec: int, plans: Sequence[RowPlan], features: RowFeatures, target: Target) -> tuple[RowPlan, ...]:
    """Returns plans that sort rows in the registers of one block; elements per thread are rounded up to a power of two."""
    largest = _held(None, vec, _BLOCK_OF_ORDER, -(-columns // (vec * _BLOCK_OF_ORDER)), features, target)
    held = [p for p in plans if p.persistence is Persistence.REGISTERS and p.cluster == 1 and p.threads.bit_count() == 1]
    ordering = [
        replace(p, vectors_per_thread=1 << (p.vectors_per_thread - 1).bit_length(), cache_weights=False, prefetch=0)
        for p in held or [largest]
    ]
    exact = [columns == p.vectors_per_thread * vec * p.threads and p.threads >= _WARP for p in ordering]
    return tuple(dict.fromkeys(replace(p, exact=fills) for p, fills in zip(ordering, exact, strict=True)))


def _segmented(features: RowFeatures, target: Target, multiples: Multiples, bounds: Mapping[str, int]) -> tuple[RowPlan, ...]:
    vec = max(_lanes(features, multiples), features.segment // _WARP)
    columns, known = _columns(features.axes, bounds)
    plans = _plans(columns, known, vec, features, target)
    candidates = (*plans, *_shared(plans, columns, known, vec, features, target))
    return tuple(plan for plan in candidates if plan.threads % (features.segment // vec) == 0)


def _tiles(columns: int | None, vec: int, widest: int, features: RowFeatures, target: Target) -> tuple[RowPlan, ...]:
    plans = column_tile_plans(columns, vec, features.read, features.column_sums, target)
    if vec == widest or features.row_step is None or not _is_worth_a_shift(features, columns, widest):
        return plans
    period = widest // math.gcd(widest, features.row_step)
    return (*plans, *shifted_tile_plans(columns, widest, features.read, features.column_sums, period, target))


def _plans(columns: int | None, known: bool, vec: int, features: RowFeatures, target: Target) -> tuple[RowPlan, ...]:
    looped = _looped(vec, target, features)
    if columns is None:
        return (looped,)
    held = partial(_held_by, columns, known, vec, features, target)
    groups = max(1, -(-columns // vec))  # a row of no columns still has one
    powers = [held(threads) for threads in _THREADS if threads == _WARP or threads < 2 * groups]
    fewest = [
        held(-(-groups // (vectors_per_thread * _WARP)) * _WARP) for vectors_per_thread in range(_MOST_ELEMENTS // vec, 0, -1)
    ]
    if features.column_sums:  # held in registers over all rows
        in_registers = [plan for plan in (*powers, *fewest) if plan is not None]
        staged = _summing(columns, known, vec, features, target)
        ordered = [*staged, *in_registers] if groups >= _BLOCK else [*in_registers, *staged]
        return tuple(dict.fromkeys(ordered or filter(None, [held(_MOST_THREADS)])))
    narrow = [held(threads) for threads in _NARROW if groups <= _WARP and threads < 2 * groups]
    at_once = [_with_early_shared(plan, features) for plan in powers]
    is_streamed = features.streamable and columns > _LONGEST_HELD
    # Prefetching gains nothing if copies wait for an index: an embedding with a norm takes 132 µs staged on an H100, 110 in
    # registers. Nor does it if nothing reads the row again.
    waits = is_streamed or (features.indexed and any(powers))
    staged = [] if waits else _staged(columns, known, vec, features, target)
    passing = _streamed(looped) if is_streamed else [looped]
    return tuple(dict.fromkeys(filter(None, [*powers, *narrow, *staged, *passing, *fewest, *at_once])))


def _with_early_shared(plan: RowPlan | None, features: RowFeatures) -> RowPlan | None:
    """Returns the plan with values shared by all rows loaded together with the row, if they need few registers: few rows then pay
    the memory latency once."""
    if plan is None or not 0 < plan.vectors_per_thread * plan.vec * features.shared <= _EARLY_REGISTERS:
        return None
    return replace(plan, cache_weights=True, prefetch=0)


def _may_be_shifted(features: RowFeatures, columns: int | None, vec: int) -> bool:
    """True if vectors may start at aligned addresses. With column sums, a thread needs the same columns in each row."""
    if features.shifted_stage_bytes is None or features.column_sums:
        return False
    return _is_worth_a_shift(features, columns, vec)


def _is_worth_a_shift(features: RowFeatures, columns: int | None, vec: int) -> bool:
    """True if a row has at least a warp of vectors, each large enough for a window."""
    is_long = columns is None or columns >= _WARP * vec
    return is_long and min(features.itemsizes, default=4) * vec >= _LEAST_BYTES


def _shifted(columns: int | None, known: bool, vec: int, features: RowFeatures, target: Target) -> tuple[RowPlan, ...]:
    """Returns plans whose vectors start at aligned addresses; a row may then have one vector more."""
    longest = None if columns is None else columns + vec - 1
    features = replace(features, stage_bytes=features.shifted_stage_bytes or 0)
    plans = _plans(longest, known, vec, features, target)
    clustered = _shared(plans, longest, known, vec, features, target)
    return tuple(_with_shift(plan, features.row_step) for plan in (*plans, *clustered) if plan.rows == 1)


def _with_shift(plan: RowPlan, row_step: int | None) -> RowPlan:
    """Returns a plan with shifted vectors. Weights stay in registers if all rows of a block have the same alignment, i.e. the rows'
    numbers differ by multiples of the period. A block that visits rows by alignment would not need that, but took a fifth longer on
    an H200, because its counters take registers."""
    plan = replace(plan, unaligned=True, exact=False)
    if not plan.cache_weights or not plan.persistent_blocks:
        return plan
    period = plan.vec // math.gcd(plan.vec, row_step or 1)
    persistent = plan.persistent_blocks // period * period
    if row_step is not None and persistent > 0:
        return replace(plan, persistent_blocks=persistent)
    return replace(plan, cache_weights=False, prefetch=1)


def _shared(
    plans: Sequence[RowPlan], columns: int | None, known: bool, vec: int, features: RowFeatures, target: Target
) -> tuple[RowPlan, ...]:
    """Returns plans of rows shared by a cluster; none if one of `plans` holds a row in a block's registers.

    The order is: the smallest cluster that holds the row, the next larger one, the smallest one with half as much per thread. If
    there is none, threads hold twice as much, with one block per SM. The smallest cluster of larger blocks comes last. If no
    cluster holds a row, the two largest ones read it in several passes.
    """
    clusters = [cluster for cluster in _CLUSTERS if cluster <= target.cluster]
    is_held = any(plan.persistence is Persistence.REGISTERS for plan in plans)
    if columns is None or is_held or not features.may_exchange or not features.reductions or not clusters:
        return ()
    elements = min(_MOST_ELEMENTS, int(_CLUSTER_REGISTERS / max(0.5, features.held)))
    held = partial(_held_by_clusters, clusters, columns, known, vec, features, target)
    most, (usual, largest) = elements // vec, _CLUSTER_BLOCKS
    in_registers = [*held(most, usual)[:2], *held(most // 2, usual)[:1]]
    in_registers = in_registers or [replace(plan, blocks_per_sm=1) for plan in held(2 * most, usual)[:1]]
    looped = [replace(_looped(vec, target, features), threads=largest * c, cluster=c) for c in reversed(clusters[-2:])]
    return tuple(dict.fromkeys([*in_registers, *held(most, largest)[:1]] or looped))


def _held_by_clusters(
    clusters: Sequence[int],
    columns: int,
    known: bool,
    vec: int,
    features: RowFeatures,
    target: Target,
    vectors_per_thread: int,
    most_threads: int,
) -> list[RowPlan]:
    """Returns plans with the row in the registers of a cluster, for each size that can hold it."""
    if vectors_per_thread == 0:
        return []
    blocks = {cluster: -(-columns // (vec * vectors_per_thread * cluster * _WARP)) * _WARP for cluster in clusters}
    length = columns if known else None
    return [
        replace(
            _held(length, vec, block * cluster, vectors_per_thread, features, target), cluster=cluster, blocks_per_sm=_blocks(block)
        )
        for cluster, block in blocks.items()
        if block <= most_threads
    ]


def _held_by(columns: int, known: bool, vec: int, features: RowFeatures, target: Target, threads: int) -> RowPlan | None:
    """Returns the plan with a row in the registers of a number of threads, if it fits. With column sums, the largest block takes
    any row, since there is no alternative."""
    vectors_per_thread = max(1, -(-columns // (vec * threads)))
    if threads < _MOST_THREADS:
        fits = _fits(vectors_per_thread * vec, max(0.5, features.held + features.column_sums))
    else:
        fits = threads == _MOST_THREADS and features.column_sums > 0
    return _held(columns if known else None, vec, threads, vectors_per_thread, features, target) if fits else None


def _fits(elements: int, held: float) -> bool:
    return elements * held <= _MOST_REGISTERS and elements <= _MOST_ELEMENTS


def _widest(features: RowFeatures) -> int:
    return max(1, min(_MOST_LANES, _VECTOR_BYTES // max(features.interleaved_bytes, min(features.itemsizes, default=4))))


def _lanes(features: RowFeatures, multiples: Multiples) -> int:
    vec = _widest(features)
    while divisor(features.axes.extents[-1], multiples) % vec:
        vec //= 2
    return vec


def _columns(axes: Axes, bounds: Mapping[str, int]) -> tuple[int | None, bool]:
    total, known = 1, True
    for extent in axes.extents:
        size = literal(extent)
        if size is None:
            size, known = _bound(extent, bounds), False
        if size is None:
            return None, False
        total *= size
    return total, known


def _bound(extent: Dim, bounds: Mapping[str, int]) -> int | None:
    """Returns a bound of an extent, or the product of its factors' bounds; None if unknown."""
    factors = () if isinstance(extent, int) else sympy.Mul.make_args(extent)
    sizes = [literal(factor) or bounds.get(str(factor)) for factor in factors]
    return bounds.get(str(extent)) or (math.prod(known) if len(known := [b for b in sizes if b]) == len(sizes) else None)


def _held(columns: int | None, vec: int, threads: int, vectors_per_thread: int, features: RowFeatures, target: Target) -> RowPlan:
    rows = _BLOCK // threads if threads <= _WARP else 1
    exact = columns == vectors_per_thread * vec * threads and threads >= _WARP  # the last rows of a warp may be missing
    if features.column_sums:  # no more blocks than run at a time: column sums take all registers they can get
        persistent_blocks = _persistent_blocks(threads * rows, target)
        blocks = persistent_blocks // target.sms
        needed = _OWN_REGISTERS + vectors_per_thread * vec * (features.held + features.column_sums + features.shared)
        keeps = features.shared > 0 and needed * threads * rows * blocks <= _REGISTERS
        return RowPlan(
            threads, rows, vec, vectors_per_thread, Persistence.REGISTERS, exact, persistent_blocks, blocks, cache_weights=keeps
        )
    needed = _OWN_REGISTERS + vectors_per_thread * vec * min(features.held, sum(features.read) / 4)
    fits_twice = threads > _THREADS_PER_SM // 2 and 2 * threads * needed <= _REGISTERS
    blocks = 2 if fits_twice else _blocks(threads * rows)
    if features.row_registers > _FEW_RESULTS:
        needed = _OWN_REGISTERS + int(vectors_per_thread * vec * features.held) + features.row_registers
        blocks = max(1, min(blocks, _REGISTERS // (threads * rows * needed)))
    return RowPlan(threads, rows, vec, vectors_per_thread, Persistence.REGISTERS, exact, 0, blocks)


def _blocks(threads: int) -> int:
    return max(1, _THREADS_PER_SM // threads)


def _staged(columns: int, known: bool, vec: int, features: RowFeatures, target: Target) -> list[RowPlan]:
    """Returns plans with rows staged in the shared memory of a block or cluster, and the next rows prefetched as room allows."""
    groups, staged = -(-columns // vec), partial(_staged_by, columns, known, vec, features, target)
    if not features.stage_bytes or groups < _STAGED_GROUPS or 2 * vec < _widest(features):
        return []
    most = min(target.cluster, groups // _STAGED_SHARE) if features.may_exchange and features.reductions else 1
    ways = [(cluster, blocks) for cluster, blocks in _STAGING if cluster <= max(1, most)]
    plans = [
        staged(c, n, -(-groups // (c * vectors_per_thread * _WARP)) * _WARP)
        for c, n in ways
        for vectors_per_thread in _STAGING_CHUNKS
    ]
    return list(dict.fromkeys(filter(None, plans)))


def _staged_by(
    columns: int, known: bool, vec: int, features: RowFeatures, target: Target, cluster: int, blocks: int, threads: int
) -> RowPlan | None:
    """Returns a plan of `cluster` blocks per row, `blocks` per SM and `threads` per block, if there is room for prefetched rows.
    If there is not enough room, data that only the last phase needs is read late."""
    vectors_per_thread = -(-columns // (vec * threads * cluster))
    if threads * blocks not in _STAGING_THREADS or threads > _MOST_THREADS or vectors_per_thread * vec > _MOST_STAGED:
        return None
    stage_vectors = _slots(vec, threads, blocks, features, target, cluster)
    late_loads = stage_vectors < 2 * vectors_per_thread and 0 < features.late_bytes < features.stage_bytes
    if late_loads:
        features = replace(features, stage_bytes=features.stage_bytes - features.late_bytes)
        stage_vectors = _slots(vec, threads, blocks, features, target, cluster)
    if not _is_worth_it(stage_vectors, vectors_per_thread):
        return None
    exact = known and columns == vectors_per_thread * vec * threads * cluster
    parts, total = target.clusters(cluster) * blocks, threads * cluster
    plan = RowPlan(
        total,
        1,
        vec,
        vectors_per_thread,
        Persistence.STAGED,
        exact,
        parts,
        blocks,
        stage_vectors,
        cluster=cluster,
        late_loads=late_loads,
    )
    return _in_registers(plan, features)


def _in_registers(plan: RowPlan, features: RowFeatures) -> RowPlan:
    """Returns a staged plan that fills the remaining registers: first with values shared by all rows, then with the row itself,
    which frees its stage at once. If the shared values do not fit, they are prefetched."""
    elements, (own, of_group) = plan.vectors_per_thread * plan.vec, _SUMMING_REGISTERS
    registers = _registers_of(plan) - own - plan.vectors_per_thread * of_group
    keeps = 0 < features.shared * elements <= registers
    registers -= int(features.shared * elements) if keeps else 0
    stage_to_registers = (
        plan.stage_vectors >= 2 * plan.vectors_per_thread and features.stage_bytes / 4 * elements + _SPARE <= registers
    )
    registers -= int(features.stage_bytes / 4 * elements) if stage_to_registers else 0
    late = (features.late_bytes / 4 if plan.late_loads else 0) + (0 if keeps else features.shared)
    prefetch = max(1, min(_FORESEEN, plan.vectors_per_thread, int(registers / (late * plan.vec)))) if late else 0
    rows = min(plan.stage_vectors / plan.vectors_per_thread, 2 if stage_to_registers else _STAGING_ROWS)
    stage_vectors = (
        int(rows) * plan.vectors_per_thread if rows >= 2 else plan.stage_vectors
    )  # whole rows need no address arithmetic
    return replace(plan, stage_vectors=stage_vectors, cache_weights=keeps, stage_to_registers=stage_to_registers, prefetch=prefetch)


def _registers_of(plan: RowPlan) -> int:
    """Returns the registers per thread: an SM has four partitions, and registers come in eights."""
    threads = -(-plan.block * plan.blocks_per_sm // (4 * _WARP)) * 4 * _WARP
    return min(_REGISTER_LIMIT, _REGISTERS // threads // 8 * 8)


def _summing(columns: int, known: bool, vec: int, features: RowFeatures, target: Target) -> list[RowPlan]:
    """Returns plans with rows in shared memory and column sums in registers, the fastest expected first."""
    groups = -(-columns // vec)
    blocks = dict.fromkeys(-(-groups // (vectors_per_thread * _WARP)) * _WARP for vectors_per_thread in _SUMMING_CHUNKS)
    plans = [_summing_by(columns, known, vec, features, target, b, n) for n in _SUMMING_BLOCKS for b in blocks]
    usual = _SUMMING_BYTES / max(1, columns * features.stage_bytes)
    return sorted(filter(None, plans), key=lambda plan: (abs(math.log2(plan.blocks_per_sm / usual)), plan.threads))


def _summing_by(
    columns: int, known: bool, vec: int, features: RowFeatures, target: Target, threads: int, blocks: int
) -> RowPlan | None:
    """Returns the plan of `threads` per block and `blocks` per SM, if there is room for sums and prefetched rows."""
    vectors_per_thread = -(-columns // (vec * threads))
    elements, (own, of_group) = vectors_per_thread * vec, _SUMMING_REGISTERS
    registers = min(_REGISTER_LIMIT, _REGISTERS // (threads * blocks)) - own - vectors_per_thread * of_group
    if not features.stage_bytes or threads < _LEAST_SUMMING or threads * blocks not in _SUMMING_THREADS:
        return None
    if elements * features.column_sums > registers:
        return None
    stage_vectors = min(_SUMMING_ROWS * vectors_per_thread, _slots(vec, threads, blocks, features, target))
    stage_vectors = (
        stage_vectors // vectors_per_thread * vectors_per_thread if stage_vectors >= 2 * vectors_per_thread else stage_vectors
    )  # whole rows need no address arithmetic
    if not _is_worth_it(stage_vectors, vectors_per_thread):
        return None
    exact = known and columns == vectors_per_thread * vec * threads
    plan = RowPlan(threads, 1, vec, vectors_per_thread, Persistence.STAGED, exact, target.sms * blocks, blocks, stage_vectors)
    return replace(plan, cache_weights=features.shared > 0 and elements * (features.column_sums + features.shared) <= registers)


def _slots(vec: int, threads: int, blocks: int, features: RowFeatures, target: Target, cluster: int = 1) -> int:
    scratch = max(_SCRATCH, _SYSTEM + (threads * cluster // _WARP + 1) * 2 * SCRATCH_BYTES * features.reductions)
    return max(0, target.shared_bytes // blocks - scratch) // (vec * threads * features.stage_bytes)


def _is_worth_it(stage_vectors: int, vectors_per_thread: int) -> bool:
    return stage_vectors * _LEAST_AHEAD[1] >= vectors_per_thread * _LEAST_AHEAD[0]


def _looped(vec: int, target: Target, features: RowFeatures) -> RowPlan:
    """Returns the multi-pass plan, which reads the row again in each phase, from L2 if it fits."""
    persistent_blocks = _persistent_blocks(_MOST_THREADS, target) if features.column_sums else 0
    return RowPlan(_MOST_THREADS, 1, vec, 0, Persistence.MULTI_PASS, False, persistent_blocks)


def _streamed(looped: RowPlan) -> list[RowPlan]:
    """Returns plans of long rows that are read once: with smaller blocks, an SM reads several rows at a time."""
    return [replace(looped, threads=threads, once=True) for threads in _STREAMING]


def _persistent_blocks(block: int, target: Target) -> int:
    """Returns the blocks that share the rows of column sums: few, so that few partial sums remain."""
    return target.sms * max(1, _MOST_THREADS // (2 * block))
