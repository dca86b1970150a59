"""What a pointwise kernel computes, before anything is decided about how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fusegen.ir.symbolic import Axes, Index
from fusegen.schedule.lower.leaves import Leaves
from fusegen.schedule.terms import Terms


@dataclass(frozen=True)
class Points:
    """Points of an iteration space.

    Attributes:
        terms: the math.
        roots: the term of each store.
        leaves: of the terms, over the axes.
        stores: buffers, and the offsets at which they are written.
        axes: merged.
        together: how many points of the group's domain one of the space is.
    """

    terms: Terms
    roots: tuple[int, ...]
    leaves: Leaves
    stores: tuple[tuple[int, Index], ...]
    axes: Axes
    together: int

    @property
    def touched(self) -> Iterator[tuple[int, Index]]:
        """Buffers and offsets of all that is read or written."""
        yield from ((read.buffer, read.offset) for read in self.leaves.reads.values())
        yield from self.stores
