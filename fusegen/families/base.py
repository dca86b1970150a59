"""The base class of kernel families: matching, lowering, templates and choice of plans.

`fusegen.families` lists all of them, in the order in which fusion asks them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias

from fusegen.fusion.matcher import Matcher
from fusegen.schedule.context import Context
from fusegen.schedule.kernel import Body, LoweredKernel, Plan
from fusegen.schedule.program import Launch, Step
from fusegen.source import Source
from fusegen.target import Target

Emitters: TypeAlias = Mapping[type[Body], Callable[[LoweredKernel, Launch, Target], Source]]
"""Maps the class of a body to the function that prints its kernel."""

MARGIN = 0.97  # share of the first plan's time: a smaller gain is not worth another kernel


class KernelFamily(Matcher):
    """A family of kernels. The tables `cuda` and `cpu` list the bodies that each machine can run, with their printers."""

    cuda: ClassVar[Emitters] = {}
    cpu: ClassVar[Emitters] = {}

    def lower(self, context: Context) -> Sequence[Step]:
        """Returns the steps of a group. Raises `VerificationError` for a group that fusion must not build."""
        raise NotImplementedError(type(self).__name__)

    def times(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Mapping[Plan, float]:
        """Returns the estimated time of a launch with each candidate, in µs; empty without a cost model."""
        return {}

    def preferred(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Plan | None:
        """Returns the candidate with the lowest estimated time, or the first if none is clearly faster. None without candidates."""
        if not launch.candidates:
            return None
        times, first = self.times(launch, sizes, target), launch.candidates[0]
        best = min(times, key=lambda plan: times[plan], default=first)
        return best if best in times and times[best] < MARGIN * times.get(first, times[best]) else first

    def contenders(self, launch: Launch, sizes: Mapping[str, int]) -> Sequence[Plan]:
        """Returns the candidates without those that cannot be the fastest at some sizes."""
        return launch.candidates

    def with_threads(self, launch: Launch, threads: int) -> Plan | None:
        """Returns the first candidate that differs from the launch's plan only in the threads per block, or None."""
        return None
