"""Plans of row kernels.

A row lives in the registers of as many threads as it needs, read from memory once: a warp for short rows, a block for longer
ones. Longer rows are staged in the shared memory of one block; the longest are looped over. Clusters of blocks that share a row
were measured on an H200 and lost to both (35% to 60% of the speed of a copy): their barriers cost more than they save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fusegen.ir.symbolic import Axes, literal
from fusegen.schedule.access import Multiples, divisor
from fusegen.schedule.heuristics import cpu
from fusegen.schedule.plan import Persistence, RowPlan
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
_SCRATCH = 4096  # bytes of shared memory beside staged rows: scratch of reductions, and what the system reserves
_THREADS = (32, 64, 128, 256, 512, _MOST_THREADS)


@dataclass(frozen=True)
class RowFeatures:
    """What the plan of a row kernel depends on.

    Attributes:
        axes: the column axes, merged.
        itemsizes: of fragments that are read or written along the row.
        held: 32-bit registers that each element of a row takes between phases, at most.
        column_sums: columns sums that are accumulated in registers.
        reductions: reductions along the row.
        stage_bytes: bytes that an element takes in shared memory when its row is staged there; 0 when it cannot be.
        computed: bytes of each element's values that are computed in one phase and used in later ones.
        shifted_stage_bytes: as `stage_bytes`, where groups of lanes start at aligned places and not where rows do; None where they
            cannot.
    """

    axes: Axes
    itemsizes: Sequence[int]
    held: float
    column_sums: int
    reductions: int
    stage_bytes: int
    computed: int = 0
    shifted_stage_bytes: int | None = None


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
        return (_tiled(columns if known else None, lanes, target),)
    plans = _plans(columns, known, lanes, features, target)
    if lanes == widest or not _may_be_shifted(features, columns, widest):
        return plans
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
    if features.column_sums:  # which threads hold over all rows: there is no other way
        found = [*powers, *fewest]
        return tuple(dict.fromkeys(filter(None, found if any(found) else [held(_MOST_THREADS)])))
    return tuple(dict.fromkeys(filter(None, [*powers, _staged(columns, known, lanes, features, target), looped, *fewest])))


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
    return tuple(replace(plan, shifted=True, exact=False) for plan in _plans(longest, known, lanes, features, target))


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
    rows = _BLOCK // threads if threads == _WARP else 1
    exact = columns == chunks * lanes * threads
    if features.column_sums:  # no more blocks than run: what is summed takes all the registers that it can have
        resident = _resident(threads * rows, target)
        return RowPlan(threads, rows, lanes, chunks, Persistence.REGISTERS, exact, resident, resident // target.processors)
    needed = _OWN_REGISTERS + chunks * lanes * features.held
    blocks = 2 if threads > _THREADS_PER_SM // 2 and 2 * threads * needed <= _REGISTERS else _THREADS_PER_SM // (threads * rows)
    return RowPlan(threads, rows, lanes, chunks, Persistence.REGISTERS, exact, 0, max(1, blocks))


def _staged(columns: int, known: bool, lanes: int, features: RowFeatures, target: Target) -> RowPlan | None:
    """A row in the shared memory of a block, with as much of the next rows beside it as there is room for."""
    if not features.stage_bytes:
        return None
    chunks = -(-columns // (lanes * _MOST_THREADS))
    slots = min(2 * chunks, (target.shared_bytes - _SCRATCH) // (lanes * _MOST_THREADS * features.stage_bytes))
    if slots * _LEAST_AHEAD[1] < chunks * _LEAST_AHEAD[0] or chunks * lanes > _MOST_STAGED:
        return None
    exact = known and columns == chunks * lanes * _MOST_THREADS
    return RowPlan(_MOST_THREADS, 1, lanes, chunks, Persistence.STAGED, exact, target.processors, 1, slots)


def _looped(lanes: int, target: Target, features: RowFeatures) -> RowPlan:
    """A row that is read again in each phase, from L2 as far as that holds it."""
    resident = _resident(_MOST_THREADS, target) if features.column_sums else 0
    return RowPlan(_MOST_THREADS, 1, lanes, 0, Persistence.LOOPED, False, resident)


def _tiled(columns: int | None, lanes: int, target: Target) -> RowPlan:
    """Tiles of columns, each summed over rows by several blocks."""
    threads, rows = _WARP, _BLOCK // _WARP
    tile = lanes * threads
    exact = columns is not None and columns % tile == 0
    tiles = 1 if columns is None else -(-columns // tile)
    resident = max(1, -(-_resident(_BLOCK, target) // tiles))
    return RowPlan(threads, rows, lanes, 1, Persistence.REGISTERS, exact, resident, tiled=True)


def _resident(block: int, target: Target) -> int:
    """Blocks that share the rows when columns are summed: few, so that few partial sums remain to be combined."""
    return target.processors * max(1, _MOST_THREADS // (2 * block))
