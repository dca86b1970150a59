"""The kernel families, in the order in which fusion asks them. A new family is one line here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fusegen.families.attention import AttentionFamily
from fusegen.families.base import KernelFamily
from fusegen.families.gemm import GemmFamily
from fusegen.families.library import AccumulationFamily, LibraryFamily
from fusegen.families.pointwise import PointwiseFamily
from fusegen.families.rows import RowFamily
from fusegen.families.rows.plan import RowPlan
from fusegen.families.runs import RunFamily
from fusegen.families.scan import ScanFamily
from fusegen.fusion.groups import GroupKind
from fusegen.fusion.matcher import matcher_of
from fusegen.schedule.choices import Measured, choice_of
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch, Program
from fusegen.target import Target

FAMILIES: tuple[KernelFamily, ...] = (
    AttentionFamily(),
    AccumulationFamily(),
    GemmFamily(),
    RunFamily(),
    LibraryFamily(),
    ScanFamily(),
    RowFamily(),
    PointwiseFamily(),
)
"""A value goes to the first family that has a group for it. The last family accepts any value."""


def family_of(kind: GroupKind) -> KernelFamily:
    return matcher_of(FAMILIES, kind)


def preferred(launch: Launch, sizes: Mapping[str, int], target: Target) -> Plan | None:
    """Returns the candidate with the lowest estimated time, or the first if none is clearly faster. None without candidates."""
    return family_of(launch.group.kind).preferred(launch, sizes, target)


def contenders(launch: Launch, sizes: Mapping[str, int]) -> Sequence[Plan]:
    """Returns the candidates without those that cannot be the fastest at some sizes."""
    return family_of(launch.group.kind).contenders(launch, sizes)


def expected_times(launch: Launch, sizes: Mapping[str, int], target: Target) -> Mapping[Plan, float]:
    """Returns the estimated time of each candidate, in µs; empty if the family has no cost model."""
    return family_of(launch.group.kind).times(launch, sizes, target)


def expected_time(launch: Launch, sizes: Mapping[str, int], target: Target) -> float | None:
    """Returns the estimated time of a launch with its plan, in µs; None if unknown."""
    return None if launch.plan is None else expected_times(launch, sizes, target).get(launch.plan)


def program_time(program: Program, sizes: Mapping[str, int], target: Target) -> float | None:
    """Returns the estimated time of all launches of a program, in µs; None if one is unknown."""
    times = [expected_time(launch, sizes, target) for launch in program.launches]
    known = [time for time in times if time is not None]
    return math.fsum(known) if len(known) == len(times) else None


def cuts_are_faster(cut: Program, whole: Program, sizes: Mapping[str, int], target: Target) -> bool:
    """True if reductions cut into rows are expected to be faster; without a cost, if whole ones launch fewer blocks than SMs."""
    time, whole_time = program_time(cut, sizes, target), program_time(whole, sizes, target)
    if time is not None and whole_time is not None:
        return time < whole_time
    rows = (launch for launch in whole.launches if isinstance(launch.plan, RowPlan) and not launch.plan.tiled)
    return any(launch.cluster == 1 and launch.grid(sizes) < target.sms for launch in rows)


def measured_plans(program: Program, sizes: Mapping[str, int], measured: Measured) -> Iterator[tuple[tuple[int, ...], Plan]]:
    """Yields the measured plans of launches, by the outputs of their groups."""
    for launch in program.launches:
        if launch.plan is not None and len(launch.candidates) > 1:
            candidates = (launch.plan, *(plan for plan in contenders(launch, sizes) if plan != launch.plan))
            plan = measured(choice_of(launch.kernel.name, program.graph, launch.group, sizes, candidates))
            if plan is not None:
                yield launch.group.outputs, plan
