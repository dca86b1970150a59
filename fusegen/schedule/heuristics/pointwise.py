"""Plans of pointwise kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusegen.ir.symbolic import Axes, Index, literal
from fusegen.schedule.access import Multiples, divisor
from fusegen.schedule.heuristics import cpu
from fusegen.schedule.plan import PointwisePlan
from fusegen.target import Backend, Target

_VECTOR_BYTES = 16  # the widest memory access of a thread
_MOST_LANES = 8
_LEAST_BYTES = 4  # of a group of lanes that a window brings
_THREADS, _ALL_THREADS = 256, (128, 256, 512)
_UNROLLS = (1, 2, 4)
_SMALL = 1 << 20  # elements below which more blocks pay more than more loads in flight


def pointwise_plans(
    axes: Axes, itemsizes: Sequence[int], offsets: Sequence[Index], target: Target, multiples: Multiples, *, may_wrap: bool = False
) -> tuple[PointwisePlan, ...]:
    """The plans for an iteration space; what is expected to be fastest comes first.

    Args:
        axes: merged axes; lanes run along the last one.
        itemsizes, offsets: of everything that is read or written.
        target: the machine.
        multiples: known divisors of sizes.
        may_wrap: whether groups of lanes may go on in the next row.
    """
    if target.backend is Backend.CPU:
        return cpu.pointwise_plans(axes, offsets)
    inner = axes.extents[-1]
    lanes = max(1, min(_MOST_LANES, _VECTOR_BYTES // min(itemsizes, default=4)))
    least = min(itemsizes, default=4) * lanes
    dividing = _dividing(divisor(inner, multiples), lanes)
    whole = divisor(math.prod(divisor(e, multiples) for e in axes.extents), {}) % lanes == 0
    if dividing == lanes:
        return _variants(PointwisePlan(_THREADS, lanes, _unroll(axes), False))
    if len(axes.symbols) == 1:  # one long row: only its end is partial
        return _variants(PointwisePlan(_THREADS, lanes, _unroll(axes), True))
    narrow = _variants(PointwisePlan(_THREADS, dividing, _unroll(axes), False))
    if may_wrap and least >= _LEAST_BYTES:
        wrapped = PointwisePlan(_THREADS, lanes, _unroll(axes), not whole, wraps=True)
        return (*narrow, *_variants(wrapped))  # which nobody has measured yet
    return narrow


def _variants(first: PointwisePlan) -> tuple[PointwisePlan, ...]:
    """A plan, and others that differ in how many blocks and loads in flight there are."""
    others = [replace(first, threads=threads, unroll=unroll) for threads in _ALL_THREADS for unroll in _UNROLLS]
    fewer = [replace(first, lanes=first.lanes // 2, unroll=unroll) for unroll in _UNROLLS if first.lanes > 1 and not first.wraps]
    return tuple(dict.fromkeys([first, *others, *fewer]))


def _dividing(extent_multiple: int, lanes: int) -> int:
    while extent_multiple % lanes:
        lanes //= 2
    return lanes


def _unroll(axes: Axes) -> int:
    sizes = [literal(e) for e in axes.extents]
    if any(s is None for s in sizes):
        return 2
    total = 1
    for size in sizes:
        total *= size or 1
    return 1 if total <= _SMALL else 2
