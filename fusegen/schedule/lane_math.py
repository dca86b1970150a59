"""Math on two neighbouring lanes of an accumulator, and what its call reads."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Axes, Index
from fusegen.schedule.indices import Check
from fusegen.schedule.math import Argument, Function


@dataclass(frozen=True)
class LaneRead:
    """What two neighbouring lanes read of a buffer.

    Attributes:
        name: of the variable: one value when both lanes read the same element, else an array of two.
        buffer: the node whose buffer it is.
        offsets: one for both lanes, or one a lane.
        conditions: of each offset, the bounds under which it may be read; 0 is taken where they do not hold.
        vector: whether the lanes' elements lie side by side, aligned to the size of both.
    """

    name: str
    buffer: int
    offsets: tuple[Index, ...]
    conditions: tuple[tuple[Bounds, ...], ...]
    vector: bool

    @property
    def places(self) -> tuple[tuple[Index, tuple[Bounds, ...]], ...]:
        """Each offset with its conditions."""
        return tuple(zip(self.offsets, self.conditions, strict=True))


@dataclass(frozen=True)
class LaneFunction:
    """Math on two neighbouring lanes of an accumulator, and what its call reads by the lanes' coordinates.

    Attributes:
        function: the math: of one lane when the lanes do not mix, else of both; its results are those of the first lane, or of both
            lanes in turn.
        lanewise: whether it is of one lane.
        arguments: one a parameter.
        reads: what must be read for them.
        checks: indices that must be in range, and which no read mentions.
        axes: the iteration space; the last axis numbers pairs of lanes.
    """

    function: Function
    lanewise: bool
    arguments: tuple[Argument, ...]
    reads: tuple[LaneRead, ...]
    checks: tuple[Check, ...]
    axes: Axes
