"""Means of long rows and sums of squares about them, as parts of one reduction: warps and blocks that share a row wait for each
other once then and not twice, and each element is looked at once less.

Short rows keep two sums: those wait for memory in any case, and a sum has fewer parts to combine. So do rows of 32 bits: where what
comes first is the greatest by far, a sum of squares about it loses a few of their last bits, far beyond the 16 of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, literal, product, same
from fusegen.passes.algebra import Value
from fusegen.passes.rewrite import rebuilt

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


def with_moments(graph: Graph) -> Graph:
    """The graph in which long rows have their moments reduced at once: not for CPUs, where a thread has rows for itself."""
    parts = dict(_parts(graph))
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
    for position, _ in graph:
        found = deviations(graph, position)
        if found is not None and is_of_16_bits(graph, found.rows) and _is_long(graph, found):
            yield found.mean, _Part("mean", found.rows, found.dims)
            yield position, _Part("m2", found.rows, found.dims)


def is_of_16_bits(graph: Graph, rows: int) -> bool:
    """True if rows are 16 bits wide, or were before they were made wider."""
    node = graph.nodes[rows]
    return node.dtype.itemsize == 2 or (node.op is Op.CAST and graph.nodes[node.args[0]].dtype.itemsize == 2)


def _is_long(graph: Graph, found: Deviations) -> bool:
    shape = graph.nodes[found.rows].shape
    count = literal(product(shape[d] for d in found.dims))
    is_along_rows = found.dims == tuple(range(len(shape) - len(found.dims), len(shape)))
    return count is not None and count > _LONG and is_along_rows


@dataclass(frozen=True)
class Deviations:
    """A sum of the squares of rows less their mean.

    Attributes:
        rows: the operand.
        dims: along which it is reduced.
        mean: of it.
        centered, square: the differences and their squares.
    """

    rows: int
    dims: tuple[int, ...]
    mean: int
    centered: int
    square: int


def deviations(graph: Graph, position: int) -> Deviations | None:
    """The deviations whose squares a value is the sum of; None where it is none."""
    nodes, node = graph.nodes, graph.nodes[position]
    square = nodes[node.args[0]] if node.op is Op.SUM else None
    if square is None or square.op is not Op.MUL or len(set(square.args)) > 1 or nodes[square.args[0]].op is not Op.SUB:
        return None
    rows, mean = nodes[square.args[0]].args
    found = Deviations(rows, cast(tuple[int, ...], node.attr("dims")), mean, square.args[0], node.args[0])
    return found if _is_mean(graph, found) else None


def _is_mean(graph: Graph, found: Deviations) -> bool:
    """Whether what is subtracted is the mean: a sum by a count, or times a share of 1."""
    node = graph.nodes[found.mean]
    if node.op not in (Op.MUL, Op.DIV):
        return False
    total, share = graph.operands(found.mean)
    if total.op is not Op.SUM or total.args != (found.rows,) or total.attr("dims") != found.dims:
        return False
    count = product(graph.nodes[found.rows].shape[d] for d in found.dims)
    if node.op is Op.DIV:
        return share.op is Op.SIZE and same(cast(Dim, share.attr("size")), count)
    known = literal(count)
    return share.op is Op.CONSTANT and bool(known) and float(share.number) == 1.0 / cast(int, known)
