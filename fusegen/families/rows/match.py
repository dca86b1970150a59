"""Matches groups around reductions along rows and column reductions."""

from __future__ import annotations

import math

from fusegen.fusion.groups import Domain, Group, GroupKind, Materialized
from fusegen.fusion.producers import (
    Producers,
    domain_axes,
    is_column_aligned,
    is_row_aligned,
    is_segment_aligned,
    reduced_dims,
    walk,
)
from fusegen.fusion.space import is_per_segment, row_elements
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, Position, broadcast_index, strided_view
from fusegen.ir.ops import Family
from fusegen.ir.symbolic import Shape, literal, nominal, same
from fusegen.passes.topk import is_from_topk

_LONGEST_SUMMED_ROW = 16384
"""Longest row for which a kernel that reduces along rows also keeps column sums in registers."""

_FEWEST_LANES = 4
"""The vector width that must divide these rows: with column sums, a thread needs the same columns in each row, so vectors cannot
shift to aligned addresses. On an H200, a norm's backward pass over 310 rows of 14449 takes 50 µs in one kernel and 32 in two; over
4000 rows of 1001, 32 and 27."""

_BARRIERS = (Family.CONTRACTION, Family.LIBRARY, Family.SCAN)
"""Families of operations that end the search for a reduction: no row kernel computes them."""
_ROW_FAMILIES = (Family.REDUCTION, Family.ORDER, Family.POINTWISE, Family.INDEXING)

ROW = GroupKind("row reduction", merges=True, writes_in_place=True, is_strided=True)
COLUMN = GroupKind("column reduction", merges=True, is_strided=True)
ROW_COLUMN = GroupKind("row and column reduction", merges=True, is_strided=True)


def reduction_group(graph: Graph, root: int, materialized: Materialized) -> Group | None:
    """Returns the group around the last reduction that can be computed with the root, or None."""
    below = _reductions_below(graph, root, materialized)
    for reduction in below:
        wider = [wide for wide in below if _is_segment_of(graph, reduction, wide)]
        for along in (*wider, reduction):
            for group in _candidates(graph, root, along, materialized):
                if {along, reduction}.issubset(group.core_nodes):
                    return group
    return None


def _is_segment_of(graph: Graph, reduction: int, wide: int) -> bool:
    """True if `reduction` reduces segments of the rows that `wide` reduces; their operands have the same shape."""
    shape, wide_shape = (graph.nodes[graph.nodes[p].args[0]].shape for p in (reduction, wide))
    is_alike = len(shape) == len(wide_shape) and all(map(same, shape, wide_shape))
    return is_alike and Domain(wide_shape, reduced_dims(graph, wide)).is_segment(reduced_dims(graph, reduction))


def _reductions_below(graph: Graph, root: int, materialized: Materialized) -> list[int]:
    reductions: list[int] = []
    stack, seen = [root], set[int]()
    while stack:
        position = stack.pop()
        family = graph.nodes[position].family
        if position in seen or family in _BARRIERS or (position in materialized and position != root):
            continue
        seen.add(position)
        if family in (Family.REDUCTION, Family.ORDER):
            reductions.append(position)
        stack += graph.nodes[position].args
    return sorted(reductions, reverse=True)


def _candidates(graph: Graph, root: int, reduction: int, materialized: Materialized) -> list[Group]:
    """Returns groups with the reduced dims as columns of a row kernel, or as rows of a column reduction."""
    shape = graph.nodes[graph.nodes[reduction].args[0]].shape
    if graph.nodes[reduction].family is Family.ORDER:
        ordered = row_group(graph, (root,), Domain(shape, (len(shape) - 1,)), materialized)
        return [] if ordered is None else [ordered]
    dims = reduced_dims(graph, reduction)
    by_row = Domain(shape, dims)
    innermost = _innermost(graph, graph.nodes[reduction].args[0])
    is_row = any(not same(shape[d], 1) for d in dims)
    is_across = is_row and innermost is not None and innermost not in dims  # neighbours in memory are in different rows
    if is_across and root == reduction:
        by_column = Domain(shape, tuple(d for d in range(len(shape)) if d not in dims))
        groups = [column_group(graph, (root,), by_column, materialized), row_group(graph, (root,), by_row, materialized)]
    elif is_across:
        groups = []
    else:
        groups = [row_group(graph, (root,), by_row, materialized)]
    return [g for g in groups if g is not None]


def _innermost(graph: Graph, position: int) -> int | None:
    """Returns the contiguous dim of an elementwise value; None for a single element.

    It is that of the first operand in memory that has the value's shape and is not broadcast; without such an operand, the last
    dim.
    """
    shape = graph.nodes[position].shape
    dims = [d for d in range(len(shape)) if not same(shape[d], 1)]
    stack, seen = [position], set[int]()
    while stack:
        node = graph.nodes[last := stack.pop()]
        alike = [a for a in node.args if _has_shape(graph, a, shape)]
        if node.family is Family.POINTWISE and alike:
            stack += [a for a in reversed(alike) if a not in seen]
            seen.update(alike)
            continue
        strides = strided_view(graph, last).strides
        if dims and not any(same(strides[d], 0) for d in dims):
            by_stride = {d: nominal(strides[d]) for d in reversed(dims)}  # the last of equal ones
            return min(by_stride, key=by_stride.__getitem__)
    return max(dims, default=None)


def _has_shape(graph: Graph, position: int, shape: Shape) -> bool:
    own = graph.nodes[position].shape
    return len(own) == len(shape) and all(map(same, own, shape))


def row_group(graph: Graph, roots: tuple[int, ...], domain: Domain, materialized: Materialized) -> Group | None:
    """Returns a row kernel that writes some values: per element, per row, per segment, or a few per row."""
    axes = domain_axes(domain)
    producers, stored = Producers(), materialized.difference(roots)

    def accepts(position: int, at: Position, _bounds: tuple[Bounds, ...]) -> bool:
        return _is_of_row(graph, position, at, domain) or _is_segment_reduction(graph, position, at, domain)

    for root in roots:
        indices = row_elements(graph, root, domain, axes)
        if not indices:
            return None
        for index in indices:
            walk(graph, root, index, axes, accepts, producers, stored)
    families = {graph.nodes[p].family for p in producers.core_nodes}
    if Family.ORDER in families and any(domain.is_segment(reduced_dims(graph, p)) for p in producers.core_nodes):
        return None  # sorts and segments need different plans
    return Group(ROW, roots, tuple(sorted(producers.inputs)), domain, tuple(sorted(producers.core_nodes)))


def column_group(graph: Graph, roots: tuple[int, ...], domain: Domain, materialized: Materialized) -> Group | None:
    """Returns a kernel that sums columns over all rows, with the row reductions that the summands need."""
    axes = domain_axes(domain)
    producers = Producers()

    def accepts(position: int, at: Position, _bounds: tuple[Bounds, ...]) -> bool:
        return fits_beside_sums(graph, domain) and _is_row_reduction(graph, position, at, domain)

    for root in roots:
        node = graph.nodes[root]
        if node.family is not Family.REDUCTION or len(node.shape) != len(domain.shape):
            return None
        if not is_column_aligned(graph, root, broadcast_index(node.shape, axes.symbols), domain, axes):
            return None
        operand = graph.nodes[root].args[0]
        at = broadcast_index(graph.nodes[operand].shape, axes.symbols)
        if operand in materialized:
            producers.inputs[operand] = None
        else:
            walk(graph, operand, at, axes, accepts, producers, materialized)
    rows = tuple(sorted(producers.core_nodes))
    kind = ROW_COLUMN if rows else COLUMN
    return Group(kind, roots, tuple(sorted(producers.inputs)), domain, tuple(sorted({*rows, *roots})))


def split_rows_and_columns(graph: Graph, group: Group) -> tuple[Group, ...]:
    """Splits a group with row and column reductions into a row kernel and a column kernel that reads its results. Returns the group
    itself if that is impossible or the program overwrites its inputs."""
    if group.kind is not ROW_COLUMN or graph.puts:
        return (group,)
    columns = tuple(p for p in group.outputs if sums_columns(graph, p, group.domain))
    rows = tuple(p for p in group.outputs if p not in columns)
    available = frozenset((*group.inputs, *rows))
    reductions = set(group.core_nodes) - set(columns)
    of_columns = column_group(graph, columns, group.domain, available | reductions)
    if of_columns is None:
        return (group,)
    of_rows = row_group(graph, (*rows, *sorted(reductions.intersection(of_columns.inputs))), group.domain, available)
    return (group,) if of_rows is None else (of_rows, of_columns)


def sums_columns(graph: Graph, position: int, domain: Domain) -> bool:
    return graph.nodes[position].family is Family.REDUCTION and reduced_dims(graph, position) == domain.rows


def fits_beside_sums(graph: Graph, domain: Domain) -> bool:
    """True if a kernel along the rows of a domain can sum its columns too, given the known bounds and divisors of their number."""
    extents = [(literal(domain.shape[d]), str(domain.shape[d])) for d in domain.columns]
    bounds, multiples = dict(graph.bounds), dict(graph.multiples)
    longest = math.prod(bounds.get(name, _LONGEST_SUMMED_ROW + 1) if known is None else known for known, name in extents)
    divided = math.prod(multiples.get(name, 1) if known is None else known for known, name in extents)
    return longest <= _LONGEST_SUMMED_ROW and divided % _FEWEST_LANES == 0


def _is_row_reduction(graph: Graph, position: int, at: Position, domain: Domain) -> bool:
    if graph.nodes[position].family is not Family.REDUCTION:
        return False
    return is_row_aligned(graph, position, at, domain, domain_axes(domain))


def _is_of_row(graph: Graph, position: int, at: Position, domain: Domain) -> bool:
    """True if a row kernel can compute a reduction or a sort that is read at an index."""
    node = graph.nodes[position]
    if node.family is not Family.ORDER:
        return _is_row_reduction(graph, position, at, domain)
    is_over = len(node.shape) == len(domain.shape) and all(map(same, node.shape, domain.shape))
    return is_over and domain.columns == (len(node.shape) - 1,) and at == _domain_index(domain)


def _domain_index(domain: Domain) -> Position:
    return broadcast_index(domain.shape, domain_axes(domain).symbols)


def _is_segment_reduction(graph: Graph, position: int, at: Position, domain: Domain) -> bool:
    if graph.nodes[position].family is not Family.REDUCTION:
        return False
    return is_segment_aligned(graph, position, at, domain, domain_axes(domain))


def merge_rows(graph: Graph, group: Group, other: int, materialized: Materialized) -> Group | None:
    columns = [p for p in group.outputs if sums_columns(graph, p, group.domain)]
    rows = [p for p in group.outputs if p not in columns]
    domain = group.domain
    if sums_columns(graph, other, domain):
        columns.append(other)
    elif graph.nodes[other].family in _ROW_FAMILIES or is_from_topk(graph.nodes, other):
        rows.append(other)
    else:
        return None
    return _combined(graph, tuple(rows), tuple(columns), domain, materialized)


def _combined(
    graph: Graph, rows: tuple[int, ...], columns: tuple[int, ...], domain: Domain, materialized: Materialized
) -> Group | None:
    trailing = domain.columns == tuple(range(len(domain.rows), len(domain.shape)))
    if rows and columns and not (trailing and fits_beside_sums(graph, domain)):  # two kernels are faster
        return None
    parts = [row_group(graph, rows, domain, materialized)] if rows else []
    if columns and domain.segment and any(part is not None and _goes_by_segments(graph, part) for part in parts):
        return None
    if columns:
        parts.append(column_group(graph, columns, domain, materialized.difference(rows)))
    if any(part is None for part in parts):
        return None
    groups = [part for part in parts if part is not None]
    core_nodes = union(*(p.core_nodes for p in groups))
    kind = ROW if not columns else ROW_COLUMN if set(core_nodes) - set(columns) or rows else COLUMN
    return Group(kind, (*rows, *columns), union(*(p.inputs for p in groups)), domain, core_nodes)


def _goes_by_segments(graph: Graph, rows: Group) -> bool:
    axes = domain_axes(rows.domain)
    indices = [index for output in rows.outputs for index in row_elements(graph, output, rows.domain, axes)]
    is_of_segments = any(rows.domain.is_segment(reduced_dims(graph, anchor)) for anchor in rows.core_nodes)
    return is_of_segments or any(is_per_segment(rows.domain, index, axes) for index in indices)


def union(*parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*parts)))
