"""Bounds of the keys of an attention: the keys that a query sees, e.g. in causal attention, and those that have values.

Scores are `where(condition, s, -inf)`, possibly nested; the conditions compare positions. Keys past the bound, or before the first
one, have weight 0, so the kernel skips them. Values may be `where(key < bound, v, 0)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position, identity_axes, sources
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Index, RunTimeNumber, same
from fusegen.schedule.indices import Choice, Less, Maximum, Minimum

_FAR = 1 << 20
_COUNTED = (DType.INT32, DType.INT64)
_EXTREMES = {Op.MINIMUM: Minimum, Op.MAXIMUM: Maximum}
_OPPOSITE = {Op.LE: Op.GT, Op.GT: Op.LE, Op.LT: Op.GE, Op.GE: Op.LT}


class NumberInMemory(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """An integer that the kernel reads: ``NumberInMemory(node, *index)``."""

    is_integer = True


def visible_keys(graph: Graph, scores: int) -> Index | None:
    """Returns a bound on the keys that a query sees; it grows with the query's position. None if a query may see all keys.

    Scores are (batch, head, query, key). The bound is over the `identity_axes` of the first three. Run-time numbers, e.g. the first
    query's position, are `RunTimeNumber` symbols in it, and integers that the kernel reads are `NumberInMemory` functions.
    """
    return _bound_of_scores(graph, scores, 1)


def first_visible_key(graph: Graph, scores: int) -> Index | None:
    """Returns the first key that a query may see, as `visible_keys` does; None for 0."""
    first = _bound_of_scores(graph, scores, -1)
    return None if first is None or sympy.sympify(first).is_nonpositive else first


def _bound_of_scores(graph: Graph, scores: int, sign: int) -> Index | None:
    axes = _axes_of(graph, scores)
    *_, query, key = axes.symbols
    bounds = map(sympy.expand, _bounds(graph, scores, axes.symbols, axes, sign * key))
    return _tightest((bound for bound in bounds if _is_usable(bound, query, key)), sign)


def _is_usable(bound: sympy.Expr, query: sympy.Symbol, key: sympy.Symbol) -> bool:
    """True unless the bound may shrink from a query to the next, or exceed 32 bits."""
    remainder = bound - query if bound.coeff(query) == 1 else bound
    return not remainder.has(query, key) and all(map(_is_small, sympy.Add.make_args(remainder)))


def _is_small(term: sympy.Expr) -> bool:
    """True if a term of a bound is a small number, a size, or a run-time number, so that sums fit into 32 bits. Integers in memory
    are 64-bit numbers in emitted text."""
    is_plain = any(t.is_Symbol or isinstance(t, (NumberInMemory, Minimum, Maximum)) for t in (term, -term))
    return is_plain or bool(term.is_Integer and abs(term) <= _FAR)


def _bounds(graph: Graph, position: int, at: Position, axes: Axes, key: sympy.Expr) -> Iterable[sympy.Expr]:
    """Yields the bounds that nested conditions set on the scores: the ends of keys, or, for ``-key``, their first ones."""
    node = graph.nodes[position]
    if node.op is Op.CAST and node.dtype.is_float:
        (operand,) = sources(graph, position, at, axes)
        yield from _bounds(graph, operand.arg, operand.index, axes, key)
    if node.op is not Op.WHERE:
        return
    condition, chosen, alternative = sources(graph, position, at, axes)
    for shown, masked, holds in ((chosen, alternative, True), (alternative, chosen, False)):
        if _is_least(graph, masked.arg):
            bound = _bound(graph, condition.arg, condition.index, axes, key, holds=holds)
            yield from () if bound is None else (bound,)
            yield from _bounds(graph, shown.arg, shown.index, axes, key)
            return


def _is_least(graph: Graph, position: int) -> bool:
    node = graph.nodes[position]
    while node.op is Op.EXPAND or (node.op is Op.CAST and node.dtype.is_float):
        node = graph.nodes[node.args[0]]
    return node.op is Op.CONSTANT and node.number == -math.inf


def _bound(graph: Graph, position: int, at: Position, axes: Axes, key: sympy.Expr, *, holds: bool) -> sympy.Expr | None:
    """Returns the first key from which on a condition never holds, or, with `holds=False`, always holds. For ``-key``, returns the
    first key for which it may hold."""
    node = graph.nodes[position]
    operands = sources(graph, position, at, axes) if node.family in (Family.POINTWISE, Family.VIEW) else ()
    if node.op is Op.LOGICAL_NOT:
        return _bound(graph, operands[0].arg, operands[0].index, axes, key, holds=not holds)
    if node.op is Op.LOGICAL_AND and holds:
        bounds = (_bound(graph, o.arg, o.index, axes, key, holds=True) for o in operands)
        return _tightest((bound for bound in bounds if bound is not None), 1 if key.is_Symbol else -1)
    if node.family is Family.VIEW and len(operands) == 1:
        return _bound(graph, operands[0].arg, operands[0].index, axes, key, holds=holds)
    if node.op not in _OPPOSITE:
        return None
    left, right = (_number(graph, o.arg, o.index, axes) for o in operands)
    return None if left is None or right is None else _solved(node.op if holds else _OPPOSITE[node.op], left - right, key)


def _solved(op: Op, difference: sympy.Expr, key: sympy.Expr) -> sympy.Expr | None:
    """Returns the first key for which ``difference op 0`` is false; for ``-key``, the first one for which it is true."""
    if op in (Op.GT, Op.GE):
        op, difference = (Op.LT if op is Op.GT else Op.LE), -difference
    end = sympy.expand(key - difference)  # of keys, or of their negatives
    if end.has(*key.free_symbols):
        return None
    return end + int(op is Op.LE) if key.is_Symbol else int(op is Op.LT) - end


def _number(graph: Graph, position: int, at: Position, axes: Axes) -> sympy.Expr | None:
    """Returns an integer that depends only on positions, sizes, constants, run-time numbers and integers in memory; None for other
    values."""
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
    if node.op is Op.INPUT:
        return NumberInMemory(position, *at)  # e.g. the length of a sequence
    if node.family is Family.LEAF:
        return None
    operands = sources(graph, position, at, axes)
    condition = None
    if node.op is Op.WHERE:
        condition, operands = _comparison(graph, operands[0].arg, operands[0].index, axes), operands[1:]
    numbers = [_number(graph, o.arg, o.index, axes) for o in operands]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    if node.op is Op.CAST and node.dtype.itemsize < graph.nodes[node.args[0]].dtype.itemsize and known[0].has(NumberInMemory):
        return None  # it may wrap
    if node.family is Family.VIEW or node.op is Op.CAST:
        return known[0] if len(known) == 1 else None
    if node.op is Op.WHERE:
        return None if condition is None else Choice(condition, *known)
    if node.op in _EXTREMES:
        return _EXTREMES[node.op](*known)
    if node.op is Op.MUL and node.dtype is DType.INT64:  # products of 32 bits may wrap
        return known[0] * known[1]
    signs = {Op.ADD: 1, Op.SUB: -1}
    return known[0] + signs[node.op] * known[1] if node.op in signs else None


def _comparison(graph: Graph, position: int, at: Position, axes: Axes) -> sympy.Expr | None:
    """Returns a comparison of two numbers as `Less`; None for other conditions."""
    while graph.nodes[position].family is Family.VIEW and graph.nodes[position].op is not Op.CONCAT:
        (operand,) = sources(graph, position, at, axes)
        position, at = operand.arg, operand.index
    op = graph.nodes[position].op
    if op not in _OPPOSITE:
        return None
    left, right = (_number(graph, o.arg, o.index, axes) for o in sources(graph, position, at, axes))
    if left is None or right is None:
        return None
    return Less(left, right + int(op is Op.LE)) if op in (Op.LT, Op.LE) else Less(right, left + int(op is Op.GE))


def page_number(graph: Graph, position: int, at: Position, axes: Axes) -> Index:
    """Returns an integer that the kernel computes from integers in memory, or else reads from memory itself."""
    while graph.nodes[position].family is Family.VIEW and graph.nodes[position].op is not Op.CONCAT:
        (operand,) = sources(graph, position, at, axes)
        position, at = operand.arg, operand.index
    number = _number(graph, position, at, axes)
    return NumberInMemory(position, *at) if number is None else number


def page_of_seen_key(number: Index, first: Index, seen: Index | None, batch: sympy.Symbol) -> Index:
    """Returns the page of a block that begins with key `first` and has a key below `seen`: the kernel reads no others. This decides
    ``where(first < length, page, other)``."""
    if seen is None or not isinstance(number, Choice) or not isinstance(number.args[0], Less):
        return number
    left, length = number.args[0].args
    holds = same(left, first) and length.free_symbols <= {batch} and _is_at_most(sympy.sympify(seen), length)
    return number.args[1] if holds else number


def _is_at_most(bound: sympy.Expr, length: sympy.Expr) -> bool:
    """True if keys below a bound, which are not negative, are below a length."""
    if isinstance(bound, Minimum):
        return any(_is_at_most(each, length) for each in bound.args)
    return bound == length or (isinstance(bound, Maximum) and 0 in bound.args and length in bound.args)


def _tightest(bounds: Iterable[sympy.Expr], sign: int) -> sympy.Expr | None:
    """Returns the least bound, or with ``sign=-1`` the greatest. Bounds that do not differ by a constant from the best one so far
    are ignored."""
    best: sympy.Expr | None = None
    for bound in bounds:
        distance = None if best is None else sympy.expand(bound - best)
        if best is None or (distance is not None and distance.is_Integer and sign * distance < 0):
            best = bound
    return best


def masked_values(graph: Graph, values: int) -> tuple[int, Index] | None:
    """Returns the ``where`` that sets values of later keys to 0, and the number of keys before them for each batch.

    Unlike for scores, a bound does not suffice: no other values may be set to 0, and all heads of a GQA group have the same bound.
    """
    axes = _axes_of(graph, values)
    position, at = values, axes.symbols
    while graph.nodes[position].family is Family.VIEW and graph.nodes[position].op is not Op.CONCAT:
        (operand,) = sources(graph, position, at, axes)
        position, at = operand.arg, operand.index
    if graph.nodes[position].op is not Op.WHERE:
        return None
    condition, _, zero = sources(graph, position, at, axes)
    _, *others, key, _ = axes.symbols
    bound = _bound(graph, condition.arg, condition.index, axes, key, holds=True)
    is_zero = graph.nodes[zero.arg].op is Op.CONSTANT and graph.nodes[zero.arg].number == 0
    if bound is None or not is_zero or not _is_comparison(graph, condition.arg):
        return None
    return None if bound.has(key, *others, axes.symbols[-1]) else (position, bound)


def _is_comparison(graph: Graph, position: int) -> bool:
    """True if a condition with a bound is one comparison, and not several of which some have no bound."""
    while graph.nodes[position].op is Op.LOGICAL_NOT or graph.nodes[position].family is Family.VIEW:
        (position,) = graph.nodes[position].args
    return graph.nodes[position].op in _OPPOSITE


def _axes_of(graph: Graph, position: int) -> Axes:
    return identity_axes(graph.nodes[position].shape)
