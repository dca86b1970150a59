"""Versions of inputs that are written to: which memory a `PUT` lies in, and where in it an element of its place is."""

from __future__ import annotations

from typing import cast

from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import Position, sources
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Dim, literal


def chain(graph: Graph, place: int) -> tuple[int, ...]:
    """The views and gathers that a place is made of, the last first, and, at the end, the version that it is a place in."""
    found = [place]
    while graph.nodes[found[-1]].family in (Family.VIEW, Family.INDEXING):
        found.append(graph.nodes[found[-1]].args[0])
    return tuple(found)


def base(graph: Graph, put: int) -> int:
    """The version of which a `PUT` is the next one."""
    return chain(graph, graph.nodes[put].args[0])[-1]


def owner(graph: Graph, version: int) -> int:
    """The input in whose memory a version lies."""
    while graph.nodes[version].op is Op.PUT:
        version = base(graph, version)
    return version


def gathers(graph: Graph, put: int) -> tuple[int, ...]:
    """The gathers in the place that is written to: their indices say where, in part."""
    return tuple(p for p in chain(graph, graph.nodes[put].args[0]) if graph.nodes[p].family is Family.INDEXING)


def chosen(graph: Graph, put: int, index: Position, axes: Axes) -> tuple[tuple[int, int, Position], ...]:
    """The gathers in the place that is written to, each with the value that is its index, and where an element's is."""
    found: list[tuple[int, int, Position]] = []
    for position in chain(graph, graph.nodes[put].args[0])[:-1]:
        operand, *indices = sources(graph, position, index, axes)
        found += [(position, value.arg, value.index) for value in indices]
        index = operand.index
    return tuple(found)


def are_apart(graph: Graph, put: int, other: int) -> bool:
    """Whether two places in one memory have certainly no element in common: the same views lead to slices that do not meet."""
    chains = [reversed(chain(graph, graph.nodes[p].args[0])[:-1]) for p in (put, other)]
    for one, two in zip(*chains, strict=False):
        a, b = graph.nodes[one], graph.nodes[two]
        if (a.op, a.attrs, a.args[1:]) != (b.op, b.attrs, b.args[1:]):
            return a.op is b.op is Op.SLICE and a.attr("dim") == b.attr("dim") and _do_not_meet(a, b)
    return False


def _do_not_meet(one: Node, other: Node) -> bool:
    """Whether two slices of a dim have no element in common, by where they begin and end."""
    starts, ends = [], []
    for node in (one, other):
        numbers = [literal(cast(Dim, node.attr(name))) for name in ("start", "length", "step")]
        if None in numbers:
            return False
        start, length, step = (n or 0 for n in numbers)
        starts.append(start)
        ends.append(start + (length - 1) * step)
    return ends[0] < starts[1] or ends[1] < starts[0]


def address(graph: Graph, put: int, index: Position, axes: Axes) -> Position:
    """Where in the version's shape an element of the place lies; an `IndexValue` where only a gather's index says it."""
    for position in chain(graph, graph.nodes[put].args[0])[:-1]:
        index = sources(graph, position, index, axes)[0].index
    return index
