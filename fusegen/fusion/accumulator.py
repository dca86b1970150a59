"""The column layout of tensor-core accumulators, as far as fusion and epilogues depend on it: pairs, eight columns apart."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position
from fusegen.ir.ops import Family
from fusegen.ir.reductions import REDUCTIONS
from fusegen.ir.symbolic import Axes, FloorDiv, Modulo, Shape, linearize, literal, product, same, simplify_dim

LANES = 2
"""Neighbouring columns that one thread holds; an epilogue may combine them."""

FRAGMENT = 8
"""Columns of an n8 fragment: the pairs of one thread are this far apart."""

WIDEST = 256
"""Columns of the widest accumulator."""


def reduces_heads(graph: Graph, position: int) -> bool:
    """True if a node reduces a last dim of whole n8 fragments that fits one accumulator, e.g. a head."""
    node = graph.nodes[position]
    if node.family is not Family.REDUCTION or len(REDUCTIONS[node.op].components) > 1:
        return False
    shape = graph.nodes[node.args[0]].shape
    extent = literal(shape[-1])
    fits = extent is not None and 0 < extent <= WIDEST and extent % FRAGMENT == 0
    return fits and node.attr("dims") == (len(shape) - 1,) and node.dtype.compute is DType.FLOAT32


def is_same_row(shape: Shape, at: Position, symbols: Sequence[sympy.Symbol], extents: Shape) -> bool:
    """True if a row of a matmul, as an index into the shape of its rows, is the row of an epilogue's axes, possibly reshaped."""
    single = {s: 0 for s, e in zip(symbols, extents, strict=True) if same(e, 1)}
    rows = [sympy.sympify(row).subs(single) for row in (linearize(at, shape), linearize(symbols, extents))]
    return same(product(shape), product(extents)) and same(*rows)


def without_single(at: Position, extents: Shape) -> Position:
    """Returns an index with 0 in dims of one element, so that it does not depend on the dims' number."""
    return tuple(0 if same(extent, 1) else i for i, extent in zip(at, extents, strict=True))


def at_lane(index: object, column: sympy.Symbol, lane: int) -> sympy.Expr:
    """Returns an index at column + lane, for an even column."""
    half = sympy.Symbol(f"{column.name}_pair", integer=True, nonnegative=True)
    shifted = sympy.sympify(index).subs(column, LANES * half + lane)
    shifted = shifted.replace(FloorDiv, _halved).replace(Modulo, _remainder)
    return sympy.expand(shifted.subs(half, column / LANES))


def _halved(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    quotient = simplify_dim(Axes((), ()).floor_div(sympy.expand(a), int(b))) if b == LANES else FloorDiv(a, b)
    return sympy.sympify(quotient)


def _remainder(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return sympy.sympify(Axes((), ()).modulo(sympy.expand(a), int(b)) if b == LANES else Modulo(a, b))
