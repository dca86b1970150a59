"""The elements of an iteration space that one thread computes together.

A rotation computes two elements, neighbours or half the channels apart, from the same two operands. A thread that computes both
reads each once and may write in place. Conditions on the index become constants; each half of a stack becomes a separate result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy

from fusegen.fusion.groups import Domain, Group
from fusegen.fusion.producers import Producers, domain_axes, reduced_dims, walk
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, Position, broadcast_index
from fusegen.ir.reductions import operation_of
from fusegen.ir.symbolic import Axes, Dim, Index, Modulo, literal, same, simplify_dim
from fusegen.passes.topk import MOST, is_from_topk

_MOST = 8  # elements per thread, each with results and operands in registers
_MOST_ELEMENTS = 512  # most values visited for a thread's elements
_FEW = 4  # a thread computes all elements of an axis this short


@dataclass(frozen=True)
class Space:
    """An iteration space in which a thread computes several elements of a group's domain at each index.

    Attributes:
        points: the elements' indices in the domain, in terms of the axes.
    """

    axes: Axes
    points: tuple[Position, ...]


def unrolled(graph: Graph, group: Group) -> Space:
    """Returns a space in which a thread computes elements that share reads together; the domain itself if there are none."""
    axes = domain_axes(group.domain)
    space = Space(axes, (axes.symbols,))
    if group.core_nodes and not (_reduces_rows(graph, group) and _goes_along_rows(graph, group)):
        return space
    while (finer := next(_unrolled_spaces(graph, group, space), None)) is not None:
        space = finer
    return space


def _reduces_rows(graph: Graph, group: Group) -> bool:
    """True if a group reduces only along its rows, by operations that a thread can start with its own elements."""
    if any(operation_of(graph.nodes[node].op) is None for node in group.core_nodes):
        return False
    return all(reduced_dims(graph, node) == group.domain.columns for node in group.core_nodes)


def _goes_along_rows(graph: Graph, group: Group) -> bool:
    """True if each result has one element per column or per row, not a few per row or one per segment."""
    axes = domain_axes(group.domain)
    indices = [row_elements(graph, output, group.domain, axes) for output in group.outputs]
    return all(len(elements) == 1 and not is_per_segment(group.domain, elements[0], axes) for elements in indices)


def producers_of(graph: Graph, group: Group, axes: Axes, point: Position) -> Producers:
    """Returns the producers of a group's outputs at an index of its domain, in terms of some axes."""
    producers = Producers()
    for root in group.outputs:
        index = broadcast_index(graph.nodes[root].shape, point)
        walk(graph, root, index, axes, lambda position, *_: position in group.core_nodes, producers, frozenset(group.inputs))
    return producers


def _unrolled_spaces(graph: Graph, group: Group, space: Space) -> Iterator[Space]:
    """Yields spaces in which each thread computes several elements of `space`, where that pays off."""
    several = [producers_of(graph, group, space.axes, point) for point in space.points]
    conditions, visited = (
        [bounds for producers in several for bounds in producers.conditions],
        sum(producers.visited for producers in several),
    )
    if not conditions:
        return
    for number, (axis, extent) in enumerate(zip(space.axes.symbols, space.axes.extents, strict=True)):
        length = literal(extent)
        split = None if length is None else _split(axis, length, conditions)
        if split is None or split.count * len(space.points) > _MOST or split.count * visited > _MOST_ELEMENTS:
            continue
        if group.domain.columns and (number not in group.domain.columns or split.rest == 1):
            continue  # a thread's elements are in one row, which must continue along the axis
        finer = split.of(space, number)
        is_innermost = split.count == length and number == len(space.axes.symbols) - 1
        if is_innermost or _shares_reads(graph, group, finer, axis):
            yield finer


@dataclass(frozen=True)
class _Split:
    """A split of an axis: a thread computes ``count`` elements, ``step`` apart (1 or ``rest``). The new extent is ``rest``."""

    count: int
    rest: int
    step: int

    def of(self, space: Space, number: int) -> Space:
        axis = space.axes.symbols[number]
        start = 0 if self.rest == 1 else axis * (self.count if self.step == 1 else 1)
        elements = [(axis, start + self.step * m) for m in range(self.count)]
        points = tuple(tuple(_substituted(i, *pair) for i in point) for point in space.points for pair in elements)
        symbols, extents = list(space.axes.symbols), list(space.axes.extents)
        if self.rest == 1:
            del symbols[number], extents[number]
        else:
            extents[number] = self.rest
        return Space(Axes(tuple(symbols), tuple(extents)), points)


def _split(axis: sympy.Symbol, extent: int, conditions: Sequence[Bounds]) -> _Split | None:
    """Splits an axis so that conditions on it become constant: a short axis whole, by index modulo a count, or into equal parts."""
    own = [bounds for bounds in conditions if sympy.sympify(bounds.index).has(axis)]
    if not own or extent < 2:
        return None
    if extent <= _FEW:
        return _Split(extent, 1, 1)
    remainders = {call for bounds in own for call in sympy.sympify(bounds.index).atoms(Modulo) if call.args[0] == axis}
    if remainders:
        counts = [literal(call.args[1]) for call in remainders]
        (count,) = counts if len(counts) == 1 else (None,)
        return _Split(count, extent // count, 1) if count is not None and 2 <= count <= _FEW and extent % count == 0 else None
    cuts = [cut for bounds in own for cut in _cuts(axis, bounds)]
    if None in cuts:
        return None
    length = math.gcd(extent, *(cut for cut in cuts if cut is not None))
    return _Split(extent // length, length, length) if length < extent else None


def _cuts(axis: sympy.Symbol, bounds: Bounds) -> list[int | None]:
    """Returns the indices of an axis where a condition begins and ends to hold; None for a bound that is unknown or depends on
    other axes."""
    index = sympy.expand(bounds.index)
    step = literal(index.coeff(axis))
    ends = [
        literal(sympy.expand(end - index + index.coeff(axis) * axis)) for end in (bounds.lower, bounds.upper) if end is not None
    ]
    return [None if end is None or not step or step < 0 else -(-end // step) for end in ends]


def _shares_reads(graph: Graph, group: Group, space: Space, axis: sympy.Symbol) -> bool:
    """True if elements of one thread read a common element that varies along the axis."""
    several = [producers_of(graph, group, space.axes, point) for point in space.points]
    read = [{(p, at) for p, at in producers.elements if any(sympy.sympify(i).has(axis) for i in at)} for producers in several]
    return len(set().union(*read)) < sum(map(len, read))


def _substituted(index: Index, axis: sympy.Symbol, by: Index) -> Index:
    return index if isinstance(index, int) else simplify_dim(index.subs(axis, by))


# The elements of a row that a result has: one per column, one per segment, or a few that are written one by one.


def row_elements(graph: Graph, position: int, domain: Domain, axes: Axes) -> tuple[Position, ...]:
    """Returns the indices of a value's elements that a kernel writes at a row of a domain's axes: one along the columns or
    segments, a single element, or a few. Empty if the value does not fit the domain."""
    shape = graph.nodes[position].shape
    if len(shape) != len(domain.shape):
        return ()
    own = tuple(0 if same(extent, 1) else axes.symbols[d] for d, extent in enumerate(shape))
    pairs = list(zip(shape, domain.shape, strict=True))
    if not all(same(a, b) for d, (a, b) in enumerate(pairs) if d not in domain.columns):
        return ()
    count = literal(shape[-1])
    if domain.columns == (len(shape) - 1,) and count is not None and 1 < count <= MOST and is_from_topk(graph.nodes, position):
        return tuple((*own[:-1], number) for number in range(count))
    is_full = all(same(a, b) for a, b in pairs)
    per_row = all(same(a, 1) for d, (a, _) in enumerate(pairs) if d in domain.columns)
    return (own,) if is_full or per_row or _is_one_a_segment(pairs, domain) else ()


def is_per_segment(domain: Domain, index: Position, axes: Axes) -> bool:
    """True if an index, from `row_elements`, is one per segment of a row."""
    *groups, last = (index[d] == axes.symbols[d] for d in domain.columns) if domain.segment else (False, False)
    return any(groups) and not last


def _is_one_a_segment(pairs: Sequence[tuple[Dim, Dim]], domain: Domain) -> bool:
    """True if a value has the domain's extents except for one element per segment."""
    if not domain.segment:
        return False
    *groups, last = domain.columns
    return same(pairs[last][0], 1) and all(same(*pairs[d]) for d in groups)
