"""A graph in which some nodes are replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from fusegen.ir.graph import Graph, GraphBuilder

Replace: TypeAlias = Callable[[GraphBuilder, Sequence[int], int], int | None]
"""Puts a node's replacement into a new graph, given its builder, the places of all earlier nodes, and the node; None leaves it."""


def rebuilt(graph: Graph, replaced: Replace) -> Graph:
    """The graph with replacements; all other nodes are as they were, on their operands' replacements."""
    builder = GraphBuilder(graph.name).like(graph)
    builder.derived = graph.derived
    moved: list[int] = []
    for position, node in graph:
        place = replaced(builder, moved, position)
        if place is None:
            place = builder.put(replace(node, args=tuple(moved[a] for a in node.args)), graph.locations[position])
        moved.append(place)
    return builder.build([moved[o] for o in graph.outputs], [moved[w] for w in graph.writes])
