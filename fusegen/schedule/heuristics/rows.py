"""Plans of row kernels.

A row lives in the registers of as many threads as it needs, read from memory once: a part of a warp for short rows, a block for
longer ones. Longer rows are staged in the shared memory of one block; the longest are looped over. Where columns are summed as
well, a block goes through many rows one after the other: shorter ones are staged too, so that the next are under way meanwhile.

Longer rows can also be shared by the blocks of a cluster, each of which holds its part in registers. Each warp sends its part of
what is reduced to all blocks, and goes on when the others' have come; the one barrier of the cluster is the first, and loads are
under way while it is waited for. On an H200 layer_norm of 700 rows of 53248 takes 55 µs so, staged 63 and looped 67; of 300 rows of
100003 79 in place of 97. Small blocks win: 8 of 224 threads take 55, 2 of 832 take 64. Blocks that read each other's parts, between
two barriers of the cluster, had lost to both others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fusegen.ir.symbolic import Axes, literal
from fusegen.schedule.access import Multiples, divisor
from fusegen.schedule.heuristics import cpu
from fusegen.schedule.heuristics.column_tiles import column_tile_plans
from fusegen.schedule.plan import Persistence, RowPlan
from fusegen.schedule.shared import SCRATCH_BYTES
from fusegen.target import Backend, Target

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
"""Of a thread, beside its part of the row. Where two blocks of more than 512 threads have room for so many, the compiler needs no
more: of layer_norm over 18432 columns a thread of 768 takes 40 in place of 48, and none is spilled."""
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
"""Of a thread that stages rows, beside what it holds over all rows, and for each group of lanes: with fewer, ptxas spills."""
_REGISTER_LIMIT = 255  # of a thread
_SCRATCH = 4096  # bytes of shared memory beside staged rows, at least: scratch of reductions, and what the system reserves
_SYSTEM = 1024  # of these, the latter
_NARROW = (4, 8, 16)  # threads of a warp that shares several short rows among its threads
_THREADS = (32, 64, 128, 256, 512, _MOST_THREADS)
_CLUSTERS = (2, 4, 8, 16)  # blocks that share a row
_CLUSTER_BLOCKS = (512, _MOST_THREADS)  # threads that a block of a cluster has at most: two ways to share a row
_CLUSTER_REGISTERS = 32
"""Registers of a thread that a row may take there, of the 64 that it has among 1024 others: with more, ptxas spills."""


@dataclass(frozen=True)
class RowFeatures:
    """What the plan of a row kernel depends on.

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
    sendable: bool = False


def row_plans(features: RowFeatures, target: Target, multiples: Multiples, bounds: Mapping[str, int]) -> tuple[RowPlan, ...]:
    """The plans that a row kernel can have; what is expected to be fastest comes first.

    Args:
        multiples: known divisors of sizes.
        bounds: known bounds of sizes.
    """
    if target.backend is Backend.CPU:
        return cpu.row_plans(features.axes, features.reductions, features.column_sums, features.computed)
    lanes, widest = _lanes(features, multiples), _widest(features)
    columns, known = _columns(features.axes, bounds)
    if features.column_sums and not features.reductions:
        return column_tile_plans(columns if known else None, lanes, features.read, features.column_sums, target)
    plans = _plans(columns, known, lanes, features, target)
    if lanes == widest or not _may_be_shifted(features, columns, widest):
        return (*plans, *_shared(plans, columns, known, lanes, features, target))
    shifted = _shifted(columns, known, widest, features, target)
    return (*shifted, *plans) if columns is None or columns >= _LONG * lanes else (*plans, *shifted)


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
    return tuple(dict.fromkeys(filter(None, [*powers, *narrow, _staged(columns, known, lanes, features, target), looped, *fewest])))


def _may_be_shifted(features: RowFeatures, columns: int | None, lanes: int) -> bool:
    """Whether groups of lanes may start at aligned places and not where rows do, and a row is worth a warp of them. Sums of columns
    need the same lanes in each row."""
    if features.shifted_stage_bytes is None or features.column_sums or min(features.itemsizes, default=4) * lanes < _LEAST_BYTES:
        return False
    return columns is None or columns >= _WARP * lanes


def _shifted(columns: int | None, known: bool, lanes: int, features: RowFeatures, target: Target) -> tuple[RowPlan, ...]:
    """Plans of rows whose groups of lanes start at aligned places: there may be one group more."""
    longest = None if columns is None else columns + lanes - 1
    features = replace(features, stage_bytes=features.shifted_stage_bytes or 0)
    plans = _plans(longest, known, lanes, features, target)
    shared = _shared(plans, longest, known, lanes, features, target)
    return tuple(replace(plan, shifted=True, exact=False) for plan in (*plans, *shared))


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
    """Whether a thread can hold its part of a row."""
    return elements * held <= _MOST_REGISTERS and elements <= _MOST_ELEMENTS


def _widest(features: RowFeatures) -> int:
    return max(1, min(_MOST_LANES, _VECTOR_BYTES // min(features.itemsizes, default=4)))


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
            size, known = bounds.get(str(extent)), False
        if size is None:
            return None, False
        total *= size
    return total, known


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
    needed = _OWN_REGISTERS + chunks * lanes * features.held
    fits_twice = threads > _THREADS_PER_SM // 2 and 2 * threads * needed <= _REGISTERS
    blocks = 2 if fits_twice else _blocks(threads * rows)
    return RowPlan(threads, rows, lanes, chunks, Persistence.REGISTERS, exact, 0, blocks)


def _blocks(threads: int) -> int:
    """Blocks of so many threads for which registers leave room on a multiprocessor."""
    return max(1, _THREADS_PER_SM // threads)


def _staged(columns: int, known: bool, lanes: int, features: RowFeatures, target: Target) -> RowPlan | None:
    """A row in the shared memory of a block, with as much of the next rows beside it as there is room for."""
    if not features.stage_bytes:
        return None
    chunks = -(-columns // (lanes * _MOST_THREADS))
    slots = min(2 * chunks, _slots(lanes, _MOST_THREADS, 1, features, target))
    if not _is_worth_it(slots, chunks) or chunks * lanes > _MOST_STAGED:
        return None
    exact = known and columns == chunks * lanes * _MOST_THREADS
    return RowPlan(_MOST_THREADS, 1, lanes, chunks, Persistence.STAGED, exact, target.processors, 1, slots)


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


def _slots(lanes: int, threads: int, blocks: int, features: RowFeatures, target: Target) -> int:
    """Slots that each of some blocks of a multiprocessor has room for."""
    scratch = max(_SCRATCH, _SYSTEM + threads // _WARP * 2 * SCRATCH_BYTES * features.reductions)
    return max(0, target.shared_bytes // blocks - scratch) // (lanes * threads * features.stage_bytes)


def _is_worth_it(slots: int, chunks: int) -> bool:
    """Whether enough of the next row is under way while one is worked on."""
    return slots * _LEAST_AHEAD[1] >= chunks * _LEAST_AHEAD[0]


def _looped(lanes: int, target: Target, features: RowFeatures) -> RowPlan:
    """A row that is read again in each phase, from L2 as far as that holds it."""
    resident = _resident(_MOST_THREADS, target) if features.column_sums else 0
    return RowPlan(_MOST_THREADS, 1, lanes, 0, Persistence.LOOPED, False, resident)


def _resident(block: int, target: Target) -> int:
    """Blocks that share the rows when columns are summed: few, so that few partial sums remain to be combined."""
    return target.processors * max(1, _MOST_THREADS // (2 * block))
