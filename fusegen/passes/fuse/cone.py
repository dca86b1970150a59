"""The cone of a value: what computing it at one point of an iteration space takes.

The walk follows index maps from the value down to memory. It stops at what must lie in memory; a reduction stays inside
when it is read exactly at the row that is being computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, Position, identity_axes, sources
from fusegen.ir.ops import Family, Op
from fusegen.ir.spread import check_spread
from fusegen.ir.symbolic import Axes, same
from fusegen.passes.fuse.groups import Domain

Accepts: TypeAlias = Callable[[int, Position, tuple[Bounds, ...]], bool]
"""Whether a reduction, scan or product may be computed inside, read at an index under some conditions."""


@dataclass
class Cone:
    """What a walk found: nodes in memory that it reads, and the reductions, scans and products that it computes."""

    inputs: dict[int, None] = field(default_factory=dict)
    anchors: dict[int, None] = field(default_factory=dict)


def walk(
    graph: Graph, root: int, index: Position, axes: Axes, accepts: Accepts, cone: Cone, kept: Collection[int] = frozenset()
) -> None:
    """Adds to a cone what ``root`` at ``index`` needs.

    Args:
        accepts: says what may be computed inside.
        kept: values that are read from memory, though they could be computed inside.
        cone: gets what is found.

    Raises:
        UnsupportedError: that is too much for a kernel.
    """
    seen: set[tuple[int, Position, tuple[Bounds, ...]]] = set()
    stack: list[tuple[int, Position, tuple[Bounds, ...]]] = [(root, index, ())]
    while stack:
        element = position, at, bounds = stack.pop()
        if element in seen:
            continue
        seen.add(element)
        check_spread(graph, len(seen))
        family = graph.nodes[position].family
        if position in kept and position != root:
            cone.inputs[position] = None
        elif family in (Family.POINTWISE, Family.VIEW):
            for source in sources(graph, position, at, axes):
                stack.append((source.arg, source.index, bounds if source.bounds is None else (*bounds, source.bounds)))
        elif family is Family.LEAF:
            if graph.nodes[position].op is Op.INPUT:
                cone.inputs[position] = None
        elif not accepts(position, at, bounds):
            cone.inputs[position] = None
        else:
            cone.anchors[position] = None
            if family is Family.SCAN:
                stack.append((graph.nodes[position].args[0], at, bounds))
            elif family is Family.REDUCTION:
                stack.append((graph.nodes[position].args[0], operand_index(graph, position, at, axes), bounds))


def operand_index(graph: Graph, reduction: int, at: Position, axes: Axes) -> Position:
    """Where a reduction's operand is evaluated: at the same row, all along the reduced dims."""
    dims = reduced_dims(graph, reduction)
    return tuple(axes.symbols[d] if d in dims else i for d, i in enumerate(at))


def reduced_dims(graph: Graph, reduction: int) -> tuple[int, ...]:
    """The dims that a reduction sums up."""
    return cast(tuple[int, ...], graph.nodes[reduction].attr("dims"))


def is_row_aligned(graph: Graph, reduction: int, at: Position, domain: Domain, axes: Axes) -> bool:
    """Whether a reduction is over the domain's columns, and read at the row that is being computed."""
    return _aligned(graph, reduction, at, domain, axes, domain.columns)


def is_column_aligned(graph: Graph, reduction: int, at: Position, domain: Domain, axes: Axes) -> bool:
    """Whether a reduction is over the domain's rows, and read at the column that is being computed."""
    return _aligned(graph, reduction, at, domain, axes, domain.rows)


def _aligned(graph: Graph, reduction: int, at: Position, domain: Domain, axes: Axes, over: tuple[int, ...]) -> bool:
    shape = graph.nodes[graph.nodes[reduction].args[0]].shape
    if reduced_dims(graph, reduction) != over or len(shape) != len(domain.shape) or not all(map(same, shape, domain.shape)):
        return False
    return all(i == (0 if d in over else _axis(axes, d)) for d, i in enumerate(at))


def _axis(axes: Axes, dim: int) -> object:
    """How an index map writes the axis of a dim: extents of 1 are read at 0."""
    return 0 if same(axes.extents[dim], 1) else axes.symbols[dim]


def domain_axes(domain: Domain) -> Axes:
    """The axes of a domain, one a dim."""
    return identity_axes(domain.shape)
