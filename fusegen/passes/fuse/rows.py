"""Groups around reductions along the rows of a domain, sums of its columns, and scans."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import Bounds, Position, broadcast_index
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Dim, literal, same
from fusegen.passes.fuse.cone import (
    Cone,
    domain_axes,
    is_column_aligned,
    is_row_aligned,
    is_segment_aligned,
    reduced_dims,
    walk,
)
from fusegen.passes.fuse.groups import Domain, Group, GroupKind, Kept

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


# Values of which a row has a few, each computed of the row: a kernel that goes along the row writes them one by one.


MOST = 16
"""Values of a row that a kernel computes one by one."""


def places_of_row(graph: Graph, position: int, domain: Domain, axes: Axes) -> tuple[Position, ...]:
    """The elements of a value that a kernel gives at a row: one that goes along the columns or their segments, the only one, or a
    few; none where the value does not fit the domain.

    Args:
        axes: of the domain.
    """
    shape = graph.nodes[position].shape
    if len(shape) != len(domain.shape):
        return ()
    own = tuple(0 if same(extent, 1) else axes.symbols[d] for d, extent in enumerate(shape))
    pairs = list(zip(shape, domain.shape, strict=True))
    if not all(same(a, b) for d, (a, b) in enumerate(pairs) if d not in domain.columns):
        return ()
    count = literal(shape[-1])
    if domain.columns == (len(shape) - 1,) and count is not None and 1 < count <= MOST and is_of_few(graph.nodes, position):
        return tuple((*own[:-1], number) for number in range(count))
    whole = all(same(a, b) for a, b in pairs)
    per_row = all(same(a, 1) for d, (a, _) in enumerate(pairs) if d in domain.columns)
    return (own,) if whole or per_row or _is_one_a_segment(pairs, domain) else ()


def is_per_segment(domain: Domain, place: Position, axes: Axes) -> bool:
    """True if an element is one of a segment of a row, and neither of all columns nor one at each.

    Args:
        place: as of `places_of_row`.
        axes: of the domain.
    """
    *groups, last = (place[d] == axes.symbols[d] for d in domain.columns) if domain.segment else (False, False)
    return any(groups) and not last


def _is_one_a_segment(pairs: Sequence[tuple[Dim, Dim]], domain: Domain) -> bool:
    """True if the extents of a value and of a domain are the same, but for the segments, of which each has one."""
    if not domain.segment:
        return False
    *groups, last = domain.columns
    return same(pairs[last][0], 1) and all(same(*pairs[d]) for d in groups)


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


# Groups around scans: what is scanned is computed as it is read, and so is what is computed of it point by point.


def scan_group(graph: Graph, root: int, kept: Collection[int]) -> Group | None:
    """The group of a value with the last scans that it is made of point by point; None where there is none.

    Scans of scans, and scans of other shapes or read elsewhere than at the element that is computed, lie in memory.
    """
    shape = graph.nodes[root].shape
    if not shape:
        return None
    domain = Domain(shape, (len(shape) - 1,))
    axes = domain_axes(domain)
    last = _last_scans(graph, root, kept)

    def accepts(position: int, at: Position, bounds: tuple[Bounds, ...]) -> bool:
        return position in last and not bounds and _is_aligned(graph, position, at, axes)

    cone = Cone()
    walk(graph, root, axes.symbols, axes, accepts, cone, kept)
    if not cone.anchors or not cone.anchors.keys().isdisjoint(cone.inputs):  # what is read elsewhere as well lies in memory
        return None
    return Group(GroupKind.SCAN, (root,), tuple(sorted(cone.inputs)), domain, tuple(sorted(cone.anchors)))


def _last_scans(graph: Graph, root: int, kept: Collection[int]) -> frozenset[int]:
    """Scans that a value reaches through pointwise operations and views alone."""
    found: set[int] = set()
    stack, seen = [root], set[int]()
    while stack:
        position = stack.pop()
        family = graph.nodes[position].family
        if position in seen or (position in kept and position != root):
            continue
        seen.add(position)
        if family is Family.SCAN:
            found.add(position)
        elif family in (Family.POINTWISE, Family.VIEW):
            stack += graph.nodes[position].args
    return frozenset(p for p in found if not any(p in graph.ancestors[other] for other in found))


def _is_aligned(graph: Graph, scan: int, at: Position, axes: Axes) -> bool:
    """Whether a scan over the whole iteration space is read at the element that is computed."""
    shape = graph.nodes[scan].shape
    if len(shape) != len(axes.extents) or not all(map(same, shape, axes.extents)):
        return False
    return all(
        i == symbol or (i == 0 and same(extent, 1)) for i, symbol, extent in zip(at, axes.symbols, axes.extents, strict=True)
    )
