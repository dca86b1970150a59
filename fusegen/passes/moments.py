"""Means of long rows and sums of squares about them, as parts of one reduction: warps and blocks that share a row wait for each
other once then and not twice, and each element is looked at once less.

Short rows keep two sums: those wait for memory in any case, and a sum has fewer parts to combine. So do rows of 32 bits: where what
comes first is the greatest by far, a sum of squares about it loses a few of their last bits, far beyond the 16 of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.ops import Family, Op
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
    """True if what is subtracted is the mean: a sum by a count, or times a share of 1."""
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


_LONGEST_HELD = 32768
"""Elements of a row up to which the registers or the shared memory of a multiprocessor hold it."""


def with_peaks(graph: Graph) -> Graph:
    """The graph in which held rows have their normalizers reduced in two steps: not for CPUs, where a thread reads a row once."""
    if not any(_is_held(graph, node) for node in graph.nodes):
        return graph

    def replaced(builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        node = graph.nodes[position]
        if not _is_held(graph, node):
            return None
        (rows,) = node.args
        is_widened = graph.nodes[rows].op is Op.CAST and is_of_16_bits(graph, rows)
        place = moved[graph.nodes[rows].args[0] if is_widened else rows]  # the same numbers, which others read as well
        found = _part(Value(builder, place, graph.locations[position]), node)
        return (found if found.dtype is node.dtype else found.apply(Op.CAST, dtype=node.dtype)).position

    return rebuilt(graph, replaced)


# Normalizers of rows that a kernel holds, as a maximum and the sum of exponentials below it: that takes one exponential an
# element and no choice, and shares both with a softmax of the same rows. What is not held has its normalizer in one pass over
# memory. The maximum of rows that a softmax caps, s tanh(x / s), is the cap of their maximum: a hyperbolic tangent a row, not
# one an element.


def with_capped_peaks(graph: Graph) -> Graph:
    """The graph in which the maximum of capped rows of an input is that of the rows, capped, where a softmax alone reads it.

    A cap rises with x, whatever the sign of s. As computed it may fall by a few units in the last place, so that an element may lie
    above the maximum by as much: a softmax is the same about any number, and so is its logarithm. What else reads a maximum relies
    on it.
    """
    peaks = {
        p: capped for p, node in graph if node.op is Op.AMAX and (capped := _cap(graph, node.args[0])) and _is_of_softmax(graph, p)
    }
    if not peaks:
        return graph

    def replaced(builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        if position not in peaks:
            return None
        rows, scale = (Value(builder, moved[p], graph.locations[position]) for p in peaks[position])
        dims = graph.nodes[position].attr("dims")
        assert isinstance(dims, tuple)
        return (scale * (rows.reduce(Op.AMAX, dims) / scale).apply(Op.TANH)).position

    return rebuilt(graph, replaced)


def _cap(graph: Graph, position: int) -> tuple[int, int] | None:
    """x and s of s tanh(x / s), for a number s and an input x; None where a value is no such cap."""
    product = graph.nodes[position]
    for scale, factor in (product.args, product.args[::-1]) if product.op is Op.MUL else ():
        tangent = graph.nodes[factor]
        quotient = graph.nodes[tangent.args[0]] if tangent.op is Op.TANH else tangent
        is_cap = quotient.op is Op.DIV and quotient.args[1] == scale and graph.nodes[scale].op in (Op.SCALAR, Op.CONSTANT)
        if is_cap and _is_read(graph, quotient.args[0]):
            return quotient.args[0], scale
    return None


def _is_read(graph: Graph, position: int) -> bool:
    """True if a value is an input, viewed or converted: the scores of attention are for its pipeline to find."""
    node = graph.nodes[position]
    while node.op is Op.CAST or (node.family is Family.VIEW and len(node.args) == 1):
        node = graph.nodes[node.args[0]]
    return node.op is Op.INPUT


def _is_of_softmax(graph: Graph, peak: int) -> bool:
    """True if nothing reads a maximum of rows but exponentials of the rows below it, and their logarithm."""
    (rows,) = graph.nodes[peak].args
    below = [graph.nodes[user] for user in graph.users[peak]]
    is_below = all(node.op in (Op.SUB, Op.EXP_BELOW) and node.args == (rows, peak) for node in below)
    distances = [user for user in graph.users[peak] if graph.nodes[user].op is Op.SUB]
    is_shared = all(_is_in_softmax(graph, distance, user) for distance in distances for user in graph.users[distance])
    return is_below and is_shared and not {peak, *distances} & set(graph.outputs)


def _is_in_softmax(graph: Graph, distance: int, user: int) -> bool:
    """True if a user of rows below their maximum takes their exponential, a sum of them, or the logarithm of the mass from them."""
    node = graph.nodes[user]
    if node.op is Op.SUB and node.args[0] == distance:
        logarithm = graph.nodes[node.args[1]]
        mass = graph.nodes[logarithm.args[0]] if logarithm.op is Op.LOG else logarithm
        return mass.op is Op.SUM and graph.nodes[mass.args[0]].op is Op.EXP and graph.nodes[mass.args[0]].args == (distance,)
    return node.op in (Op.EXP, Op.SUM)


def _is_held(graph: Graph, node: Node) -> bool:
    """True if a node is a part of the normalizer of rows that are short enough to stay on the chip; columns never do."""
    if node.op is not Op.NORMALIZER:
        return False
    shape, dims = graph.nodes[node.args[0]].shape, node.attr("dims")
    assert isinstance(dims, tuple)
    count = literal(product(shape[d] for d in dims))
    return count is not None and count <= _LONGEST_HELD and dims == tuple(range(len(shape) - len(dims), len(shape)))


def _part(rows: Value, node: Node) -> Value:
    dims = node.attr("dims")
    assert isinstance(dims, tuple)
    peak = rows.reduce(Op.AMAX, dims)
    return peak if node.attr("part") == "peak" else rows.apply(Op.EXP_BELOW, peak).reduce(Op.SUM, dims)
