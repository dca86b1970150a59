"""Grows a group from a value and its producers, and merges groups over one iteration space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import combinations

from fusegen.fusion.groups import Group, Materialized, is_stored_elsewhere, strip_views
from fusegen.fusion.matcher import Decision, Matcher, matcher_of
from fusegen.fusion.order import blocked_writes, reads_overwritten, with_write_indices
from fusegen.ir.graph import Graph
from fusegen.ir.symbolic import Shape, nominal, product, same
from fusegen.passes.writes import WriteTimes
from fusegen.target import Target


def grow(graph: Graph, root: int, target: Target, families: Sequence[Matcher], decision: Decision) -> Group:
    groups = (family.group(graph, root, target, decision) for family in families)
    return next(group for group in groups if group is not None)


# Groups over one iteration space are merged: one read then serves all results, and unrelated values save a launch.
#
# A value joins a group that reads its operands already. It joins a group that would read them anew only as a last resort: its
# operands would stay in memory longer.


_PART = 4
"""A read counts if the value has at least 1/_PART of the elements that its reader iterates over."""


def absorb(
    graph: Graph,
    group: Group,
    values: Sequence[int],
    families: Sequence[Matcher],
    materialized: Materialized,
    times: WriteTimes,
    groups: Sequence[Group],
) -> Group:
    """Returns the group extended by each candidate value that it can write as well without reading more, the latest first."""
    candidates = list(values)
    while True:
        for value in candidates:
            merged = _extended(graph, group, value, families, materialized, times)
            if merged is None or (value not in _reads(graph, group) and _new_reads(graph, group, merged)):
                continue
            if _dependencies(graph, merged.inputs, groups).isdisjoint(merged.outputs):  # else another kernel must run between
                group = merged
                candidates.remove(value)
                break
        else:
            return group


def merge_independent(
    graph: Graph, groups: Sequence[Group], families: Sequence[Matcher], decision: Decision, times: WriteTimes
) -> list[Group]:
    """Joins independent groups that one kernel can compute: first those with most common reads, then those that hold only results
    or whose values have the same readers. Joining others would lengthen lifetimes and save nothing."""
    remaining = list(groups)
    alone = decision.write_copies | decision.ends | set(decision.extra_outputs)
    rejected: set[tuple[Group, Group]] = set()
    while (pair := _closest_pair(graph, remaining, alone, rejected)) is not None:
        n, m = pair
        joined = _joined(graph, remaining, n, m, families, decision.materialized, times)
        if joined is None:
            rejected.add((remaining[n], remaining[m]))
        else:
            remaining = joined
    return remaining


def _closest_pair(
    graph: Graph, groups: Sequence[Group], alone: Materialized, apart: Set[tuple[Group, Group]]
) -> tuple[int, int] | None:
    """Returns the two groups over one iteration space with most common reads; None if there are none.

    ``alone`` are values whose kernels compute nothing else, ``apart`` pairs that one kernel cannot compute.
    """
    numbers = [n for n, group in enumerate(groups) if group.kind.merges and alone.isdisjoint(group.outputs)]
    pairs = [(n, m) for n, m in combinations(numbers, 2) if _have_equal_spaces(groups[n].domain.shape, groups[m].domain.shape)]
    pairs = [(n, m) for n, m in pairs if (groups[n], groups[m]) not in apart]
    results = {strip_views(graph, p) for p in (*graph.outputs, *graph.puts)}
    shared = {(n, m): _common_reads(graph, groups[n], groups[m]) for n, m in pairs}
    readers = {n: _readers(graph, groups, n) if not results.issuperset(groups[n].outputs) else None for n in numbers}
    worth = [(n, m) for n, m in pairs if shared[n, m] or readers[n] == readers[m]]
    return max(worth, key=shared.__getitem__, default=None)


def _readers(graph: Graph, groups: Sequence[Group], number: int) -> frozenset[int]:
    outputs = set(groups[number].outputs)
    return frozenset(n for n, group in enumerate(groups) if not outputs.isdisjoint(_reads(graph, group)))


def _have_equal_spaces(first: Shape, second: Shape) -> bool:
    """True if two iteration spaces are equal, or one covers only the other's rows or columns."""
    return len(first) == len(second) and all(same(a, b) or same(a, 1) or same(b, 1) for a, b in zip(first, second, strict=True))


def _joined(
    graph: Graph,
    groups: Sequence[Group],
    n: int,
    m: int,
    families: Sequence[Matcher],
    materialized: Materialized,
    times: WriteTimes,
) -> list[Group] | None:
    """Returns the groups with two of them merged; None if no kernel computes both or another must run between."""
    merged: Group | None = groups[n]
    for output in groups[m].outputs:
        merged = None if merged is None else _extended(graph, merged, output, families, materialized, times)
    if merged is None:
        return None
    joined = [merged if k == n else group for k, group in enumerate(groups) if k != m]
    computed = {output for group in joined for output in group.outputs}
    is_served = all(is_stored_elsewhere(graph, p) or strip_views(graph, p) in computed for p in merged.inputs)
    return joined if is_served and _dependencies(graph, merged.inputs, joined).isdisjoint(merged.outputs) else None


def _extended(
    graph: Graph, group: Group, other: int, families: Sequence[Matcher], materialized: Materialized, times: WriteTimes
) -> Group | None:
    merged = matcher_of(families, group.kind).merged(graph, group, other, materialized)
    merged = None if merged is None else with_write_indices(graph, merged)
    if merged is None or _reads_itself(graph, merged) or reads_overwritten(merged, times):
        return None
    return merged if blocked_writes(graph, [merged]) <= blocked_writes(graph, [group]) else None


def _reads(graph: Graph, group: Group) -> set[int]:
    return {strip_views(graph, p) for p in group.inputs}


def _new_reads(graph: Graph, group: Group, merged: Group) -> set[int]:
    """Returns the large enough values that a merged group reads and the original did not."""
    return {p for p in set(merged.inputs) - set(group.inputs) if _is_large(graph, merged, p)}


def _common_reads(graph: Graph, first: Group, second: Group) -> int:
    """Returns the number of large enough values that both groups read."""
    return sum(_is_large(graph, first, p) for p in set(first.inputs) & set(second.inputs))


def _is_large(graph: Graph, group: Group, position: int) -> bool:
    return _PART * nominal(product(graph.nodes[position].shape)) >= nominal(product(group.domain.shape))


def _dependencies(graph: Graph, positions: Iterable[int], groups: Sequence[Group]) -> set[int]:
    """Returns everything that values depend on, including all inputs of the groups that compute them."""
    writers = {output: group for group in groups for output in group.outputs}
    needed, pending, seen = set[int](), list(positions), set[int]()
    while pending:
        position = pending.pop()
        needed |= graph.ancestors[position]
        outputs = (graph.ancestors[position] | {position}) & writers.keys() - seen
        seen |= outputs
        read = {p for output in outputs for p in writers[output].inputs}
        needed |= read
        pending += read
    return needed


def _reads_itself(graph: Graph, group: Group) -> bool:
    """True if a group would read a value that it writes itself."""
    return not _reads(graph, group).isdisjoint(group.outputs)
