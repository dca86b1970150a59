"""The group around a value: those of its producers that one kernel can compute; and groups over one iteration space, merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import combinations

from fusegen.fusion.groups import Group, Materialized, is_stored_elsewhere, strip_views
from fusegen.fusion.matcher import Decision, Matcher, matcher_of
from fusegen.fusion.order import addressed, hindered, is_torn
from fusegen.ir.graph import Graph
from fusegen.ir.symbolic import Shape, nominal, product, same
from fusegen.passes.writes import WriteTimes
from fusegen.target import Target


def grow(graph: Graph, root: int, target: Target, families: Sequence[Matcher], decision: Decision) -> Group:
    """The group that ends in a value: of the first family that has one."""
    found = (family.group(graph, root, target, decision) for family in families)
    return next(group for group in found if group is not None)


# Groups over one iteration space become one: what a kernel reads anyway serves all that is made of it, and values that have
# nothing to do with each other save a launch.
#
# A value goes to the group that reads what it is made of. To a later one that would have to read it once more it goes last of
# all: there it would keep in memory what nobody else needs any more.


_PART = 4
"""A value counts that has at least one of so many of the elements that its reader goes over."""


def absorb(
    graph: Graph,
    group: Group,
    others: Sequence[int],
    families: Sequence[Matcher],
    kept: Materialized,
    times: WriteTimes,
    groups: Sequence[Group],
) -> Group:
    """The group with every other wanted value that it can write as well, of what it reads anyway.

    Args:
        others: the latest first.
        groups: made before.
    """
    left = list(others)
    while True:
        for other in left:
            merged = _with(graph, group, other, families, kept, times)
            if merged is None or (other not in _read(graph, group) and _further(graph, group, merged)):
                continue
            if _needed(graph, merged.inputs, groups).isdisjoint(merged.outputs):  # else a kernel comes between
                group = merged
                left.remove(other)
                break
        else:
            return group


def alongside(
    graph: Graph, groups: Sequence[Group], families: Sequence[Matcher], decision: Decision, times: WriteTimes
) -> list[Group]:
    """The groups, those joined of which none waits for another and which one kernel can compute: first those that read the same,
    then those that give results alone, or values for the same kernels. Others would lie in memory for longer, and spare nothing.
    """
    found = list(groups)
    alone = decision.held | decision.ends | set(decision.beside)
    apart: set[tuple[Group, Group]] = set()
    while (pair := _nearest(graph, found, alone, apart)) is not None:
        one, other = pair
        joined = _joined(graph, found, one, other, families, decision.kept, times)
        if joined is None:
            apart.add((found[one], found[other]))
        else:
            found = joined
    return found


def _nearest(graph: Graph, groups: Sequence[Group], alone: Materialized, apart: Set[tuple[Group, Group]]) -> tuple[int, int] | None:
    """The two groups over one iteration space that share most of what they read; None where there are none.

    Args:
        alone: values whose kernels compute nothing else.
        apart: groups that cannot be one.
    """
    numbers = [n for n, group in enumerate(groups) if group.kind.merges and alone.isdisjoint(group.outputs)]
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


def _joined(
    graph: Graph, groups: Sequence[Group], one: int, other: int, families: Sequence[Matcher], kept: Materialized, times: WriteTimes
) -> list[Group] | None:
    """The groups with two of them as one; None where no kernel computes both, or one comes between."""
    merged: Group | None = groups[one]
    for output in groups[other].outputs:
        merged = None if merged is None else _with(graph, merged, output, families, kept, times)
    if merged is None:
        return None
    joined = [merged if n == one else group for n, group in enumerate(groups) if n != other]
    computed = {output for group in joined for output in group.outputs}
    is_served = all(is_stored_elsewhere(graph, p) or strip_views(graph, p) in computed for p in merged.inputs)
    return joined if is_served and _needed(graph, merged.inputs, joined).isdisjoint(merged.outputs) else None


def _with(
    graph: Graph, group: Group, other: int, families: Sequence[Matcher], kept: Materialized, times: WriteTimes
) -> Group | None:
    """The group with another value that it writes as well; None where one kernel cannot."""
    merged = matcher_of(families, group.kind).merged(graph, group, other, kept)
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


def _reads_itself(graph: Graph, group: Group) -> bool:
    """True if the group would need something in memory that it writes itself."""
    return not _read(graph, group).isdisjoint(group.outputs)
