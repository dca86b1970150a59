"""Operands of pointwise kernels that lie across the results, as a transposed one does: where results are contiguous, neighbours of
theirs are far apart, and where they are contiguous, those of the results are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy

from fusegen.ir.symbolic import Axes, Index
from fusegen.schedule.access import Pattern, pattern_of
from fusegen.schedule.indices import Checked, Loaded
from fusegen.schedule.lower.leaves import Leaves
from fusegen.schedule.terms import Read, Terms


@dataclass(frozen=True)
class Crossing:
    """Two axes along which different tensors of a kernel are contiguous.

    Attributes:
        row_axis: along which some operands are, which lie across the results.
        column_axis: along which all results are.
        reads: of those operands.
    """

    row_axis: sympy.Symbol
    column_axis: sympy.Symbol
    reads: frozenset[Read]


def in_memory_order(axes: Axes, reads: Sequence[Index], stores: Sequence[Index]) -> Axes:
    """The axes with that last along which all results are contiguous, where nothing is along the last one: as where a transposed
    tensor is worked on in place.

    Args:
        reads, stores: offsets.
    """
    if any(pattern_of(offset, axis) is Pattern.VECTOR for axis in axes.symbols[-1:] for offset in (*reads, *stores)):
        return axes
    inner = next((axis for axis in axes.symbols if _are_contiguous(stores, axis)), None)
    extents = dict(zip(axes.symbols, axes.extents, strict=True))
    symbols = tuple(sorted(extents, key=lambda axis: axis == inner))
    return Axes(symbols, tuple(extents[axis] for axis in symbols))


def crossing_of(points: Points) -> Crossing | None:
    """The axes between which most operands lie across the results; None where none does, or where one place may depend on what
    another point does: on an index that is read, or on an operand that the kernel writes to."""
    if points.leaves.checks or any(sympy.sympify(offset).has(Loaded, Checked) for _, offset in points.touched):
        return None
    symbols = points.axes.symbols
    columns = [axis for axis in symbols if _are_contiguous([offset for _, offset in points.stores], axis)]
    pairs = [Crossing(row, column, _across(points, row, column)) for column in columns for row in symbols if row != column]
    found = max(pairs, key=lambda pair: len(pair.reads), default=None)
    return found if found is not None and found.reads else None


def _across(points: Points, row: sympy.Symbol, column: sympy.Symbol) -> frozenset[Read]:
    """Reads of what lies across."""
    written = {buffer for buffer, _ in points.stores}
    reads = (r for r in points.leaves.reads.values() if r.buffer not in written and not r.drawn)
    return frozenset(r for r in reads if _lies_across(r, row, column))


def _are_contiguous(offsets: Sequence[Index], axis: sympy.Symbol) -> bool:
    return all(pattern_of(offset, axis) is Pattern.VECTOR for offset in offsets)


def _lies_across(read: Read, row: sympy.Symbol, column: sympy.Symbol) -> bool:
    """Whether neighbours in memory differ in the row alone, and all points of a tile or none of them read."""
    if any(sympy.sympify(bounds.index).has(row, column) for bounds in read.conditions):
        return False
    return pattern_of(read.offset, row) is Pattern.VECTOR and pattern_of(read.offset, column) is Pattern.GATHER


# The math of a pointwise kernel, before its layout is decided.


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
