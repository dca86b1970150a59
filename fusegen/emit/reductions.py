"""Reductions as templates see them: variables of a state, and what starts and combines it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusegen.ir.reductions import REDUCTIONS
from fusegen.schedule.math import Function, Reduction
from fusegen.schedule.reductions import combine_function, identity_function


@dataclass(frozen=True)
class ReductionView:
    """A reduction as a template sees it.

    A statement is about a variable a component. Templates give patterns of them: of ``sum_4``, ``{}_part[v]`` is ``sum_4_part[v]``.

    Attributes:
        kind: what its functions' names begin with.
        components: variables and their types.
    """

    kind: str
    components: tuple[tuple[str, str], ...]

    @property
    def single(self) -> bool:
        """Whether the state is one value, which functions return; they write several through references."""
        return len(self.components) == 1

    @property
    def bytes(self) -> str:
        """Of a state, as an expression."""
        return " + ".join(f"sizeof({type_})" for _, type_ in self.components)

    def of(self, pattern: str) -> list[str]:
        """A pattern of each component's variable."""
        return [pattern.format(name) for name, _ in self.components]

    def start(self, into: str = "{}") -> str:
        """The statement that makes a state that of no elements."""
        targets, function = self.of(into), f"{self.kind}_identity"
        return f"{targets[0]} = {function}();" if self.single else f"{function}({', '.join(targets)});"

    def combined(self, other: str | Sequence[str], into: str = "{}", base: str | None = None) -> str:
        """The statement that combines a state (``base``, or ``into`` itself) with another (a pattern, or texts)."""
        targets, function = self.of(into), f"{self.kind}_combine"
        operands = ", ".join([*self.of(base or into), *(self.of(other) if isinstance(other, str) else other)])
        return f"{targets[0]} = {function}({operands});" if self.single else f"{function}({operands}, {', '.join(targets)});"


def view(reduction: Reduction) -> ReductionView:
    """The view of a reduction."""
    return ReductionView(_stem(reduction), tuple((c.name, c.dtype.spelling) for c in reduction.components))


def kinds(reductions: Iterable[Reduction]) -> list[ReductionView]:
    """The distinct kinds among some reductions, with variables of no particular one."""
    found = {_stem(r): r for r in reductions}
    return [ReductionView(kind, _variables(r)) for kind, r in found.items()]


def _variables(reduction: Reduction) -> tuple[tuple[str, str], ...]:
    names = ["value"] if len(reduction.components) == 1 else [c.name for c in REDUCTIONS[reduction.op].components]
    return tuple((name, c.dtype.spelling) for name, c in zip(names, reduction.components, strict=True))


def reduction_functions(reductions: Iterable[Reduction]) -> list[Function]:
    """The functions of the distinct kinds among some reductions."""
    found = {_stem(r): r for r in reductions}
    return [function for kind, r in found.items() for function in _functions(kind, r)]


def _functions(kind: str, reduction: Reduction) -> tuple[Function, Function]:
    identity = identity_function(f"{kind}_identity", reduction.op, reduction.dtype)
    return identity, combine_function(f"{kind}_combine", reduction.op, reduction.dtype, fast=reduction.fast)


def _stem(reduction: Reduction) -> str:
    return f"{reduction.op.row.name}_{reduction.dtype.short}"
