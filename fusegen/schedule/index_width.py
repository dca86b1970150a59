"""Arithmetic on coordinates in 32 bits, where it is proved that nothing overflows.

torch's integers have 64 bits, which a GPU adds, compares and converts in several instructions each. Positions in tensors of
less than 2^31 elements need 31, and so do their differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from fusegen.dtypes import DType
from fusegen.ir.ops import Op
from fusegen.schedule.terms import Leaf, Term, Terms

SMALL = (1 << 31) - (1 << 22)
"""What sizes and coordinates stay below in a kernel that is not wide."""

_COMPARISONS = (Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE)


@dataclass(frozen=True)
class _Narrow:
    """A term in 32 bits, with the range of its values."""

    position: int
    low: int
    high: int


def narrowed(terms: Terms, roots: Sequence[int], axes: frozenset[sympy.Symbol], limit: int = SMALL) -> list[int]:
    """The roots with integer arithmetic on coordinates in 32 bits.

    Args:
        axes: the symbols that number elements.
        limit: what coordinates over them stay below.
    """
    narrower = _Narrower(terms, axes, limit)
    return [narrower.value(root) for root in roots]


class _Narrower:
    def __init__(self, terms: Terms, axes: frozenset[sympy.Symbol], limit: int) -> None:
        self.terms, self.axes, self.limit = terms, axes, limit
        self._values: dict[int, int] = {}
        self._narrow: dict[int, _Narrow | None] = {}

    def value(self, position: int) -> int:
        """The same value in the same type, made of narrower ones where possible."""
        for p in self.terms.below((position,)):  # operands come first
            if p not in self._values:
                self._values[p] = self._rebuilt(p)
        return self._values[position]

    def _rebuilt(self, position: int) -> int:
        term = self.terms.items[position]
        if not term.args:
            return position
        args = tuple(self._values[a] for a in term.args)
        if term.op in _COMPARISONS or (term.op is Op.CAST and term.dtype.is_float):
            found = [self.narrow(a) for a in term.args]
            if all(n is not None for n in found):
                args = tuple(n.position for n in found if n is not None)
        return self.terms.put(Term(term.op, args, term.dtype, term.payload), self.terms.locations[position])

    def narrow(self, position: int) -> _Narrow | None:
        """An integer term in 32 bits; None where it may not fit."""
        stack = [position]
        while stack:
            p = stack[-1]
            term = self.terms.items[p]
            waiting = [a for a in term.args if a not in self._narrow] if term.dtype is DType.INT64 else []
            if p not in self._narrow and not waiting:
                self._narrow[p] = self._narrowed(p)
            stack += waiting
            if not waiting:
                stack.pop()
        return self._narrow[position]

    def _narrowed(self, position: int) -> _Narrow | None:
        term = self.terms.items[position]
        if term.dtype is not DType.INT64:
            return None
        bounds = self._range(term)
        if bounds is None or bounds[0] < -SMALL or bounds[1] > SMALL:
            return None
        args = tuple(n.position for n in map(self._narrow.get, term.args) if n is not None)
        return _Narrow(self.terms.put(Term(term.op, args, DType.INT32, term.payload), self.terms.locations[position]), *bounds)

    def _range(self, term: Term) -> tuple[int, int] | None:
        """The least and the greatest value; None where it is not known."""
        if term.op is Leaf.CONSTANT:
            value = int(float(str(term.payload)))
            return value, value
        if term.op is Leaf.COORDINATE:
            return self._coordinate_range(term.payload)
        found = [self._narrow[a] for a in term.args]
        if term.op not in (Op.ADD, Op.SUB, Op.MUL) or any(n is None for n in found):
            return None
        a, b = (n for n in found if n is not None)
        if term.op is Op.ADD:
            return a.low + b.low, a.high + b.high
        if term.op is Op.SUB:
            return a.low - b.high, a.high - b.low
        corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return min(corners), max(corners)

    def _coordinate_range(self, index: object) -> tuple[int, int] | None:
        """A position along the axes, or a size."""
        symbols = sympy.sympify(index).free_symbols
        if symbols and symbols <= self.axes:
            return 0, self.limit
        return (0, SMALL) if isinstance(index, sympy.Symbol) else None
