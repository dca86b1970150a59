"""Memory accesses of a kernel: merged axes, and for each read or write the pattern of neighbouring lanes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import sympy

from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Axes, Dim, FloorDiv, Index, Modulo, Stride, axis_symbol, same, simplify_dim
from fusegen.schedule.indices import Loaded

Multiples: TypeAlias = Mapping[str, int]


class AccessPattern(Enum):
    """The pattern in which the lanes of a thread read or write."""

    VECTOR = "vector"  # neighbouring elements
    WINDOW = "window"  # neighbouring elements, from any place on
    UNIFORM = "uniform"  # the same element
    INTERLEAVED = "interleaved"  # neighbouring elements, which are lanes of several variables in turn
    GATHER = "gather"  # anything else, one by one


@dataclass(frozen=True)
class Access:
    """One way of touching a buffer.

    Attributes:
        name: of the variable that holds what was read or is written.
        buffer: the node whose buffer it is.
        offset: elements from the start, over the axes and sizes.
        pattern: what the lanes do.
        width: elements in one memory access of a VECTOR or INTERLEAVED pattern.
        conditions: bounds under which the address is valid at all.
        parts: the variables of an INTERLEAVED pattern.
    """

    name: str
    buffer: int
    offset: Index
    pattern: AccessPattern
    width: int = 1
    conditions: tuple[Bounds, ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of what is read or written."""
        return self.parts or (self.name,)


@dataclass(frozen=True)
class Anchor:
    """The start of rows that are accessed at aligned places, when groups of lanes do not start with the row.

    Attributes:
        start: the offset of a row's first element.
        dense: whether the rows lie one behind the other, so that memory goes on behind all but the last.
    """

    start: Index
    dense: bool


def merge_axes(axes: Axes, expressions: Iterable[Index], single: str) -> tuple[Axes, dict[sympy.Symbol, Index]]:
    """Neighbouring axes that every expression uses as if they were one become one.

    Args:
        axes: to be merged.
        expressions: everything that depends on them.
        single: the name of the axis when only one remains.

    Returns:
        The remaining axes, and the replacements of symbols that are gone (0 when a neighbour carries them).
    """
    expanded = [sympy.expand(e) for e in expressions]
    symbols, extents = list(axes.symbols), list(axes.extents)
    replaced: dict[sympy.Symbol, Index] = {}
    d = len(symbols) - 2
    while d >= 0:
        outer, inner, extent = symbols[d], symbols[d + 1], extents[d + 1]
        if all(_acts_as_one(e, outer, inner, extent) for e in expanded):
            expanded = [e.subs(outer, 0) for e in expanded]
            replaced[outer] = 0
            extents[d : d + 2] = [simplify_dim(extents[d] * extent)]
            del symbols[d]
        d -= 1
    if len(symbols) == 1:
        replaced[symbols[0]] = axis_symbol(single)
        symbols = [axis_symbol(single)]
    return Axes(tuple(symbols), tuple(extents)), replaced


def _acts_as_one(expression: sympy.Expr, outer: sympy.Symbol, inner: sympy.Symbol, extent: Dim) -> bool:
    """True if an expression depends on outer * extent + inner only, linearly."""
    if not expression.has(outer) and not expression.has(inner):
        return True
    for call in expression.atoms(FloorDiv, Modulo):
        if call.has(outer) or call.has(inner):
            return False
    reads = expression.atoms(Loaded)
    if reads:  # indices, which must depend on both axes as on one, too
        if not all(_acts_as_one(read.offset, outer, inner, extent) for read in reads):
            return False
        expression = expression.subs({read: sympy.Dummy() for read in reads})
    a, b = expression.coeff(outer), expression.coeff(inner)
    rest = sympy.expand(expression - a * outer - b * inner)
    return not rest.has(outer) and not rest.has(inner) and same(sympy.expand(b * extent), a)


def pattern_of(offset: Index, lane_axis: sympy.Symbol | None) -> AccessPattern:
    """The pattern of lanes along an axis at an offset."""
    expanded = sympy.expand(offset)
    if lane_axis is None or not expanded.has(lane_axis):
        return AccessPattern.UNIFORM
    rest = sympy.expand(expanded - lane_axis)
    return AccessPattern.GATHER if rest.has(lane_axis) else AccessPattern.VECTOR


def vector_width(offset: Index, lane_axis: sympy.Symbol, lanes: int, alignment: int, itemsize: int, multiples: Multiples) -> int:
    """The widest aligned access of ``lanes`` neighbours whose first one is at a multiple of ``lanes``.

    Args:
        alignment: bytes that divide the buffer's address and the strides that are symbols of their own.
        multiples: known divisors of sizes, by name.
    """
    width = math.gcd(lanes, max(1, alignment // itemsize))
    rest = sympy.expand(sympy.expand(offset) - lane_axis)
    own = max(1, alignment // itemsize)
    for term in sympy.Add.make_args(rest):
        width = math.gcd(width, divisor(term, multiples, own))
    return width & -width


def is_alike(bounds: Bounds, lane_axis: sympy.Symbol, lanes: int, multiples: Multiples) -> bool:
    """True if a condition holds for all of ``lanes`` neighbours, the first one at a multiple of ``lanes``, or for none of them.

    Args:
        multiples: known divisors of sizes, by name.
    """
    pattern = pattern_of(bounds.index, lane_axis)
    if pattern is not AccessPattern.VECTOR:
        return pattern is AccessPattern.UNIFORM
    moved = sympy.expand(sympy.sympify(bounds.index) - lane_axis)
    ends = [sympy.expand(sympy.sympify(end)) for end in (bounds.lower, bounds.upper) if end is not None]
    return all(divisor(term, multiples) % lanes == 0 for e in (moved, *ends) for term in sympy.Add.make_args(e))


def divisor(term: Index, multiples: Multiples, stride_multiple: int = 1) -> int:
    """A number that divides a product for all values of its symbols."""
    if isinstance(term, int):
        return abs(term) if term else 1 << 30
    if term.is_Integer:
        return abs(int(term)) if int(term) else 1 << 30
    found = 1
    for factor in sympy.Mul.make_args(term):
        if factor.is_Integer:
            found *= abs(int(factor))
        elif isinstance(factor, sympy.Symbol):
            found *= stride_multiple if isinstance(factor, Stride) else multiples.get(factor.name, 1)
    return found


def size_names(expressions: Iterable[Index], axes: Iterable[sympy.Symbol]) -> tuple[str, ...]:
    """Names of the sizes and strides in some expressions, sorted."""
    symbols: set[sympy.Symbol] = set()
    for expression in expressions:
        if not isinstance(expression, int):
            symbols |= expression.free_symbols
    return tuple(sorted(s.name for s in symbols - set(axes)))
