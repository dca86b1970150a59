"""Graphs made of another one: with some nodes replaced, or of some of its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.ops import Op

Replace: TypeAlias = Callable[[GraphBuilder, Sequence[int], int], int | None]
"""Puts a node's replacement into a new graph, given its builder, the places of all earlier nodes, and the node; None leaves it."""


def rebuilt(graph: Graph, replaced: Replace) -> Graph:
    """The graph with replacements; all other nodes are as they were, on their operands' replacements."""
    builder = GraphBuilder.like(graph)
    moved: list[int] = []
    for position, node in graph:
        place = replaced(builder, moved, position)
        if place is None:
            place = builder.put(replace(node, args=tuple(moved[a] for a in node.args)), graph.locations[position])
        moved.append(place)
    return builder.build([moved[o] for o in graph.outputs], [moved[w] for w in graph.writes])


def part_of(graph: Graph, outputs: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """The graph of some of its values alone, and for each of its nodes which one it was."""
    wanted = set(outputs)
    for position in range(len(graph.nodes) - 1, -1, -1):
        if position in wanted:
            wanted.update(graph.nodes[position].args)
    before = sorted(wanted.union(p for p, node in graph if node.op in (Op.INPUT, Op.SCALAR)))
    moved = {old: new for new, old in enumerate(before)}
    nodes = tuple(replace(graph.nodes[p], args=tuple(moved[a] for a in graph.nodes[p].args)) for p in before)
    locations = tuple(graph.locations[p] for p in before)
    return replace(graph, nodes=nodes, outputs=tuple(moved[o] for o in outputs), locations=locations), tuple(before)


def moved_after_operands(
    position: int, moved: dict[int, int], operands: Callable[[int], Sequence[int]], make: Callable[[int], int]
) -> int:
    """The place of a value in a new graph, made if need be, after all that it is made of.

    Args:
        position: the value.
        moved: places that are known already; grows.
        operands: of a value, in the old graph.
        make: puts a value into the new graph, whose operands are there.
    """
    stack = [position]
    while stack:
        last = stack[-1]
        missing = [] if last in moved else [a for a in operands(last) if a not in moved]
        if missing:
            stack += missing
        else:
            stack.pop()
            if last not in moved:
                moved[last] = make(last)
    return moved[position]
