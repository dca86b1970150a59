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
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, literal, product
from fusegen.passes.algebra import Value

_REDUCTIONS = (Op.SUM, Op.PROD, Op.AMAX, Op.AMIN)
_LONGEST = 4096  # elements of a row
_LONGEST_NORMALIZED = 16384  # of one whose kernel reduces it anyway

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
    builder = GraphBuilder.like(graph)
    moved: list[int] = []
    for position, node in graph:
        rebuilt = replace(node, args=tuple(moved[a] for a in node.args))
        if position in chosen:
            operand = Value(builder, rebuilt.args[0], graph.locations[position])
            moved.append(_in_two_steps(node, operand, _own_row(graph, node.args[0])).position)
        else:
            moved.append(builder.put(rebuilt, graph.locations[position]))
    return builder.build([moved[o] for o in graph.outputs], [moved[w] for w in graph.writes])


def _in_two_steps(node: Node, operand: Value, own: int) -> Value:
    """The reduction of rows, and of their results.

    Args:
        own: the dim from which on the last dims are a row; the number of dims where a row is a part of them.
    """
    shape = operand.node.shape
    if own < len(shape):
        rows = operand.reduce(node.op, tuple(range(own, len(shape))))
        return _shaped(rows.reduce(node.op, tuple(range(len(shape)))), node.shape)
    first, row = _first_literal(shape), _row(shape)
    leading = (*shape[:first], prod(cast(tuple[int, ...], shape[first:])) // row)
    rows = operand.apply(Op.RESHAPE, shape=(*leading, row)).reduce(node.op, (len(leading),))
    ones = (1,) * max(0, len(shape) - len(leading))  # so that the result has the shape of what it is in place of
    rows = rows.apply(Op.RESHAPE, shape=(*leading, *ones))
    return _shaped(rows.reduce(node.op, tuple(range(len(leading)))), node.shape)


def _shaped(value: Value, shape: Shape) -> Value:
    return value if value.node.shape == shape else value.apply(Op.RESHAPE, shape=shape)


def _own_row(graph: Graph, operand: int) -> int:
    """The dim from which on the last dims of a value are a row that it is reduced along on its way, as in a norm, so that one
    kernel reduces it for both; the number of dims where there is no such row."""
    shape = graph.nodes[operand].shape
    for position in sorted(graph.ancestors[operand]):
        node = graph.nodes[position]
        if node.family is Family.REDUCTION and graph.nodes[node.args[0]].shape == shape:
            dims = cast(tuple[int, ...], node.attr("dims"))
            length = literal(product(shape[d] for d in dims))
            is_last = dims == tuple(range(len(shape) - len(dims), len(shape)))
            if is_last and length is not None and 1 < length <= _LONGEST_NORMALIZED and len(dims) < len(shape):
                return dims[0]
    return len(shape)


def _row(shape: Shape) -> int:
    """The length of a row: the largest one that the last dims have room for a number of times; 1 where nothing is known of them."""
    known = prod(cast(tuple[int, ...], shape[_first_literal(shape) :]))
    return next(divisor for divisor in range(min(known, _LONGEST), 0, -1) if known % divisor == 0) if known else 1


def _first_literal(shape: Shape) -> int:
    """The first of the last dims that are all known."""
    unknown = [dim for dim, extent in enumerate(shape) if literal(extent) is None]
    return unknown[-1] + 1 if unknown else 0
