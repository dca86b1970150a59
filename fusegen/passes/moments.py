"""Means of long rows and sums of squares about them, as parts of one reduction: warps and blocks that share a row wait for each
other once then and not twice, and each element is looked at once less.

Short rows keep two sums: those wait for memory in any case, and a sum has fewer parts to combine. So do rows of 32 bits: where what
comes first is the greatest by far, a sum of squares about it loses a few of their last bits, far beyond the 16 of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal, product
from fusegen.passes.algebra import Value
from fusegen.passes.rebuilt import rebuilt
from fusegen.target import Backend, Target

_LONG = 32768
"""Elements of a row above which the registers of one block do not hold it: it is staged, or several blocks share it."""


@dataclass(frozen=True)
class _Part:
    """The operands of a part of a state.

    Attributes:
        name: of the component.
        rows: the operand.
        dims: along which it is reduced.
    """

    name: str
    rows: int
    dims: tuple[int, ...]


def with_moments(graph: Graph, target: Target) -> Graph:
    """The graph in which long rows have their moments reduced at once, on GPUs; a thread of a CPU has rows for itself."""
    parts = {} if target.backend is Backend.CPU else dict(_parts(graph))
    if not parts:
        return graph

    def replaced(builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        if (part := parts.get(position)) is None:
            return None
        rows = Value(builder, moved[part.rows], graph.locations[position])
        return rows.reduce(Op.MOMENTS, part.dims, part=part.name).position

    return rebuilt(graph, replaced)


def _parts(graph: Graph) -> Iterator[tuple[int, _Part]]:
    """Each sum of the squares of long rows less their mean, and the mean."""
    nodes = graph.nodes
    for position, node in graph:
        square = nodes[node.args[0]] if node.op is Op.SUM else None
        if square is None or square.op is not Op.MUL or len(set(square.args)) > 1 or nodes[square.args[0]].op is not Op.SUB:
            continue
        rows, mean = nodes[square.args[0]].args
        dims = node.attr("dims")
        if isinstance(dims, tuple) and is_of_16_bits(graph, rows) and _is_mean(graph, mean, rows, dims):
            yield mean, _Part("mean", rows, dims)
            yield position, _Part("m2", rows, dims)


def is_of_16_bits(graph: Graph, rows: int) -> bool:
    """True if rows are 16 bits wide, or were before they were made wider."""
    node = graph.nodes[rows]
    return node.dtype.itemsize == 2 or (node.op is Op.CAST and graph.nodes[node.args[0]].dtype.itemsize == 2)


def _is_mean(graph: Graph, mean: int, rows: int, dims: tuple[int, ...]) -> bool:
    """Whether a value is the mean of long rows."""
    shape = graph.nodes[rows].shape
    count = literal(product(shape[d] for d in dims))
    is_along_rows = dims == tuple(range(len(shape) - len(dims), len(shape)))
    if count is None or count <= _LONG or not is_along_rows or graph.nodes[mean].op is not Op.MUL:
        return False
    total, share = graph.operands(mean)
    is_total = total.op is Op.SUM and total.args == (rows,) and total.attr("dims") == dims
    return is_total and share.op is Op.CONSTANT and float(share.number) == 1.0 / count
