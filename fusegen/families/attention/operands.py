"""Queries, keys and values of attention as TMA reads them: as they are, in 8 bits, or in pages.

The kernel multiplies the stored elements of 8-bit keys and values, whose conversion to 16 bits is exact. Products of elements and
scales may be rounded to 16 bits: such keys and values are written first. Scales may multiply the scores and the result instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from fusegen.dtypes import DType
from fusegen.families.attention.bounds import masked_values, page_number
from fusegen.families.attention.plan import MOST_ROWS
from fusegen.families.gemm.pipelines import is_tma_view
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import (
    Passed,
    StridedView,
    first_version,
    gathered_view,
    identity_axes,
    repeated_view,
    strided_view,
)
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Index, exact_quotient, literal, same
from fusegen.schedule.access import divisor
from fusegen.target import Target

PAGE_MULTIPLE = 16
"""Keys of the smallest box that is read from a page."""

STORED = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8)
"""The dtypes of elements that the kernel of few queries converts."""


@dataclass(frozen=True)
class PageTable:
    """A table of pages: the keys of a sequence are in blocks, and each block is a page of the cache.

    Attributes:
        page: keys of a page.
        number: the page of a block, over the `identity_axes` of (batch, block); may have `NumberInMemory` functions.
        gather: the gather of pages.
    """

    page: Dim
    number: Index
    gather: int


@dataclass(frozen=True)
class AttentionOperands:
    """Queries (batch, head, query, channel), keys and values (batch, head, key, channel), channels contiguous.

    With a page table, keys and values are (page, head, key of the page, channel).

    Attributes:
        gqa_group: size of the GQA group: query heads per head of keys and values (Ainslie et al., arXiv 2305.13245).
        present_keys: the number of keys with values, for each batch; values of later keys are 0. None if all have values.
    """

    q: StridedView
    k: StridedView
    v: StridedView
    gqa_group: int
    present_keys: Index | None = None
    table: PageTable | None = None

    @property
    def views(self) -> tuple[StridedView, ...]:
        return self.q, self.k, self.v


def operands_of(graph: Graph, q: int, keys: int, values: int, target: Target) -> AttentionOperands | None:
    """Returns the operands of two matmuls as TMA reads them, or None; keys are (batch, head, channel, key)."""
    return next((o for o in operand_candidates(graph, q, keys, values, target) if _is_readable(graph, o)), None)


def operand_candidates(graph: Graph, q: int, keys: int, values: int, target: Target) -> Iterator[AttentionOperands]:
    """Yields the operands for each way to read keys and values, in 8 bits (with `wgmma`) and in pages first."""
    q, keys = without_widening(graph, q), without_widening(graph, keys)
    if any(len(graph.nodes[p].shape) != 4 for p in (q, keys, values)):
        return
    where, present = masked_values(graph, values) or (None, None)
    k_passed, v_passed = stored_operands(graph, keys), stored_operands(graph, values, where)
    if target.wgmma and k_passed is not None and v_passed is not None:
        stored = _read_by(graph, q, (keys, values), (k_passed, v_passed), present)
        yield from (o for o in stored if graph.nodes[o.k.base].dtype is graph.nodes[o.v.base].dtype in STORED)
    yield from _read_by(graph, q, (keys, values), ((), () if where is None else ((where, 1),)), present)


def _read_by(
    graph: Graph, q: int, cache: tuple[int, int], passed: tuple[Passed, Passed], present: Index | None
) -> Iterator[AttentionOperands]:
    view = strided_view(graph, q)
    for find in (_paged_operands, _shared_operands):
        for gqa_group in _group_sizes(graph, q, cache[0], passed[0]):
            found = find(graph, cache, passed, gqa_group)
            if found is not None and same(found[0], view.shape[0]) and same(found[1].shape[1] * gqa_group, view.shape[1]):
                yield AttentionOperands(view, *found[1:3], gqa_group, present, found[3])


def _is_readable(graph: Graph, operands: AttentionOperands) -> bool:
    """True if TMA can read the operands, and whole boxes of keys from each page; elements of 8 bits only for few queries."""
    table, queries = operands.table, operands.q.shape[-2]
    most = literal(queries) or dict(graph.bounds).get(str(queries), MOST_ROWS + 1)
    if graph.nodes[operands.k.base].dtype in STORED and most * operands.gqa_group > MOST_ROWS:
        return False
    if table is not None and divisor(table.page, dict(graph.multiples)) % PAGE_MULTIPLE:
        return False
    return all(is_tma_view(graph, view, graph.nodes[view.base].dtype.itemsize) for view in operands.views)


def stored_operands(graph: Graph, operand: int, where: int | None = None) -> Passed | None:
    """Returns the conversions between keys or values and their stored elements of 8 bits; None if there are other operations.

    Args:
        where: passed as if it chose its second operand everywhere.
    """
    passed: list[tuple[int, int]] = []
    position = operand
    while (node := graph.nodes[position]).dtype not in STORED:
        if position == where or (node.op is Op.CAST and node.dtype.is_float):
            passed.append((position, int(position == where)))
        elif node.family is not Family.VIEW or node.op is Op.CONCAT:
            return None
        position = node.args[int(position == where)]
    return tuple(passed)


def without_widening(graph: Graph, position: int) -> int:
    """Skips a conversion to float32: tensor cores accumulate exact products of 16-bit floats in float32 anyway."""
    node = graph.nodes[position]
    is_widened = node.op is Op.CAST and node.dtype is DType.FLOAT32 and graph.nodes[node.args[0]].dtype.is_half
    return node.args[0] if is_widened else position


def _group_sizes(graph: Graph, q: int, keys: int, passed: Passed) -> list[int]:
    """Returns candidates for the size of the GQA group: all heads for a single head of keys, 1 if no view repeats heads."""
    position, heads = keys, literal(graph.nodes[q].shape[1])
    if heads is not None and same(graph.nodes[keys].shape[1], 1):
        return [heads]
    while (below := _operand_below(graph, position, passed)) is not None:
        if graph.nodes[position].op is Op.EXPAND and heads is not None:
            return [n for n in range(heads, 0, -1) if heads % n == 0]
        position = below
    return [1]


def _operand_below(graph: Graph, position: int, passed: Passed) -> int | None:
    """Returns the operand of a view or of a passed node, or None."""
    node, number = graph.nodes[position], dict(passed).get(position)
    if node.family is Family.VIEW and node.op is not Op.CONCAT:
        return node.args[0]
    return None if number is None else node.args[number]


_Found: TypeAlias = tuple[Dim, StridedView, StridedView, PageTable | None]
"""The batch, keys, values, and the page table."""


def _shared_operands(graph: Graph, cache: tuple[int, int], passed: tuple[Passed, Passed], gqa_group: int) -> _Found | None:
    kt, v = (_unrepeated(graph, *each, gqa_group) for each in zip(cache, passed, strict=True))
    if kt is None or v is None or not all(map(same, kt.shape[:2], v.shape[:2])):
        return None
    return kt.shape[0], StridedView(kt.base, _transposed(kt.shape), _transposed(kt.strides), kt.offset), v, None


def _paged_operands(graph: Graph, cache: tuple[int, int], passed: tuple[Passed, Passed], gqa_group: int) -> _Found | None:
    """Returns the operands if keys and values are gathered from pages of the same numbers."""
    gather = _gather_below(graph, cache[0], passed[0])
    if gather is None:
        return None
    for page in dict.fromkeys(graph.nodes[gather].shape):
        k = _paged(graph, cache[0], passed[0], gqa_group, page, is_transposed=True)
        v = _paged(graph, cache[1], passed[1], gqa_group, page)
        if k is not None and v is not None and k[1:] == v[1:] and all(map(same, k[0].shape[:2], v[0].shape[:2])):
            return k[1], k[0], v[0], PageTable(page, k[2], gather)
    return None


def _gather_below(graph: Graph, position: int, passed: Passed) -> int | None:
    while (below := _operand_below(graph, position, passed)) is not None:
        position = below
    return position if graph.nodes[position].family is Family.INDEXING else None


def _paged(
    graph: Graph, position: int, passed: Passed, gqa_group: int, page: Dim, *, is_transposed: bool = False
) -> tuple[StridedView, Dim, Index, bool] | None:
    """Returns keys or values as pages, the batch, the page of each block, and whether its number wraps; None if they are not in
    pages of this size."""
    shape = graph.nodes[position].shape
    batch, heads, length, channels = _transposed(shape) if is_transposed else shape
    count = 1 if same(heads, 1) else gqa_group
    kv_heads, blocks = exact_quotient(heads, count), exact_quotient(length, page)
    if kv_heads is None or blocks is None:
        return None
    axes = identity_axes((batch, blocks, kv_heads, count, page, channels))
    b, block, head, repeat, key, channel = axes.symbols
    index = (b, head * count + repeat, block * page + key, channel)
    found = gathered_view(graph, position, _transposed(index) if is_transposed else index, axes, passed)
    if found is None or graph.nodes[first_version(graph, found.view.base)].op is not Op.INPUT:
        return None
    pages, *strides = found.view.strides
    number = page_number(graph, *found.index, axes)
    of_sequence = (*strides[:2], *(strides[3:4] if count > 1 else ()))
    if any(not same(stride, 0) for stride in of_sequence) or sympy.sympify(number).has(head, repeat, key, channel):
        return None
    view = StridedView(
        found.view.base,
        (found.view.shape[0], kv_heads, page, channels),
        (pages, strides[2], strides[4], strides[5]),
        found.view.offset,
    )
    return view, batch, number, bool(graph.nodes[found.gather].attr("wraps"))


def _unrepeated(graph: Graph, position: int, passed: Passed, gqa_group: int) -> StridedView | None:
    """Returns keys or values with each head once: without the view that repeats heads, or the broadcast by the matmul."""
    is_plain = gqa_group == 1 or same(graph.nodes[position].shape[1], 1)
    if is_plain and not passed:
        return strided_view(graph, position)
    return repeated_view(graph, position, 1, 1 if is_plain else gqa_group, passed)


def _transposed(dims: tuple[Index, ...]) -> tuple[Index, ...]:
    return (*dims[:-2], dims[-1], dims[-2])
