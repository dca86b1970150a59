"""Values of which a row has a few, each computed of the row: a kernel that goes along the row writes them one by one."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import Position
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Dim, literal, same
from fusegen.passes.fuse.groups import Domain

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
