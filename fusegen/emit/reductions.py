"""Reductions as templates see them: variables of a state, and what starts and combines it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusegen.ir.reductions import REDUCTIONS
from fusegen.schedule.math import Function, Reduction
from fusegen.schedule.reductions import combine_function, gathering_functions, identity_function


@dataclass(frozen=True)
class GatheredView:
    """How a state is gathered as sums about a pivot, as a template sees it.

    Attributes:
        kind: what its functions' names begin with.
        type: of all that is computed.
        pivot: variable of the component that is measured from the pivot.
        count: variable of the number of elements.
        rest: variables of the components beside the count.
        state: variables of all components.
        sums: names of what is added up beside the count.
    """

    kind: str
    type: str
    pivot: str
    count: str
    rest: tuple[str, ...]
    state: tuple[str, ...]
    sums: tuple[str, ...]

    def of(self, pattern: str = "{}") -> list[str]:
        """A pattern of each sum's name."""
        return [pattern.format(name) for name in self.sums]

    def gather(self, element: str, pivot: str, sums: str) -> str:
        """The statement that adds an element to sums, which a pattern gives."""
        return self._call("gather", [*self.of(sums), element, pivot], self.of(sums))

    def spread(self, pivot: str, sums: str = "{}", state: str = "{}") -> str:
        """The statement that makes sums of a state, of which a pattern gives the components."""
        return self._call("spread", [*(state.format(name) for name in self.state), pivot], self.of(sums))

    def settle(self, pivot: str, sums: str = "{}") -> str:
        """The statement that makes the variables of a state of sums, and of the count."""
        return self._call("settle", [pivot, self.count, *self.of(sums)], self.rest)

    def _call(self, function: str, operands: Sequence[str], results: Sequence[str]) -> str:
        return f"{self.kind}_{function}({', '.join([*operands, *results])});"


@dataclass(frozen=True)
class ReductionView:
    """A reduction as a template sees it.

    A statement is about a variable a component. Templates give patterns of them: of ``sum_4``, ``{}_part[v]`` is ``sum_4_part[v]``.

    Attributes:
        kind: what its functions' names begin with.
        components: variables and their types.
        gathered: how states are combined as sums about a pivot; None where they are not.
    """

    kind: str
    components: tuple[tuple[str, str], ...]
    gathered: GatheredView | None = None

    @property
    def single(self) -> bool:
        """Whether the state is one value, which functions return; they write several through references."""
        return len(self.components) == 1

    @property
    def summed(self) -> bool:
        """Whether a thread has several parts of it under way: of one value, or of sums about a pivot."""
        return self.single or self.gathered is not None

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
    return _named(reduction, [c.name for c in reduction.components])


def kinds(reductions: Iterable[Reduction]) -> list[ReductionView]:
    """The distinct kinds among some reductions, with variables of no particular one."""
    return [_named(r, _variables(r)) for r in {_stem(r): r for r in reductions}.values()]


def _named(reduction: Reduction, names: Sequence[str]) -> ReductionView:
    """A view with some variables."""
    kind, types = _stem(reduction), [c.dtype.spelling for c in reduction.components]
    rule, gathered = reduction.gathering, None
    if rule is not None:
        of = dict(zip((c.name for c in REDUCTIONS[reduction.op].components), names, strict=True))
        rest = tuple(name for component, name in of.items() if component != rule.count)
        gathered = GatheredView(kind, types[0], of[rule.pivot], of[rule.count], rest, tuple(names), rule.sums)
    return ReductionView(kind, tuple(zip(names, types, strict=True)), gathered)


def _variables(reduction: Reduction) -> list[str]:
    single = len(reduction.components) == 1
    return ["value"] if single else [c.name for c in REDUCTIONS[reduction.op].components]


def reduction_functions(reductions: Iterable[Reduction]) -> list[Function]:
    """The functions of the distinct kinds among some reductions."""
    found = {(_stem(r), r.gathering is None): r for r in reductions}
    return list(dict.fromkeys(function for (kind, _), r in found.items() for function in _functions(kind, r)))


def _functions(kind: str, reduction: Reduction) -> tuple[Function, ...]:
    identity = identity_function(f"{kind}_identity", reduction.op, reduction.dtype)
    if reduction.gathering is not None:
        return identity, *gathering_functions(kind, reduction)
    return identity, combine_function(f"{kind}_combine", reduction.op, reduction.dtype, fast=reduction.fast)


def _stem(reduction: Reduction) -> str:
    return f"{reduction.op.row.name}_{reduction.dtype.short}"
