"""Normalizers of rows that a kernel holds, as a maximum and the sum of exponentials below it: that takes one exponential an element
and no choice, and shares both with a softmax of the same rows. What is not held has its normalizer in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal, product
from fusegen.passes.algebra import Value
from fusegen.passes.moments import is_of_16_bits
from fusegen.passes.rebuilt import rebuilt
from fusegen.target import Backend, Target

_LONGEST_HELD = 32768
"""Elements of a row up to which the registers or the shared memory of a multiprocessor hold it."""


def with_peaks(graph: Graph, target: Target) -> Graph:
    """The graph in which held rows have their normalizers reduced in two steps, on GPUs; a thread of a CPU reads a row once."""
    if target.backend is Backend.CPU or not any(_is_held(graph, node) for node in graph.nodes):
        return graph

    def replaced(builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        node = graph.nodes[position]
        if not _is_held(graph, node):
            return None
        (rows,) = node.args
        is_widened = graph.nodes[rows].op is Op.CAST and is_of_16_bits(graph, rows)
        place = moved[graph.nodes[rows].args[0] if is_widened else rows]  # of the same numbers, which others read as well
        found = _part(Value(builder, place, graph.locations[position]), node)
        return (found if found.dtype is node.dtype else found.apply(Op.CAST, dtype=node.dtype)).position

    return rebuilt(graph, replaced)


def _is_held(graph: Graph, node: Node) -> bool:
    """True if a node is a part of the normalizer of rows that are short enough to stay on the chip; columns never do."""
    if node.op is not Op.NORMALIZER:
        return False
    shape, dims = graph.nodes[node.args[0]].shape, node.attr("dims")
    count = literal(product(shape[d] for d in dims)) if isinstance(dims, tuple) else None
    return count is not None and count <= _LONGEST_HELD and dims == tuple(range(len(shape) - len(dims), len(shape)))


def _part(rows: Value, node: Node) -> Value:
    dims = node.attr("dims")
    assert isinstance(dims, tuple)
    peak = rows.reduce(Op.AMAX, dims)
    return peak if node.attr("part") == "peak" else rows.apply(Op.EXP_BELOW, peak).reduce(Op.SUM, dims)
