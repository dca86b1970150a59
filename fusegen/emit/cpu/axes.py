"""Loop nests over axes: chunks run along the last axis, all others are one loop."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.emit.text import c_text
from fusegen.emit.views import decode
from fusegen.ir.symbolic import Axes, product


@dataclass(frozen=True)
class NestView:
    """Axes as a template loops over them.

    Attributes:
        lane: the last axis.
        extent: its length.
        outer: the variable that numbers all points of the axes before; empty where there are none.
        outer_count: the number of these points.
        decode: statements that find the axes before from their number.
    """

    lane: str
    extent: str
    outer: str
    outer_count: str
    decode: list[str]

    @classmethod
    def of(cls, axes: Axes, outer: str) -> NestView:
        """The view of axes; ``outer`` names the number of a point of several axes before the last."""
        before = Axes(axes.symbols[:-1], axes.extents[:-1])
        several = len(before.symbols) > 1
        return cls(
            lane=axes.symbols[-1].name,
            extent=c_text(axes.extents[-1]),
            outer=outer if several else "".join(s.name for s in before.symbols),
            outer_count=c_text(product(before.extents)),
            decode=decode(before, outer, "Index") if several else [],
        )

    @property
    def flat(self) -> bool:
        """Whether there is only one axis."""
        return not self.outer
