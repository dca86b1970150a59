"""Launch plans under other names: the plan of a graph serves each graph that differs from it only in names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any

from fusegen.lazy import dataclass
from fusegen.program.call import LaunchPlan, Loop
from fusegen.program.formula import Formula, FormulaKind
from fusegen.program.numbers import Scalar


@dataclass(frozen=True)
class GraphNames:
    """The names in a graph, each at the place that it has in all graphs that differ only in names.

    Attributes:
        tensors: the inputs.
        numbers: the run-time scalars.
        sizes: the strides of all inputs, then the symbolic sizes.
    """

    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    sizes: tuple[str, ...]

    @property
    def are_unique(self) -> bool:
        return all(len({*names}) == len(names) for names in self.kinds)

    @property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        return self.tensors, self.numbers, self.sizes

    def to(self, other: GraphNames) -> list[dict[str, str]]:
        """For each kind, the names at the same places in another graph. Raises `ValueError` if its places differ."""
        return [dict(zip(*each, strict=True)) for each in zip(self.kinds, other.kinds, strict=True)]


def renamed(plan: LaunchPlan, old: GraphNames, new: GraphNames) -> LaunchPlan:
    """A launch plan with the names of another graph.

    Raises:
        KeyError: the plan has a name that is not one of the graph's.
        ValueError: the graphs have different places, or a size has the name of a loop's size.
    """
    if old == new:
        return plan
    tensors, numbers, sizes = old.to(new)
    own = {*_sizes_of_loops(plan)}
    if not own.isdisjoint((*old.sizes, *new.sizes)):
        raise ValueError("a size has the name of a loop's size")
    inputs = tuple((key, tensors[name]) for key, name in plan.inputs)
    by_key = dict(inputs)
    buffers = tuple(replace(buffer, name=by_key.get(buffer.key, buffer.name)) for buffer in plan.buffers)
    result: LaunchPlan = _Renaming(numbers, sizes | {name: name for name in own})(replace(plan, buffers=buffers, inputs=inputs))
    return result


def _sizes_of_loops(plan: LaunchPlan) -> Iterator[str]:
    loops = [step for step in plan.steps if isinstance(step, Loop)]
    return chain.from_iterable(chain((loop.start, loop.rows), _sizes_of_loops(loop.body)) for loop in loops)


@dataclass(frozen=True)
class _Renaming:
    """Renames the run-time scalars and the sizes in a part of a launch plan."""

    numbers: Mapping[str, str]
    sizes: Mapping[str, str]

    def __call__(self, part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(self, part))
        if isinstance(part, Scalar):
            return Scalar(self.numbers[part.name])
        if isinstance(part, Formula) and part.operator is FormulaKind.SIZE:
            return replace(part, value=self.sizes[str(part.value)])
        if is_dataclass(part) and not isinstance(part, type):
            changed = {field.name: self(getattr(part, field.name)) for field in fields(part)}
            return replace(part, **changed)
        return part
