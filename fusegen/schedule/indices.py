"""Data-dependent indices: sympy functions in offsets for integers that a kernel reads, and bounds checks of them.

If an offset is independent of an index (a dim with one element, a constant), the check is separate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import sympy
from sympy.core.symbol import Str

from fusegen.ir.formula import integer_text
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, first_version
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Index


class LoadedIndex(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """An integer in memory: ``LoadedIndex(buffer, offset)``."""

    nargs = (2,)
    is_integer = True

    @property
    def buffer(self) -> int:
        return int(self.args[0])

    @property
    def offset(self) -> sympy.Expr:
        """The offset in elements."""
        return self.args[1]


class Scalar(sympy.Function):  # type: ignore[misc]
    """A run-time scalar: ``Scalar(name)`` with its name in emitted text."""

    nargs = (1,)
    is_integer = True

    @property
    def name(self) -> str:
        return str(self.args[0].name)


class Differs(sympy.Function):  # type: ignore[misc]
    """True if two integers differ: ``Differs(left, right)``."""

    nargs = (2,)


class Less(sympy.Function):  # type: ignore[misc]
    """True if an integer is less than another: ``Less(left, right)``."""

    nargs = (2,)


class Choice(sympy.Function):  # type: ignore[misc]
    """One of two integers: ``Choice(condition, where_true, where_false)``; the condition is `Differs`, `Less` or `LoadedIndex`."""

    nargs = (3,)
    is_integer = True


class Minimum(sympy.Function):  # type: ignore[misc]
    """The smaller of two integers; unlike `sympy.Min`, also of integers in memory."""

    nargs = (2,)
    is_integer = True


class Maximum(sympy.Function):  # type: ignore[misc]
    """The larger of two integers."""

    nargs = (2,)
    is_integer = True


class CheckedIndex(sympy.Function):  # type: ignore[misc]
    """A value as an index: ``CheckedIndex(value, extent, wraps, table, message)``; the kernel fails unless it is in [0, extent).

    A negative value counts from the end if ``wraps`` is 1.
    """

    nargs = (5,)
    is_integer = True
    is_nonnegative = True

    @property
    def wraps(self) -> bool:
        return bool(self.args[2])

    @property
    def table(self) -> str:
        """The name of the indexed tensor."""
        return str(self.args[3].name)

    @property
    def message(self) -> str:
        return str(self.args[4].name)


def checked_index(graph: Graph, gather: int, value: Index) -> CheckedIndex:
    """Returns the checked index at which a gather reads its operand."""
    node = graph.nodes[gather]
    table, wraps = _input_name(graph, node.args[0]), bool(node.attr("wraps"))
    extent = graph.nodes[node.args[0]].shape[cast(int, node.attr("dim"))]
    end = integer_text(extent)
    start = f"-{end if end.isidentifier() or end.isdigit() else f'({end})'}" if wraps else "0"
    indexed = "a computed tensor" if table is None else f"'{table}'"
    message = f"index of {indexed} out of range [{start}, {end})"
    return CheckedIndex(value, extent, int(wraps), Str(table or "value"), Str(message))


def _input_name(graph: Graph, position: int) -> str | None:
    """Returns the name of the input that a node is a view of; None for computed tensors."""
    while (
        (node := graph.nodes[position]).op is Op.PUT or node.op is Op.GATHER or (node.family is Family.VIEW and len(node.args) == 1)
    ):
        position = first_version(graph, position) if node.op is Op.PUT else node.args[0]
    return str(node.attr("name")) if node.op is Op.INPUT else None


@dataclass(frozen=True)
class IndexCheck:
    call: CheckedIndex
    conditions: tuple[Bounds, ...] = ()

    def substituted(self, substitute: Callable[[Index], Index]) -> IndexCheck:
        """Substitutes indices; bounds are unchanged."""
        bounds = (replace(b, index=substitute(b.index)) for b in self.conditions)
        return IndexCheck(cast(CheckedIndex, substitute(self.call)), tuple(bounds))

    def expressions(self) -> list[Index]:
        return [self.call, *(e for b in self.conditions for e in (b.index, b.lower or 0, b.upper or 0))]


def remaining_checks(
    checks: Sequence[IndexCheck], expressions: Iterable[tuple[Index, tuple[Bounds, ...]]]
) -> tuple[IndexCheck, ...]:
    """Returns the checks that remain: no expression performs them in every case in which they are needed."""
    computed = [(e, conditions) for e, conditions in expressions if not isinstance(e, int) and e.has(CheckedIndex)]
    computed += [(check.call.args[0], check.conditions) for check in checks]  # nested indices
    return tuple(c for c in checks if not any(e.has(c.call) and set(known) <= set(c.conditions) for e, known in computed))


def loaded_buffers(expressions: Iterable[Index]) -> list[int]:
    return sorted({call.buffer for e in expressions if not isinstance(e, int) for call in e.atoms(LoadedIndex)})


def scalars_in(expressions: Iterable[Index]) -> frozenset[str]:
    return frozenset(call.name for e in expressions if not isinstance(e, int) for call in e.atoms(Scalar))


def has_checks(expressions: Iterable[Index]) -> bool:
    return any(e.has(CheckedIndex) for e in expressions if not isinstance(e, int))
