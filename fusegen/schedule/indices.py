"""Indices that are values: how an offset mentions an integer that the kernel reads, and checks before it reads there.

Both are functions in an offset as a division is: axes and sizes in them are replaced with those around them, and what depends
on an axis through a value that is read depends on it. Where an offset does not depend on an index (along a dim of one element, in
a constant), the check stands apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import sympy
from sympy.core.symbol import Str

from fusegen.ir.formula import integer_text
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, owner
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Index


class Loaded(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """An integer in memory: ``Loaded(buffer, offset)``."""

    nargs = (2,)
    is_integer = True

    @property
    def buffer(self) -> int:
        """The buffer's key."""
        return int(self.args[0])

    @property
    def offset(self) -> sympy.Expr:
        """In elements."""
        return self.args[1]


class Scalar(sympy.Function):  # type: ignore[misc]
    """A run-time scalar: ``Scalar(name)``, by its name in emitted text."""

    nargs = (1,)
    is_integer = True

    @property
    def name(self) -> str:
        """The kernel's parameter."""
        return str(self.args[0].name)


class Differs(sympy.Function):  # type: ignore[misc]
    """A condition, true where two integers differ: ``Differs(left, right)``."""

    nargs = (2,)


class Choice(sympy.Function):  # type: ignore[misc]
    """One of two integers: ``Choice(condition, where_true, where_false)``, by `Differs` or a condition that is `Loaded`."""

    nargs = (3,)
    is_integer = True


class Checked(sympy.Function):  # type: ignore[misc]
    """A value as an index: ``Checked(value, extent, wraps, table, message)``, which is in [0, extent), or ends the kernel.

    A negative value counts from the end where ``wraps`` is 1.
    """

    nargs = (5,)
    is_integer = True
    is_nonnegative = True

    @property
    def wraps(self) -> bool:
        """True if a negative value counts from the end."""
        return bool(self.args[2])

    @property
    def table(self) -> str:
        """The name of what is indexed."""
        return str(self.args[3].name)

    @property
    def message(self) -> str:
        """The message for an index that is out of range."""
        return str(self.args[4].name)


def checked_index(graph: Graph, gather: int, value: Index) -> Checked:
    """The index at which a gather reads its operand, of the value that says so."""
    node = graph.nodes[gather]
    table, wraps = _input_name(graph, node.args[0]), bool(node.attr("wraps"))
    extent = graph.nodes[node.args[0]].shape[cast(int, node.attr("dim"))]
    end = integer_text(extent)
    start = f"-{end if end.isidentifier() or end.isdigit() else f'({end})'}" if wraps else "0"
    indexed = "a computed tensor" if table is None else f"'{table}'"
    message = f"index of {indexed} out of range [{start}, {end})"
    return Checked(value, extent, int(wraps), Str(table or "value"), Str(message))


def _input_name(graph: Graph, position: int) -> str | None:
    """The user's name of the tensor that a node is a view of; None for what is computed."""
    while (
        (node := graph.nodes[position]).op is Op.PUT or node.op is Op.GATHER or (node.family is Family.VIEW and len(node.args) == 1)
    ):
        position = owner(graph, position) if node.op is Op.PUT else node.args[0]
    return str(node.attr("name")) if node.op is Op.INPUT else None


@dataclass(frozen=True)
class IndexCheck:
    """An index that must be in range where some conditions hold."""

    call: Checked
    conditions: tuple[Bounds, ...] = ()

    def moved(self, move: Callable[[Index], Index]) -> IndexCheck:
        """The same over other axes; bounds stay."""
        bounds = (replace(b, index=move(b.index)) for b in self.conditions)
        return IndexCheck(cast(Checked, move(self.call)), tuple(bounds))

    def expressions(self) -> list[Index]:
        """Everything in it."""
        return [self.call, *(e for b in self.conditions for e in (b.index, b.lower or 0, b.upper or 0))]


def checks_apart(checks: Sequence[IndexCheck], places: Iterable[tuple[Index, tuple[Bounds, ...]]]) -> tuple[IndexCheck, ...]:
    """The checks that nothing makes which the kernel computes anyway.

    Args:
        places: what it computes, and under which conditions.
    """
    made = [(place, under) for place, under in places if not isinstance(place, int) and place.has(Checked)]
    made += [(check.call.args[0], check.conditions) for check in checks]  # indices of indices
    return tuple(c for c in checks if not any(place.has(c.call) and set(under) <= set(c.conditions) for place, under in made))


def loaded_buffers(expressions: Iterable[Index]) -> list[int]:
    """The buffers that some expressions read."""
    return sorted({call.buffer for e in expressions if not isinstance(e, int) for call in e.atoms(Loaded)})


def scalars_in(expressions: Iterable[Index]) -> frozenset[str]:
    """The run-time scalars that some expressions take."""
    return frozenset(call.name for e in expressions if not isinstance(e, int) for call in e.atoms(Scalar))


def has_checks(expressions: Iterable[Index]) -> bool:
    """True if some expressions check an index."""
    return any(e.has(Checked) for e in expressions if not isinstance(e, int))
