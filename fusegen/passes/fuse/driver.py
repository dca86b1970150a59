"""The fuser: first what lies in memory, then which kernel computes it.

`decide` says which values are kept. From the results back to the inputs, each value that must lie in memory becomes a group with
everything that its cone can hold; what the cone cannot hold must lie in memory in turn. Groups over the same iteration space are
merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusegen.errors import UnsupportedError
from fusegen.ir.graph import Graph, Node, Shape
from fusegen.ir.ops import Family, Op
from fusegen.ir.spread import check_repetition
from fusegen.ir.strided import strided_view
from fusegen.ir.symbolic import nominal, same
from fusegen.passes.fuse.attention import attention_group
from fusegen.passes.fuse.cone import Cone, domain_axes, reduced_dims, walk
from fusegen.passes.fuse.contraction import accumulation_group, call_group, library_group
from fusegen.passes.fuse.decide import Decision, Kept, decide
from fusegen.passes.fuse.epilogue import ending, extended, limited
from fusegen.passes.fuse.groups import Domain, Group, GroupKind, computed, is_stored_elsewhere, strip_views
from fusegen.passes.fuse.rows import column_group, fits_beside_sums, row_group, sums_columns
from fusegen.passes.fuse.scan import scan_group
from fusegen.passes.fuse.together import together
from fusegen.passes.fuse.writes import addressed, first_of, hindered, is_early, is_torn
from fusegen.passes.versions import Times
from fusegen.target import Target

_NO_WAY = (Family.CONTRACTION, Family.LIBRARY, Family.SCAN)
"""Families through which no reduction is reached that one kernel could compute with what follows."""


def fuse(graph: Graph, target: Target) -> tuple[Group, ...]:
    """The groups of a graph in the order in which they run.

    Args:
        graph: in primitives, after the passes.
        target: says which skeletons can be used.

    Raises:
        UnsupportedError: values are computed at too many places, or again by too many kernels.
    """
    apart: Kept = frozenset()
    once: Kept = frozenset()
    while True:
        groups = _groups(graph, target, apart, once)
        if again := _summed_again(graph, groups) - once:
            once |= again
            continue
        ordered, stuck = _in_order(graph, groups)
        hindering = hindered(graph, groups) or first_of(graph, stuck, apart)
        if not stuck and not hindering:
            return ordered
        if hindering <= apart:
            raise UnsupportedError(
                "kernels wait for each other, or write what they read", mend="copy what is read of a tensor before it is written to"
            )
        apart |= hindering


def _summed_again(graph: Graph, groups: Sequence[Group]) -> Kept:
    """Sums that several groups compute: each adds in an order of its own, and what they get is not one number."""
    times = Counter(position for group in groups for position in computed(graph, group))
    return frozenset(p for p, count in times.items() if count > 1 and _depends_on_order(graph.nodes[p]))


def _depends_on_order(node: Node) -> bool:
    return node.dtype.is_float and (node.op in (Op.SUM, Op.PROD) or node.family is Family.SCAN)


def _groups(graph: Graph, target: Target, apart: Kept, once: Kept) -> list[Group]:
    """The groups of a graph in no order.

    Args:
        apart: writes that no other kernel can make.
        once: values that one kernel computes for all.
    """
    groups: list[Group] = []
    count = 0
    decision, times = decide(graph, target, apart, once), Times.of(graph)
    wanted = set(decision.stored.union(strip_views(graph, o) for o in graph.outputs))
    done: set[int] = set()
    while pending := wanted - done:
        root = max(pending)
        end = decision.beside.get(root, root)
        root = root if end in done else end
        group = addressed(graph, _grow(graph, root, target, decision))
        others = pending - {root} - decision.ends - set(decision.beside) if root not in decision.held else set()
        group = _absorb(graph, group, sorted(others, reverse=True), decision.kept, times, groups)
        groups.append(group)
        count += len(computed(graph, group))
        check_repetition(graph, count)
        done |= {root, *group.outputs}
        wanted |= {strip_views(graph, p) for p in group.inputs if not is_stored_elsewhere(graph, p)}
    return together(graph, _read(graph, groups), target)


def _read(graph: Graph, groups: list[Group]) -> list[Group]:
    """The groups without what nobody reads: a value that was kept for several kernels which became one."""
    while True:
        needed = {strip_views(graph, p) for p in (*graph.outputs, *graph.puts, *(p for group in groups for p in group.inputs))}
        found = [limited(group, tuple(o for o in group.outputs if o in needed)) for group in groups]
        if found == groups:
            return groups
        groups = [group for group in found if group.outputs]


def _grow(graph: Graph, root: int, target: Target, decision: Decision) -> Group:
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
    return scan_group(graph, root, kept) or _reduction_group(graph, root, kept) or _pointwise_group(graph, root, kept)


def _products_group(graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
    """The group of products that end in a value, with everything else that their epilogue gives."""
    group = ending(graph, root, target, decision.kept)
    others = [other for other, end in decision.beside.items() if end == root]
    return group if group is None or not others else extended(graph, group, others, decision.kept) or group


def _pointwise_group(graph: Graph, root: int, kept: Kept) -> Group:
    domain = Domain(graph.nodes[root].shape)
    cone = Cone()
    axes = domain_axes(domain)
    walk(graph, root, axes.symbols, axes, lambda position, at, _bounds: False, cone, kept)
    return Group(GroupKind.POINTWISE, (root,), tuple(sorted(cone.inputs)), domain)


def _reduction_group(graph: Graph, root: int, kept: Kept) -> Group | None:
    """The group around the last reduction that the root can hold, or None when it can hold none."""
    for reduction in _reductions_below(graph, root, kept):
        for group in _candidates(graph, root, reduction, kept):
            if reduction in group.anchors:
                return group
    return None


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
        if family is Family.REDUCTION:
            found.append(position)
        stack += graph.nodes[position].args
    return sorted(found, reverse=True)


def _candidates(graph: Graph, root: int, reduction: int, kept: Kept) -> list[Group]:
    """The ways to see a reduction: its dims as columns of a row kernel, or as rows whose columns are summed."""
    shape = graph.nodes[graph.nodes[reduction].args[0]].shape
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


# Merging.


def _absorb(graph: Graph, group: Group, others: list[int], kept: Kept, times: Times, groups: Sequence[Group]) -> Group:
    """The group with every other wanted value that it can write as well.

    Args:
        others: the latest first, so that none depends on what the group has.
        groups: made before.
    """
    for other in others:
        if other in _needed(graph, group.inputs, groups):
            continue  # a kernel comes between
        merged = _merge(graph, group, other, kept)
        merged = None if merged is None else addressed(graph, merged)
        if merged is None or _reads_itself(graph, merged) or is_torn(merged, times):
            continue
        if not _needed(graph, (other,), groups).isdisjoint(group.outputs):
            continue  # likewise, by way of a group that has several outputs
        if hindered(graph, [merged]) <= hindered(graph, [group]):
            group = merged
    return group


def _needed(graph: Graph, positions: Iterable[int], groups: Sequence[Group]) -> set[int]:
    """Everything that some values depend on, where a value waits for all that its group reads.

    Args:
        groups: as far as they are made.
    """
    made = {output: group for group in groups for output in group.outputs}
    needed, pending, seen = set[int](), list(positions), set[int]()
    while pending:
        position = pending.pop()
        needed |= graph.ancestors[position]
        found = (graph.ancestors[position] | {position}) & made.keys() - seen
        seen |= found
        read = {p for output in found for p in made[output].inputs}
        needed |= read
        pending += read
    return needed


def _merge(graph: Graph, group: Group, other: int, kept: Kept) -> Group | None:
    if group.kind is GroupKind.POINTWISE:
        return _merge_pointwise(graph, group, other, kept)
    if group.kind in (GroupKind.ROW, GroupKind.COLUMN, GroupKind.ROW_COLUMN):
        return _merge_rows(graph, group, other, kept)
    return None


def _merge_pointwise(graph: Graph, group: Group, other: int, kept: Kept) -> Group | None:
    """Together over one shape; or, when the other is a row reduction over that shape, as a row kernel."""
    grown = _reduction_group(graph, other, kept)
    if grown is not None and grown.kind is not GroupKind.POINTWISE:
        return _merge_rows(graph, grown, group.outputs[0], kept) if len(group.outputs) == 1 else None
    node = graph.nodes[other]
    is_made_by_points = node.family in (Family.POINTWISE, Family.INDEXING) or node.op is Op.CONCAT
    if not is_made_by_points or Domain(node.shape) != group.domain:
        return None
    outputs = (*group.outputs, other)
    parts = [_pointwise_group(graph, output, kept.difference(outputs)) for output in outputs]
    return replace(group, outputs=outputs, inputs=_union(*(part.inputs for part in parts)))


def _merge_rows(graph: Graph, group: Group, other: int, kept: Kept) -> Group | None:
    columns = [p for p in group.outputs if sums_columns(graph, p, group.domain)]
    rows = [p for p in group.outputs if p not in columns]
    domain = group.domain
    if sums_columns(graph, other, domain):
        columns.append(other)
    elif graph.nodes[other].family in (Family.REDUCTION, Family.POINTWISE, Family.INDEXING):
        rows.append(other)
    else:
        return None
    return _combined(graph, tuple(rows), tuple(columns), domain, kept)


def _combined(graph: Graph, rows: tuple[int, ...], columns: tuple[int, ...], domain: Domain, kept: Kept) -> Group | None:
    trailing = domain.columns == tuple(range(len(domain.rows), len(domain.shape)))
    if rows and columns and not (trailing and fits_beside_sums(graph, domain)):  # better two kernels
        return None
    parts = []
    if rows:
        parts.append(row_group(graph, rows, domain, kept))
    if columns:
        parts.append(column_group(graph, columns, domain, kept.difference(rows)))
    if any(part is None for part in parts):
        return None
    found = [part for part in parts if part is not None]
    anchors = _union(*(p.anchors for p in found))
    kind = GroupKind.ROW if not columns else GroupKind.ROW_COLUMN if set(anchors) - set(columns) or rows else GroupKind.COLUMN
    return Group(kind, (*rows, *columns), _union(*(p.inputs for p in found)), domain, anchors)


def _reads_itself(graph: Graph, group: Group) -> bool:
    """Whether the group would need something in memory that it writes itself."""
    return any(strip_views(graph, p) in group.outputs for p in group.inputs)


def _made(graph: Graph, group: Group) -> list[int]:
    """What a group reads that other groups compute."""
    return [p for p in group.inputs if not is_stored_elsewhere(graph, p)]


def _union(*parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*parts)))


def _in_order(graph: Graph, groups: list[Group]) -> tuple[tuple[Group, ...], list[Group]]:
    """Groups after those whose outputs they read, and after those that read what they write over; and those that wait for each
    other."""
    ordered: list[Group] = []
    written: set[int] = set()
    waiting = list(reversed(groups))
    while waiting:
        served = (g for g in waiting if all(strip_views(graph, p) in written for p in _made(graph, g)))
        ready = next((g for g in served if not is_early(graph, g, waiting)), None)
        if ready is None:
            break
        waiting.remove(ready)
        ordered.append(ready)
        written |= set(ready.outputs)
    return tuple(ordered), waiting
