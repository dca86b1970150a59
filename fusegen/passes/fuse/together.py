"""Products of one first operand in one launch: q, k and v of separate weights read their rows once."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from fusegen.ir.graph import Graph
from fusegen.passes.fuse.epilogue import joined, plain_group
from fusegen.passes.fuse.groups import Group, GroupKind
from fusegen.passes.fuse.order import waits
from fusegen.passes.fuse.skeletons import skeleton_named
from fusegen.target import Target

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
    operands = skeleton_named(group.skeleton).operands(graph, products[0])
    assert operands is not None  # which its skeleton reads
    return group.skeleton, operands.a, operands.a_major, operands.b_major, graph.nodes[products[0]].dtype, len(products)


def _can_join(graph: Graph, groups: Sequence[Group], launches: Sequence[Group | None], one: int, other: int) -> bool:
    both = [group for group in (launches[one], launches[other]) if group is not None]
    parts = [part for group in both for part in group.parts]
    widths = skeleton_named(both[0].skeleton).tile_widths(math.lcm(*(part.head for part in parts)), len(parts[0].products))
    if len(parts) > _MOST_PARTS or not widths:
        return False
    return not waits(graph, groups, one, other) and not waits(graph, groups, other, one)
