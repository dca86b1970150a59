"""The producers of a value at one index of an iteration space.

The walk follows index maps from the value to memory. It stops at materialized values; a reduction stays inside if it is read at
the row that is being computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from fusegen.dtypes import DType
from fusegen.fusion.groups import READ, Domain
from fusegen.ir.graph import Graph, Node, check_recompute
from fusegen.ir.index_map import Bounds, ElementSource, Position, holds, identity_axes, index_values, sources
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, same

ReadElement: TypeAlias = tuple[int, Position, tuple[Bounds, ...]]
"""An element of a node: the node, its index, and the conditions under which it is needed."""

Accepts: TypeAlias = Callable[[int, Position, tuple[Bounds, ...]], bool]
"""Returns True if the kernel may compute a reduction, scan or matmul that is read at this index under these conditions."""

_SMALL = 1 << 20  # largest constant added to an index in place: 32-bit indices leave this much room
_INDICES = (DType.INT32, DType.INT64)
_NUMBERS = (Op.CONSTANT, Op.SCALAR)
_INDEX_LEAVES = (Op.INPUT, Op.IOTA, Op.SIZE, Op.CONSTANT)


@dataclass
class Producers:
    """The result of a walk: values read from memory, including indices; the elements read; conditions that select between operands
    of concatenations; reductions, scans and matmuls computed inside (core nodes); the number of visited elements."""

    inputs: dict[int, None] = field(default_factory=dict)
    elements: dict[tuple[int, Position], None] = field(default_factory=dict)
    conditions: dict[Bounds, None] = field(default_factory=dict)
    core_nodes: dict[int, None] = field(default_factory=dict)
    visited: int = 0

    def read(self, position: int, at: Position) -> None:
        self.inputs[position] = None
        self.elements[position, at] = None


def walk(
    graph: Graph,
    root: int,
    index: Position,
    axes: Axes,
    accepts: Accepts,
    producers: Producers,
    materialized: Collection[int] = frozenset(),
) -> None:
    """Adds everything that ``root`` at ``index`` needs to ``producers``.

    Args:
        accepts: says which core nodes may be computed inside.
        materialized: values read from memory instead of being recomputed.

    Raises:
        UnsupportedError: too many elements for a kernel.
    """
    visit = _Walk(graph, root, axes, accepts, producers, materialized)
    seen: set[ReadElement] = set()
    stack: list[ReadElement] = [(root, index, ())]
    while stack:
        element = stack.pop()
        if element not in seen:
            seen.add(element)
            check_recompute(graph, len(seen))
            stack += visit.below(element)
    producers.visited += len(seen)


@dataclass(frozen=True)
class _Walk:
    graph: Graph
    root: int
    axes: Axes
    accepts: Accepts
    producers: Producers
    materialized: Collection[int]

    def below(self, element: ReadElement) -> list[ReadElement]:
        """Returns the elements that an element is computed from; records memory reads and core nodes."""
        position, at, bounds = element
        family = self.graph.nodes[position].family
        if (position in self.materialized and position != self.root) or _has_gathered_index(self.graph, position, at):
            return self._read(position, at)
        if family is Family.INDEXING:
            return self._indexed(element)
        if family in (Family.POINTWISE, Family.VIEW):
            return [(s.arg, s.index, bounds if s.bounds is None else (*bounds, s.bounds)) for s in self._sources(position, at)]
        if family is Family.LIBRARY:
            return self._read(position, at)
        if family is Family.LEAF:
            return self._read(position, at) if self.graph.nodes[position].op in READ else []
        return self._anchored(element) if self.accepts(position, at, bounds) else self._read(position, at)

    def _sources(self, position: int, at: Position) -> list[ElementSource]:
        """Returns the sources of an element; records the conditions that select between them."""
        elements = sources(self.graph, position, at, self.axes)
        possible = [(s, s.bounds is None or holds(s.bounds, self.axes)) for s in elements]
        self.producers.conditions |= {s.bounds: None for s, known in possible if s.bounds is not None and known is None}
        return [s for s, known in possible if known is not False]

    def _read(self, position: int, at: Position) -> list[ReadElement]:
        self.producers.read(position, at)
        return []

    def _indexed(self, element: ReadElement) -> list[ReadElement]:
        position, at, bounds = element
        if bounds and position != self.root and _selects_coordinates(self.graph, position):
            return self._read(position, at)
        operand, chosen = sources(self.graph, position, at, self.axes)
        computed = computed_index(self.graph, chosen.arg)
        if computed is None:
            return [(operand.arg, operand.index, bounds), (chosen.arg, chosen.index, bounds)]
        self.producers.inputs[computed] = None
        return [(operand.arg, operand.index, bounds)]

    def _anchored(self, element: ReadElement) -> list[ReadElement]:
        position, at, bounds = element
        self.producers.core_nodes[position] = None
        node = self.graph.nodes[position]
        if node.family is Family.REDUCTION:
            return [(node.args[0], operand_index(self.graph, position, at, self.axes), bounds)]
        return [(node.args[0], at, bounds)] if node.family in (Family.SCAN, Family.ORDER) else []


def computed_index(graph: Graph, position: int) -> int | None:
    """Returns the value that must be materialized before a kernel can use an index.

    None if the kernel can read the index from memory, possibly adding a constant.
    """
    leaf = _index_leaf(graph, position)
    node = graph.nodes[leaf]
    is_plain = node.family is Family.INDEXING and all(graph.nodes[_index_leaf(graph, a)].op is Op.INPUT for a in node.args)
    return None if node.op in _INDEX_LEAVES or is_plain else leaf


def _index_leaf(graph: Graph, position: int) -> int:
    """Returns the value below views of an index, widening casts, additions of small constants, and replacements of one number by
    another."""
    added = 0
    while True:
        node = graph.nodes[position]
        numbers = [n.number for n in graph.operands(position) if n.op is Op.CONSTANT and not n.dtype.is_float]
        if node.op is Op.WHERE and (passed := _passed_through(graph, node)) is not None:
            position = passed
            continue
        is_view = node.family is Family.VIEW and node.op is not Op.CONCAT
        if is_view or (node.op is Op.CAST and node.dtype is DType.INT64 and graph.operands(position)[0].dtype in _INDICES):
            below = node.args[0]
        elif node.op is Op.ADD and node.dtype is DType.INT64 and len(numbers) == 1:
            below = next(a for a in node.args if graph.nodes[a].op is not Op.CONSTANT)
            added += abs(int(numbers[0]))
        else:
            return position
        if added > _SMALL or graph.nodes[below].op is Op.SCALAR:
            return position
        position = below


def _passed_through(graph: Graph, choice: Node) -> int | None:
    """Returns the integer that ``where(value != number, value, other number)`` passes through; None for other choices."""
    condition, value, instead = (graph.nodes[a] for a in choice.args)
    if condition.op is not Op.NE or condition.args[0] != choice.args[1] or not value.dtype is choice.dtype is DType.INT64:
        return None
    numbers = instead, graph.nodes[condition.args[1]]
    return choice.args[1] if all(n.op in _NUMBERS and not n.dtype.is_float for n in numbers) else None


def _has_gathered_index(graph: Graph, position: int, at: Position) -> bool:
    """True if a value must be materialized because it is read at data-dependent indices. A concatenation could not select its
    operand, and nested gathers would recurse without end."""
    node = graph.nodes[position]
    if node.op is Op.CONCAT:
        return bool(index_values([at[cast(int, node.attr("dim"))]]))
    return node.family is Family.INDEXING and any(len(index_values([v])) > 1 for v in index_values(at))


def _selects_coordinates(graph: Graph, gather: int) -> bool:
    """True if a gather reads coordinates: its result is then the index, which the kernel reads unconditionally."""
    operand = graph.nodes[gather].args[0]
    return any(graph.nodes[p].op is Op.IOTA for p in (operand, *graph.ancestors[operand]))


def operand_index(graph: Graph, reduction: int, at: Position, axes: Axes) -> Position:
    """Returns the index of a reduction's operand: that of the row, with new axes along the reduced dims."""
    dims = reduced_dims(graph, reduction)
    return tuple(axes.symbols[d] if d in dims else i for d, i in enumerate(at))


def reduced_dims(graph: Graph, reduction: int) -> tuple[int, ...]:
    """Returns the dims that a reduction reduces; for a sort, the last dim."""
    node = graph.nodes[reduction]
    if node.family is Family.ORDER:
        return (len(node.shape) - 1,)
    return cast(tuple[int, ...], node.attr("dims"))


def is_row_aligned(graph: Graph, reduction: int, at: Position, domain: Domain, axes: Axes) -> bool:
    """True if a reduction is over the domain's columns and read at the row that is being computed."""
    return _aligned(graph, reduction, at, domain, axes, domain.columns)


def is_segment_aligned(graph: Graph, reduction: int, at: Position, domain: Domain, axes: Axes) -> bool:
    """True if a reduction is over a segment of the domain's row and read at the segment that is being computed."""
    dims = reduced_dims(graph, reduction)
    return domain.is_segment(dims) and _aligned(graph, reduction, at, domain, axes, dims)


def is_column_aligned(graph: Graph, reduction: int, at: Position, domain: Domain, axes: Axes) -> bool:
    return _aligned(graph, reduction, at, domain, axes, domain.rows)


def _aligned(graph: Graph, reduction: int, at: Position, domain: Domain, axes: Axes, over: tuple[int, ...]) -> bool:
    shape = graph.nodes[graph.nodes[reduction].args[0]].shape
    if reduced_dims(graph, reduction) != over or len(shape) != len(domain.shape) or not all(map(same, shape, domain.shape)):
        return False
    return all(i == (0 if d in over else _axis(axes, d)) for d, i in enumerate(at))


def _axis(axes: Axes, dim: int) -> object:
    """Returns the index along a dim; 0 for an extent of 1."""
    return 0 if same(axes.extents[dim], 1) else axes.symbols[dim]


def domain_axes(domain: Domain) -> Axes:
    return identity_axes(domain.shape)
