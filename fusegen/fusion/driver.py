"""The fuser: first what lies in memory, then which kernel computes it.

`decide` says which values are materialized. From the results back to the inputs, each of them becomes a group with all of its
producers that one kernel can compute; what it cannot compute is materialized in turn. Groups over one iteration space are merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fusegen.errors import UnsupportedError
from fusegen.fusion.decide import decide
from fusegen.fusion.groups import Group, Materialized, computed, is_stored_elsewhere, limited, strip_views
from fusegen.fusion.grow import absorb, alongside, grow
from fusegen.fusion.matcher import Matcher, asked
from fusegen.fusion.order import addressed, first_of, hindered, in_order
from fusegen.ir.graph import Graph, Node, check_repetition
from fusegen.ir.ops import Family, Op
from fusegen.passes.writes import WriteTimes
from fusegen.target import Target


def fuse(graph: Graph, target: Target, families: Sequence[Matcher]) -> tuple[Group, ...]:
    """The groups of a graph in the order in which they run.

    Args:
        graph: in primitives, after the passes.
        target: says which kernels can be used.
        families: of kernels, in the order in which they are asked.

    Raises:
        UnsupportedError: values are computed at too many places, or again by too many kernels.
    """
    families, apart = asked(families, graph), frozenset[int]()
    once: Materialized = frozenset()
    while True:
        groups = _groups(graph, target, families, apart, once)
        if again := _summed_again(graph, groups) - once:
            once |= again
            continue
        ordered, stuck = in_order(graph, groups)
        hindering = hindered(graph, groups) or first_of(graph, stuck, apart)
        if not stuck and not hindering:
            return ordered
        if hindering <= apart:
            raise UnsupportedError(
                "kernels wait for each other, or write what they read", hint="copy what is read of a tensor before it is written to"
            )
        apart |= hindering


def _summed_again(graph: Graph, groups: Sequence[Group]) -> Materialized:
    """Sums that several groups compute: each adds in an order of its own, and what they get is not one number."""
    times = Counter(position for group in groups for position in computed(graph, group))
    return frozenset(p for p, count in times.items() if count > 1 and _depends_on_order(graph.nodes[p]))


def _depends_on_order(node: Node) -> bool:
    return node.dtype.is_float and (node.op in (Op.SUM, Op.PROD) or node.family is Family.SCAN)


def _groups(graph: Graph, target: Target, families: Sequence[Matcher], apart: Materialized, once: Materialized) -> list[Group]:
    """The groups of a graph in no order.

    Args:
        apart: writes that no other kernel can make.
        once: values that one kernel computes for all.
    """
    groups: list[Group] = []
    count = 0
    decision, times = decide(graph, target, families, apart, once), WriteTimes.of(graph)
    wanted = set(decision.stored.union(strip_views(graph, o) for o in graph.outputs))
    done: set[int] = set()
    while pending := wanted - done:
        root = max(pending)
        end = decision.beside.get(root, root)
        root = root if end in done else end
        group = addressed(graph, grow(graph, root, target, families, decision))
        others = pending - {root} - decision.ends - set(decision.beside) if root not in decision.held else set()
        group = absorb(graph, group, sorted(others, reverse=True), families, decision.kept, times, groups)
        groups.append(group)
        count += len(computed(graph, group))
        check_repetition(graph, count)
        done |= {root, *group.outputs}
        wanted |= {strip_views(graph, p) for p in group.inputs if not is_stored_elsewhere(graph, p)}
    groups = _read(graph, alongside(graph, groups, families, decision, times))
    for family in families:
        groups = list(family.joined(graph, groups, target))
    return groups


def _read(graph: Graph, groups: list[Group]) -> list[Group]:
    """The groups without what nobody reads: a value that was kept for several kernels which became one."""
    while True:
        needed = {strip_views(graph, p) for p in (*graph.outputs, *graph.puts, *(p for group in groups for p in group.inputs))}
        found = [limited(group, tuple(o for o in group.outputs if o in needed)) for group in groups]
        if found == groups:
            return groups
        groups = [group for group in found if group.outputs]
