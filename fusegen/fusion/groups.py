"""Groups of nodes, each computed by one step of the program; fusion returns them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fusegen.ir.graph import Graph
from fusegen.ir.index_map import strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Shape, literal, product, same

READ = (Op.INPUT, Op.RANDOM)
"""Leaves that kernels read element by element: input tensors, and random bits, which are indexed like a tensor."""


Materialized: TypeAlias = frozenset[int]
"""Values that are written to memory, although a kernel that reads them could recompute them."""

_SEGMENTS = (2, 256)
"""Fewest and most columns of a segment: at most eight neighbours for each thread of a warp."""

_LONGEST_SEGMENTED = 1 << 15
"""Longest row whose segments are reduced in one kernel with the row: one block holds it in registers."""


@dataclass(frozen=True, repr=False)
class GroupKind:
    """A kind of group: the properties that fusion and buffer allocation need. A family has one or more kinds.

    Attributes:
        name: shown to users.
        merges: whether values over one iteration space may join its groups.
        writes_in_place: whether its kernels can store at the addresses of a write to an input.
        is_tiled: whether its blocks compute tiles, from operands that blocks of other tiles read too.
        is_strided: whether its kernels read and write rows with any stride, such as padded rows.
        reads_logical_dtype: whether it reads operands in their logical dtype, as matmuls do.
        is_library: whether torch computes it.
    """

    name: str
    merges: bool = False
    writes_in_place: bool = False
    is_tiled: bool = False
    is_strided: bool = False
    reads_logical_dtype: bool = False
    is_library: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True)
class Domain:
    """The iteration space of a group: a shape whose dims are split into rows and columns.

    Attributes:
        columns: the dims along which a row runs; empty if nothing is reduced.
    """

    shape: Shape
    columns: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The dims that number the rows."""
        return tuple(d for d in range(len(self.shape)) if d not in self.columns)

    @property
    def segment(self) -> int:
        """The extent of the last column dim if threads of one warp can reduce it among themselves, else 0.

        It must be a power of two. The row must have several column dims and must not be too long."""
        extents = [literal(self.shape[d]) for d in self.columns]
        known = [extent for extent in extents if extent is not None]
        columns, last = math.prod(known), known[-1] if known else 0
        if len(known) < len(extents) or not last < columns <= _LONGEST_SEGMENTED:
            return 0
        return last if _SEGMENTS[0] <= last <= _SEGMENTS[1] and last.bit_count() == 1 else 0

    def is_segment(self, dims: tuple[int, ...]) -> bool:
        """True if a reduction over these dims is over segments of a row."""
        return bool(self.segment) and dims == self.columns[-1:]


@dataclass(frozen=True)
class EpiloguePart:
    """The columns of a matmul launch that share one epilogue.

    Attributes:
        outputs: results of the epilogue.
        orders: for each output, its dims in the domain's order.
        products: the matmuls that it reads; all have the same first operand.
        domain: rows and columns, in the order of the matmuls' elements.
        head: columns that one tile must hold, since the epilogue combines them.
        shift: the distance between the columns that it combines, 0 if there are none; None for several distances or reductions.
    """

    outputs: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    products: tuple[int, ...]
    domain: Domain
    head: int = 1
    shift: int | None = 0


@dataclass(frozen=True)
class Group:
    """The nodes of one step.

    Attributes:
        outputs: nodes that it writes to memory.
        inputs: nodes that it reads from memory: inputs of the graph and outputs of earlier groups.
        domain: its iteration space.
        core_nodes: the reductions, scans and matmuls that it computes.
        reason: explains the choice of the group, for `explain`; empty if the kind is explanation enough.
        parts: the epilogues of a matmul launch; `domain` is the first one's.
        pipeline: the name of a matmul launch's pipeline.
        match: the matched pattern, for lowering: an `AttentionMatch`, or the operands of matmuls.
    """

    kind: GroupKind
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    domain: Domain
    core_nodes: tuple[int, ...] = ()
    reason: str = ""
    parts: tuple[EpiloguePart, ...] = ()
    pipeline: str = ""
    match: Any = field(default=None, compare=False, repr=False)

    @property
    def adds_in_place(self) -> bool:
        """True if torch accumulates a matmul into an input: the group's output is not its matmul."""
        return self.kind.is_library and bool(self.core_nodes) and self.outputs != self.core_nodes


def with_outputs(group: Group, outputs: tuple[int, ...]) -> Group:
    parts = []
    for part in group.parts:
        remaining = [(o, order) for o, order in zip(part.outputs, part.orders, strict=True) if o in outputs]
        if remaining:
            parts.append(replace(part, outputs=tuple(o for o, _ in remaining), orders=tuple(order for _, order in remaining)))
    return replace(group, outputs=outputs, parts=tuple(parts))


def strip_views(graph: Graph, position: int) -> int:
    """Returns the value below reshapes and permutations, which a store undoes by its addresses. For a functionalized write, starts
    at the written value."""
    if graph.nodes[position].op is Op.PUT:
        position = graph.nodes[position].args[1]
    while graph.nodes[position].op in (Op.RESHAPE, Op.PERMUTE):
        position = graph.nodes[position].args[0]
    return position


def is_stored_elsewhere(graph: Graph, position: int) -> bool:
    """True if no kernel needs to store a node: an input, or a constant that each reader inlines. Coordinates are stored, since a
    library call reads them from memory."""
    node = graph.nodes[position]
    return node.family is Family.LEAF and node.op is not Op.IOTA


def is_as_large(graph: Graph, a: int, b: int) -> bool:
    """True if two values have equally many elements."""
    return same(product(graph.nodes[a].shape), product(graph.nodes[b].shape))


def computed(graph: Graph, group: Group) -> frozenset[int]:
    """Returns the nodes that a group computes from its inputs to its outputs."""
    nodes: set[int] = set()
    stack = list(group.outputs)
    while stack:
        position = stack.pop()
        if position not in nodes and position not in group.inputs:
            nodes.add(position)
            stack += graph.nodes[position].args
    return frozenset(nodes)


def matmuls_below(graph: Graph, root: int, materialized: Collection[int] = ()) -> list[int]:
    """Returns the matmuls that the root reaches through unmaterialized pointwise nodes and views, the latest first."""
    products: set[int] = set()
    stack = list(graph.nodes[root].args)
    seen: set[int] = set()
    while stack:
        position = stack.pop()
        if position in seen:
            continue
        seen.add(position)
        node = graph.nodes[position]
        if node.family is Family.CONTRACTION:
            products.add(position)
        elif position not in materialized and node.family in (Family.POINTWISE, Family.VIEW):
            stack += node.args
    return sorted(products, reverse=True)


def matmuls_of(graph: Graph) -> tuple[int, ...]:
    return tuple(position for position, node in graph if node.op is Op.MATMUL)


def operand_base(graph: Graph, position: int) -> int:
    """Returns the node whose buffer a matmul reads: below all views that strides can express."""
    return strided_view(graph, position).base
