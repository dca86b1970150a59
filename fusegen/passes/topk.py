"""The first few of short rows, as reductions: each is the next number of a row in an order of all of its elements.

An element and its index make one integer (`Op.SORT_KEY`), so that no two of a row are equal, and the least above the one before is
the next. Sums over the few, and elements at their indices, become math on a row's numbers: one kernel that goes along the row
computes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from fusegen.dtypes import DType
from fusegen.ir.graph import Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.reductions import SHORT_ROW, operation_of
from fusegen.ir.symbolic import literal, same
from fusegen.passes.algebra import Value

MOST = 16
"""Values of a row that a kernel computes one by one."""

_LONGEST_ORDER = 1024
"""Elements of a row up to which a kernel puts all of it in order. On an H100, 8192 rows of 64 take 22 µs, by torch 60; of 1024 258
and 312; but 4096 of 4096 694 and 570."""

_HIGH = -(1 << 32)
"""The bits of a key in which the value is: without them the order of values turns around, that of indices does not."""

_LOW = (1 << 32) - 1
_ABOVE = 0x7F800002 << 32
"""A number above all keys, and exact as a float64."""

_EXTREMES = (Op.MAX, Op.MIN)


def is_of_few(nodes: Sequence[Node], position: int) -> bool:
    """True if a value is computed, point by point, of numbers of a row that stand side by side."""
    last = len(nodes[position].shape) - 1
    stack, seen = [position], set[int]()
    while stack:
        position = stack.pop()
        node = nodes[position]
        if position in seen:
            continue
        seen.add(position)
        if node.op is Op.CONCAT and node.attr("dim") == last and all(_is_number_of_row(nodes[a], last) for a in node.args):
            return True
        if node.family is Family.POINTWISE or node.op in (Op.EXPAND, Op.SLICE):
            stack += node.args
    return False


def _is_number_of_row(node: Node, last: int) -> bool:
    return len(node.shape) == last + 1 and same(node.shape[last], 1) and node.family is Family.REDUCTION


def first_few(x: Value) -> Value | None:
    """The first of rows that registers hold, of floats that float32 holds."""
    rows, count = x.arg(0), literal(x.node.shape[-1])
    length = literal(rows.node.shape[-1])
    if count is None or not 0 < count <= MOST or length is None or length > SHORT_ROW or rows.dtype.compute is not DType.FLOAT32:
        return None
    descending = bool(x.node.attr("descending"))
    keys = _keys(rows, descending=descending)
    found: list[Value] = []
    for _ in range(count):
        left = keys if not found else (keys > found[-1]).where(keys, _ABOVE)
        found.append(left.reduce(Op.AMIN, (len(x.node.shape) - 1,)))
    few = found[0] if count == 1 else found[0].apply(Op.CONCAT, *found[1:], dim=len(x.node.shape) - 1)
    return _index(few) if x.node.attr("result") else _value(few, x.dtype, descending=descending)


def put_in_order(x: Value) -> Value:
    """Whole rows that registers of a block hold, of floats that float32 holds, in order; all else as it is."""
    length = literal(x.node.shape[-1]) if x.node.op is Op.TOPK else None
    if length is None or not 0 < length <= _LONGEST_ORDER:
        return x
    rows, descending = x.arg(0), bool(x.node.attr("descending"))
    if not same(rows.node.shape[-1], length) or rows.dtype.compute is not DType.FLOAT32:
        return x
    keys = _keys(rows, descending=descending).apply(Op.SORTED)
    return _index(keys) if x.node.attr("result") else _value(keys, x.dtype, descending=descending)


def _keys(rows: Value, *, descending: bool) -> Value:
    """The numbers of a row's elements, of which the first is the least."""
    keys = rows.apply(Op.SORT_KEY, _places(rows), dtype=DType.INT64)
    return keys.apply(Op.BITWISE_XOR, _HIGH) if descending else keys


def _places(rows: Value) -> Value:
    """The indices along the last dim."""
    iota = rows.builder.add(Op.IOTA, (), location=rows.location, shape=rows.node.shape[-1:], dtype=DType.INT64)
    return Value(rows.builder, iota, rows.location)


def _index(key: Value) -> Value:
    return key.apply(Op.BITWISE_AND, _LOW).apply(Op.RIGHT_SHIFT, 1)


def _value(key: Value, dtype: DType, *, descending: bool) -> Value:
    found = (key.apply(Op.BITWISE_XOR, _HIGH) if descending else key).apply(Op.SORTED_VALUE, dtype=DType.FLOAT32)
    return found if dtype is DType.FLOAT32 else found.apply(Op.CAST, dtype=dtype)


def reduced_few(x: Value) -> Value | None:
    """A reduction of the first few of a row, as math on each of them."""
    few, op = x.arg(0), operation_of(x.node.op)
    last = len(few.node.shape) - 1
    count = literal(few.node.shape[-1]) if few.node.shape else None
    if op is None or x.node.attr("dims") != (last,) or count is None or count > MOST or not few.dtype.is_float:
        return None
    if not count > 1 or not is_of_few(few.builder.nodes, few.position):
        return None
    return reduce(lambda a, b: a.apply(op, b), _each(few, count))


def at_few(x: Value) -> Value | None:
    """The elements of a row at indices that are computed of the row: each is the only one whose index is that."""
    rows, index = x.arg(0), x.arg(1)
    last = len(x.node.shape) - 1
    count, length = literal(index.node.shape[-1]), literal(rows.node.shape[-1])
    if x.node.attr("dim") != last or count is None or count > MOST or length is None or length > SHORT_ROW:
        return None
    if not rows.dtype.is_float or not all(map(same, rows.node.shape[:-1], index.node.shape[:-1])):
        return None
    below = index.arg(0) if index.node.op is Op.EXPAND else index
    if below.node.op in _EXTREMES or not _is_below(below, length):
        return None  # which is checked where it is read
    if (key := _key_of(index)) is not None and (order := _order_of(key)) is not None and order.rows == rows.position:
        return _value(key, x.dtype, descending=order.descending)
    places = _places(rows)
    found = [places.apply(Op.EQ, at).where(rows, float("-inf")).reduce(Op.AMAX, (last,)) for at in _each(index, count)]
    return found[0] if count == 1 else found[0].apply(Op.CONCAT, *found[1:], dim=last)


def _is_below(index: Value, length: int) -> bool:
    """True if an index is known to be one of a row of some length: of the first few, or of an extreme, or one of two such."""
    if index.node.op is Op.EXPAND:
        return _is_below(index.arg(0), length)
    if index.node.op is Op.WHERE:
        return all(_is_below(index.arg(number), length) for number in (1, 2))
    if index.node.op in _EXTREMES:
        return index.node.attr("part") == "indices" and same(index.arg(0).node.shape[-1], length)
    order = None if (key := _key_of(index)) is None else _order_of(key)
    return order is not None and same(index.builder.nodes[order.rows].shape[-1], length)


def _each(few: Value, count: int) -> list[Value]:
    """The numbers of a row that stand side by side."""
    last = len(few.node.shape) - 1
    return [few] if count == 1 else [few.apply(Op.SLICE, dim=last, start=n, length=1, step=1) for n in range(count)]


def _key_of(index: Value) -> Value | None:
    """The number of an element and its index of which an index was taken."""
    if index.node.op is Op.SLICE:
        key = _key_of(index.arg(0))
        return None if key is None else key.apply(Op.SLICE, **dict(index.node.attrs))
    if index.node.op is not Op.RIGHT_SHIFT or index.arg(0).node.op is not Op.BITWISE_AND:
        return None
    return index.arg(0).arg(0)


@dataclass(frozen=True)
class _Order:
    """An order of rows: these, and whether their greatest come first."""

    rows: int
    descending: bool


def _order_of(key: Value) -> _Order | None:
    """The order in which a number of an element and its index is one of the first."""
    while key.node.op in (Op.SLICE, Op.CONCAT):
        key = key.arg(0)
    if key.node.op is not Op.AMIN:
        return None
    below = key.arg(0)
    below = below.arg(1) if below.node.op is Op.WHERE else below
    descending = below.node.op is Op.BITWISE_XOR
    below = below.arg(0) if descending else below
    return _Order(below.node.args[0], descending) if below.node.op is Op.SORT_KEY else None
