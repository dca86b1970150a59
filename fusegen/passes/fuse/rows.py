"""Groups around reductions along the rows of a domain, and around sums of its columns."""

from __future__ import annotations

import math

from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, Position, broadcast_index
from fusegen.ir.ops import Family
from fusegen.ir.symbolic import literal, same
from fusegen.passes.fuse.cone import (
    Cone,
    domain_axes,
    is_column_aligned,
    is_row_aligned,
    is_segment_aligned,
    reduced_dims,
    walk,
)
from fusegen.passes.fuse.decide import Kept
from fusegen.passes.fuse.few import places_of_row
from fusegen.passes.fuse.groups import Domain, Group, GroupKind

_LONGEST_SUMMED_ROW = 16384
"""Columns up to which a kernel that reduces along rows can also keep column sums in its registers."""

_FEWEST_LANES = 4
"""Neighbours that divide such a row: what is summed needs the same lanes in each row, which elsewhere may start where memory is
aligned. On an H200 the backward pass of a norm takes 50 µs in one kernel for 310 rows of 14449, in two 32; for 4000 of 1001 32 and
27."""


def row_group(graph: Graph, roots: tuple[int, ...], domain: Domain, kept: Kept) -> Group | None:
    """A row kernel that writes some values: each over the whole domain, or one a row or a segment of it, or a few."""
    axes = domain_axes(domain)
    cone, others = Cone(), kept.difference(roots)

    def accepts(position: int, at: Position, _bounds: tuple[Bounds, ...]) -> bool:
        return _is_of_row(graph, position, at, domain) or _is_segment_reduction(graph, position, at, domain)

    for root in roots:
        places = places_of_row(graph, root, domain, axes)
        if not places:
            return None
        for place in places:
            walk(graph, root, place, axes, accepts, cone, others)
    families = {graph.nodes[p].family for p in cone.anchors}
    if Family.ORDER in families and any(domain.is_segment(reduced_dims(graph, p)) for p in cone.anchors):
        return None  # plans for the one are not for the other
    return Group(GroupKind.ROW, roots, tuple(sorted(cone.inputs)), domain, tuple(sorted(cone.anchors)))


def column_group(graph: Graph, roots: tuple[int, ...], domain: Domain, kept: Kept) -> Group | None:
    """A kernel that sums columns over all rows; what it sums may need reductions along the row."""
    axes = domain_axes(domain)
    cone = Cone()

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
            cone.inputs[operand] = None
        else:
            walk(graph, operand, at, axes, accepts, cone, kept)
    rows = tuple(sorted(cone.anchors))
    kind = GroupKind.ROW_COLUMN if rows else GroupKind.COLUMN
    return Group(kind, roots, tuple(sorted(cone.inputs)), domain, tuple(sorted({*rows, *roots})))


def apart(graph: Graph, group: Group) -> tuple[Group, ...]:
    """The kernels of a group that sums columns beside reductions along rows: one for what it has of rows, and after it one that
    sums columns with what the rows' reductions gave. The group itself where it has no such part, or where the program writes over
    what both would read."""
    if group.kind is not GroupKind.ROW_COLUMN or graph.puts:
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
    """Whether a value is reduced over the rows of a domain."""
    return graph.nodes[position].family is Family.REDUCTION and reduced_dims(graph, position) == domain.rows


def fits_beside_sums(graph: Graph, domain: Domain) -> bool:
    """Whether a kernel that goes along the rows of a domain can sum its columns too, as far as is known of their number."""
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
