"""The fuser: chooses the materialized values, then builds the kernels that compute them.

`decide` chooses the values. From the results back to the inputs, each one becomes a group with all producers that one kernel can
compute; any other producer is materialized in turn. Groups over one iteration space are merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fusegen.errors import UnsupportedError
from fusegen.fusion.decide import decide
from fusegen.fusion.groups import Group, Materialized, computed, is_stored_elsewhere, strip_views, with_outputs
from fusegen.fusion.grow import absorb, grow, merge_independent
from fusegen.fusion.matcher import Matcher, applicable
from fusegen.fusion.order import blocked_writes, first_write, in_order, with_write_indices
from fusegen.ir.graph import Graph, Node, check_total_recompute
from fusegen.ir.ops import Family, Op
from fusegen.passes.writes import WriteTimes
from fusegen.target import Target


def fuse(graph: Graph, target: Target, families: Sequence[Matcher]) -> tuple[Group, ...]:
    """Returns the groups of a graph in primitives in execution order. Families are asked in their order.

    Raises:
        UnsupportedError: a value is computed at too many indices or again in too many kernels, or writes form a cycle.
    """
    families, separate = applicable(families, graph), frozenset[int]()
    once: Materialized = frozenset()
    while True:
        groups = _unordered(graph, target, families, separate, once)
        if again := _summed_again(graph, groups) - once:
            once |= again
            continue
        ordered, stuck = in_order(graph, groups)
        blocked = blocked_writes(graph, groups) or first_write(graph, stuck, separate)
        if not stuck and not blocked:
            return ordered
        if blocked <= separate:
            raise UnsupportedError(
                "the kernels that write to a tensor and those that read it form a cycle",
                hint="read from a clone that is taken before the write",
            )
        separate |= blocked


def _summed_again(graph: Graph, groups: Sequence[Group]) -> Materialized:
    """Returns the sums that several groups compute: each would add in its own order, so their results would differ."""
    times = Counter(position for group in groups for position in computed(graph, group))
    return frozenset(p for p, count in times.items() if count > 1 and _depends_on_order(graph.nodes[p]))


def _depends_on_order(node: Node) -> bool:
    return node.dtype.is_float and (node.op in (Op.SUM, Op.PROD) or node.family is Family.SCAN)


def _unordered(
    graph: Graph, target: Target, families: Sequence[Matcher], separate: Materialized, once: Materialized
) -> list[Group]:
    """Returns the groups in no particular order. For the arguments, see `decide`."""
    groups: list[Group] = []
    count = 0
    decision, times = decide(graph, target, families, separate, once), WriteTimes.of(graph)
    required = set(decision.stored.union(strip_views(graph, o) for o in graph.outputs))
    done: set[int] = set()
    while pending := required - done:
        root = max(pending)
        end = decision.extra_outputs.get(root, root)
        root = root if end in done else end
        group = with_write_indices(graph, grow(graph, root, target, families, decision))
        candidates = pending - {root} - decision.ends - set(decision.extra_outputs) if root not in decision.write_copies else set()
        group = absorb(graph, group, sorted(candidates, reverse=True), families, decision.materialized, times, groups)
        groups.append(group)
        count += len(computed(graph, group))
        check_total_recompute(graph, count)
        done |= {root, *group.outputs}
        required |= {strip_views(graph, p) for p in group.inputs if not is_stored_elsewhere(graph, p)}
    groups = _without_unread(graph, merge_independent(graph, groups, families, decision, times))
    for family in families:
        groups = list(family.joined(graph, groups, target, decision))
    return groups


def _without_unread(graph: Graph, groups: list[Group]) -> list[Group]:
    """Drops outputs that nothing reads, e.g. values materialized for kernels that were merged since."""
    while True:
        needed = {strip_views(graph, p) for p in (*graph.outputs, *graph.puts, *(p for group in groups for p in group.inputs))}
        limits = [with_outputs(group, tuple(o for o in group.outputs if o in needed)) for group in groups]
        if limits == groups:
            return groups
        groups = [group for group in limits if group.outputs]
