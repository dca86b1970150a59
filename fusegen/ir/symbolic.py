"""Symbolic integers: sizes and indices as sympy expressions, with integer division and remainder.

`Axes.floor_div` and `Axes.modulo` simplify with the ranges of the axes, so that a reshape followed by its inverse disappears: with
0 <= j < n, (i*n + j) // n is i.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import mul
from typing import TypeAlias

import sympy

Dim: TypeAlias = int | sympy.Expr
"""A size: a literal, or an expression of symbolic sizes."""

Shape: TypeAlias = tuple[Dim, ...]

Index: TypeAlias = int | sympy.Expr
"""An index: a literal, or an expression of axes and sizes."""


class NamedNumber(sympy.Symbol):  # type: ignore[misc]  # sympy has no types
    """A number that emitted text defines as a constant; products end with it."""


class FloorDiv(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """Integer division of non-negative operands; evaluated for literals. Division by 0, in unused indices of empty tensors,
    gives 0."""

    nargs = (2,)
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if b.is_zero:
            return sympy.Integer(0)
        return a // b if a.is_Integer and b.is_Integer else None


class Modulo(sympy.Function):  # type: ignore[misc]
    nargs = (2,)
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if b.is_zero:
            return sympy.Integer(0)
        return a % b if a.is_Integer and b.is_Integer else None


class IndexValue(sympy.Function):  # type: ignore[misc]
    """The index ``IndexValue(node, extent, *index)`` that the kernel reads for a gather's element, checked against the extent."""

    is_integer = True
    is_nonnegative = True

    @property
    def node(self) -> int:
        return int(self.args[0])

    @property
    def index(self) -> tuple[sympy.Expr, ...]:
        return tuple(self.args[2:])


def size_symbol(name: str) -> sympy.Symbol:
    """Returns the symbol of a run-time size; at least 1, because empty tensors never reach a kernel."""
    return sympy.Symbol(name, integer=True, positive=True)


def axis_symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


class Stride(sympy.Symbol):  # type: ignore[misc]
    """An input's stride that no size implies; only the input's alignment is known about it."""


def stride_symbol(name: str) -> sympy.Symbol:
    """Returns the symbol of an input's stride that no size implies; it may be 0."""
    return Stride(name, integer=True, nonnegative=True)


class RunTimeNumber(sympy.Symbol):  # type: ignore[misc]
    """An integer whose value is the call's scalar argument of this name."""


def product(dims: Iterable[Dim]) -> Dim:
    return reduce(mul, dims, 1)


def literal(dim: Dim) -> int | None:
    """Returns the value of a literal size, None for a symbolic one."""
    if isinstance(dim, int):
        return dim
    return int(dim) if dim.is_Integer else None


_NOMINAL = 1024  # stands in for a symbolic size when bytes are compared


def nominal(size: Dim) -> int:
    """Returns a number for a size, for cost decisions that change no result; symbolic sizes count as large."""
    return size if isinstance(size, int) else int(size.subs(dict.fromkeys(size.free_symbols, _NOMINAL)))


def simplify_dim(dim: Dim) -> Dim:
    """Expands an expression; literals become ints."""
    if isinstance(dim, int):
        return dim
    expanded = sympy.expand(dim)
    return int(expanded) if expanded.is_Integer else expanded


_ATOMS = (int, sympy.Symbol, sympy.Integer)


def same(a: Dim, b: Dim) -> bool:
    """True if two sizes are equal for all values of their symbols."""
    if isinstance(a, _ATOMS) and isinstance(b, _ATOMS):  # the common case: nothing to expand
        return a is b or bool(a == b)
    return bool(a == b) or sympy.expand(a - b) == 0


@lru_cache(maxsize=1 << 16, typed=True)
def exact_quotient(a: Dim, b: Dim) -> Dim | None:
    """Returns a / b if it is an integer polynomial for all values, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.sympify(a) / b
    if quotient.has(sympy.Add):  # a product is reduced already
        quotient = sympy.cancel(quotient)
    numerator, denominator = quotient.as_numer_denom()
    if denominator != 1:
        return None
    return simplify_dim(numerator)


@dataclass(frozen=True)
class Axes:
    """The axes of an iteration space, with their extents: 0 <= axis < extent."""

    symbols: tuple[sympy.Symbol, ...]
    extents: tuple[Dim, ...]
    _bounds: Mapping[sympy.Symbol, Dim] = field(init=False, repr=False, compare=False, hash=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bounds", dict(zip(self.symbols, self.extents, strict=True)))

    def floor_div(self, a: Index, b: Dim) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a // b
        if b == 1:
            return a
        quotient, remaining = self._split(a, b)
        if self.is_below(remaining, b):
            return simplify_dim(quotient)
        return simplify_dim(quotient + FloorDiv(sympy.sympify(remaining), sympy.sympify(b)))

    def modulo(self, a: Index, b: Dim) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a % b
        if b == 1:
            return 0
        _, remaining = self._split(a, b)
        if self.is_below(remaining, b):
            return simplify_dim(remaining)
        return Modulo(sympy.sympify(remaining), sympy.sympify(b))

    def is_below(self, index: Index, bound: Dim) -> bool:
        """True if index < bound is certain."""
        top = self._greatest(index)
        if top is None:
            return False
        slack = sympy.expand(sympy.sympify(bound) - 1 - top)
        return bool(slack.is_nonnegative)

    def _split(self, a: Index, b: Dim) -> tuple[sympy.Expr, sympy.Expr]:
        """The quotient of the terms of a that b divides, and the remaining terms, which are non-negative like a."""
        quotients: sympy.Expr = sympy.Integer(0)
        remaining: sympy.Expr = sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(a)):
            if isinstance(b, int) and term.is_Integer:
                quotients, remaining = quotients + int(term) // b, remaining + int(term) % b
                continue
            quotient = exact_quotient(term, b)
            if quotient is None:
                remaining += term
            else:
                quotients += quotient
        return (quotients, remaining) if quotients == 0 or self.is_nonnegative(remaining) else (sympy.Integer(0), sympy.expand(a))

    def is_nonnegative(self, index: sympy.Expr) -> bool:
        least: sympy.Expr = sympy.Integer(0)
        for term in sympy.Add.make_args(index):
            most = sympy.Integer(0) if term.is_nonnegative else self._greatest(-term)
            if most is None:
                return False
            least -= most
            if term.is_Integer:
                least += max(int(term), 0)
        return bool(sympy.expand(least).is_nonnegative)

    def _greatest(self, index: Index) -> sympy.Expr | None:
        """An upper bound of a sum of products with non-negative coefficients; None if there is none."""
        total: sympy.Expr = sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(index)):
            bound = self._greatest_term(term)
            if bound is None:
                return None
            total += bound
        return total

    def _greatest_term(self, term: sympy.Expr) -> sympy.Expr | None:
        if term.is_Integer:
            return term
        if not term.is_nonnegative:
            return None
        bounded: dict[sympy.Expr, sympy.Expr] = {axis: extent - 1 for axis, extent in self._bounds.items() if term.has(axis)}
        for call in term.atoms(Modulo, IndexValue):  # both are below their second operand
            bounded = {call: call.args[1] - 1} | {a: e for a, e in bounded.items() if not call.has(a)}
        if term.atoms(FloorDiv):
            return self._greatest_quotient(term)
        return sympy.expand(term.xreplace(bounded))

    def _greatest_quotient(self, term: sympy.Expr) -> sympy.Expr | None:
        """Returns an upper bound of a term c * FloorDiv(a, b); None if the bound of a, or b, is not literal, or c has axes."""
        calls = term.atoms(FloorDiv)
        if len(calls) != 1:
            return None
        call = next(iter(calls))
        coefficient = term / call
        top = self._greatest(call.args[0])
        if top is None or not (top.is_Integer and call.args[1].is_Integer and not coefficient.free_symbols & set(self.symbols)):
            return None
        return coefficient * (int(top) // int(call.args[1]))


def linearize(index: Sequence[Index], shape: Sequence[Dim]) -> Index:
    """Returns the row-major offset of an index."""
    position: Index = 0
    for i, extent in zip(index, shape, strict=True):
        position = position * extent + i
    return recombined(simplify_dim(position))


def recombined(index: Index) -> Index:
    """Simplifies b * (a // b) + a % b to a."""
    changed = True
    while changed and not isinstance(index, int) and index.has(FloorDiv):
        changed = False
        for remainder in index.atoms(Modulo):
            a, b = remainder.args
            factor = index.coeff(remainder)
            quotient = sympy.expand(factor * b * FloorDiv(a, b))
            if factor != 0 and set(sympy.Add.make_args(quotient)) <= set(sympy.Add.make_args(index)):
                index, changed = simplify_dim(index - factor * remainder - quotient + factor * a), True
                break
    return index


def delinearize(position: Index, shape: Sequence[Dim], axes: Axes) -> tuple[Index, ...]:
    """Returns the index of a row-major offset; the inverse of `linearize`."""
    if not shape:
        return ()
    index: list[Index] = []
    for d in range(len(shape) - 1):
        inner = product(shape[d + 1 :])
        quotient = axes.floor_div(position, inner)
        index.append(quotient)
        position = axes.modulo(position, inner)
    return (*index, position)
