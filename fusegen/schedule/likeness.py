"""What two launches have in common whose sizes alone differ: a measurement of one says something about the other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from fusegen.fusion.groups import Group, computed
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, Node
from fusegen.ir.symbolic import literal, product
from fusegen.schedule.program import Launch

_DIMS = ("dim", "dims", "part")
"""Attributes that are no sizes, beside words."""


def likeness(graph: Graph, group: Group) -> str:
    """A digest of what a group computes, whatever the sizes: operations, dtypes, dims, and which of these have one element."""
    return hashlib.sha256("\n".join(_lines(graph, group)).encode()).hexdigest()[:32]


def extents(launch: Launch, sizes: Mapping[str, int]) -> tuple[int, int]:
    """How many rows and how many columns a launch goes through; where nothing is reduced, the last dim counts as columns."""
    domain = launch.group.domain
    along = domain.columns or tuple(range(len(domain.shape)))[-1:]  # a tensor without dims is a row of one
    rows = product(extent for d, extent in enumerate(domain.shape) if d not in along)
    columns = product(domain.shape[d] for d in along)
    return formula(rows)(sizes), formula(columns)(sizes)


def _lines(graph: Graph, group: Group) -> Iterator[str]:
    inside = computed(graph, group)
    numbers = {position: number for number, position in enumerate(sorted({*group.inputs, *inside}))}
    yield f"{group.kind.name} {group.domain.rows} {group.domain.columns} {[numbers[p] for p in group.outputs]}"
    if graph.fast_math:
        yield "fast math"
    for position, number in numbers.items():
        node = graph.nodes[position]
        made = f"{node.op} {[numbers[a] for a in node.args]} {_words(node)}" if position in inside else "input"
        yield f"{number} {node.dtype} {''.join('1' if literal(e) == 1 else 'n' for e in node.shape)} {made}"


def _words(node: Node) -> list[tuple[str, object]]:
    return [(name, value) for name, value in node.attrs if name in _DIMS or isinstance(value, bool)]
