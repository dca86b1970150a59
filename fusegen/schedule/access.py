"""Memory accesses of a kernel: merged axes, and the pattern of neighbouring lanes for each read or write."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import sympy

from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Axes, Dim, FloorDiv, Index, Modulo, Stride, axis_symbol, same, simplify_dim
from fusegen.schedule.indices import LoadedIndex

Multiples: TypeAlias = Mapping[str, int]


class AccessPattern(Enum):
    VECTOR = "vector"  # neighbouring elements
    WINDOW = "window"  # neighbouring elements, from an unaligned start
    UNIFORM = "uniform"  # the same element
    INTERLEAVED = "interleaved"  # neighbouring elements that belong to several variables in turn
    GATHER = "gather"  # any other pattern, one element at a time


@dataclass(frozen=True)
class Access:
    """A read or a write of a buffer.

    Attributes:
        offset: elements from the start, over the axes and sizes.
        width: elements per memory access of a VECTOR or INTERLEAVED pattern.
        conditions: bounds under which the address is valid.
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
        return self.parts or (self.name,)


@dataclass(frozen=True)
class Anchor:
    """The first element of unaligned rows that are accessed at aligned addresses. If the rows are `dense`, memory past the end of
    all but the last is readable."""

    start: Index
    dense: bool


def merge_axes(axes: Axes, expressions: Iterable[Index], single: str) -> tuple[Axes, dict[sympy.Symbol, Index]]:
    """Merges adjacent axes that every expression uses only in linearized form, and drops outer ones of extent 1; a single remaining
    axis is named `single`.

    Also returns the replacements of removed symbols (0 if merged into a neighbour).
    """
    expanded = [sympy.expand(e) for e in expressions]
    symbols, extents = list(axes.symbols), list(axes.extents)
    replaced: dict[sympy.Symbol, Index] = {}
    d = len(symbols) - 2
    while d >= 0:
        outer, inner, extent = symbols[d], symbols[d + 1], extents[d + 1]
        if extents[d] == 1 or all(_acts_as_one(e, outer, inner, extent) for e in expanded):
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
    """True if an expression is linear and depends on outer * extent + inner only."""
    if not expression.has(outer) and not expression.has(inner):
        return True
    for call in expression.atoms(FloorDiv, Modulo):
        if call.has(outer) or call.has(inner):
            return False
    reads = expression.atoms(LoadedIndex)
    if reads:  # offsets of index reads must depend on the merged axis only, too
        if not all(_acts_as_one(read.offset, outer, inner, extent) for read in reads):
            return False
        expression = expression.subs({read: sympy.Dummy() for read in reads})
    a, b = expression.coeff(outer), expression.coeff(inner)
    remainder = sympy.expand(expression - a * outer - b * inner)
    return not remainder.has(outer) and not remainder.has(inner) and same(sympy.expand(b * extent), a)


def pattern_of(offset: Index, lane_axis: sympy.Symbol | None) -> AccessPattern:
    expanded = sympy.expand(offset)
    if lane_axis is None or not expanded.has(lane_axis):
        return AccessPattern.UNIFORM
    remainder = sympy.expand(expanded - lane_axis)
    return AccessPattern.GATHER if remainder.has(lane_axis) else AccessPattern.VECTOR


def vector_width(offset: Index, lane_axis: sympy.Symbol, vec: int, alignment: int, itemsize: int, multiples: Multiples) -> int:
    """Returns the widest aligned access to ``vec`` neighbours that start at a multiple of ``vec``. ``alignment``, in bytes, divides
    the buffer's address and its symbolic strides."""
    width = math.gcd(vec, max(1, alignment // itemsize))
    remainder = sympy.expand(sympy.expand(offset) - lane_axis)
    aligned = max(1, alignment // itemsize)
    for term in sympy.Add.make_args(remainder):
        width = math.gcd(width, divisor(term, multiples, aligned))
    return width & -width


def is_uniform(bounds: Bounds, lane_axis: sympy.Symbol, vec: int, multiples: Multiples) -> bool:
    """True if a condition has one value for all ``vec`` neighbours that start at a multiple of ``vec``."""
    pattern = pattern_of(bounds.index, lane_axis)
    if pattern is not AccessPattern.VECTOR:
        return pattern is AccessPattern.UNIFORM
    relative = sympy.expand(sympy.sympify(bounds.index) - lane_axis)
    ends = [sympy.expand(sympy.sympify(end)) for end in (bounds.lower, bounds.upper) if end is not None]
    return all(divisor(term, multiples) % vec == 0 for e in (relative, *ends) for term in sympy.Add.make_args(e))


def divisor(term: Index, multiples: Multiples, stride_multiple: int = 1) -> int:
    """Returns a number that divides a product of symbols for all their values."""
    if isinstance(term, int):
        return abs(term) if term else 1 << 30
    if term.is_Integer:
        return abs(int(term)) if int(term) else 1 << 30
    common = 1
    for factor in sympy.Mul.make_args(term):
        if factor.is_Integer:
            common *= abs(int(factor))
        elif isinstance(factor, sympy.Symbol):
            common *= stride_multiple if isinstance(factor, Stride) else multiples.get(factor.name, 1)
    return common


def size_names(expressions: Iterable[Index], axes: Iterable[sympy.Symbol]) -> tuple[str, ...]:
    """Returns the names of the sizes in some expressions, in the order of their first use: kernels that differ only in the names of
    sizes have the same order."""
    free = (sorted(e.free_symbols - set(axes), key=str) for e in expressions if not isinstance(e, int))
    return tuple(dict.fromkeys(symbol.name for symbols in free for symbol in symbols))
