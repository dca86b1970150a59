"""A family of kernels: how it takes values of a graph, what it lowers them to, the text of its pipelines, and which plan is best.

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
"""The text of a kernel, by the class of its body."""

MARGIN = 0.97  # of the time of the first plan: what is expected to be hardly faster is not worth a kernel of its own


class KernelFamily(Matcher):
    """A family of kernels.

    Attributes:
        cuda, cpu: its text for GPUs and for CPUs; a body that is in neither is not made for such machines.
    """

    cuda: ClassVar[Emitters] = {}
    cpu: ClassVar[Emitters] = {}

    def lower(self, context: Context) -> Sequence[Step]:
        """The steps of a group.

        Raises:
            VerificationError: the group is none that fusion may make.
        """
        raise NotImplementedError(type(self).__name__)

    def times(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Mapping[Plan, float]:
        """The time that a launch is expected to take with each of its plans, in µs; nothing where nothing is known of them.

        Args:
            launch: with any of its plans.
            sizes: values of all sizes.
        """
        return {}

    def preferred(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Plan | None:
        """The plan of a launch that is expected to be fastest; the first one where none is clearly faster, None where there are
        no several."""
        if not launch.candidates:
            return None
        times, first = self.times(launch, sizes, target), launch.candidates[0]
        best = min(times, key=lambda plan: times[plan], default=first)
        return best if best in times and times[best] < MARGIN * times.get(first, times[best]) else first

    def with_threads(self, launch: Launch, threads: int) -> Plan | None:
        """The first candidate that differs from a launch's plan in nothing but its number of threads a block; None where there is
        none, or the plan has as many."""
        return None
