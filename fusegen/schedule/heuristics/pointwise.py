"""Plans of pointwise kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusegen.ir.symbolic import Axes, Index, literal
from fusegen.schedule.access import Multiples, divisor
from fusegen.schedule.heuristics import cpu
from fusegen.schedule.plan import PointwisePlan
from fusegen.target import Backend, Target

_VECTOR_BYTES = 16  # the widest memory access of a thread
_MOST_LANES = 8
_THREADS, _ALL_THREADS = 256, (128, 256, 512)
_UNROLLS = (1, 2, 4)
_SMALL = 1 << 20  # elements below which more blocks pay more than more loads in flight


def pointwise_plans(
    axes: Axes, itemsizes: Sequence[int], offsets: Sequence[Index], target: Target, multiples: Multiples
) -> tuple[PointwisePlan, ...]:
    """The plans for an iteration space; what is expected to be fastest comes first.

    Args:
        axes: merged axes; lanes run along the last one.
        itemsizes, offsets: of everything that is read or written.
        target: the machine.
        multiples: known divisors of sizes.
    """
    if target.backend is Backend.CPU:
        return cpu.pointwise_plans(axes, offsets)
    inner = axes.extents[-1]
    lanes = max(1, min(_MOST_LANES, _VECTOR_BYTES // min(itemsizes, default=4)))
    tail = False
    if divisor(inner, multiples) % lanes:
        if len(axes.symbols) == 1:
            tail = True  # one long row: only its end is partial
        else:
            lanes = _dividing(divisor(inner, multiples), lanes)
    first = PointwisePlan(_THREADS, lanes, _unroll(axes), tail)
    others = [replace(first, threads=threads, unroll=unroll) for threads in _ALL_THREADS for unroll in _UNROLLS]
    fewer = [replace(first, lanes=lanes // 2, unroll=unroll) for unroll in _UNROLLS if lanes > 1]
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
