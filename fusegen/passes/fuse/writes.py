"""Writes to inputs: which of them a kernel can make as it computes their values, and what must come before them.

`separate_writes` gave each written value two copies. The kernel that computes the last one stores it in the input's memory. Where
that would change what the same kernel still reads, or what one reads that has to come later, the value lies in memory of its own,
and the last copy is a kernel that does nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position, address, are_apart, base, broadcast_index, gathers, identity_axes, owner
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import product, same
from fusegen.passes.fuse.cone import Cone, computed_index, walk
from fusegen.passes.fuse.contraction import accumulation
from fusegen.passes.fuse.groups import Group, GroupKind, strip_views
from fusegen.passes.fuse.unrolled import cone_of, unrolled
from fusegen.passes.versions import BEFORE, COMPUTED, NEVER, Times

_STORES = (GroupKind.POINTWISE, GroupKind.ROW)
"""Kinds whose kernels store each element where it belongs."""


def written_by(graph: Graph, group: Group) -> tuple[int, ...]:
    """The writes that a group makes."""
    return tuple(put for put in graph.puts if strip_views(graph, put) in group.outputs)


def held(graph: Graph, apart: Collection[int]) -> frozenset[int]:
    """Values that lie in memory before something is stored of them, each with a kernel of its own, and what that is.

    Args:
        apart: writes that no other kernel can make.
    """
    if not graph.writes:
        return frozenset()
    before = {p for p, node in graph if node.op is Op.COPY and node.attr("role") == BEFORE}
    last = [strip_views(graph, put) for put in apart]
    return frozenset(before.union(last, (_complete(graph, p) for p in last)))


def _complete(graph: Graph, last: int) -> int:
    """What lies in memory of a value that is written apart: itself, or, where nothing computes it, its first copy."""
    (first,) = graph.nodes[last].args
    (value,) = graph.nodes[first].args
    return value if graph.nodes[value].family in COMPUTED else first


def addressed(graph: Graph, group: Group) -> Group:
    """A group that stores element by element, which reads the indices as well by which it finds where to write."""
    if group.kind not in _STORES:
        return group
    cone = Cone()
    for put in written_by(graph, group):
        for gather in gathers(graph, put):
            chosen = graph.nodes[gather].args[1]
            computed = computed_index(graph, chosen)
            if computed is not None:
                cone.inputs[computed] = None
            else:
                axes = identity_axes(graph.nodes[chosen].shape)
                walk(graph, chosen, axes.symbols, axes, lambda position, at, _bounds: False, cone)
    return replace(group, inputs=tuple(sorted({*group.inputs, *cone.inputs}))) if cone.inputs else group


def is_torn(group: Group, times: Times) -> bool:
    """Whether a group would read a version that a write which it depends on has changed."""
    latest = max(times.latest[p] for p in group.outputs)
    return any(times.deadline.get(p, NEVER) <= latest for p in group.inputs)


def hindered(graph: Graph, groups: Sequence[Group]) -> frozenset[int]:
    """Writes that the groups which they fell to cannot make."""
    return frozenset(put for group in groups for put in written_by(graph, group) if _is_hindered(graph, group, put))


def _is_hindered(graph: Graph, group: Group, put: int) -> bool:
    memory = owner(graph, put)
    if accumulation(graph, put) in group.anchors:
        return False
    if group.kind not in _STORES or (gathers(graph, put) and not _goes_over_elements(graph, group, put)):
        return True
    earlier = [other for other in written_by(graph, group) if other < put and owner(graph, other) == memory]
    if not all(are_apart(graph, put, other) for other in earlier):
        return True
    read = [p for p in group.inputs if graph.nodes[p].op in (Op.INPUT, Op.PUT) and owner(graph, p) == memory]
    if not read:
        return False
    return read != [base(graph, put)] or bool(gathers(graph, put)) or not _is_in_place(graph, group, put)


def _goes_over_elements(graph: Graph, group: Group, put: int) -> bool:
    """True if the value that is written has an element at each point of the group's domain: others are stored without a check."""
    return same(product(graph.nodes[graph.nodes[put].args[1]].shape), product(group.domain.shape))


def _is_in_place(graph: Graph, group: Group, put: int) -> bool:
    """True if a thread of the group, which reads before it writes, reads no other elements of the memory than it writes."""
    value = graph.nodes[put].args[1]
    if value not in group.outputs:
        return False  # but a view of it is, whose elements lie elsewhere
    space = unrolled(graph, group)
    shape = graph.nodes[value].shape
    own = [address(graph, put, broadcast_index(shape, point), space.axes) for point in space.points]
    cones = [cone_of(graph, group, space.axes, point) for point in space.points]
    read = [at for cone in cones for position, at in cone.elements if position == base(graph, put)]
    return all(any(_is_same(at, place) for place in own) for at in read)


def _is_same(one: Position, other: Position) -> bool:
    return all(map(same, one, other))


def is_early(graph: Graph, group: Group, waiting: Sequence[Group]) -> bool:
    """Whether a group writes where others have to read, or to write, before.

    Args:
        waiting: groups that have not run, the group among them.
    """
    changed = {base(graph, put) for put in written_by(graph, group)}
    others = [other for other in waiting if other is not group]
    return any(not changed.isdisjoint((*other.inputs, *written_by(graph, other))) for other in others)


def first_of(graph: Graph, groups: Sequence[Group], apart: Collection[int]) -> frozenset[int]:
    """The first write of some groups that is not apart already."""
    found = [put for group in groups for put in written_by(graph, group) if put not in apart]
    return frozenset(sorted(found)[:1])
