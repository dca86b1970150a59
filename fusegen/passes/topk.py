"""Top-k of short rows as reductions: each one finds the next element in a total order.

An element and its index form one distinct integer (`Op.SORT_KEY`); the next element is the least key above the previous one. Sums
over the top k, and gathers at their indices, become math on row values, so that one kernel computes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from fusegen.dtypes import DType
from fusegen.ir.graph import Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.reductions import ABOVE_ALL_KEYS, SHORT_ROW, operation_of
from fusegen.ir.symbolic import literal, same
from fusegen.passes.algebra import Value

MOST = 16
"""Largest k that a kernel computes by repeated reductions."""

_LONGEST_ORDER = 1024
"""Longest row, in elements, that a kernel sorts.

Times on an H100, as reductions and by torch: 22 and 60 µs for 8192 rows of 64, 258 and 312 for 8192 rows of 1024, but 694 and 570
for 4096 rows of 4096.
"""

_EXTREMES = (Op.MAX, Op.MIN)


def is_from_topk(nodes: Sequence[Node], position: int) -> bool:
    """True if a value is computed pointwise from concatenated row reductions, like the result of top-k."""
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


def topk_as_reductions(x: Value) -> Value | None:
    """Top-k of short rows with values that float32 holds."""
    rows, count = x.arg(0), literal(x.node.shape[-1])
    length = literal(rows.node.shape[-1])
    if count is None or not 0 < count <= MOST or length is None or length > SHORT_ROW or rows.dtype.compute is not DType.FLOAT32:
        return None
    descending = bool(x.node.attr("descending"))
    keys = _keys(rows, descending=descending)
    keys_found: list[Value] = []
    for _ in range(count):
        remaining = keys if not keys_found else (keys > keys_found[-1]).where(keys, ABOVE_ALL_KEYS)
        keys_found.append(remaining.reduce(Op.AMIN, (len(x.node.shape) - 1,)))
    first = keys_found[0] if count == 1 else keys_found[0].apply(Op.CONCAT, *keys_found[1:], dim=len(x.node.shape) - 1)
    return _index(first) if x.node.attr("result") else _value(first, x.dtype, descending=descending)


def sort_rows(x: Value) -> Value:
    """Sorts short rows with values that float32 holds; other values are unchanged."""
    length = literal(x.node.shape[-1]) if x.node.op is Op.TOPK else None
    if length is None or not 0 < length <= _LONGEST_ORDER:
        return x
    rows, descending = x.arg(0), bool(x.node.attr("descending"))
    if not same(rows.node.shape[-1], length) or rows.dtype.compute is not DType.FLOAT32:
        return x
    keys = _keys(rows, descending=descending).apply(Op.SORTED)
    return _index(keys) if x.node.attr("result") else _value(keys, x.dtype, descending=descending)


def _keys(rows: Value, *, descending: bool) -> Value:
    """The sort keys of a row; the first element has the least key."""
    return rows.apply(Op.DESCENDING_KEY if descending else Op.SORT_KEY, _last_dim_indices(rows), dtype=DType.INT64)


def _last_dim_indices(rows: Value) -> Value:
    iota = rows.builder.add(Op.IOTA, (), location=rows.location, shape=rows.node.shape[-1:], dtype=DType.INT64)
    return Value(rows.builder, iota, rows.location)


def _index(key: Value) -> Value:
    return key.apply(Op.KEY_INDEX, dtype=DType.INT64)


def _value(key: Value, dtype: DType, *, descending: bool) -> Value:
    value = key.apply(Op.DESCENDING_VALUE if descending else Op.SORTED_VALUE, dtype=DType.FLOAT32)
    return value if dtype is DType.FLOAT32 else value.apply(Op.CAST, dtype=dtype)


def reduced_topk(x: Value) -> Value | None:
    """Turns a reduction of the top k into math on each element."""
    few, op = x.arg(0), operation_of(x.node.op)
    last = len(few.node.shape) - 1
    count = literal(few.node.shape[-1]) if few.node.shape else None
    if op is None or x.node.attr("dims") != (last,) or count is None or count > MOST or not few.dtype.is_float:
        return None
    if not count > 1 or not is_from_topk(few.builder.nodes, few.position):
        return None
    return reduce(lambda a, b: a.apply(op, b), _columns(few, count))


def gathered_topk(x: Value) -> Value | None:
    """Turns a gather of a row at its top-k indices into reductions that select the element with that index."""
    rows, index = x.arg(0), x.arg(1)
    last = len(x.node.shape) - 1
    count, length = literal(index.node.shape[-1]), literal(rows.node.shape[-1])
    if x.node.attr("dim") != last or count is None or count > MOST or length is None or length > SHORT_ROW:
        return None
    if not rows.dtype.is_float or not all(map(same, rows.node.shape[:-1], index.node.shape[:-1])):
        return None
    unexpanded = index.arg(0) if index.node.op is Op.EXPAND else index
    if unexpanded.node.op in _EXTREMES or not _is_below(unexpanded, length):
        return None  # the gather checks the index
    if (key := _key_of(index)) is not None and (order := _order_of(key)) is not None and order.rows == rows.position:
        return _value(key, x.dtype, descending=order.descending)
    positions = _last_dim_indices(rows)
    elements = [
        positions.apply(Op.EQ, column).where(rows, float("-inf")).reduce(Op.AMAX, (last,)) for column in _columns(index, count)
    ]
    return elements[0] if count == 1 else elements[0].apply(Op.CONCAT, *elements[1:], dim=last)


def _is_below(index: Value, length: int) -> bool:
    """True if an index is known to be below a row's length: it comes from top-k or from an extremum of rows of this length."""
    if index.node.op is Op.EXPAND:
        return _is_below(index.arg(0), length)
    if index.node.op is Op.WHERE:
        return all(_is_below(index.arg(number), length) for number in (1, 2))
    if index.node.op in _EXTREMES:
        return index.node.attr("part") == "indices" and same(index.arg(0).node.shape[-1], length)
    order = None if (key := _key_of(index)) is None else _order_of(key)
    return order is not None and same(index.builder.nodes[order.rows].shape[-1], length)


def _columns(few: Value, count: int) -> list[Value]:
    last = len(few.node.shape) - 1
    return [few] if count == 1 else [few.apply(Op.SLICE, dim=last, start=n, length=1, step=1) for n in range(count)]


def _key_of(index: Value) -> Value | None:
    if index.node.op is Op.SLICE:
        key = _key_of(index.arg(0))
        return None if key is None else key.apply(Op.SLICE, **dict(index.node.attrs))
    return index.arg(0) if index.node.op is Op.KEY_INDEX else None


@dataclass(frozen=True)
class _Order:
    rows: int
    descending: bool


def _order_of(key: Value) -> _Order | None:
    while key.node.op in (Op.SLICE, Op.CONCAT):
        key = key.arg(0)
    if key.node.op is not Op.AMIN:
        return None
    source = key.arg(0)
    source = source.arg(1) if source.node.op is Op.WHERE else source
    is_key = source.node.op in (Op.SORT_KEY, Op.DESCENDING_KEY)
    return _Order(source.node.args[0], source.node.op is Op.DESCENDING_KEY) if is_key else None
