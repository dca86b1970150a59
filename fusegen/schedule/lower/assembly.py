"""The kernel around calls of math: its parameters are what these calls read, write and compute of coordinates and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Index, RunTimeNumber
from fusegen.schedule.access import size_names
from fusegen.schedule.bodies import Body
from fusegen.schedule.indices import Check, has_checks, scalars_in
from fusegen.schedule.kernel import Kernel, Pointer
from fusegen.schedule.lower.context import Context
from fusegen.schedule.math import Argument, Origin
from fusegen.schedule.names import scalar_identifier

Place: TypeAlias = tuple[Index, Sequence[Bounds]]
"""An offset in memory, and the conditions under which it is valid."""


@dataclass(frozen=True)
class Uses:
    """What calls of math need of the kernel around them.

    Attributes:
        expressions: what is computed of coordinates and sizes.
        scalars: names of the run-time scalars that are taken.
    """

    expressions: tuple[Index, ...]
    scalars: frozenset[str]


def uses_of(places: Sequence[Place], arguments: Iterable[Argument], checks: Iterable[Check], extents: Iterable[Index]) -> Uses:
    """What calls with some arguments need.

    Args:
        places: where they read.
        checks: indices that must be in range besides.
        extents: by which a point of the iteration space is found.
    """
    arguments = tuple(arguments)
    coordinates = [value for argument in arguments for value in argument.coordinates]
    bounds = [bound for _, conditions in places for bound in conditions]
    bounds += [value for value in coordinates if isinstance(value, Bounds)]
    expressions = [offset for offset, _ in places]
    expressions += [value for value in coordinates if not isinstance(value, Bounds)]
    expressions += [e for b in bounds for e in (b.index, b.lower, b.upper) if e is not None]
    expressions += [e for check in checks for e in check.expressions()]
    scalars = frozenset(argument.name for argument in arguments if argument.origin is Origin.SCALAR)
    return Uses((*expressions, *extents), scalars | scalars_in(expressions))


def assemble(
    context: Context,
    body: Body,
    uses: Sequence[Uses],
    pointers: Sequence[Pointer],
    others: Iterable[Index] = (),
    axes: Iterable[sympy.Symbol] = (),
) -> Kernel:
    """The kernel that a body is of.

    Args:
        uses: of all calls in it.
        pointers: to what it reads and writes.
        others: what it computes beside its calls, of offsets that it writes at.
        axes: symbols that are no sizes.
    """
    expressions = [*others, *(e for used in uses for e in used.expressions)]
    numbers = {number for e in expressions if not isinstance(e, int) for number in e.atoms(RunTimeNumber)}
    scalars = frozenset(number.name for number in numbers).union(*(used.scalars for used in uses))
    named = ((scalar_identifier(name), dtype) for name, dtype in context.graph.scalars)
    return Kernel(
        name=context.name,
        pointers=tuple(pointers),
        sizes=size_names(expressions, {*axes, *numbers}),
        scalars=tuple((name, dtype) for name, dtype in named if name in scalars),
        body=body,
        wide=context.wide,
        checks=has_checks(expressions),
    )
