"""Groups around reductions along the rows of a domain, sums of its columns, and scans."""

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
from fusegen.fusion.space import is_per_segment, places_of_row
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, Position, broadcast_index, strided_view
from fusegen.ir.ops import Family
from fusegen.ir.symbolic import Shape, literal, nominal, same
from fusegen.passes.topk import is_of_few

_LONGEST_SUMMED_ROW = 16384
"""Columns up to which a kernel that reduces along rows can also keep column sums in its registers."""

_FEWEST_LANES = 4
"""Neighbours that divide such a row: what is summed needs the same lanes in each row, which elsewhere may start where memory is
aligned. On an H200 the backward pass of a norm takes 50 µs in one kernel for 310 rows of 14449, in two 32; for 4000 of 1001 32 and
27."""

_NO_WAY = (Family.CONTRACTION, Family.LIBRARY, Family.SCAN)
"""Families of operations through which no reduction is reached that one kernel could compute with what follows."""
_OF_ROWS = (Family.REDUCTION, Family.ORDER, Family.POINTWISE, Family.INDEXING)

ROW = GroupKind("row reduction", merges=True, writes_in_place=True, is_strided=True)
COLUMN = GroupKind("column reduction", merges=True, is_strided=True)
ROW_COLUMN = GroupKind("row and column reduction", merges=True, is_strided=True)


def reduction_group(graph: Graph, root: int, kept: Materialized) -> Group | None:
    """The group around the last reduction that the root can hold, or None when it can hold none."""
    below = _reductions_below(graph, root, kept)
    for reduction in below:
        wider = [wide for wide in below if _is_segment_of(graph, reduction, wide)]
        for along in (*wider, reduction):
            for group in _candidates(graph, root, along, kept):
                if {along, reduction}.issubset(group.anchors):
                    return group
    return None


def _is_segment_of(graph: Graph, reduction: int, wide: int) -> bool:
    """True if a reduction is over segments of the rows that another one, of the same shape, is over."""
    shape, wide_shape = (graph.nodes[graph.nodes[p].args[0]].shape for p in (reduction, wide))
    is_alike = len(shape) == len(wide_shape) and all(map(same, shape, wide_shape))
    return is_alike and Domain(wide_shape, reduced_dims(graph, wide)).is_segment(reduced_dims(graph, reduction))


def _reductions_below(graph: Graph, root: int, kept: Materialized) -> list[int]:
    """Reductions that the root reaches through what is not in memory, the latest first."""
    found: list[int] = []
    stack, seen = [root], set[int]()
    while stack:
        position = stack.pop()
        family = graph.nodes[position].family
        if position in seen or family in _NO_WAY or (position in kept and position != root):
            continue
        seen.add(position)
        if family in (Family.REDUCTION, Family.ORDER):
            found.append(position)
        stack += graph.nodes[position].args
    return sorted(found, reverse=True)


def _candidates(graph: Graph, root: int, reduction: int, kept: Materialized) -> list[Group]:
    """The ways to see a reduction: its dims as columns of a row kernel, or as rows whose columns are summed."""
    shape = graph.nodes[graph.nodes[reduction].args[0]].shape
    if graph.nodes[reduction].family is Family.ORDER:
        ordered = row_group(graph, (root,), Domain(shape, (len(shape) - 1,)), kept)
        return [] if ordered is None else [ordered]
    dims = reduced_dims(graph, reduction)
    by_row = Domain(shape, dims)
    innermost = _innermost(graph, graph.nodes[reduction].args[0])
    is_row = any(not same(shape[d], 1) for d in dims)
    is_across = is_row and innermost is not None and innermost not in dims  # memory: neighbours in it are of different rows
    if is_across and root == reduction:
        by_column = Domain(shape, tuple(d for d in range(len(shape)) if d not in dims))
        found = [column_group(graph, (root,), by_column, kept), row_group(graph, (root,), by_row, kept)]
    elif is_across:
        found = []
    else:
        found = [row_group(graph, (root,), by_row, kept)]
    return [g for g in found if g is not None]


def _innermost(graph: Graph, position: int) -> int | None:
    """The dim along which neighbours lie in memory, of a value that is computed point by point: in the first operand of its shape
    that repeats nothing, else in row-major order; None where it has one element."""
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


def row_group(graph: Graph, roots: tuple[int, ...], domain: Domain, kept: Materialized) -> Group | None:
    """A row kernel that writes some values: each over the whole domain, or one a row or a segment of it, or a few."""
    axes = domain_axes(domain)
    producers, others = Producers(), kept.difference(roots)

    def accepts(position: int, at: Position, _bounds: tuple[Bounds, ...]) -> bool:
        return _is_of_row(graph, position, at, domain) or _is_segment_reduction(graph, position, at, domain)

    for root in roots:
        places = places_of_row(graph, root, domain, axes)
        if not places:
            return None
        for place in places:
            walk(graph, root, place, axes, accepts, producers, others)
    families = {graph.nodes[p].family for p in producers.anchors}
    if Family.ORDER in families and any(domain.is_segment(reduced_dims(graph, p)) for p in producers.anchors):
        return None  # plans for the one are not for the other
    return Group(ROW, roots, tuple(sorted(producers.inputs)), domain, tuple(sorted(producers.anchors)))


def column_group(graph: Graph, roots: tuple[int, ...], domain: Domain, kept: Materialized) -> Group | None:
    """A kernel that sums columns over all rows; what it sums may need reductions along the row."""
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
        if operand in kept:
            producers.inputs[operand] = None
        else:
            walk(graph, operand, at, axes, accepts, producers, kept)
    rows = tuple(sorted(producers.anchors))
    kind = ROW_COLUMN if rows else COLUMN
    return Group(kind, roots, tuple(sorted(producers.inputs)), domain, tuple(sorted({*rows, *roots})))


def apart(graph: Graph, group: Group) -> tuple[Group, ...]:
    """The kernels of a group that sums columns beside reductions along rows: one for what it has of rows, and after it one that
    sums columns with what the rows' reductions gave. The group itself where it has no such part, or where the program writes over
    what both would read."""
    if group.kind is not ROW_COLUMN or graph.puts:
        return (group,)
    columns = tuple(p for p in group.outputs if sums_columns(graph, p, group.domain))
    rows = tuple(p for p in group.outputs if p not in columns)
    given = frozenset((*group.inputs, *rows))
    reductions = set(group.anchors) - set(columns)
    of_columns = column_group(graph, columns, group.domain, given | reductions)
    if of_columns is None:
        return (group,)
    of_rows = row_group(graph, (*rows, *sorted(reductions.intersection(of_columns.inputs))), group.domain, given)
    return (group,) if of_rows is None else (of_rows, of_columns)


def sums_columns(graph: Graph, position: int, domain: Domain) -> bool:
    """True if a value is reduced over the rows of a domain."""
    return graph.nodes[position].family is Family.REDUCTION and reduced_dims(graph, position) == domain.rows


def fits_beside_sums(graph: Graph, domain: Domain) -> bool:
    """True if a kernel that goes along the rows of a domain can sum its columns too, as far as is known of their number."""
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
    """True if a kernel that goes along the rows of a domain computes a reduction or an order of the row, read at an index."""
    node = graph.nodes[position]
    if node.family is not Family.ORDER:
        return _is_row_reduction(graph, position, at, domain)
    is_over = len(node.shape) == len(domain.shape) and all(map(same, node.shape, domain.shape))
    return is_over and domain.columns == (len(node.shape) - 1,) and at == _places_of_domain(domain)


def _places_of_domain(domain: Domain) -> Position:
    """Each point of a domain."""
    return broadcast_index(domain.shape, domain_axes(domain).symbols)


def _is_segment_reduction(graph: Graph, position: int, at: Position, domain: Domain) -> bool:
    if graph.nodes[position].family is not Family.REDUCTION:
        return False
    return is_segment_aligned(graph, position, at, domain, domain_axes(domain))


def merge_rows(graph: Graph, group: Group, other: int, kept: Materialized) -> Group | None:
    columns = [p for p in group.outputs if sums_columns(graph, p, group.domain)]
    rows = [p for p in group.outputs if p not in columns]
    domain = group.domain
    if sums_columns(graph, other, domain):
        columns.append(other)
    elif graph.nodes[other].family in _OF_ROWS or is_of_few(graph.nodes, other):
        rows.append(other)
    else:
        return None
    return _combined(graph, tuple(rows), tuple(columns), domain, kept)


def _combined(graph: Graph, rows: tuple[int, ...], columns: tuple[int, ...], domain: Domain, kept: Materialized) -> Group | None:
    trailing = domain.columns == tuple(range(len(domain.rows), len(domain.shape)))
    if rows and columns and not (trailing and fits_beside_sums(graph, domain)):  # better two kernels
        return None
    parts = [row_group(graph, rows, domain, kept)] if rows else []
    if columns and domain.segment and any(part is not None and _goes_by_segments(graph, part) for part in parts):
        return None
    if columns:
        parts.append(column_group(graph, columns, domain, kept.difference(rows)))
    if any(part is None for part in parts):
        return None
    found = [part for part in parts if part is not None]
    anchors = union(*(p.anchors for p in found))
    kind = ROW if not columns else ROW_COLUMN if set(anchors) - set(columns) or rows else COLUMN
    return Group(kind, (*rows, *columns), union(*(p.inputs for p in found)), domain, anchors)


def _goes_by_segments(graph: Graph, rows: Group) -> bool:
    """True if results of a group of rows are one a segment, or need a reduction of segments."""
    axes = domain_axes(rows.domain)
    places = [place for output in rows.outputs for place in places_of_row(graph, output, rows.domain, axes)]
    is_of_segments = any(rows.domain.is_segment(reduced_dims(graph, anchor)) for anchor in rows.anchors)
    return is_of_segments or any(is_per_segment(rows.domain, place, axes) for place in places)


def union(*parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*parts)))
