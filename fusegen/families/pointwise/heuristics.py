"""Candidates of pointwise kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusegen.families.pointwise.cpu import cpu_plans
from fusegen.families.pointwise.plan import PointwisePlan, TilePlan
from fusegen.ir.symbolic import Axes, Dim, Index, literal
from fusegen.schedule.access import Multiples, divisor
from fusegen.target import Target

_VECTOR_BYTES = 16  # the widest memory access of a thread
_MOST_LANES = 8
_LEAST_BYTES = 4  # bytes of the smallest vector in a window
_THREADS = (128, 256, 512)
SHORT = 64
"""Fewest columns for which plans whose vectors wrap rows come first, if at most a quarter of the vector width divides a row. On an
H200, they are then up to twice as fast."""
_NARROW_THREADS = 256  # threads of blocks with half the vector width
_UNROLLS = (1, 2, 4)
_REPEATS = (4, 8, 16, 2)
_REPEATED_UNROLLS = (2, 1, 4)
_ROOM, _MOST_MOVED = 1024, 48  # threads per SM, with 64 registers each; most registers for reads and writes


def widest(itemsizes: Sequence[int]) -> int:
    """Returns the vector width: as many of the narrowest elements as one access moves, at most 8 unless all are bytes."""
    vec = _VECTOR_BYTES // min(itemsizes, default=4)
    return max(1, vec if max(itemsizes, default=4) == 1 else min(_MOST_LANES, vec))


@dataclass(frozen=True)
class PointwiseFeatures:
    """The properties that the plan of a pointwise kernel depends on.

    Attributes:
        axes: merged axes; vectors run along the last one.
        itemsizes, offsets: those of all reads and writes.
        may_wrap: whether vectors may continue in the next row.
        interleaved_bytes: bytes per lane of the widest interleaved access; 0 if there is none.
        elements_per_index: elements of the group's domain per index of the axes.
        along: the extent of the axis for hoisting, or None.
    """

    axes: Axes
    itemsizes: Sequence[int]
    offsets: Sequence[Index]
    may_wrap: bool = False
    interleaved_bytes: int = 0
    elements_per_index: int = 1
    along: Dim | None = None


def pointwise_plans(features: PointwiseFeatures, target: Target, multiples: Multiples) -> tuple[PointwisePlan, ...]:
    """Returns the candidates for an iteration space, the fastest expected first."""
    if not target.warp:
        return cpu_plans(features.axes, features.offsets)
    plans = (*_repeated(features, multiples), *_vectorized(features, multiples))
    return plans if features.elements_per_index == 1 else tuple(_with_room(plan, features.itemsizes) for plan in plans)


def _vectorized(features: PointwiseFeatures, multiples: Multiples) -> tuple[PointwisePlan, ...]:
    axes, itemsizes = features.axes, features.itemsizes
    inner, vec = axes.extents[-1], _lanes(features)
    least = min(itemsizes, default=4) * vec
    dividing = _dividing(divisor(inner, multiples), vec)
    has_no_tail = divisor(math.prod(divisor(e, multiples) for e in axes.extents), {}) % vec == 0
    if dividing == vec:
        return _variants(vec, tail=False)
    if len(axes.symbols) == 1:  # one long row: only its end is partial
        return _variants(vec, tail=True)
    narrow = _variants(dividing, tail=False)
    if not features.may_wrap or least < _LEAST_BYTES:
        return narrow
    wrapped = _variants(vec, tail=not has_no_tail, wraps=True)
    columns = literal(inner)
    return (*wrapped, *narrow) if dividing * 4 <= vec and (columns is None or columns >= SHORT) else (*narrow, *wrapped)


def _lanes(features: PointwiseFeatures) -> int:
    vec = widest(features.itemsizes)
    return min(vec, max(1, _VECTOR_BYTES // features.interleaved_bytes)) if features.interleaved_bytes else vec


def _variants(vec: int, *, tail: bool, wraps: bool = False) -> tuple[PointwisePlan, ...]:
    """Returns plans that differ in threads per block and loads in flight. On an H200, the first is within 1% of the best above 64
    MB; 256 threads that load two vectors ahead lose 2%."""
    all_of = [PointwisePlan(threads, vec, unroll, tail, wraps=wraps) for threads in _THREADS for unroll in _UNROLLS]
    fewer = [replace(plan, vec=vec // 2) for plan in all_of if plan.threads == _NARROW_THREADS and vec > 1 and not wraps]
    return (*all_of, *fewer)


def _repeated(features: PointwiseFeatures, multiples: Multiples) -> tuple[PointwisePlan, ...]:
    """Returns plans in which each thread loops along an axis; on an H100, the first is fastest for a rotation by computed
    angles."""
    if features.along is None:
        return ()
    vec = _dividing(divisor(features.axes.extents[-1], multiples), _lanes(features))
    extent = literal(features.along)
    plans = [
        PointwisePlan(threads, vec, unroll, tail=False, repeats=count)
        for count in _REPEATS
        for threads in _THREADS[:2]
        for unroll in _REPEATED_UNROLLS
    ]
    return tuple(plan for plan in plans if extent is None or plan.repeats <= extent)


def _with_room(plan: PointwisePlan, itemsizes: Sequence[int]) -> PointwisePlan:
    """Limits registers so that half of an SM's threads fit, if that costs no spills."""
    moved = sum(itemsizes) * plan.vec * plan.unroll // 4
    is_light = moved <= _MOST_MOVED and max(itemsizes, default=4) <= 4 and plan.repeats == 1
    return replace(plan, blocks_per_sm=_ROOM // plan.threads) if is_light else plan


def _dividing(extent_multiple: int, vec: int) -> int:
    while extent_multiple % vec:
        vec //= 2
    return vec


# Plans of pointwise kernels with transposed operands.


FEWEST = 32
"""Fewest elements along both axes for which tiles pay: the smallest tile."""
_TILE_SHAPES = ((64, 64, 128), (128, 64, 256), (128, 64, 128), (64, 64, 256), (32, 64, 128), (32, 32, 128))
"""Rows and columns of a tile, and threads of its block. On an H200, a transposed copy of 16384 x 4096 takes 74 to 79 µs with each
of them, and 67 without the transposition. For 300 x 500, the first takes 6.8 µs and the last, which has more blocks, 5.3."""
_BLOCKS_OF_TILES = 8  # blocks per SM that shared memory must leave room for
_LEAST_IN_FLIGHT = 32  # bytes in flight per thread that hide the memory latency on a full SM


def tile_plans(rows: Dim, columns: Dim, vec: int, itemsizes: Sequence[int], target: Target) -> tuple[TilePlan, ...]:
    """Returns the candidates for an iteration space, the fastest expected first.

    Args:
        rows, columns: elements along the axes in which transposed operands and results are contiguous.
        vec: vector width of results.
        itemsizes: bytes per element of the transposed operands.
    """
    if not target.warp or not all(is_long(extent) for extent in (rows, columns)):
        return ()
    plans = [TilePlan(threads, vec, *sides) for *sides, threads in _TILE_SHAPES if _fits(sides, rows, columns)]
    fitting = (plan for plan in plans if plan.unroll and _room(plan, itemsizes) * _BLOCKS_OF_TILES <= target.shared_bytes)
    return tuple(sorted(fitting, key=lambda plan: plan.rows * plan.columns * sum(itemsizes) < _LEAST_IN_FLIGHT * plan.threads))


def is_long(extent: Dim) -> bool:
    known = literal(extent)
    return known is None or known >= FEWEST


def _fits(sides: Sequence[int], rows: Dim, columns: Dim) -> bool:
    return all(known is None or known > side // 2 for side, known in zip(sides, (literal(rows), literal(columns)), strict=True))


def _room(plan: TilePlan, itemsizes: Sequence[int]) -> int:
    return sum(map(plan.tile_bytes, itemsizes))
