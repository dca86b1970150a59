"""Groups around scans: what is scanned is computed as it is read, and so is what is computed of it point by point."""

from __future__ import annotations

from collections.abc import Collection

from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, Position
from fusegen.ir.ops import Family
from fusegen.ir.symbolic import Axes, same
from fusegen.passes.fuse.cone import Cone, domain_axes, walk
from fusegen.passes.fuse.groups import Domain, Group, GroupKind


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
