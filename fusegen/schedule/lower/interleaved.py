"""Accesses to neighbours whose places alternate, as those to the pairs of an interleaved rotation: one vector of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from fusegen.ir.symbolic import literal
from fusegen.schedule.access import Access, Pattern, is_alike, vector_width
from fusegen.schedule.lower.context import Context
from fusegen.schedule.terms import Read

_MOST = 4  # elements that belong together


def interleaved(context: Context, accesses: Sequence[Access], axis: sympy.Symbol, lanes: int) -> tuple[Access, ...]:
    """The accesses, of which those that touch all elements of a run in turn are one.

    Args:
        axis: along which lanes run, the first one at a multiple of their number.
    """
    found: list[Access] = []
    left = list(accesses)
    while left:
        first = left.pop(0)
        run = _run_of(first, left, axis)
        if len(run) > 1 and all(is_alike(b, axis, lanes, context.multiples) for b in first.conditions):
            left = [access for access in left if access not in run]
            found.append(_joined(context, run, axis, lanes))
        else:
            found.append(first)
    return tuple(found)


def bytes_in_turn(context: Context, kinds: Sequence[Sequence[Read]], axis: sympy.Symbol) -> int:
    """Bytes that a lane takes of the widest access to several variables in turn; 0 where there is none.

    Args:
        kinds: what is read, and what is written.
        axis: along which lanes run.
    """
    accesses = [[context.access("", r.buffer, r.offset, axis, 1, r.conditions) for r in kind] for kind in kinds]
    joined = [access for kind in accesses for access in interleaved(context, kind, axis, 1)]
    return max((len(a.parts) * context.dtype(a.buffer).itemsize for a in joined if len(a.parts) % 2 == 0), default=0)


def _run_of(first: Access, others: Sequence[Access], axis: sympy.Symbol) -> list[Access]:
    """The accesses that touch, with one of them, all elements of a run; the first alone where there are none."""
    step = literal(sympy.expand(first.offset).coeff(axis)) if first.pattern is Pattern.GATHER else None
    if step is None or not 2 <= step <= _MOST:
        return [first]
    alike = [a for a in others if a.buffer == first.buffer and a.conditions == first.conditions]
    placed = {literal(sympy.expand(a.offset - first.offset)): a for a in alike} | {0: first}
    for begin in range(1 - step, 1):
        run = [placed.get(begin + k) for k in range(step)]
        if None not in run:
            return [access for access in run if access is not None]
    return [first]


def _joined(context: Context, run: Sequence[Access], axis: sympy.Symbol, lanes: int) -> Access:
    first, step = run[0], len(run)
    dtype = context.dtype(first.buffer)
    start = sympy.expand(first.offset - (step - 1) * axis)
    width = vector_width(start, axis, lanes * step, context.alignment(first.buffer), dtype.itemsize, context.multiples)
    name = context.names.take(f"{first.name}_in_turn")
    return Access(name, first.buffer, first.offset, Pattern.INTERLEAVED, width, first.conditions, tuple(a.name for a in run))
