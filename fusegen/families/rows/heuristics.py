"""Plans of row kernels.

A row lives in the registers of as many threads as it needs, read from memory once: a part of a warp for short rows, a block for
longer ones. Longer rows are staged in shared memory: a block goes through many rows, and the next are under way while it works on
one. The longest are looped over. Where columns are summed as well, shorter rows are staged too.

Longer rows can also be shared by the blocks of a cluster, each of which holds its part in registers, or stages it. Each warp sends
its part of what is reduced to all blocks, and goes on when the others' have come; the one barrier of the cluster is the first.
Staged, one read of memory is enough for rows of up to a million elements. On an H200 layer_norm of 2048 rows of 65536 takes 142 µs
by 8 blocks of 128 threads, two such on a multiprocessor, 179 where registers of a cluster hold a row, and 188 by the one block that
could stage it before; softmax of 512 rows of 262144 151 in place of 283. What all rows share is kept in registers where there are
some left; else each thread asks for some groups of it ahead, in front of the reduction that it comes behind: stores forbid loads to
move, so that every group would wait for the store of the one before. In kernels that hold rows in registers that gained nothing.
Blocks that read each other's parts, between two barriers of the cluster, had lost to both.
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
_BLOCK = 256  # threads of a block that works on several short rows
_MOST_ELEMENTS = 32
"""Elements of a row that a thread holds while more threads can share it: on an H200 layer_norm then runs at 88% of the speed
of a copy from 4096 to 16384 columns, against 84% with 64 and 76% with 8."""
_MOST_REGISTERS = 64
"""Registers of a thread that a row may take in all, beside the arithmetic."""
_THREADS_PER_SM = 1024
"""Threads for which registers must leave room on a multiprocessor, so that one row is loaded while another is reduced."""
_REGISTERS = 65536  # of a multiprocessor
_OWN_REGISTERS = 27
"""Registers of a thread beside its part of the row as it was read. Where two blocks of more than 512 threads have room for so
many, the compiler needs no more: of layer_norm over 18432 columns a thread of 768 takes 40 in place of 48, and none is spilled.
What a phase computed of the row and later ones use, as a softmax's exponentials, it computes again."""
_MOST_STAGED = 64  # elements of a row that a thread stages
_LEAST_AHEAD = (5, 4)  # slots to groups of a row from which on staging is worth its barriers
_LEAST_BYTES = 4  # of a group of lanes that a window brings
_LONG = 1024
"""Groups of lanes in a row from which on wider groups at aligned places pay, whatever they cost at its ends: on an H200 1001
single elements take as long either way, and 3001 a third longer; 1002 in pairs take less."""
_LEAST_SUMMING = 128  # threads of a block that stages rows whose columns are summed
_SUMMING_THREADS = range(256, 1024 + 1)  # of a multiprocessor, likewise
_USUAL_SUMMING = 1 << 15
"""Bytes of the rows that a multiprocessor works on at a time, in blocks of the fewest threads: every warp takes its steps in what
ends a phase. On an H200 a norm's backward pass takes 120 µs for 16384 rows of 4096 with two blocks of 128 threads, 131 with two of
256 and 147 with four of 128; for 8192 rows of 8192 125 with one block of 256, 138 with one of 512."""
_SUMMING_BLOCKS = (2, 4, 1)  # a multiprocessor
_SUMMING_CHUNKS = (1, 2, 4, 8)
_SUMMING_ROWS = 4  # of room in shared memory, at most
_SUMMING_REGISTERS = 41, 3
"""Registers of a thread that stages rows, beside those that it holds over all rows, and for each group of lanes: with fewer,
ptxas spills."""
_SPARE = 16
"""Registers that a thread must have left over where it takes a staged row at once. With none, layer_norm_gelu_add of 4096 rows of
18432 spilled 36 bytes, and took 134 µs in place of 118."""
_REGISTER_LIMIT = 255  # of a thread
_SCRATCH = 4096  # bytes of shared memory beside staged rows, at least: scratch of reductions, and what the system reserves
_SYSTEM = 1024  # of these, the latter
_NARROW = (4, 8, 16)  # threads of a warp that shares several short rows among its threads
_STAGING = ((8, 2), (8, 4), (4, 1), (2, 4), (16, 4), (8, 1), (2, 1), (16, 1), (1, 2), (1, 1), (1, 4))
"""Blocks that share a staged row, and blocks of a multiprocessor. More of these hide what the others wait for, most of all where a
row is short or blocks wait for each other."""
_STAGING_CHUNKS = (8, 6, 4, 3)
_STAGED_GROUPS = 256  # of a row from which on it is staged, if they are not narrow: others are faster in registers
_STAGED_SHARE = 640  # groups of a row that a block of a cluster has at least
_STAGING_THREADS = range(256, 1024 + 1)  # of a multiprocessor
_STAGING_ROWS = 3  # of room in shared memory, at most
_FORESEEN = 4  # groups of lanes of what only the last phase of a staged row needs that a thread asks for ahead
_AT_ONCE = 16  # registers of what all rows share that a thread holds from the start
_THREADS = (32, 64, 128, 256, 512, _MOST_THREADS)
_BLOCK_OF_ORDER = 512  # threads of a block that puts the longest rows in order
_CLUSTERS = (2, 4, 8, 16)  # blocks that share a row
_CLUSTER_BLOCKS = (512, _MOST_THREADS)  # threads that a block of a cluster has at most: two ways to share a row
_CLUSTER_REGISTERS = 32
"""Registers of a thread that a row may take there, of the 64 that it has among 1024 others: with more, ptxas spills."""


@dataclass(frozen=True)
class RowFeatures:
    """The properties that the plan of a row kernel depends on.

    Attributes:
        axes: the column axes, merged.
        itemsizes: of fragments that are read or written along the row.
        held: 32-bit registers that each element of a row takes between phases, at most.
        column_sums: 32-bit registers that each element of a row takes for sums of its column.
        reductions: components of what is reduced along the row.
        stage_bytes: bytes that an element takes in shared memory when its row is staged there; 0 when it cannot be.
        read: bytes of an element of each fragment that is read of the row itself.
        shared: 32-bit registers that each element of a row takes for what all rows share.
        computed: bytes of each element's values that are computed in one phase and used in later ones.
        shifted_stage_bytes: as `stage_bytes`, where groups of lanes start at aligned places and not where rows do; None where they
            cannot.
        deferred: of `stage_bytes`, those of fragments that only the last phase needs.
        row_step: a number that divides the elements from one row to the next; None where what is read of rows does not lie alike,
            or these do not follow each other in equal steps.
        orders: whether rows are put in order.
        segment: columns of a segment, the last axis's extent, whose threads must be neighbours in a warp; 0 where nothing goes by
            segments.
        in_turn: bytes that a lane takes of the widest access to several variables in turn; 0 where there is none.
        indexed: whether an index that is read says where some of a row lies.
        sendable: whether blocks may send each other their parts of what is reduced along the row.
    """

    axes: Axes
    itemsizes: Sequence[int]
    held: float
    column_sums: float
    reductions: int
    stage_bytes: int
    read: Sequence[int] = ()
    shared: float = 0
    computed: int = 0
    shifted_stage_bytes: int | None = None
    row_step: int | None = None
    sendable: bool = False
    deferred: int = 0
    orders: bool = False
    segment: int = 0
    in_turn: int = 0
    indexed: bool = False


def row_plans(features: RowFeatures, target: Target, multiples: Multiples, bounds: Mapping[str, int]) -> tuple[RowPlan, ...]:
    """The plans that a row kernel can have; what is expected to be fastest comes first.

    Args:
        multiples: known divisors of sizes.
        bounds: known bounds of sizes.
    """
    if not target.warp:
        return cpu_plans(features.axes, features.reductions, features.column_sums, features.computed, features.segment)
    if features.segment:
        return _segmented(features, target, multiples, bounds)
    lanes, widest = _lanes(features, multiples), _widest(features)
    columns, known = _columns(features.axes, bounds)
    if features.column_sums and not features.reductions:
        return _tiles(columns if known else None, lanes, widest, features, target)
    plans = _plans(columns, known, lanes, features, target)
    if features.orders:
        return _ordering(columns or 1, lanes, plans, features, target)
    if lanes == widest or not _may_be_shifted(features, columns, widest):
        return (*plans, *_shared(plans, columns, known, lanes, features, target))
    shifted = _shifted(columns, known, widest, features, target)
    return (*shifted, *plans) if columns is None or columns >= _LONG * lanes else (*plans, *shifted)


def _ordering(columns: int, lanes: int, plans: Sequence[RowPlan], features: RowFeatures, target: Target) -> tuple[RowPlan, ...]:
    """Plans of rows that are put in order: in the registers of a block, as many for a row as a power of two."""
    largest = _held(None, lanes, _BLOCK_OF_ORDER, -(-columns // (lanes * _BLOCK_OF_ORDER)), features, target)
    held = [p for p in plans if p.persistence is Persistence.REGISTERS and p.cluster == 1 and p.threads.bit_count() == 1]
    found = [replace(p, chunks=1 << (p.chunks - 1).bit_length(), keeps_shared=False, foresees=0) for p in held or [largest]]
    exact = [columns == p.chunks * lanes * p.threads and p.threads >= _WARP for p in found]
    return tuple(dict.fromkeys(replace(p, exact=fills) for p, fills in zip(found, exact, strict=True)))


def _segmented(features: RowFeatures, target: Target, multiples: Multiples, bounds: Mapping[str, int]) -> tuple[RowPlan, ...]:
    """Plans by which the threads that share a segment are neighbours in a warp, and each has as many lanes as any other."""
    lanes = max(_lanes(features, multiples), features.segment // _WARP)
    columns, known = _columns(features.axes, bounds)
    plans = _plans(columns, known, lanes, features, target)
    found = (*plans, *_shared(plans, columns, known, lanes, features, target))
    return tuple(plan for plan in found if plan.threads % (features.segment // lanes) == 0)


def _tiles(columns: int | None, lanes: int, widest: int, features: RowFeatures, target: Target) -> tuple[RowPlan, ...]:
    """Plans of sums of columns, where nothing is reduced along rows."""
    plans = column_tile_plans(columns, lanes, features.read, features.column_sums, target)
    if lanes == widest or features.row_step is None or not _is_worth_a_shift(features, columns, widest):
        return plans
    period = widest // math.gcd(widest, features.row_step)
    return (*plans, *shifted_tile_plans(columns, widest, features.read, features.column_sums, period, target))


def _plans(columns: int | None, known: bool, lanes: int, features: RowFeatures, target: Target) -> tuple[RowPlan, ...]:
    """Plans of rows whose groups of lanes start where the row does."""
    looped = _looped(lanes, target, features)
    if columns is None:
        return (looped,)
    held = partial(_held_by, columns, known, lanes, features, target)
    groups = max(1, -(-columns // lanes))  # a sum of no columns is a row of them still
    powers = [held(threads) for threads in _THREADS if threads == _WARP or threads < 2 * groups]
    fewest = [held(-(-groups // (chunks * _WARP)) * _WARP) for chunks in range(_MOST_ELEMENTS // lanes, 0, -1)]
    if features.column_sums:  # which threads hold over all rows
        found = [plan for plan in (*powers, *fewest) if plan is not None]
        staged = _summing(columns, known, lanes, features, target)
        ordered = [*staged, *found] if groups >= _BLOCK else [*found, *staged]
        return tuple(dict.fromkeys(ordered or filter(None, [held(_MOST_THREADS)])))
    narrow = [held(threads) for threads in _NARROW if groups <= _WARP and threads < 2 * groups]
    at_once = [_at_once(plan, features) for plan in powers]
    # Copies that wait for an index are no longer ahead: an embedding with a norm takes 132 µs staged on an H100, 110 in registers.
    waits = features.indexed and any(powers)
    staged = [] if waits else _staged(columns, known, lanes, features, target)
    return tuple(dict.fromkeys(filter(None, [*powers, *narrow, *staged, looped, *fewest, *at_once])))


def _at_once(plan: RowPlan | None, features: RowFeatures) -> RowPlan | None:
    """The plan with all that rows share asked for together with the row, where a thread holds little of it: few rows then wait for
    memory once, and not twice."""
    if plan is None or not 0 < plan.chunks * plan.lanes * features.shared <= _AT_ONCE:
        return None
    return replace(plan, keeps_shared=True, foresees=0)


def _may_be_shifted(features: RowFeatures, columns: int | None, lanes: int) -> bool:
    """True if groups of lanes may start at aligned places and not where rows do. Sums of columns need the same lanes in each row of
    a thread."""
    if features.shifted_stage_bytes is None or features.column_sums:
        return False
    return _is_worth_a_shift(features, columns, lanes)


def _is_worth_a_shift(features: RowFeatures, columns: int | None, lanes: int) -> bool:
    """True if a row has a warp of groups of lanes, each of which a window can bring."""
    is_long = columns is None or columns >= _WARP * lanes
    return is_long and min(features.itemsizes, default=4) * lanes >= _LEAST_BYTES


def _shifted(columns: int | None, known: bool, lanes: int, features: RowFeatures, target: Target) -> tuple[RowPlan, ...]:
    """Plans of rows whose groups of lanes start at aligned places: there may be one group more."""
    longest = None if columns is None else columns + lanes - 1
    features = replace(features, stage_bytes=features.shifted_stage_bytes or 0)
    plans = _plans(longest, known, lanes, features, target)
    shared = _shared(plans, longest, known, lanes, features, target)
    return tuple(_at_aligned_places(plan, features.row_step) for plan in (*plans, *shared) if plan.rows == 1)


def _at_aligned_places(plan: RowPlan, row_step: int | None) -> RowPlan:
    """A plan with shifted lanes. Weights are kept over rows where all of a block start alike among their lanes, as those do whose
    numbers differ by a multiple of some. A block that goes through rows in the order of where they start would need no such number;
    it took a fifth longer on an H200, for what it counts with and the registers that this takes.

    Args:
        row_step: as of `RowFeatures`.
    """
    plan = replace(plan, shifted=True, exact=False)
    if not plan.keeps_shared or not plan.resident:
        return plan
    period = plan.lanes // math.gcd(plan.lanes, row_step or 1)
    alike = plan.resident // period * period
    if row_step is not None and alike > 0:
        return replace(plan, resident=alike)
    return replace(plan, keeps_shared=False, foresees=1)


def _shared(
    plans: Sequence[RowPlan], columns: int | None, known: bool, lanes: int, features: RowFeatures, target: Target
) -> tuple[RowPlan, ...]:
    """Plans of rows that the blocks of a cluster share; none where one of the given plans holds a row in a block's registers.

    The fewest blocks that hold it come first, then twice as many, and those that hold it with half as much a thread; where there
    are none, those that do with twice as much, which have a multiprocessor for themselves. Then the fewest of more threads. Where
    no cluster holds a row, the largest ones loop over it.
    """
    clusters = [cluster for cluster in _CLUSTERS if cluster <= target.cluster]
    is_held = any(plan.persistence is Persistence.REGISTERS for plan in plans)
    if columns is None or is_held or not features.sendable or not features.reductions or not clusters:
        return ()
    elements = min(_MOST_ELEMENTS, int(_CLUSTER_REGISTERS / max(0.5, features.held)))
    held = partial(_held_by_clusters, clusters, columns, known, lanes, features, target)
    most, (usual, largest) = elements // lanes, _CLUSTER_BLOCKS
    found = [*held(most, usual)[:2], *held(most // 2, usual)[:1]]
    found = found or [replace(plan, blocks_per_sm=1) for plan in held(2 * most, usual)[:1]]
    looped = [replace(_looped(lanes, target, features), threads=largest * c, cluster=c) for c in reversed(clusters[-2:])]
    return tuple(dict.fromkeys([*found, *held(most, largest)[:1]] or looped))


def _held_by_clusters(
    clusters: Sequence[int], columns: int, known: bool, lanes: int, features: RowFeatures, target: Target, chunks: int, most: int
) -> list[RowPlan]:
    """A row in the registers of clusters of some sizes, those that can hold it.

    Args:
        chunks: groups of lanes that a thread holds.
        most: threads of a block.
    """
    if chunks == 0:
        return []
    blocks = {cluster: -(-columns // (lanes * chunks * cluster * _WARP)) * _WARP for cluster in clusters}
    length = columns if known else None
    return [
        replace(_held(length, lanes, block * cluster, chunks, features, target), cluster=cluster, blocks_per_sm=_blocks(block))
        for cluster, block in blocks.items()
        if block <= most
    ]


def _held_by(columns: int, known: bool, lanes: int, features: RowFeatures, target: Target, threads: int) -> RowPlan | None:
    """A row in the registers of so many threads, if these can hold it. A whole block's hold any where columns are summed, for
    which there is no other way."""
    chunks = max(1, -(-columns // (lanes * threads)))
    if threads < _MOST_THREADS:
        fits = _fits(chunks * lanes, max(0.5, features.held + features.column_sums))
    else:
        fits = threads == _MOST_THREADS and features.column_sums > 0
    return _held(columns if known else None, lanes, threads, chunks, features, target) if fits else None


def _fits(elements: int, held: float) -> bool:
    """True if a thread can hold its part of a row."""
    return elements * held <= _MOST_REGISTERS and elements <= _MOST_ELEMENTS


def _widest(features: RowFeatures) -> int:
    return max(1, min(_MOST_LANES, _VECTOR_BYTES // max(features.in_turn, min(features.itemsizes, default=4))))


def _lanes(features: RowFeatures, multiples: Multiples) -> int:
    lanes = _widest(features)
    while divisor(features.axes.extents[-1], multiples) % lanes:
        lanes //= 2
    return lanes


def _columns(axes: Axes, bounds: Mapping[str, int]) -> tuple[int | None, bool]:
    """The length of a row, or a bound of it, or None; and whether it is the length itself."""
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
    """A bound of an extent, or of each of its factors; None where there is none."""
    factors = () if isinstance(extent, int) else sympy.Mul.make_args(extent)
    found = [literal(factor) or bounds.get(str(factor)) for factor in factors]
    return bounds.get(str(extent)) or (math.prod(known) if len(known := [b for b in found if b]) == len(found) else None)


def _held(columns: int | None, lanes: int, threads: int, chunks: int, features: RowFeatures, target: Target) -> RowPlan:
    """A row in the registers of some threads."""
    rows = _BLOCK // threads if threads <= _WARP else 1
    exact = columns == chunks * lanes * threads and threads >= _WARP  # of a warp's rows the last may be missing
    if features.column_sums:  # no more blocks than run: what is summed takes all the registers that it can have
        resident = _resident(threads * rows, target)
        blocks = resident // target.processors
        needed = _OWN_REGISTERS + chunks * lanes * (features.held + features.column_sums + features.shared)
        keeps = features.shared > 0 and needed * threads * rows * blocks <= _REGISTERS
        return RowPlan(threads, rows, lanes, chunks, Persistence.REGISTERS, exact, resident, blocks, keeps_shared=keeps)
    needed = _OWN_REGISTERS + chunks * lanes * min(features.held, sum(features.read) / 4)
    fits_twice = threads > _THREADS_PER_SM // 2 and 2 * threads * needed <= _REGISTERS
    blocks = 2 if fits_twice else _blocks(threads * rows)
    return RowPlan(threads, rows, lanes, chunks, Persistence.REGISTERS, exact, 0, blocks)


def _blocks(threads: int) -> int:
    """Blocks of so many threads for which registers leave room on a multiprocessor."""
    return max(1, _THREADS_PER_SM // threads)


def _staged(columns: int, known: bool, lanes: int, features: RowFeatures, target: Target) -> list[RowPlan]:
    """Rows in the shared memory of a block, or of the blocks of a cluster, with as much of the next rows beside them as there is
    room for."""
    groups, staged = -(-columns // lanes), partial(_staged_by, columns, known, lanes, features, target)
    if not features.stage_bytes or groups < _STAGED_GROUPS or 2 * lanes < _widest(features):
        return []
    most = min(target.cluster, groups // _STAGED_SHARE) if features.sendable and features.reductions else 1
    ways = [(cluster, blocks) for cluster, blocks in _STAGING if cluster <= max(1, most)]
    found = [staged(c, n, -(-groups // (c * chunks * _WARP)) * _WARP) for c, n in ways for chunks in _STAGING_CHUNKS]
    return list(dict.fromkeys(filter(None, found)))


def _staged_by(
    columns: int, known: bool, lanes: int, features: RowFeatures, target: Target, cluster: int, blocks: int, threads: int
) -> RowPlan | None:
    """The plan of some blocks a row, blocks a multiprocessor and threads a block, if there is room for rows ahead. What only the
    last phase needs is read there if there is none otherwise."""
    chunks = -(-columns // (lanes * threads * cluster))
    if threads * blocks not in _STAGING_THREADS or threads > _MOST_THREADS or chunks * lanes > _MOST_STAGED:
        return None
    slots = _slots(lanes, threads, blocks, features, target, cluster)
    defers = slots < 2 * chunks and 0 < features.deferred < features.stage_bytes
    if defers:
        features = replace(features, stage_bytes=features.stage_bytes - features.deferred)
        slots = _slots(lanes, threads, blocks, features, target, cluster)
    if not _is_worth_it(slots, chunks):
        return None
    exact = known and columns == chunks * lanes * threads * cluster
    parts, total = target.clusters(cluster) * blocks, threads * cluster
    plan = RowPlan(total, 1, lanes, chunks, Persistence.STAGED, exact, parts, blocks, slots, cluster=cluster, defers=defers)
    return _in_registers(plan, features)


def _in_registers(plan: RowPlan, features: RowFeatures) -> RowPlan:
    """A staged plan with what its registers have room for: first what all rows share, then the row itself, which makes room for the
    next ones at once. Where they do not have it, what all rows share is asked for ahead of its use."""
    elements, (own, of_group) = plan.chunks * plan.lanes, _SUMMING_REGISTERS
    registers = _registers_of(plan) - own - plan.chunks * of_group
    keeps = 0 < features.shared * elements <= registers
    registers -= int(features.shared * elements) if keeps else 0
    drains = plan.slots >= 2 * plan.chunks and features.stage_bytes / 4 * elements + _SPARE <= registers
    registers -= int(features.stage_bytes / 4 * elements) if drains else 0
    late = (features.deferred / 4 if plan.defers else 0) + (0 if keeps else features.shared)
    foresees = max(1, min(_FORESEEN, plan.chunks, int(registers / (late * plan.lanes)))) if late else 0
    rows = min(plan.slots / plan.chunks, 2 if drains else _STAGING_ROWS)
    slots = int(rows) * plan.chunks if rows >= 2 else plan.slots  # whole rows, whose places take no arithmetic
    return replace(plan, slots=slots, keeps_shared=keeps, drains=drains, foresees=foresees)


def _registers_of(plan: RowPlan) -> int:
    """Registers that a thread can have, of the quarter of a multiprocessor that it runs on; they come by eights."""
    threads = -(-plan.block * plan.blocks_per_sm // (4 * _WARP)) * 4 * _WARP
    return min(_REGISTER_LIMIT, _REGISTERS // threads // 8 * 8)


def _summing(columns: int, known: bool, lanes: int, features: RowFeatures, target: Target) -> list[RowPlan]:
    """Rows in shared memory whose columns are summed in registers; what is expected to be fastest comes first."""
    groups = -(-columns // lanes)
    blocks = dict.fromkeys(-(-groups // (chunks * _WARP)) * _WARP for chunks in _SUMMING_CHUNKS)
    found = [_summing_by(columns, known, lanes, features, target, b, n) for n in _SUMMING_BLOCKS for b in blocks]
    usual = _USUAL_SUMMING / max(1, columns * features.stage_bytes)
    return sorted(filter(None, found), key=lambda plan: (abs(math.log2(plan.blocks_per_sm / usual)), plan.threads))


def _summing_by(
    columns: int, known: bool, lanes: int, features: RowFeatures, target: Target, threads: int, blocks: int
) -> RowPlan | None:
    """The plan of so many threads a block and blocks a multiprocessor, if there is room for what they hold and for rows ahead."""
    chunks = -(-columns // (lanes * threads))
    elements, (own, of_group) = chunks * lanes, _SUMMING_REGISTERS
    registers = min(_REGISTER_LIMIT, _REGISTERS // (threads * blocks)) - own - chunks * of_group
    if not features.stage_bytes or threads < _LEAST_SUMMING or threads * blocks not in _SUMMING_THREADS:
        return None
    if elements * features.column_sums > registers:
        return None
    slots = min(_SUMMING_ROWS * chunks, _slots(lanes, threads, blocks, features, target))
    slots = slots // chunks * chunks if slots >= 2 * chunks else slots  # whole rows, whose places take no arithmetic
    if not _is_worth_it(slots, chunks):
        return None
    exact = known and columns == chunks * lanes * threads
    plan = RowPlan(threads, 1, lanes, chunks, Persistence.STAGED, exact, target.processors * blocks, blocks, slots)
    return replace(plan, keeps_shared=features.shared > 0 and elements * (features.column_sums + features.shared) <= registers)


def _slots(lanes: int, threads: int, blocks: int, features: RowFeatures, target: Target, cluster: int = 1) -> int:
    """Slots that each of some blocks of a multiprocessor has room for."""
    scratch = max(_SCRATCH, _SYSTEM + (threads * cluster // _WARP + 1) * 2 * SCRATCH_BYTES * features.reductions)
    return max(0, target.shared_bytes // blocks - scratch) // (lanes * threads * features.stage_bytes)


def _is_worth_it(slots: int, chunks: int) -> bool:
    """True if enough of the next row is under way while one is worked on."""
    return slots * _LEAST_AHEAD[1] >= chunks * _LEAST_AHEAD[0]


def _looped(lanes: int, target: Target, features: RowFeatures) -> RowPlan:
    """A row that is read again in each phase, from L2 as far as that holds it."""
    resident = _resident(_MOST_THREADS, target) if features.column_sums else 0
    return RowPlan(_MOST_THREADS, 1, lanes, 0, Persistence.LOOPED, False, resident)


def _resident(block: int, target: Target) -> int:
    """Blocks that share the rows when columns are summed: few, so that few partial sums remain to be combined."""
    return target.processors * max(1, _MOST_THREADS // (2 * block))
