"""The cost of a region: launches and bytes of torch eager, and of the program that fusegen makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fusegen.api import Kernel
from fusegen.eager_cost import EagerCost, eager_cost
from fusegen.errors import FusegenError
from fusegen.integrations.fx.cut import Region
from fusegen.integrations.fx.function import RegionFunction, region_function
from fusegen.integrations.fx.kinds import example_of
from fusegen.schedule.peaks import LAUNCH_SECONDS


@dataclass(frozen=True)
class Cost:
    """A region's cost, before and after.

    Attributes:
        region: it.
        function: that computes it.
        eager: of torch.
        launches, moved: of fusegen.
    """

    region: Region
    function: RegionFunction
    eager: EagerCost
    launches: int
    moved: int

    def seconds_saved(self, bandwidth: float) -> float:
        """Expected: bytes over a GPU's bandwidth, in bytes a second, and a kernel's start for each launch."""
        return (self.eager.moved - self.moved) / bandwidth + (self.eager.launches - self.launches) * LAUNCH_SECONDS

    def seconds_after(self, bandwidth: float) -> float:
        """Expected, of fusegen's launches."""
        return self.moved / bandwidth + self.launches * LAUNCH_SECONDS


class Costs:
    """The costs of regions; equal ones are lowered once.

    Args:
        target: the machine.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._known: dict[object, Cost | None] = {}

    def of(self, region: Region) -> Cost | None:
        """The cost of a region; None where fusegen does not compute it whole, or eager cannot be counted."""
        key = key_of(region)
        if key not in self._known:
            self._known[key] = self._lowered(region, region_function(region.nodes, region.results))
        return self._known[key]

    def _lowered(self, region: Region, function: RegionFunction) -> Cost | None:
        python = function.function()
        values = [example_of(node) for node in function.parameters]
        eager = eager_cost(python, dict(zip(function.parameters.values(), values, strict=True)))
        if eager is None:
            return None
        try:
            low = Kernel(python, name=function.name).lower(*values, target=self.target)
        except FusegenError:
            return None
        return Cost(
            region, function, eager, len(low.program.steps), sum(step.traffic.moved(low.sizes) for step in low.program.steps)
        )


def key_of(region: Region) -> tuple[object, ...]:
    """The same for regions that compute the same of tensors of equal shapes, strides and dtypes.

    Raises:
        Unwritable: something in it has no text.
    """
    function = region_function(region.nodes, region.results, "x")
    return (function.text, *facts_of(list(function.parameters)))


def facts_of(nodes: Sequence[fx.Node]) -> list[object]:
    """Shapes, strides and dtypes."""
    values = [example_of(node) for node in nodes]
    return [(tuple(v.shape), v.stride(), v.dtype) if hasattr(v, "stride") else v for v in values]
