"""The families of kernels, in the order in which fusion asks them: a new family is a line here."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusegen.families.attention import AttentionFamily
from fusegen.families.base import KernelFamily
from fusegen.families.gemm import GemmFamily
from fusegen.families.library import AccumulationFamily, LibraryFamily
from fusegen.families.pointwise import PointwiseFamily
from fusegen.families.rows import RowFamily
from fusegen.families.scan import ScanFamily
from fusegen.fusion.groups import GroupKind
from fusegen.fusion.matcher import matcher_of
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch, Program
from fusegen.target import Target

FAMILIES: tuple[KernelFamily, ...] = (
    AttentionFamily(),
    AccumulationFamily(),
    GemmFamily(),
    LibraryFamily(),
    ScanFamily(),
    RowFamily(),
    PointwiseFamily(),
)
"""The first that has a group for a value gets it; the last has one for any."""


def family_of(kind: GroupKind) -> KernelFamily:
    """The family that makes groups of a kind."""
    return matcher_of(FAMILIES, kind)


def preferred(launch: Launch, sizes: Mapping[str, int], target: Target) -> Plan | None:
    """The plan that is expected to be fastest; the first one where none is clearly faster, None where there are no several."""
    return family_of(launch.group.kind).preferred(launch, sizes, target)


def expected_times(launch: Launch, sizes: Mapping[str, int], target: Target) -> Mapping[Plan, float]:
    """The time that a launch is expected to take with each of its plans, in µs; nothing where nothing is known of them."""
    return family_of(launch.group.kind).times(launch, sizes, target)


def expected_time(launch: Launch, sizes: Mapping[str, int], target: Target) -> float | None:
    """The time that a launch is expected to take with its plan, in µs; None where nothing is known of it."""
    return None if launch.plan is None else expected_times(launch, sizes, target).get(launch.plan)


def program_time(program: Program, sizes: Mapping[str, int], target: Target) -> float | None:
    """The time that the launches of a program are expected to take, in µs; None where nothing is known of some."""
    times = [expected_time(launch, sizes, target) for launch in program.launches]
    known = [time for time in times if time is not None]
    return math.fsum(known) if len(known) == len(times) else None
