"""Groups of nodes, each computed by one step of the program: the result of fusion."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fusegen.ir.graph import Graph
from fusegen.ir.index_map import strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape, literal, product, same

READ = (Op.INPUT, Op.RANDOM)
"""Leaves that kernels read element by element: the caller's tensors, and random bits, which are read as if they lay in memory."""


Materialized: TypeAlias = frozenset[int]
"""Values that lie in memory, though a kernel that needs them could compute them."""

_SEGMENTS = (2, 256)
"""Columns of a segment: eight neighbours for each thread of a warp, at most."""

_LONGEST_SEGMENTED = 1 << 15
"""Columns of a row whose segments are reduced together with it: a block holds so many in its registers. Longer ones, as all of a
tensor, are better many rows than one."""


@dataclass(frozen=True, repr=False)
class GroupKind:
    """The kind of a group: its treatment of memory, as fusion and the allocation of buffers need it. A family of kernels has
    one or more.

    Attributes:
        name: in words.
        merges: whether values over one iteration space may join a group of it.
        writes_in_place: whether its kernels store each element where it belongs, so that they can write to an input.
        is_strided: whether it reads and writes rows wherever they start.
        reads_as_typed: whether it reads its operands in their logical dtype, as products do.
        is_library: whether torch computes it.
    """

    name: str
    merges: bool = False
    writes_in_place: bool = False
    is_strided: bool = False
    reads_as_typed: bool = False
    is_library: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True)
class Domain:
    """The iteration space of a group: a shape whose dims are rows or columns.

    Attributes:
        shape: the extents.
        columns: the dims along which a row runs; empty where there is nothing to reduce.
    """

    shape: Shape
    columns: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The dims that number the rows."""
        return tuple(d for d in range(len(self.shape)) if d not in self.columns)

    @property
    def segment(self) -> int:
        """The extent of the last column dim, if rows have several parts of so many columns, which neighbouring threads of a warp
        can reduce among themselves: a power of two, of a row that is not too long. 0 if they cannot."""
        extents = [literal(self.shape[d]) for d in self.columns]
        known = [extent for extent in extents if extent is not None]
        columns, last = math.prod(known), known[-1] if known else 0
        if len(known) < len(extents) or not last < columns <= _LONGEST_SEGMENTED:
            return 0
        return last if _SEGMENTS[0] <= last <= _SEGMENTS[1] and last.bit_count() == 1 else 0

    def is_segment(self, dims: tuple[int, ...]) -> bool:
        """True if a reduction over some dims is one over the segments of a row."""
        return bool(self.segment) and dims == self.columns[-1:]


@dataclass(frozen=True)
class EpiloguePart:
    """Columns of a launch of products that end in an epilogue.

    Attributes:
        outputs: what the epilogue gives.
        orders: of each, its dims in the order of the domain.
        products: products of one first operand that it takes.
        domain: rows and columns, in the order of the products' elements.
        head: columns that one tile must hold together, since the epilogue combines them.
    """

    outputs: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    products: tuple[int, ...]
    domain: Domain
    head: int = 1


@dataclass(frozen=True)
class Group:
    """The nodes of one step.

    Attributes:
        kind: what it does with memory.
        outputs: nodes that it writes to memory.
        inputs: nodes that it reads from memory: inputs of the graph and outputs of earlier groups.
        domain: its iteration space.
        anchors: reductions or products that it computes on the way.
        reason: why the group is what it is, for `explain`; empty where the kind says it all.
        parts: of a launch of products, its epilogues; the domain is that of the first.
        pipeline: of such a launch, the name of its pipeline.
        match: the parts that were recognized, for lowering: of attention an `AttentionMatch`, of products their operands.
    """

    kind: GroupKind
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    domain: Domain
    anchors: tuple[int, ...] = ()
    reason: str = ""
    parts: tuple[EpiloguePart, ...] = ()
    pipeline: str = ""
    match: Any = field(default=None, compare=False, repr=False)

    @property
    def adds_in_place(self) -> bool:
        """True if torch adds a product to an input as it writes: the group ends in another value than its product."""
        return self.kind.is_library and bool(self.anchors) and self.outputs != self.anchors


def limited(group: Group, outputs: tuple[int, ...]) -> Group:
    """The group with some of its results only."""
    parts = []
    for part in group.parts:
        kept = [(o, order) for o, order in zip(part.outputs, part.orders, strict=True) if o in outputs]
        if kept:
            parts.append(replace(part, outputs=tuple(o for o, _ in kept), orders=tuple(order for _, order in kept)))
    return replace(group, outputs=outputs, parts=tuple(parts))


def strip_views(graph: Graph, position: int) -> int:
    """The value below reshapes and permutations, which a store can undo by writing to other addresses; of a version of an input,
    what was written last."""
    if graph.nodes[position].op is Op.PUT:
        position = graph.nodes[position].args[1]
    while graph.nodes[position].op in (Op.RESHAPE, Op.PERMUTE):
        position = graph.nodes[position].args[0]
    return position


def is_stored_elsewhere(graph: Graph, position: int) -> bool:
    """True if a node lies in memory already (an input), or if all that reads it has it in its text (a number). A library call reads
    coordinates from memory, so that a kernel must store them."""
    node = graph.nodes[position]
    return node.family is Family.LEAF and node.op is not Op.IOTA


def is_as_large(graph: Graph, one: int, other: int) -> bool:
    """True if two values have as many elements."""
    return same(product(graph.nodes[one].shape), product(graph.nodes[other].shape))


def computed(graph: Graph, group: Group) -> frozenset[int]:
    """The nodes that a group computes on the way from its inputs to its outputs."""
    found: set[int] = set()
    stack = list(group.outputs)
    while stack:
        position = stack.pop()
        if position not in found and position not in group.inputs:
            found.add(position)
            stack += graph.nodes[position].args
    return frozenset(found)


def read_in_part(graph: Graph, group: Group) -> Mapping[int, Dim]:
    """The number of elements of inputs that a group reads only at indices which are values, or of which it reads slices only, each
    as often as it is named."""
    inside = computed(graph, group)
    sliced = {position: _sliced(graph, inside, position) for position in group.inputs}
    return {position: count for position, count in sliced.items() if count is not None} | _gathered(graph, group)


def _sliced(graph: Graph, inside: Collection[int], position: int) -> Dim | None:
    """The elements of all slices of a value that some nodes take; None where they take all of it."""
    found: Dim = 0
    users = [user for user in graph.users[position] if user in inside]
    for user in users:
        node = graph.nodes[user]
        below = _sliced(graph, inside, user) if node.op in (Op.SLICE, Op.RESHAPE, Op.PERMUTE) else None
        if node.op is Op.SLICE and below is None:
            below = product(node.shape)
        if below is None:
            return None
        found = found + below
    return found if users else None


def _gathered(graph: Graph, group: Group) -> dict[int, Dim]:
    """The number of elements of inputs that a group reads only at indices which are values."""
    found: dict[int, Dim] = {}
    everywhere = _inputs_below(graph, group, group.outputs)
    for position in sorted(computed(graph, group)):
        node = graph.nodes[position]
        if node.family is Family.INDEXING:
            for read in _inputs_below(graph, group, node.args[:1]) - everywhere:
                found[read] = found.get(read, 0) + product(node.shape)
    return found


def _inputs_below(graph: Graph, group: Group, roots: Iterable[int]) -> set[int]:
    """The inputs that some values are made of, but for those that are gathered from."""
    found: set[int] = set()
    stack, seen = list(roots), set[int]()
    while stack:
        position = stack.pop()
        if position in group.inputs:
            found.add(position)
        elif position not in seen:
            node = graph.nodes[position]
            stack += node.args[1:] if node.family is Family.INDEXING else node.args
        seen.add(position)
    return found


def products_below(graph: Graph, root: int, kept: Collection[int] = ()) -> list[int]:
    """Products that the root reaches through pointwise nodes and views, but for what lies in memory; the latest first."""
    found: set[int] = set()
    stack = list(graph.nodes[root].args)
    seen: set[int] = set()
    while stack:
        position = stack.pop()
        if position in seen:
            continue
        seen.add(position)
        node = graph.nodes[position]
        if node.family is Family.CONTRACTION:
            found.add(position)
        elif position not in kept and node.family in (Family.POINTWISE, Family.VIEW):
            stack += node.args
    return sorted(found, reverse=True)


def products_of(graph: Graph) -> tuple[int, ...]:
    """All products of a graph."""
    return tuple(position for position, node in graph if node.op is Op.MATMUL)


def operand_base(graph: Graph, position: int) -> int:
    """The node whose buffer a product reads: below the views where strides can say them."""
    return strided_view(graph, position).base
