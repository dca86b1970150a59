"""The roofline of a step: its arithmetic intensity beside its GPU's ridge point, and the resource that binds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from fusegen.ir.graph import Graph
from fusegen.schedule.flops import Flops, step_flops
from fusegen.schedule.peaks import LAUNCH_SECONDS, PEAKS, Peaks
from fusegen.schedule.program import Step
from fusegen.target import Target
from fusegen.units import human_flops


class Bound(Enum):
    """The resource whose limit a step meets first."""

    BANDWIDTH = "bandwidth"
    ARITHMETIC = "arithmetic"
    LAUNCH = "launch latency"


@dataclass(frozen=True)
class Roofline:
    """The work of a step against the peaks of its GPU.

    Attributes:
        flops: its floating-point operations.
        moved: the fewest bytes that it reads and writes.
        peaks: of the GPU; None where they are not known.
    """

    flops: Flops
    moved: int
    peaks: Peaks | None

    @property
    def intensity(self) -> float:
        """FLOP a byte; 0 where nothing is moved."""
        return self.flops.count / self.moved if self.moved else 0.0

    @property
    def ridge(self) -> float | None:
        """FLOP a byte at which peak arithmetic, in the step's type and unit, takes as long as peak bandwidth."""
        return self._arithmetic / self.peaks.bandwidth if self.peaks else None

    @property
    def bound(self) -> Bound | None:
        """The resource that binds the step; launch latency where the work at peak rates takes less time than the launch."""
        if self.peaks is None:
            return None
        if self.seconds == LAUNCH_SECONDS:
            return Bound.LAUNCH
        return Bound.ARITHMETIC if self._computing > self._moving else Bound.BANDWIDTH

    @property
    def seconds(self) -> float | None:
        """The time at peak rates: that of moving bytes, of arithmetic, or of a launch, whichever is longest."""
        return None if self.peaks is None else max(self._moving, self._computing, LAUNCH_SECONDS)

    def describe(self) -> str:
        """The figures in one line."""
        figures = f"{human_flops(self.flops.count)}, {_figure(self.intensity)} FLOP/byte"
        left_out = f" (not counted: {', '.join(self.flops.uncounted)})" if self.flops.uncounted else ""
        if self.peaks is None or self.ridge is None or self.bound is None:
            return figures + left_out
        ridge = f"{self.peaks.gpu} ridge point {_figure(self.ridge)} FLOP/byte for {self._unit}"
        return f"{figures}{left_out}; {ridge}: bound by {self.bound.value}"

    @property
    def _moving(self) -> float:
        assert self.peaks is not None
        return self.moved / self.peaks.bandwidth

    @property
    def _computing(self) -> float:
        return self.flops.count / self._arithmetic

    @property
    def _arithmetic(self) -> float:
        assert self.peaks is not None
        return self.peaks.arithmetic(self.flops.dtype, is_matmul=self.flops.is_matmul)

    @property
    def _unit(self) -> str:
        return f"{self.flops.dtype.short} matmuls" if self.flops.is_matmul else self.flops.dtype.short


def roofline(step: Step, graph: Graph, sizes: Mapping[str, int], target: Target) -> Roofline:
    """The roofline of a step at some sizes."""
    return Roofline(step_flops(step, graph, sizes), step.traffic.moved(sizes), PEAKS.get(target.name))


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.2g}"
