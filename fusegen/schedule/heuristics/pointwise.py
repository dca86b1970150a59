"""Plans of pointwise kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusegen.ir.symbolic import Axes, Dim, Index, literal
from fusegen.schedule.access import Multiples, divisor
from fusegen.schedule.heuristics import cpu
from fusegen.schedule.plan import PointwisePlan
from fusegen.target import Backend, Target

_VECTOR_BYTES = 16  # the widest memory access of a thread
_MOST_LANES = 8
_LEAST_BYTES = 4  # of a group of lanes that a window brings
_THREADS = (128, 256, 512)
SHORT = 64
"""Columns from which on groups of lanes may go on in the next row where a quarter of them divides a row at most: on an H200 that is
up to twice as fast."""
_NARROW_THREADS = 256  # of blocks with half the lanes
_UNROLLS = (1, 2, 4)
_REPEATS = (32, 16, 8, 4, 2)
_REPEATED_UNROLLS = (1, 2)


def widest(itemsizes: Sequence[int]) -> int:
    """The neighbours that a thread takes at once: as many of the narrowest elements as one access moves, and no more than 8 where
    something is wider than a byte."""
    lanes = _VECTOR_BYTES // min(itemsizes, default=4)
    return max(1, lanes if max(itemsizes, default=4) == 1 else min(_MOST_LANES, lanes))


def pointwise_plans(
    axes: Axes,
    itemsizes: Sequence[int],
    offsets: Sequence[Index],
    target: Target,
    multiples: Multiples,
    *,
    may_wrap: bool = False,
    in_turn: int = 0,
    along: Dim | None = None,
) -> tuple[PointwisePlan, ...]:
    """The plans for an iteration space; what is expected to be fastest comes first.

    Args:
        axes: merged axes; lanes run along the last one.
        itemsizes, offsets: of everything that is read or written.
        target: the machine.
        multiples: known divisors of sizes.
        may_wrap: whether groups of lanes may go on in the next row.
        in_turn: bytes that a lane takes of an access to several variables in turn.
        along: the extent of an axis along which costly values are the same; None where there is none.
    """
    if target.backend is Backend.CPU:
        return cpu.pointwise_plans(axes, offsets)
    inner = axes.extents[-1]
    lanes = min(widest(itemsizes), max(1, _VECTOR_BYTES // in_turn)) if in_turn else widest(itemsizes)
    least = min(itemsizes, default=4) * lanes
    dividing = _dividing(divisor(inner, multiples), lanes)
    whole = divisor(math.prod(divisor(e, multiples) for e in axes.extents), {}) % lanes == 0
    repeated = () if along is None else _repeated(dividing, literal(along))
    if dividing == lanes:
        return (*repeated, *_variants(lanes, tail=False))
    if len(axes.symbols) == 1:  # one long row: only its end is partial
        return _variants(lanes, tail=True)
    narrow = _variants(dividing, tail=False)
    if not may_wrap or least < _LEAST_BYTES:
        return (*repeated, *narrow)
    wrapped = _variants(lanes, tail=not whole, wraps=True)
    columns = literal(inner)
    return (
        (*repeated, *wrapped, *narrow)
        if dividing * 4 <= lanes and (columns is None or columns >= SHORT)
        else (*repeated, *narrow, *wrapped)
    )


def _variants(lanes: int, *, tail: bool, wraps: bool = False) -> tuple[PointwisePlan, ...]:
    """Plans that differ in how many blocks and loads in flight there are. On an H200 the first is within 1% of the best above 64
    MB; 256 threads that load two groups ahead lose 2%."""
    all_of = [PointwisePlan(threads, lanes, unroll, tail, wraps=wraps) for threads in _THREADS for unroll in _UNROLLS]
    fewer = [replace(plan, lanes=lanes // 2) for plan in all_of if plan.threads == _NARROW_THREADS and lanes > 1 and not wraps]
    return (*all_of, *fewer)


def _repeated(lanes: int, extent: int | None) -> tuple[PointwisePlan, ...]:
    """Plans of which each thread goes along an axis; those that compute most for what is the same along it come first."""
    counts = [count for count in _REPEATS if extent is None or count <= extent]
    return tuple(
        PointwisePlan(threads, lanes, unroll, tail=False, repeats=count)
        for count in counts
        for threads in _THREADS[:2]
        for unroll in _REPEATED_UNROLLS
    )


def _dividing(extent_multiple: int, lanes: int) -> int:
    while extent_multiple % lanes:
        lanes //= 2
    return lanes
