"""Rows of matrices between kernels and the library, padded so that each starts at a multiple of 16 bytes.

cuBLAS has fast kernels for 16-bit floats where rows lie like that, and takes several times as long where they do not. To pad memory
of the call's own costs nothing: a kernel writes longer rows, and another skips the ends, which nobody writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.strided import may_pad, strided_view
from fusegen.ir.symbolic import literal
from fusegen.passes.fuse import Group, GroupKind
from fusegen.passes.fuse.contraction import is_heavy
from fusegen.passes.fuse.groups import READ, strip_views
from fusegen.target import Backend, Target

_STRIDED = (GroupKind.LIBRARY, GroupKind.POINTWISE, GroupKind.ROW, GroupKind.COLUMN, GroupKind.ROW_COLUMN)
"""Groups that read and write rows wherever they start."""


def with_padded_rows(graph: Graph, groups: Sequence[Group], target: Target) -> Graph:
    """The graph which says of matrices that are operands or results of library products, and no result of the call, that their rows
    are padded in memory, where they would start at other places."""
    if target.backend is not Backend.CUDA:
        return graph
    padded = {value: nodes for value, nodes in _temporaries(graph, groups).items() if _may_be_padded(graph, groups, value, nodes)}
    while padded:
        found = replace(graph, padded=frozenset(p for nodes in padded.values() for p in nodes))
        lost = {strip_views(graph, base) for base in _no_views_now(graph, found, groups)}
        if not lost:
            return found
        padded = {value: nodes for value, nodes in padded.items() if value not in lost}
    return graph


def _temporaries(graph: Graph, groups: Sequence[Group]) -> dict[int, set[int]]:
    """Values that a group leaves for another, and for no one else, with the views of each as which they may lie in memory."""
    wanted = {strip_views(graph, position) for position in (*graph.outputs, *graph.puts)}
    found: dict[int, set[int]] = {}
    for group in groups:
        for position in group.inputs:
            value = strip_views(graph, position)
            if graph.nodes[position].op not in (*READ, Op.PUT) and value not in wanted:
                found.setdefault(value, {value}).add(position)
    return found


def _may_be_padded(graph: Graph, groups: Sequence[Group], value: int, nodes: set[int]) -> bool:
    """True if a heavy library product has a value as an operand or result, its rows are none of multiples of 16 bytes, and all that
    touch it can do with padded ones."""
    columns = {literal(graph.nodes[p].shape[-1]) if len(graph.nodes[p].shape) > 1 else None for p in nodes}
    extent = columns.pop()
    if columns or extent is None or not may_pad(extent):
        return False
    touching = [group for group in groups if value in group.outputs or not nodes.isdisjoint(group.inputs)]
    heavy = [group for group in touching if group.kind is GroupKind.LIBRARY and is_heavy(graph, group.anchors[0])]
    return bool(heavy) and all(group.kind in _STRIDED for group in touching)


def _no_views_now(graph: Graph, padded: Graph, groups: Sequence[Group]) -> Iterator[int]:
    """Operands in memory of which, padded, no strides make what a library product reads."""
    products = (group.anchors[0] for group in groups if group.kind is GroupKind.LIBRARY)
    for position in (p for product in products for p in graph.nodes[product].args):
        base = strided_view(graph, position).base
        if strided_view(padded, position).base != base:
            yield base
