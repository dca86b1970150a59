"""The programs of one graph: which a call runs depends on how many rows its products have; each is made when it is first wanted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from fusegen.calls.formula import Formula
from fusegen.emit import emit
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph
from fusegen.ir.symbolic import Dim, literal
from fusegen.passes.fuse import Group, fuse
from fusegen.passes.fuse.contraction import leave_to_library
from fusegen.passes.fuse.skeletons import WGMMA
from fusegen.schedule.choose import Choice, choose
from fusegen.schedule.expected import CLASSES, Expected, class_of
from fusegen.schedule.heuristics.contraction import rows_of
from fusegen.schedule.lower import lower
from fusegen.schedule.plan import ContractionPlan
from fusegen.schedule.program import Program
from fusegen.source import Source
from fusegen.target import Target

Key: TypeAlias = tuple[ContractionPlan | None, ...]
Rows: TypeAlias = Mapping[Dim, range]
Choose: TypeAlias = Callable[[Graph, Group, Target, Expected], Choice]


@dataclass(frozen=True)
class Form:
    """One way to compute a graph.

    Attributes:
        graph: in primitives; products that the library computes by choice say so.
        groups: what fusion decided.
        program: the steps of a call.
        sources: the text of each launch.
    """

    graph: Graph
    groups: tuple[Group, ...]
    program: Program
    sources: tuple[Source, ...]


class Forms:
    """All forms of a graph for a machine.

    Args:
        graph: in primitives.
        target: the machine.
        wide: whether indices need 64 bits.
        choose: says who computes a launch of products, and by which plan.
    """

    def __init__(self, graph: Graph, target: Target, *, wide: bool, choose: Choose = choose) -> None:
        self.graph, self._target, self._wide, self._choose = graph, target, wide, choose
        self._made: dict[Key, Form] = {}
        self._by_class: dict[tuple[int, ...], Form] = {}

    def at(self, sizes: Mapping[str, int]) -> Form:
        """The form for some sizes."""
        classes = self._classes(sizes)
        if classes not in self._by_class:
            self._by_class[classes] = self._form(classes)
        return self._by_class[classes]

    def expected(self, sizes: Mapping[str, int]) -> Expected:
        """What is expected of some sizes."""
        return self._expected(self._classes(sizes))

    def choices(self, sizes: Mapping[str, int]) -> dict[int, Choice]:
        """For products that a kernel of ours could compute, what is chosen for some sizes."""
        expected = self.expected(sizes)
        found = {group: self._choose(self.graph, group, self._target, expected) for group in self.products}
        return {product: choice for group, choice in found.items() for product in group.anchors}

    def all(self) -> Iterator[tuple[Rows, Form]]:
        """Every form that some sizes run, with the numbers of rows that do; what is above all classes counts as the last."""
        for parts in itertools.product(*(self._ranges(dim) for dim in self._rows)):
            yield dict(zip(self._rows, parts, strict=True)), self._form(tuple(part[-1] for part in parts))

    @cached_property
    def _groups(self) -> tuple[Group, ...]:
        """Where nothing is left to the library by choice."""
        return fuse(self.graph, self._target)

    @cached_property
    def products(self) -> tuple[Group, ...]:
        """Launches of products by the skeleton of which something is known to choose by."""
        return _priced(self._groups)

    @cached_property
    def _rows(self) -> tuple[Dim, ...]:
        """Numbers of rows that are known at the call only."""
        rows = dict.fromkeys(rows_of(self.graph, group.anchors[0]) for group in self.products)
        return tuple(dim for dim in rows if literal(dim) is None)

    @cached_property
    def _formulas(self) -> tuple[Formula, ...]:
        return tuple(map(formula, self._rows))

    def _classes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(class_of(rows(sizes)) for rows in self._formulas)

    def _expected(self, classes: tuple[int, ...]) -> Expected:
        return Expected(dict(zip(self._rows, classes, strict=True)))

    def _ranges(self, dim: Dim) -> list[range]:
        """Numbers of rows that make the same choices."""
        groups = [group for group in self.products if rows_of(self.graph, group.anchors[0]) == dim]
        found: list[range] = []
        before: Key | None = None
        for first, last in zip((1, *(c + 1 for c in CLASSES)), CLASSES, strict=False):
            key = tuple(self._choose(self.graph, group, self._target, Expected({dim: last})).key for group in groups)
            if key == before:
                found[-1] = range(found[-1].start, last + 1)
            else:
                found.append(range(first, last + 1))
            before = key
        return found

    def _form(self, classes: tuple[int, ...]) -> Form:
        expected = self._expected(classes)
        choices = tuple(self._choose(self.graph, group, self._target, expected) for group in self.products)
        key = tuple(choice.key for choice in choices)
        if key not in self._made:
            self._made[key] = self._lowered(choices, expected)
        return self._made[key]

    def _lowered(self, choices: tuple[Choice, ...], expected: Expected) -> Form:
        chosen = zip(self.products, choices, strict=True)
        by_library = {product for group, choice in chosen if choice.takes_library for product in group.anchors}
        graph = leave_to_library(self.graph, by_library)
        groups = fuse(graph, self._target) if by_library else self._groups
        plans = {group.anchors: self._choose(graph, group, self._target, expected).plan for group in _priced(groups)}
        program = lower(graph, groups, self._target, plans, wide=self._wide)
        return Form(graph, groups, program, tuple(emit(launch, self._target) for launch in program.launches))


def _priced(groups: Sequence[Group]) -> tuple[Group, ...]:
    return tuple(group for group in groups if group.skeleton == WGMMA.name)
