"""Finds regions that a loop over rows can compute: a wide matmul whose rows are reduced again, and all of its users."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import reshape_blocks
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape, nominal, product, same

_WIDER = 2  # smallest ratio of a matmul's columns to its inner size at which it is not materialized
_NEAR = 2  # half as many elements count as equally large


@dataclass(frozen=True)
class BlockRegion:
    """Nodes that are computed for one block of rows at a time.

    Attributes:
        dims: maps each node to its row dim.
        sums: nodes that accumulate over all rows.
        extent: the number of rows.
        count: number of elements of the matmul that the region starts from, by `nominal`.
    """

    dims: Mapping[int, int]
    sums: frozenset[int]
    extent: Dim
    count: int

    def is_large(self, graph: Graph, position: int) -> bool:
        """True if a value has about as many elements as the matmul."""
        return _NEAR * _elements(graph.nodes[position].shape) >= self.count

    def large(self, graph: Graph) -> tuple[int, ...]:
        """The large values that are not materialized whole: all but results."""
        return tuple(p for p in self.dims if p not in graph.outputs and self.is_large(graph, p))


@lru_cache(maxsize=1 << 12)
def _elements(shape: Shape) -> int:
    return nominal(product(shape))


class NotBlockwise(Exception):
    """The nodes cannot be computed row by row."""


def regions(graph: Graph, elsewhere: Collection[int] = (), outer: Collection[Dim] = ()) -> Iterator[BlockRegion]:
    """Yields the possible loops of a graph (in primitives), in the order of their matmuls.

    Args:
        elsewhere: matmuls that kernels compute without materializing them.
        outer: rows per block of the enclosing loops.
    """
    for position, node in graph:
        if node.op is Op.MATMUL and position not in elsewhere and _is_wide(graph, position):
            candidates = (_region(graph, position, dim) for dim in _row_dims(node) if node.shape[dim] not in outer)
            yield from (region for region in candidates if region is not None)


def _is_wide(graph: Graph, position: int) -> bool:
    a, _ = graph.operands(position)
    return nominal(graph.nodes[position].shape[-1]) >= _WIDER * nominal(a.shape[-1])


def _row_dims(node: Node) -> Iterable[int]:
    """Dims over which a matmul can be blocked: batch dims first, which need the fewest sums."""
    dims = range(len(node.shape) - 1)
    return (dim for dim in dims if not same(node.shape[dim], 1))


def _region(graph: Graph, seed: int, dim: int) -> BlockRegion | None:
    builder = _RegionBuilder(graph, seed, dim)
    try:
        builder.grow()
    except NotBlockwise:
        return None
    region = builder.region
    large = region.large(graph)
    if seed in graph.outputs or _draws_key(graph, region):
        return None
    return region if any(_uses_row_statistic(graph, region.dims, p) for p in large) else None


def _draws_key(graph: Graph, region: BlockRegion) -> bool:
    """True if the region depends on a random key drawn by the call: each block would draw it anew."""
    inside = frozenset[int]().union(*(graph.ancestors[p] for p in region.dims))
    return any(graph.nodes[p].op is Op.RANDOM and not graph.nodes[p].args for p in inside)


def _uses_row_statistic(graph: Graph, dims: Mapping[int, int], large: int) -> bool:
    """True if rows of a value are reduced to a statistic or combined with one, unlike those of a hidden layer."""
    node = graph.nodes[large]
    if any(graph.nodes[user].family is Family.REDUCTION and user in dims for user in graph.users[large]):
        return True
    statistics = (graph.nodes[a] for a in node.args if node.family is Family.POINTWISE or node.op is Op.EXPAND)
    return any(_is_statistic(node, dims[large], operand) for operand in statistics)


def _is_statistic(node: Node, dim: int, operand: Node) -> bool:
    row_dim = dim - len(node.shape) + len(operand.shape)
    return row_dim >= 0 and not same(operand.shape[row_dim], 1) and same(operand.shape[-1], 1)


class _RegionBuilder:
    """Grows a region: all users of its large values, and all nodes between them."""

    def __init__(self, graph: Graph, seed: int, dim: int) -> None:
        self.graph = graph
        self.dims: dict[int, int] = {}
        self.sums: dict[int, None] = {}
        node = graph.nodes[seed]
        self._empty = BlockRegion({}, frozenset(), node.shape[dim], _elements(node.shape))
        self._heavy = self._heavy_nodes()
        self._new: list[int] = []
        self._add(seed, dim)

    def grow(self) -> None:
        """Adds all required nodes, or raises `NotBlockwise`."""
        while self._new:
            position = self._new.pop()
            self._add_operands(position)
            if position in self.dims and self._is_large(position):
                for user in self.graph.users[position]:
                    self._add_user(position, user)
            if not self._new:  # operands may depend on nodes that were added later
                for added in (*self.dims, *self.sums):
                    self._add_operands(added)

    @property
    def region(self) -> BlockRegion:
        return replace(self._empty, dims=self.dims, sums=frozenset(self.sums))

    def _is_large(self, position: int) -> bool:
        return self._empty.is_large(self.graph, position)

    def _heavy_nodes(self) -> frozenset[int]:
        """Large nodes that are too expensive to recompute: they depend on matmuls or reductions through large nodes."""
        heavy: set[int] = set()
        for position, node in self.graph:
            cheap_families = (Family.LEAF, Family.VIEW, Family.POINTWISE)
            if self._is_large(position) and (node.family not in cheap_families or not heavy.isdisjoint(node.args)):
                heavy.add(position)
        return frozenset(heavy)

    def _reduces_large(self, position: int) -> bool:
        """True for a reduction of a large value: each block recomputes the value and reduces it."""
        node = self.graph.nodes[position]
        return node.family is Family.REDUCTION and self._is_large(node.args[0])

    def _add(self, position: int, dim: int) -> None:
        if position in self.sums or not same(self.graph.nodes[position].shape[dim], self._empty.extent):
            raise NotBlockwise
        if self.dims.setdefault(position, dim) != dim:
            raise NotBlockwise
        self._new.append(position)

    def _add_user(self, operand: int, user: int) -> None:
        """Adds a node that reads a large one: row by row, or as a sum over all rows."""
        if user in self.dims or user in self.sums:
            return
        dim = result_dim(self.graph, user, operand, self.dims[operand])
        if dim is not None:
            self._add(user, dim)
        else:
            self.sums[user] = None
            self._new.append(user)

    def _add_operands(self, position: int) -> None:
        """Adds operands that depend on the region, or are as large and as expensive."""
        for slot, a in enumerate(self.graph.nodes[position].args):
            dim = self._requested_dim(position, slot)
            if a in self.dims:
                if dim != self.dims[a]:
                    raise NotBlockwise
            elif a in self._heavy or self._reduces_large(a) or not self.graph.ancestors[a].isdisjoint(self.dims):
                if dim is None:
                    raise NotBlockwise
                self._add(a, dim)

    def _requested_dim(self, position: int, slot: int) -> int | None:
        if position in self.sums:
            return summed_dim(self.graph, position, slot, self.dims)
        return operand_dim(self.graph, position, slot, self.dims[position])


# Row dims of results and of operands.


def operand_dim(graph: Graph, position: int, slot: int, dim: int) -> int | None:
    """Returns the dim of an operand that splits into blocks together with a node's dim.

    None if each block reads the complete operand; raises `NotBlockwise` if the node does not split.
    """
    node, operand = graph.nodes[position], graph.nodes[graph.nodes[position].args[slot]]
    if operand.weak or not operand.shape:
        return None
    if node.op is Op.MATMUL:
        return _matmul_dim(node, operand, slot, dim)
    if node.op is Op.PERMUTE:
        return cast(tuple[int, ...], node.attr("dims"))[dim]
    if node.op is Op.RESHAPE:
        return _reshaped_dim(node, operand, dim)
    if node.family in (Family.POINTWISE, Family.INDEXING) or node.op is Op.EXPAND:
        aligned_dim = dim - len(node.shape) + len(operand.shape)
        is_complete = aligned_dim < 0 or (same(operand.shape[aligned_dim], 1) and not same(node.shape[dim], 1))
        return None if is_complete and node.family is not Family.INDEXING else _along(node, dim, aligned_dim)
    if node.family in (Family.REDUCTION, Family.SCAN) or node.op in (Op.SLICE, Op.CONCAT):
        return _along(node, dim, dim)
    raise NotBlockwise


def _along(node: Node, dim: int, row_dim: int) -> int:
    """Returns `row_dim` if the node treats the rows along a dim independently, else raises `NotBlockwise`."""
    dims = cast(tuple[int, ...], dict(node.attrs).get("dims", ())) if node.family is Family.REDUCTION else ()
    is_indexed = dict(node.attrs).get("dim") == dim or (node.family is Family.SCAN and dim == len(node.shape) - 1)
    if is_indexed or dim in dims:
        raise NotBlockwise
    return row_dim


def _matmul_dim(node: Node, operand: Node, slot: int, dim: int) -> int | None:
    last = len(node.shape) - 1
    if dim >= last - 1:
        is_row_dim = dim == last - 1
        return len(operand.shape) - 2 + (not is_row_dim) if is_row_dim == (slot == 0) else None
    batch_dim = dim - len(node.shape) + len(operand.shape)
    return None if batch_dim < 0 or same(operand.shape[batch_dim], 1) else batch_dim


def _reshaped_dim(node: Node, operand: Node, dim: int) -> int:
    for source, result in reshape_blocks(operand.shape, node.shape):
        nontrivial = [[d for d in dims if not same(shape[d], 1)] for dims, shape in ((source, operand.shape), (result, node.shape))]
        if dim in result and nontrivial[1] == [dim] and len(nontrivial[0]) == 1:
            return nontrivial[0][0]
    raise NotBlockwise


def summed_dim(graph: Graph, position: int, slot: int, dims: Mapping[int, int]) -> int | None:
    """Returns the dim of an operand that a node sums over all rows."""
    node = graph.nodes[position]
    operand = node.args[slot]
    if node.op is Op.MATMUL:
        return len(graph.nodes[operand].shape) - (1 if slot == 0 else 2)
    return dims[operand]


def result_dim(graph: Graph, position: int, operand: int, dim: int) -> int | None:
    """Returns the dim of a node that corresponds to a dim of its operand; None if it sums over it; or raises `NotBlockwise`."""
    slots = [slot for slot, a in enumerate(graph.nodes[position].args) if a == operand]
    first, *remaining = (_result_dim_of(graph, position, slot, dim) for slot in slots)
    if any(result != first for result in remaining):
        raise NotBlockwise
    return first


def _result_dim_of(graph: Graph, position: int, slot: int, dim: int) -> int | None:
    node = graph.nodes[position]
    operand = graph.nodes[node.args[slot]]
    rank, result_rank = len(operand.shape), len(node.shape)
    if node.op is Op.MATMUL:
        summed = rank - (1 if slot == 0 else 2)
        return None if dim == summed else result_rank - rank + dim
    if node.op is Op.PERMUTE:
        return cast(tuple[int, ...], node.attr("dims")).index(dim)
    if node.op is Op.RESHAPE:
        return _reshaped_dim(operand, node, dim)
    if node.op is Op.SUM and dim in cast(tuple[int, ...], node.attr("dims")):
        return None
    if node.family is Family.POINTWISE or node.op is Op.EXPAND:
        return result_rank - rank + dim
    if node.family in (Family.REDUCTION, Family.SCAN, Family.INDEXING) or node.op in (Op.SLICE, Op.CONCAT):
        return _along(node, dim, dim)
    raise NotBlockwise
