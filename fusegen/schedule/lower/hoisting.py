"""Loops of a thread along an axis on which costly parts of the math do not depend, as the angles of a rotation on the head: these
are computed once, before the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Axes, Index, literal
from fusegen.schedule.lower.leaves import bound_index
from fusegen.schedule.lower.points import Points
from fusegen.threads import cached_property

_COSTS = {Op.POW: 3, Op.SIN: 2, Op.COS: 2, Op.ATAN2: 2, Op.LGAMMA: 3}
"""Prices of operations, beside those of a few instructions, and those that are as much as an exponential."""

_CHEAP = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.NEG, Op.ABS, Op.MAXIMUM, Op.MINIMUM, Op.CAST, Op.WHERE, Op.SQRT, Op.RSQRT)
_LEAST = 4
"""The price of what is worth a loop: an exponential an element still goes along with memory."""


@dataclass(frozen=True)
class Hoisting:
    """The math that does not depend on an axis.

    Attributes:
        axis: the one that a thread goes along.
        terms: computed before.
        reads: terms of what is read before.
    """

    axis: sympy.Symbol
    terms: tuple[int, ...]
    reads: frozenset[int]

    def ordered(self, axes: Axes) -> Axes:
        """The axes with its own first."""
        symbols = sorted(axes.symbols, key=lambda axis: axis != self.axis)
        extents = dict(zip(axes.symbols, axes.extents, strict=True))
        return Axes(tuple(symbols), tuple(extents[axis] for axis in symbols))


def hoisting_of(points: Points) -> Hoisting | None:
    """The axis along which most of what is costly is the same; None where that is nothing, or an index is checked."""
    if points.leaves.checks:
        return None
    axes = zip(points.axes.symbols[:-1], points.axes.extents[:-1], strict=True)
    found = [_Invariance(points, axis) for axis, extent in axes if literal(extent) != 1]
    best = max(found, key=lambda each: each.saved, default=None)
    if best is None or best.saved < _LEAST:
        return None
    return Hoisting(best.axis, best.terms, best.reads)


@dataclass(frozen=True)
class _Invariance:
    points: Points
    axis: sympy.Symbol

    @property
    def saved(self) -> int:
        """The price of what does not depend on the axis."""
        found = [self.points.terms.items[t].op for t in self.points.terms.below(self.terms)]
        return sum(_COSTS.get(op, 1) for op in found if isinstance(op, Op) and op not in _CHEAP)

    @property
    def reads(self) -> frozenset[int]:
        """Reads that do not depend on it."""
        return frozenset(t for t in self.points.leaves.reads if t not in self._varying)

    @cached_property
    def terms(self) -> tuple[int, ...]:
        """The outermost operations that do not depend on it."""
        items, varying = self.points.terms.items, self._varying
        used = {a for t in varying for a in items[t].args}.union(self.points.roots)
        return tuple(sorted(t for t in used if t not in varying and isinstance(items[t].op, Op)))

    @cached_property
    def _varying(self) -> frozenset[int]:
        """Terms that depend on the axis."""
        found: set[int] = set()
        for position in self.points.terms.below(self.points.roots):
            if self._is_leaf_along(position) or not found.isdisjoint(self.points.terms.items[position].args):
                found.add(position)
        return frozenset(found)

    def _is_leaf_along(self, position: int) -> bool:
        leaves = self.points.leaves
        if position in leaves.reads:
            read = leaves.reads[position]
            return any(self._goes_along(index) for index in (read.offset, *map(bound_index, read.conditions)))
        coordinate = leaves.coordinates.get(position)
        return coordinate is not None and self._goes_along(bound_index(coordinate))

    def _goes_along(self, index: Index) -> bool:
        return bool(sympy.sympify(index).has(self.axis))
