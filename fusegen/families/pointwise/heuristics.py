"""Plans of pointwise kernels."""

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
_LEAST_BYTES = 4  # of a group of lanes that a window brings
_THREADS = (128, 256, 512)
SHORT = 64
"""Columns from which on groups of lanes may go on in the next row where a quarter of them divides a row at most: on an H200 that is
up to twice as fast."""
_NARROW_THREADS = 256  # of blocks with half the lanes
_UNROLLS = (1, 2, 4)
_REPEATS = (4, 8, 16, 2)
_REPEATED_UNROLLS = (2, 1, 4)
_ROOM, _MOST_MOVED = 1024, 48  # threads of a multiprocessor, of 64 registers each; of these, such as hold what is read and written


def widest(itemsizes: Sequence[int]) -> int:
    """The neighbours that a thread takes at once: as many of the narrowest elements as one access moves, and no more than 8 where
    something is wider than a byte."""
    lanes = _VECTOR_BYTES // min(itemsizes, default=4)
    return max(1, lanes if max(itemsizes, default=4) == 1 else min(_MOST_LANES, lanes))


@dataclass(frozen=True)
class PointFeatures:
    """The features by which plans are chosen.

    Attributes:
        axes: merged axes; lanes run along the last one.
        itemsizes, offsets: of everything that is read or written.
        may_wrap: whether groups of lanes may go on in the next row.
        in_turn: bytes that a lane takes of an access to several variables in turn; 0 where there is none.
        together: points of the group's domain that one point of the axes is.
        along: the extent of an axis along which costly values are the same; None where there is none.
    """

    axes: Axes
    itemsizes: Sequence[int]
    offsets: Sequence[Index]
    may_wrap: bool = False
    in_turn: int = 0
    together: int = 1
    along: Dim | None = None


def pointwise_plans(features: PointFeatures, target: Target, multiples: Multiples) -> tuple[PointwisePlan, ...]:
    """The plans for an iteration space; what is expected to be fastest comes first.

    Args:
        target: the machine.
        multiples: known divisors of sizes.
    """
    if not target.warp:
        return cpu_plans(features.axes, features.offsets)
    found = (*_repeated(features, multiples), *_straight(features, multiples))
    return found if features.together == 1 else tuple(_with_room(plan, features.itemsizes) for plan in found)


def _straight(features: PointFeatures, multiples: Multiples) -> tuple[PointwisePlan, ...]:
    """Plans of which a thread takes groups of lanes that are far apart."""
    axes, itemsizes = features.axes, features.itemsizes
    inner, lanes = axes.extents[-1], _lanes(features)
    least = min(itemsizes, default=4) * lanes
    dividing = _dividing(divisor(inner, multiples), lanes)
    whole = divisor(math.prod(divisor(e, multiples) for e in axes.extents), {}) % lanes == 0
    if dividing == lanes:
        return _variants(lanes, tail=False)
    if len(axes.symbols) == 1:  # one long row: only its end is partial
        return _variants(lanes, tail=True)
    narrow = _variants(dividing, tail=False)
    if not features.may_wrap or least < _LEAST_BYTES:
        return narrow
    wrapped = _variants(lanes, tail=not whole, wraps=True)
    columns = literal(inner)
    return (*wrapped, *narrow) if dividing * 4 <= lanes and (columns is None or columns >= SHORT) else (*narrow, *wrapped)


def _lanes(features: PointFeatures) -> int:
    """The neighbours that a thread takes at once."""
    lanes = widest(features.itemsizes)
    return min(lanes, max(1, _VECTOR_BYTES // features.in_turn)) if features.in_turn else lanes


def _variants(lanes: int, *, tail: bool, wraps: bool = False) -> tuple[PointwisePlan, ...]:
    """Plans that differ in how many blocks and loads in flight there are. On an H200 the first is within 1% of the best above 64
    MB; 256 threads that load two groups ahead lose 2%."""
    all_of = [PointwisePlan(threads, lanes, unroll, tail, wraps=wraps) for threads in _THREADS for unroll in _UNROLLS]
    fewer = [replace(plan, lanes=lanes // 2) for plan in all_of if plan.threads == _NARROW_THREADS and lanes > 1 and not wraps]
    return (*all_of, *fewer)


def _repeated(features: PointFeatures, multiples: Multiples) -> tuple[PointwisePlan, ...]:
    """Plans of which each thread goes along an axis; on an H100 the first is fastest of a rotation by angles that are computed."""
    if features.along is None:
        return ()
    lanes = _dividing(divisor(features.axes.extents[-1], multiples), _lanes(features))
    extent = literal(features.along)
    plans = [
        PointwisePlan(threads, lanes, unroll, tail=False, repeats=count)
        for count in _REPEATS
        for threads in _THREADS[:2]
        for unroll in _REPEATED_UNROLLS
    ]
    return tuple(plan for plan in plans if extent is None or plan.repeats <= extent)


def _with_room(plan: PointwisePlan, itemsizes: Sequence[int]) -> PointwisePlan:
    """A plan whose registers leave room for half of a multiprocessor's threads, where they do so without much ado."""
    moved = sum(itemsizes) * plan.lanes * plan.unroll // 4
    is_light = moved <= _MOST_MOVED and max(itemsizes, default=4) <= 4 and plan.repeats == 1
    return replace(plan, blocks_per_sm=_ROOM // plan.threads) if is_light else plan


def _dividing(extent_multiple: int, lanes: int) -> int:
    while extent_multiple % lanes:
        lanes //= 2
    return lanes


# Plans of pointwise kernels whose operands lie across their results.


FEWEST = 32
"""Points along both axes from which on tiles pay: there is no smaller tile."""
_TILE_SHAPES = ((64, 64, 128), (128, 64, 256), (128, 64, 128), (64, 64, 256), (32, 64, 128), (32, 32, 128))
"""Rows and columns of a tile, and threads of its block. On an H200 a transposed copy of 16384 x 4096 takes 74 to 79 µs with each of
them, and 67 where nothing is transposed. Of 300 x 500 the first takes 6.8 µs and the last, which has more blocks, 5.3."""
_BLOCKS_OF_TILES = 8  # whose tiles a multiprocessor has room for
_LEAST_UNDER_WAY = 32  # that a thread has under way, so that a multiprocessor full of threads waits for memory alone


def tile_plans(rows: Dim, columns: Dim, lanes: int, itemsizes: Sequence[int], target: Target) -> tuple[TilePlan, ...]:
    """The plans for an iteration space; what is expected to be fastest comes first.

    Args:
        rows: points along the axis along which operands lie that lie across the results.
        columns: points along the axis along which results lie.
        lanes: neighbours of a result that a thread handles together.
        itemsizes: of the operands that lie across.
        target: the machine.
    """
    if not target.warp or not all(is_long(extent) for extent in (rows, columns)):
        return ()
    found = [TilePlan(threads, lanes, *sides) for *sides, threads in _TILE_SHAPES if _fits(sides, rows, columns)]
    fitting = (plan for plan in found if plan.unroll and _room(plan, itemsizes) * _BLOCKS_OF_TILES <= target.shared_bytes)
    return tuple(sorted(fitting, key=lambda plan: plan.rows * plan.columns * sum(itemsizes) < _LEAST_UNDER_WAY * plan.threads))


def is_long(extent: Dim) -> bool:
    """True if there may be so many points along an axis that tiles pay."""
    known = literal(extent)
    return known is None or known >= FEWEST


def _fits(sides: Sequence[int], rows: Dim, columns: Dim) -> bool:
    """True if no axis is known to fill less than half a tile, or just that."""
    return all(known is None or known > side // 2 for side, known in zip(sides, (literal(rows), literal(columns)), strict=True))


def _room(plan: TilePlan, itemsizes: Sequence[int]) -> int:
    return sum(map(plan.tile_bytes, itemsizes))
