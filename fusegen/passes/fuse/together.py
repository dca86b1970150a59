"""Products of one first operand in one launch: q, k and v of separate weights read their rows once."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from fusegen.ir.graph import Graph
from fusegen.passes.fuse.contraction import product_operands, unserved
from fusegen.passes.fuse.epilogue import joined, plain_group, tile_widths
from fusegen.passes.fuse.groups import Group, GroupKind, strip_views

_MOST_PARTS = 8  # each takes tensor maps of its own among the kernel's parameters


def together(graph: Graph, groups: Sequence[Group]) -> list[Group]:
    """The groups, those joined that can be one launch, where none waits for another."""
    found = list(groups)
    keys = [_key(graph, group) for group in found]
    number = 0
    while number < len(found):
        same = (n for n in range(number + 1, len(found)) if keys[n] is not None and keys[n] == keys[number])
        partner = next((n for n in same if _can_join(graph, found, number, n)), None)
        if partner is None:
            number += 1
        else:
            found[number] = joined(graph, [_as_launch(graph, found[n]) for n in (number, partner)])
            del found[partner], keys[partner]
    return found


def _key(graph: Graph, group: Group) -> Hashable | None:
    """What groups of one launch have in common; None where tensor cores do not serve the group."""
    if group.kind is GroupKind.LIBRARY:
        products: tuple[int, ...] = group.outputs
        if unserved(graph, products[0], products[0]) is not None:
            return None
    elif group.kind is GroupKind.CONTRACTION:
        products = group.parts[0].products
    else:
        return None
    operands = product_operands(graph, products[0])
    assert operands is not None
    return operands.a, operands.a_major, operands.b_major, graph.nodes[products[0]].dtype, len(products)


def _as_launch(graph: Graph, group: Group) -> Group:
    return plain_group(graph, group.outputs[0]) if group.kind is GroupKind.LIBRARY else group


def _can_join(graph: Graph, groups: Sequence[Group], one: int, other: int) -> bool:
    parts = [part for n in (one, other) for part in _as_launch(graph, groups[n]).parts]
    if len(parts) > _MOST_PARTS or not tile_widths(math.lcm(*(part.head for part in parts)), len(parts[0].products)):
        return False
    return not _waits(graph, groups, one, other) and not _waits(graph, groups, other, one)


def _waits(graph: Graph, groups: Sequence[Group], later: int, earlier: int) -> bool:
    """Whether a group needs what another one computes, or what is made of that."""
    writers = {output: n for n, group in enumerate(groups) for output in group.outputs}
    stack, seen = [later], {later}
    while stack:
        needed = {writers[p] for p in (strip_views(graph, i) for i in groups[stack.pop()].inputs) if p in writers}
        if earlier in needed:
            return True
        stack += needed - seen
        seen |= needed
    return False
