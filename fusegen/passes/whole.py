"""Reductions of a whole tensor: row by row, and then of the rows' results.

One row alone is one block of threads, or one cluster: it reads at a small part of the memory's speed, and adds many numbers one
after the other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod
from typing import cast

from fusegen.ir.graph import Graph, GraphBuilder, Node, Shape
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, literal, product
from fusegen.passes.algebra import Value

_REDUCTIONS = (Op.SUM, Op.PROD, Op.AMAX, Op.AMIN)
_LONGEST = 4096  # elements of a row

FEW = 1 << 17
"""Elements that one block reduces as fast as two launches do."""


def whole_reductions(graph: Graph) -> dict[int, Dim]:
    """The reductions that could go row by row, with the numbers of elements that they combine."""
    found = {}
    for position, node in graph:
        if node.op in _REDUCTIONS:
            shape = graph.nodes[node.args[0]].shape
            if len(cast(tuple[int, ...], node.attr("dims"))) == len(shape) and _row(shape) > 1:
                found[position] = product(shape)
    return found


def by_rows(graph: Graph, chosen: Collection[int]) -> Graph:
    """The graph in which some of its `whole_reductions` go row by row first."""
    if not chosen:
        return graph
    builder = GraphBuilder(graph.name).like(graph)
    builder.derived = graph.derived
    moved: list[int] = []
    for position, node in graph:
        rebuilt = replace(node, args=tuple(moved[a] for a in node.args))
        if position in chosen:
            moved.append(_in_two_steps(node, Value(builder, rebuilt.args[0], graph.locations[position])).position)
        else:
            moved.append(builder.put(rebuilt, graph.locations[position]))
    return builder.build([moved[o] for o in graph.outputs], [moved[w] for w in graph.writes])


def _in_two_steps(node: Node, operand: Value) -> Value:
    shape = operand.node.shape
    first, row = _first_literal(shape), _row(shape)
    leading = (*shape[:first], prod(cast(tuple[int, ...], shape[first:])) // row)
    rows = operand.apply(Op.RESHAPE, shape=(*leading, row)).reduce(node.op, (len(leading),))
    ones = (1,) * max(0, len(shape) - len(leading))  # so that the result has the shape of what it is in place of
    rows = rows.apply(Op.RESHAPE, shape=(*leading, *ones))
    total = rows.reduce(node.op, tuple(range(len(leading))))
    return total if total.node.shape == node.shape else total.apply(Op.RESHAPE, shape=node.shape)


def _row(shape: Shape) -> int:
    """The length of a row: the largest one that the last dims have room for a number of times; 1 where nothing is known of them."""
    known = prod(cast(tuple[int, ...], shape[_first_literal(shape) :]))
    return next(divisor for divisor in range(min(known, _LONGEST), 0, -1) if known % divisor == 0) if known else 1


def _first_literal(shape: Shape) -> int:
    """The first of the last dims that are all known."""
    unknown = [dim for dim, extent in enumerate(shape) if literal(extent) is None]
    return unknown[-1] + 1 if unknown else 0
