"""The fuser: first what lies in memory, then which kernel computes it.

`decide` says which values are kept. From the results back to the inputs, each value that must lie in memory becomes a group with
everything that its cone can hold; what the cone cannot hold must lie in memory in turn. Groups over the same iteration space are
merged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

from fusegen.errors import UnsupportedError
from fusegen.ir.graph import Graph, Node, check_repetition
from fusegen.ir.ops import Family, Op
from fusegen.passes.fuse.decide import decide
from fusegen.passes.fuse.epilogue import joined, limited, plain_group
from fusegen.passes.fuse.groups import Group, GroupKind, Kept, computed, is_stored_elsewhere, strip_views
from fusegen.passes.fuse.grow import absorb, alongside, grow
from fusegen.passes.fuse.order import addressed, first_of, hindered, in_order, waits
from fusegen.passes.fuse.skeletons import skeleton_named
from fusegen.passes.versions import Times
from fusegen.target import Target


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
        ordered, stuck = in_order(graph, groups)
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
        group = addressed(graph, grow(graph, root, target, decision))
        others = pending - {root} - decision.ends - set(decision.beside) if root not in decision.held else set()
        group = absorb(graph, group, sorted(others, reverse=True), decision.kept, times, groups)
        groups.append(group)
        count += len(computed(graph, group))
        check_repetition(graph, count)
        done |= {root, *group.outputs}
        wanted |= {strip_views(graph, p) for p in group.inputs if not is_stored_elsewhere(graph, p)}
    return together(graph, _read(graph, alongside(graph, groups, decision, times)), target)


def _read(graph: Graph, groups: list[Group]) -> list[Group]:
    """The groups without what nobody reads: a value that was kept for several kernels which became one."""
    while True:
        needed = {strip_views(graph, p) for p in (*graph.outputs, *graph.puts, *(p for group in groups for p in group.inputs))}
        found = [limited(group, tuple(o for o in group.outputs if o in needed)) for group in groups]
        if found == groups:
            return groups
        groups = [group for group in found if group.outputs]


# Products of one first operand in one launch: q, k and v of separate weights read their rows once.


_MOST_PARTS = 8  # each takes tensor maps of its own among the kernel's parameters


def together(graph: Graph, groups: Sequence[Group], target: Target) -> list[Group]:
    """The groups, those joined that can be one launch, where none waits for another."""
    found = list(groups)
    launches = [_as_launch(graph, group, target) for group in found]
    keys = [_key(graph, launch) for launch in launches]
    number = 0
    while number < len(found):
        same = (n for n in range(number + 1, len(found)) if keys[n] is not None and keys[n] == keys[number])
        partner = next((n for n in same if _can_join(graph, found, launches, number, n)), None)
        if partner is None:
            number += 1
        else:
            found[number] = launches[number] = joined(graph, [g for g in (launches[number], launches[partner]) if g is not None])
            del found[partner], launches[partner], keys[partner]
    return found


def _as_launch(graph: Graph, group: Group, target: Target) -> Group | None:
    """The group as a launch on tensor cores; None where they do not serve it."""
    if group.kind is GroupKind.LIBRARY and group.outputs == group.anchors:
        return plain_group(graph, group.outputs[0], target)
    return group if group.kind is GroupKind.CONTRACTION else None


def _key(graph: Graph, group: Group | None) -> Hashable | None:
    """What groups of one launch have in common."""
    if group is None:
        return None
    products = group.parts[0].products
    operands = group.match[products[0]]
    return group.skeleton, operands.a, operands.a_major, operands.b_major, graph.nodes[products[0]].dtype, len(products)


def _can_join(graph: Graph, groups: Sequence[Group], launches: Sequence[Group | None], one: int, other: int) -> bool:
    both = [group for group in (launches[one], launches[other]) if group is not None]
    parts = [part for group in both for part in group.parts]
    widths = skeleton_named(both[0].skeleton).tile_widths(math.lcm(*(part.head for part in parts)), len(parts[0].products))
    if len(parts) > _MOST_PARTS or not widths:
        return False
    return not waits(graph, groups, one, other) and not waits(graph, groups, other, one)
