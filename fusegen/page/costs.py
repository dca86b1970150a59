"""The costs on the page: memory traffic beside that of torch eager, and expected times of candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusegen.describe import Stages, rated_text
from fusegen.eager_cost import OperationCost
from fusegen.emit.math import Quote, quote_of
from fusegen.families import expected_times
from fusegen.ir.graph import Location
from fusegen.ir.ops import Family
from fusegen.page.units import Unit
from fusegen.schedule.program import Launch, Step
from fusegen.units import human_bytes

_MOST_CANDIDATES = 8
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
"""Operations of torch that multiply matrices."""


# Memory traffic.


@dataclass(frozen=True)
class Work:
    """Launches and bytes.

    Attributes:
        names: the operations or kernels that are launched.
    """

    moved: int
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{human_bytes(self.moved)} · {len(self.names)} launch{'' if len(self.names) == 1 else 'es'}"


@dataclass(frozen=True)
class Comparison:
    """The fused work of a step, or of the whole call, and that of torch eager; None if that cannot be counted."""

    unit: Unit | None
    title: str
    fused: Work
    eager: Work | None


def comparisons(stages: Stages, units: Sequence[Unit]) -> list[Comparison]:
    """Returns the work of the whole call, and of each step if there are several.

    An operation of torch counts for the step that computes its source line; of several such steps, for one that multiplies matrices
    if the operation does, else for another one. If a line runs several times, as that of a norm that two layers call, its steps
    count in turn.
    """
    eager, steps = stages.eager(), [unit for unit in units if not unit.is_inner]
    families = {unit.number: _families(unit) for unit in steps}
    runs: dict[tuple[object, str], list[OperationCost]] = {}
    for cost in eager.costs if eager else ():
        runs.setdefault((cost.place, cost.name), []).append(cost)
    owned: dict[int, list[OperationCost]] = {}
    for same in runs.values():
        owners = _owners(same[0], families)
        for turn, cost in enumerate(same if owners else ()):
            owner = owners[turn * len(owners) // len(same)] if len(same) >= len(owners) else owners[-1]
            owned.setdefault(owner, []).append(cost)
    rows = [
        Comparison(unit, unit.name, _fused(unit, stages.sizes), _eager(owned.get(unit.number, ())) if eager else None)
        for unit in steps
    ]
    total = Work(sum(row.fused.moved for row in rows), tuple(row.title for row in rows))
    whole = Comparison(None, "the whole call", total, _eager(eager.costs) if eager else None)
    return [whole, *rows] if len(rows) > 1 else [whole]


def _eager(costs: Sequence[OperationCost]) -> Work:
    return Work(sum(cost.read + cost.written for cost in costs), tuple(cost.name for cost in costs))


def _fused(unit: Unit, sizes: Mapping[str, int]) -> Work:
    return Work(sum(part.traffic.moved(sizes) for part in unit.parts), (unit.name,))


def _owners(cost: OperationCost, families: Mapping[int, Mapping[Quote, set[Family]]]) -> list[int]:
    """Returns the numbers of the steps that compute the line of an operation."""
    if not isinstance(cost.place, Location):
        return []
    quote, multiplies = quote_of(cost.place), cost.name in _MATMULS
    owners = [number for number, by_quote in families.items() if quote in by_quote]
    return [number for number in owners if multiplies == (Family.CONTRACTION in families[number][quote])] or owners


def _families(unit: Unit) -> dict[Quote, set[Family]]:
    """Maps the user's lines to the families of the operations that a unit computes for them; views cost nothing."""
    families: dict[Quote, set[Family]] = {}
    for position in unit.nodes:
        place, family = unit.graph.locations[position], unit.graph.nodes[position].family
        if place is not None and family is not Family.VIEW:
            families.setdefault(quote_of(place), set()).add(family)
    return families


# Candidates.


@dataclass(frozen=True)
class Candidate:
    """An implementation with its expected time in µs."""

    text: str
    microseconds: float
    is_chosen: bool


@dataclass(frozen=True)
class Ranking:
    """The fastest candidates of a step by expected time, the chosen one among them; none are shown if there is one alone."""

    shown: tuple[Candidate, ...] = ()
    rated: int = 0

    @property
    def title(self) -> str:
        return rated_text(self.rated, len(self.shown))


def ranking(stages: Stages, unit: Unit) -> Ranking:
    found = [candidate for part in unit.parts for candidate in (*_implementations(stages, part), *_plans(stages, part))]
    ordered = sorted(found, key=lambda candidate: (candidate.microseconds, not candidate.is_chosen))
    shown = tuple(c for n, c in enumerate(ordered) if n < _MOST_CANDIDATES or c.is_chosen)
    return Ranking(shown, len(found)) if len(shown) > 1 else Ranking()


def _plans(stages: Stages, part: Step) -> Iterator[Candidate]:
    if isinstance(part, Launch) and part.plan is not None:
        times = expected_times(part, stages.sizes, stages.program.target)
        for plan, time in times.items() if part.plan in times else ():
            yield Candidate(plan.description, time, plan == part.plan)


def _implementations(stages: Stages, part: Step) -> Iterator[Candidate]:
    choice = next((stages.choices[position] for position in part.group.core_nodes if position in stages.choices), None)
    if choice is not None and choice.generated_time is not None and choice.library_time is not None:
        yield Candidate("a generated kernel", choice.generated_time, isinstance(part, Launch))
        yield Candidate("a library matmul and separate epilogue", choice.library_time, not isinstance(part, Launch))
