"""The group around a value: everything that its cone can hold; and groups over one iteration space, merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import combinations

from fusegen.ir.graph import Graph, Shape
from fusegen.ir.index_map import strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import nominal, product, same
from fusegen.passes.fuse.attention import attention_group
from fusegen.passes.fuse.cone import Cone, domain_axes, reduced_dims, walk
from fusegen.passes.fuse.contraction import accumulation_group, call_group, library_group
from fusegen.passes.fuse.decide import Decision
from fusegen.passes.fuse.epilogue import ending, extended
from fusegen.passes.fuse.groups import Domain, Group, GroupKind, Kept, is_stored_elsewhere, strip_views
from fusegen.passes.fuse.order import addressed, hindered, is_torn
from fusegen.passes.fuse.rows import (
    column_group,
    fits_beside_sums,
    is_of_few,
    is_per_segment,
    places_of_row,
    row_group,
    scan_group,
    sums_columns,
)
from fusegen.passes.versions import Times
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


# Groups over one iteration space become one: what a kernel reads anyway serves all that is made of it, and values that have
# nothing to do with each other save a launch.
#
# A value goes to the group that reads what it is made of. To a later one that would have to read it once more it goes last of
# all: there it would keep in memory what nobody else needs any more.


_ROWS = (GroupKind.ROW, GroupKind.COLUMN, GroupKind.ROW_COLUMN)
_OF_ROWS = (Family.REDUCTION, Family.ORDER, Family.POINTWISE, Family.INDEXING)
_KINDS = (GroupKind.POINTWISE, *_ROWS)

_PART = 4
"""A value counts that has at least one of so many of the elements that its reader goes over."""


def absorb(graph: Graph, group: Group, others: Sequence[int], kept: Kept, times: Times, groups: Sequence[Group]) -> Group:
    """The group with every other wanted value that it can write as well, of what it reads anyway.

    Args:
        others: the latest first.
        groups: made before.
    """
    left = list(others)
    while True:
        for other in left:
            merged = _with(graph, group, other, kept, times)
            if merged is None or (other not in _read(graph, group) and _further(graph, group, merged)):
                continue
            if _needed(graph, merged.inputs, groups).isdisjoint(merged.outputs):  # else a kernel comes between
                group = merged
                left.remove(other)
                break
        else:
            return group


def alongside(graph: Graph, groups: Sequence[Group], decision: Decision, times: Times) -> list[Group]:
    """The groups, those joined of which none waits for another and which one kernel can compute: first those that read the same,
    then those that give results alone, or values for the same kernels. Others would lie in memory for longer, and spare nothing.
    """
    found = list(groups)
    alone = decision.held | decision.ends | set(decision.beside)
    apart: set[tuple[Group, Group]] = set()
    while (pair := _nearest(graph, found, alone, apart)) is not None:
        one, other = pair
        joined = _joined(graph, found, one, other, decision.kept, times)
        if joined is None:
            apart.add((found[one], found[other]))
        else:
            found = joined
    return found


def _nearest(graph: Graph, groups: Sequence[Group], alone: Kept, apart: Set[tuple[Group, Group]]) -> tuple[int, int] | None:
    """The two groups over one iteration space that share most of what they read; None where there are none.

    Args:
        alone: values whose kernels compute nothing else.
        apart: groups that cannot be one.
    """
    numbers = [n for n, group in enumerate(groups) if group.kind in _KINDS and alone.isdisjoint(group.outputs)]
    pairs = [(n, m) for n, m in combinations(numbers, 2) if _are_alike(groups[n].domain.shape, groups[m].domain.shape)]
    pairs = [(n, m) for n, m in pairs if (groups[n], groups[m]) not in apart]
    results = {strip_views(graph, p) for p in (*graph.outputs, *graph.puts)}
    shared = {(n, m): _shared(graph, groups[n], groups[m]) for n, m in pairs}
    readers = {n: _readers(graph, groups, n) if not results.issuperset(groups[n].outputs) else None for n in numbers}
    worth = [(n, m) for n, m in pairs if shared[n, m] or readers[n] == readers[m]]
    return max(worth, key=shared.__getitem__, default=None)


def _readers(graph: Graph, groups: Sequence[Group], number: int) -> frozenset[int]:
    """The groups that read what one gives."""
    outputs = set(groups[number].outputs)
    return frozenset(n for n, group in enumerate(groups) if not outputs.isdisjoint(_read(graph, group)))


def _are_alike(one: Shape, other: Shape) -> bool:
    """Tells if two iteration spaces are one, or one of them is of the other's rows, or of its columns."""
    return len(one) == len(other) and all(same(a, b) or same(a, 1) or same(b, 1) for a, b in zip(one, other, strict=True))


def _joined(graph: Graph, groups: Sequence[Group], one: int, other: int, kept: Kept, times: Times) -> list[Group] | None:
    """The groups with two of them as one; None where no kernel computes both, or one comes between."""
    merged: Group | None = groups[one]
    for output in groups[other].outputs:
        merged = None if merged is None else _with(graph, merged, output, kept, times)
    if merged is None:
        return None
    joined = [merged if n == one else group for n, group in enumerate(groups) if n != other]
    computed = {output for group in joined for output in group.outputs}
    is_served = all(is_stored_elsewhere(graph, p) or strip_views(graph, p) in computed for p in merged.inputs)
    return joined if is_served and _needed(graph, merged.inputs, joined).isdisjoint(merged.outputs) else None


def _with(graph: Graph, group: Group, other: int, kept: Kept, times: Times) -> Group | None:
    """The group with another value that it writes as well; None where one kernel cannot."""
    merged = _merge(graph, group, other, kept)
    merged = None if merged is None else addressed(graph, merged)
    if merged is None or _reads_itself(graph, merged) or is_torn(merged, times):
        return None
    return merged if hindered(graph, [merged]) <= hindered(graph, [group]) else None


def _read(graph: Graph, group: Group) -> set[int]:
    """The values that a group reads, below views of them."""
    return {strip_views(graph, p) for p in group.inputs}


def _further(graph: Graph, group: Group, merged: Group) -> set[int]:
    """The values of a size that counts that a group which has grown reads, and did not before."""
    return {p for p in set(merged.inputs) - set(group.inputs) if _counts(graph, merged, p)}


def _shared(graph: Graph, one: Group, other: Group) -> int:
    """The number of values of a size that counts that two groups both read."""
    return sum(_counts(graph, one, p) for p in set(one.inputs) & set(other.inputs))


def _counts(graph: Graph, group: Group, position: int) -> bool:
    return _PART * nominal(product(graph.nodes[position].shape)) >= nominal(product(group.domain.shape))


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
    if group.kind in _ROWS:
        return _merge_rows(graph, group, other, kept)
    return None


def _merge_pointwise(graph: Graph, group: Group, other: int, kept: Kept) -> Group | None:
    """Together over one shape; or, when the other is a row reduction over that shape, as a row kernel."""
    grown = reduction_group(graph, other, kept)
    if grown is not None and grown.kind is not GroupKind.POINTWISE:
        return _merge_rows(graph, grown, group.outputs[0], kept) if len(group.outputs) == 1 else None
    node = graph.nodes[other]
    is_made_by_points = node.family in (Family.POINTWISE, Family.INDEXING) or node.op is Op.CONCAT
    if not is_made_by_points or Domain(node.shape) != group.domain:
        return None
    outputs = (*group.outputs, other)
    parts = [pointwise_group(graph, output, kept.difference(outputs)) for output in outputs]
    return replace(group, outputs=outputs, inputs=_union(*(part.inputs for part in parts)))


def _merge_rows(graph: Graph, group: Group, other: int, kept: Kept) -> Group | None:
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


def _combined(graph: Graph, rows: tuple[int, ...], columns: tuple[int, ...], domain: Domain, kept: Kept) -> Group | None:
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
    anchors = _union(*(p.anchors for p in found))
    kind = GroupKind.ROW if not columns else GroupKind.ROW_COLUMN if set(anchors) - set(columns) or rows else GroupKind.COLUMN
    return Group(kind, (*rows, *columns), _union(*(p.inputs for p in found)), domain, anchors)


def _goes_by_segments(graph: Graph, rows: Group) -> bool:
    """True if results of a group of rows are one a segment, or need a reduction of segments."""
    axes = domain_axes(rows.domain)
    places = [place for output in rows.outputs for place in places_of_row(graph, output, rows.domain, axes)]
    is_of_segments = any(rows.domain.is_segment(reduced_dims(graph, anchor)) for anchor in rows.anchors)
    return is_of_segments or any(is_per_segment(rows.domain, place, axes) for place in places)


def _reads_itself(graph: Graph, group: Group) -> bool:
    """True if the group would need something in memory that it writes itself."""
    return not _read(graph, group).isdisjoint(group.outputs)


def _union(*parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*parts)))
