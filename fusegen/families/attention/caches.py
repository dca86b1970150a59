"""Keys and values that are stored in 8 bits. The kernel multiplies the stored elements, whose conversion to 16 bits is exact, and
applies their factors to the sums: torch rounds each product of an element and its factor to 16 bits first."""

from __future__ import annotations

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Passed, Position, elements_below, identity_axes, sources
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, same

STORED = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8)


def stored_operands(graph: Graph, operand: int, where: int | None = None) -> Passed | None:
    """Returns the conversions and multiplications between keys or values and their stored elements of 8 bits; None if there are
    other operations, or if a factor depends on the key or the channel, which are the last two dims.

    Args:
        where: passed as if it chose its second operand everywhere.
    """
    passed: list[tuple[int, int]] = []
    position = operand
    while graph.nodes[position].dtype not in STORED:
        number = _stored_operand(graph, position, where)
        if number is None:
            return None
        if graph.nodes[position].family is not Family.VIEW:
            passed.append((position, number))
        position = graph.nodes[position].args[number]
    axes = identity_axes(graph.nodes[operand].shape)
    indices = [at for _, at in _factors(graph, operand, tuple(passed), axes.symbols, axes)]
    return None if any(sympy.sympify(i).has(*axes.symbols[-2:]) for at in indices for i in at) else tuple(passed)


def _stored_operand(graph: Graph, position: int, where: int | None) -> int | None:
    """Returns the number of the operand that may hold the stored elements of a value, or None."""
    node = graph.nodes[position]
    if position == where:
        return 1
    if (node.family is Family.VIEW and node.op is not Op.CONCAT) or (node.op is Op.CAST and node.dtype.is_float):
        return 0
    if node.op is not Op.MUL or not node.dtype.is_float:
        return None
    shapes = [graph.nodes[a].shape for a in node.args]
    whole = [n for n, shape in enumerate(shapes) if len(shape) == len(node.shape) and all(map(same, shape, node.shape))]
    return whole[0] if len(whole) == 1 else None


def factors(graph: Graph, product: int, passed: Passed, index: Position, axes: Axes) -> list[tuple[int, Position]]:
    """Returns the factors of the second operand of a matmul for an element of the result, as elements of nodes."""
    operand = without_widening(graph, graph.nodes[product].args[1])
    heads = (0 if same(extent, 1) else i for extent, i in zip(graph.nodes[operand].shape[:-2], index[:-2], strict=True))
    return _factors(graph, operand, passed, (*heads, 0, index[-1]), axes)


def _factors(graph: Graph, operand: int, passed: Passed, index: Position, axes: Axes) -> list[tuple[int, Position]]:
    found: list[tuple[int, Position]] = []
    for position, number in passed:
        if graph.nodes[position].op is Op.MUL:
            at = dict(elements_below(graph, operand, index, axes, passed))[position]
            factor = sources(graph, position, at, axes)[1 - number]
            found.append(elements_below(graph, factor.arg, factor.index, axes)[-1])
    return found


def without_widening(graph: Graph, position: int) -> int:
    """Skips a conversion to float32: tensor cores accumulate exact products of 16-bit floats in float32 anyway."""
    node = graph.nodes[position]
    is_widened = node.op is Op.CAST and node.dtype is DType.FLOAT32 and graph.nodes[node.args[0]].dtype.is_half
    return node.args[0] if is_widened else position
