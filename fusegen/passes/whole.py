"""Reductions of a whole tensor: row by row, and then of the rows' results.

One row alone is one block of threads, or one cluster: it reads at a small part of the memory's speed, and adds many numbers one
after the other.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import cast

from fusegen.ir.graph import Graph, GraphBuilder, Node, Shape
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal
from fusegen.passes.algebra import Value

_REDUCTIONS = (Op.SUM, Op.PROD, Op.AMAX, Op.AMIN)
_FEW = 1 << 17  # elements that one block reduces as fast as two launches do
_ROWS = 256  # that keep a GPU busy
_LEAST, _MOST = 512, 1 << 14  # elements of a row


def by_rows(graph: Graph) -> Graph:
    """The graph in which reductions of whole tensors, but of small ones, go row by row first."""
    builder = GraphBuilder(graph.name).like(graph)
    builder.derived = graph.derived
    moved: list[int] = []
    for position, node in graph:
        operand = Value(builder, moved[node.args[0]], graph.locations[position]) if node.op in _REDUCTIONS else None
        apart = None if operand is None else _apart(graph, node, operand)
        rebuilt = replace(node, args=tuple(moved[a] for a in node.args))
        moved.append(builder.put(rebuilt, graph.locations[position]) if apart is None else apart.position)
    return builder.build([moved[o] for o in graph.outputs], [moved[w] for w in graph.writes])


def _apart(graph: Graph, node: Node, operand: Value) -> Value | None:
    """A reduction in two steps; None where it is not of a whole tensor, or of few elements."""
    shape = operand.node.shape
    dims = cast(tuple[int, ...], node.attr("dims"))
    kept = [extent for dim, extent in enumerate(shape) if dim not in dims]
    elements = _most(graph, shape)
    if any(literal(extent) != 1 for extent in kept) or elements <= _FEW:
        return None
    first = _first_literal(shape)
    known = prod(extent for extent in shape[first:] if isinstance(extent, int))
    row = _divisor(known, min(_MOST, max(_LEAST, elements // _ROWS)))
    if row == 1:
        return None
    leading = (*shape[:first], known // row)
    rows = operand.apply(Op.RESHAPE, shape=(*leading, row)).reduce(node.op, (len(leading),))
    ones = (1,) * max(0, len(shape) - len(leading))
    rows = rows.apply(Op.RESHAPE, shape=(*leading, *ones))
    total = rows.reduce(node.op, tuple(range(len(leading))))
    return total if total.node.shape == node.shape else total.apply(Op.RESHAPE, shape=node.shape)


def _most(graph: Graph, shape: Shape) -> int:
    """The most elements of a shape; a great many where nothing is known of a size."""
    bounds = dict(graph.bounds)
    return prod(extent if isinstance(extent, int) else bounds.get(str(extent), _ROWS * _MOST) for extent in shape)


def _first_literal(shape: Shape) -> int:
    """The first of the last dims that are all known."""
    unknown = [dim for dim, extent in enumerate(shape) if literal(extent) is None]
    return unknown[-1] + 1 if unknown else 0


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most another."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
