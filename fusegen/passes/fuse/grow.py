"""The group around a value: everything that its cone can hold."""

from __future__ import annotations

from fusegen.ir.graph import Graph, Shape
from fusegen.ir.index_map import strided_view
from fusegen.ir.ops import Family
from fusegen.ir.symbolic import nominal, same
from fusegen.passes.fuse.attention import attention_group
from fusegen.passes.fuse.cone import Cone, domain_axes, reduced_dims, walk
from fusegen.passes.fuse.contraction import accumulation_group, call_group, library_group
from fusegen.passes.fuse.decide import Decision, Kept
from fusegen.passes.fuse.epilogue import ending, extended
from fusegen.passes.fuse.groups import Domain, Group, GroupKind
from fusegen.passes.fuse.rows import column_group, row_group
from fusegen.passes.fuse.scan import scan_group
from fusegen.target import Target

_NO_WAY = (Family.CONTRACTION, Family.LIBRARY, Family.SCAN)
"""Families through which no reduction is reached that one kernel could compute with what follows."""


def grow(graph: Graph, root: int, target: Target, decision: Decision) -> Group:
    """The group that ends in a value."""
    kept = decision.kept
    if root in decision.ends:
        special = (
            accumulation_group(graph, root)
            or attention_group(graph, root, target, kept)
            or _products_group(graph, root, target, decision)
        )
        if special is not None:
            return special
    if graph.nodes[root].family is Family.CONTRACTION:
        return library_group(graph, root, decision.refusals.get(root, ""))
    if graph.nodes[root].family is Family.LIBRARY:
        return call_group(graph, root)
    return scan_group(graph, root, kept) or reduction_group(graph, root, kept) or pointwise_group(graph, root, kept)


def _products_group(graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
    """The group of products that end in a value, with everything else that their epilogue gives."""
    group = ending(graph, root, target, decision.kept)
    others = [other for other, end in decision.beside.items() if end == root]
    return group if group is None or not others else extended(graph, group, others, decision.kept) or group


def pointwise_group(graph: Graph, root: int, kept: Kept) -> Group:
    """The pointwise group that ends in a value."""
    domain = Domain(graph.nodes[root].shape)
    cone = Cone()
    axes = domain_axes(domain)
    walk(graph, root, axes.symbols, axes, lambda position, at, _bounds: False, cone, kept)
    return Group(GroupKind.POINTWISE, (root,), tuple(sorted(cone.inputs)), domain)


def reduction_group(graph: Graph, root: int, kept: Kept) -> Group | None:
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


def _reductions_below(graph: Graph, root: int, kept: Kept) -> list[int]:
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


def _candidates(graph: Graph, root: int, reduction: int, kept: Kept) -> list[Group]:
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
