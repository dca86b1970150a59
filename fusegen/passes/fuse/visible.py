"""How many keys a query sees, where all scores beyond are minus infinity whatever the operands hold: causal attention's half.

Scores are `where(condition, s, -inf)`, or several such, with comparisons of positions that the function counts itself. Keys beyond
the bound weigh nothing; a kernel need not visit them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position, sources
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Index, RunTimeNumber
from fusegen.passes.fuse.cone import domain_axes
from fusegen.passes.fuse.groups import Domain

_FAR = 1 << 20
_COUNTED = (DType.INT32, DType.INT64)
_OPPOSITE = {Op.LE: Op.GT, Op.GT: Op.LE, Op.LT: Op.GE, Op.GE: Op.LT}


def seen_keys(graph: Graph, scores: int, query: sympy.Symbol) -> Index | None:
    """A bound on the keys that a query sees, growing with its position; None where they may be all. A run-time number in it,
    such as the first query's position, is a `RunTimeNumber`.

    Args:
        scores: (batch, head, query, key).
        query: what stands for a query's position in the result.
    """
    axes = domain_axes(Domain(graph.nodes[scores].shape))
    found = _least(_bounds(graph, scores, axes.symbols, axes))
    if found is None:
        return None
    own = axes.symbols[-2]
    rest = sympy.expand(found - own) if sympy.expand(found).coeff(own) == 1 else sympy.expand(found)
    if rest.free_symbols & set(axes.symbols) or not all(map(_is_small, sympy.Add.make_args(rest))):
        return None  # it may shrink from a query to the next, or leave 32 bits
    return sympy.sympify(found.subs(own, query))


def _is_small(term: sympy.Expr) -> bool:
    """True if a term of a bound is a number that 32 bits hold with others, a size, or a run-time number."""
    return term.is_Symbol or (-term).is_Symbol or bool(term.is_Integer and abs(term) <= _FAR)


def _bounds(graph: Graph, position: int, at: Position, axes: Axes) -> Iterable[sympy.Expr]:
    """What each condition says of the scores below."""
    node = graph.nodes[position]
    if node.op is Op.CAST and node.dtype.is_float:
        (below,) = sources(graph, position, at, axes)
        yield from _bounds(graph, below.arg, below.index, axes)
    if node.op is not Op.WHERE:
        return
    condition, chosen, other = sources(graph, position, at, axes)
    for kept, hidden, holds in ((chosen, other, True), (other, chosen, False)):
        if _is_least(graph, hidden.arg):
            bound = _bound(graph, condition.arg, condition.index, axes, holds=holds)
            yield from () if bound is None else (bound,)
            yield from _bounds(graph, kept.arg, kept.index, axes)
            return


def _is_least(graph: Graph, position: int) -> bool:
    node = graph.nodes[position]
    while node.op is Op.EXPAND or (node.op is Op.CAST and node.dtype.is_float):
        node = graph.nodes[node.args[0]]
    return node.op is Op.CONSTANT and node.number == -math.inf


def _bound(graph: Graph, position: int, at: Position, axes: Axes, *, holds: bool) -> sympy.Expr | None:
    """The least key from which on a condition never holds, or always does."""
    node = graph.nodes[position]
    operands = sources(graph, position, at, axes) if node.family in (Family.POINTWISE, Family.VIEW) else ()
    if node.op is Op.LOGICAL_NOT:
        return _bound(graph, operands[0].arg, operands[0].index, axes, holds=not holds)
    if node.op is Op.LOGICAL_AND and holds:
        return _least(b for o in operands if (b := _bound(graph, o.arg, o.index, axes, holds=True)) is not None)
    if node.family is Family.VIEW and len(operands) == 1:
        return _bound(graph, operands[0].arg, operands[0].index, axes, holds=holds)
    if node.op not in _OPPOSITE:
        return None
    left, right = (_number(graph, o.arg, o.index, axes) for o in operands)
    return None if left is None or right is None else _solved(node.op if holds else _OPPOSITE[node.op], left - right, axes)


def _solved(op: Op, difference: sympy.Expr, axes: Axes) -> sympy.Expr | None:
    """The least key for which a difference is not less than, or not at most, or not greater than, or not at least 0."""
    key = axes.symbols[-1]
    if op in (Op.GT, Op.GE):
        op, difference = (Op.LT if op is Op.GT else Op.LE), -difference
    difference = sympy.expand(difference)
    if difference.coeff(key) != 1 or (difference - key).has(key):
        return None
    return sympy.expand(key - difference + (1 if op is Op.LE else 0))


def _number(graph: Graph, position: int, at: Position, axes: Axes) -> sympy.Expr | None:
    """An integer that the function counts itself, over the axes."""
    node = graph.nodes[position]
    if node.dtype not in _COUNTED or node.family not in (Family.LEAF, Family.POINTWISE, Family.VIEW) or node.op is Op.CONCAT:
        return None  # numbers of fewer bits wrap
    if node.op is Op.IOTA:
        return sympy.sympify(at[0])
    if node.op is Op.CONSTANT:
        return sympy.Integer(int(node.number))
    if node.op is Op.SIZE:
        return sympy.sympify(node.attr("size"))
    if node.op is Op.SCALAR:
        return RunTimeNumber(str(node.attr("name")), integer=True)
    if node.family is Family.LEAF:
        return None  # read from memory, as lengths of keys are
    operands = [_number(graph, o.arg, o.index, axes) for o in sources(graph, position, at, axes)]
    known = [o for o in operands if o is not None]
    if len(known) < len(operands):
        return None
    if node.family is Family.VIEW or node.op is Op.CAST:
        return known[0] if len(known) == 1 else None
    signs = {Op.ADD: 1, Op.SUB: -1}
    return known[0] + signs[node.op] * known[1] if node.op in signs else None


def _least(bounds: Iterable[sympy.Expr]) -> sympy.Expr | None:
    """The least of some bounds that differ by numbers; the first of them otherwise."""
    found: sympy.Expr | None = None
    for bound in bounds:
        distance = None if found is None else sympy.expand(bound - found)
        if found is None or (distance is not None and distance.is_Integer and distance < 0):
            found = bound
    return found
