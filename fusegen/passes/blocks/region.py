"""Regions of a graph that a loop over rows can compute: a product of many columns that are reduced again, and all that needs it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import reshape_blocks
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape, nominal, product, same

_WIDER = 2  # columns of a product, in multiples of what it sums over, from which on its values are better never stored whole
_NEAR = 2  # a value of half as many elements counts as one of as many


@dataclass(frozen=True)
class BlockRegion:
    """Nodes that are computed for a block of rows at a time.

    Attributes:
        dims: for each of them, the dim that is the rows.
        sums: nodes that add up over all rows, of such.
        extent: the rows.
        count: elements of the product that is the reason for it all, as `nominal` counts.
    """

    dims: Mapping[int, int]
    sums: frozenset[int]
    extent: Dim
    count: int

    def is_large(self, graph: Graph, position: int) -> bool:
        """True if a value has about as many elements as that product."""
        return _NEAR * _elements(graph.nodes[position].shape) >= self.count

    def large(self, graph: Graph) -> tuple[int, ...]:
        """Such nodes of it."""
        return tuple(p for p in self.dims if self.is_large(graph, p))


@lru_cache(maxsize=1 << 12)
def _elements(shape: Shape) -> int:
    return nominal(product(shape))


class Impossible(Exception):
    """Some nodes cannot be computed row by row."""


def regions(graph: Graph, elsewhere: Collection[int] = (), outer: Collection[Dim] = ()) -> Iterator[BlockRegion]:
    """The loops that a graph could have, the first product's first.

    Args:
        graph: in primitives.
        elsewhere: products that kernels compute without storing them.
        outer: rows of blocks that the graph computes already.
    """
    for position, node in graph:
        if node.op is Op.MATMUL and position not in elsewhere and _is_wide(graph, position):
            found = (_region(graph, position, dim) for dim in _row_dims(node) if node.shape[dim] not in outer)
            yield from (region for region in found if region is not None)


def _is_wide(graph: Graph, position: int) -> bool:
    a, _ = graph.operands(position)
    return nominal(graph.nodes[position].shape[-1]) >= _WIDER * nominal(a.shape[-1])


def _row_dims(node: Node) -> Iterable[int]:
    """Dims by which a product could be computed in blocks: first what it is a batch of, over which hardly anything is summed."""
    dims = range(len(node.shape) - 1)
    return (dim for dim in dims if not same(node.shape[dim], 1))


def _region(graph: Graph, seed: int, dim: int) -> BlockRegion | None:
    growing = _Growing(graph, seed, dim)
    try:
        growing.grow()
    except Impossible:
        return None
    region = growing.region
    large = region.large(graph)
    if any(p in graph.outputs for p in large) or _draws(graph, region):
        return None
    return region if any(_meets_rows(graph, region.dims, p) for p in large) else None


def _draws(graph: Graph, region: BlockRegion) -> bool:
    """True if a call draws the key of random bits in it: each block would draw another one."""
    inside = frozenset[int]().union(*(graph.ancestors[p] for p in region.dims))
    return any(graph.nodes[p].op is Op.RANDOM and not graph.nodes[p].args for p in inside)


def _meets_rows(graph: Graph, dims: Mapping[int, int], large: int) -> bool:
    """True if each row of a value is reduced to a statistic, or meets one: that of a hidden layer does neither."""
    node = graph.nodes[large]
    if any(graph.nodes[user].family is Family.REDUCTION and user in dims for user in graph.users[large]):
        return True
    statistics = (graph.nodes[a] for a in node.args if node.family is Family.POINTWISE or node.op is Op.EXPAND)
    return any(_is_statistic(node, dims[large], operand) for operand in statistics)


def _is_statistic(node: Node, dim: int, operand: Node) -> bool:
    of_rows = dim - len(node.shape) + len(operand.shape)
    return of_rows >= 0 and not same(operand.shape[of_rows], 1) and same(operand.shape[-1], 1)


class _Growing:
    """A region in the making: all that needs a large value of it, and all between such values."""

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
        """Adds what has to be in it.

        Raises:
            Impossible: something of it cannot be computed row by row.
        """
        while self._new:
            position = self._new.pop()
            self._take_operands(position)
            if position in self.dims and self._is_large(position):
                for user in self.graph.users[position]:
                    self._take_user(position, user)
            if not self._new:  # operands may depend on nodes that came later
                for earlier in (*self.dims, *self.sums):
                    self._take_operands(earlier)

    @property
    def region(self) -> BlockRegion:
        """The region as it is now."""
        return replace(self._empty, dims=self.dims, sums=frozenset(self.sums))

    def _is_large(self, position: int) -> bool:
        return self._empty.is_large(self.graph, position)

    def _heavy_nodes(self) -> frozenset[int]:
        """Large nodes that are made of products or reductions by large nodes alone: they cannot be computed again anywhere."""
        found: set[int] = set()
        for position, node in self.graph:
            light = (Family.LEAF, Family.VIEW, Family.POINTWISE)
            if self._is_large(position) and (node.family not in light or not found.isdisjoint(node.args)):
                found.add(position)
        return frozenset(found)

    def _is_of_large(self, position: int) -> bool:
        """True if a value is reduced of such a large one that each block computes again: it may as well be reduced there."""
        node = self.graph.nodes[position]
        return node.family is Family.REDUCTION and self._is_large(node.args[0])

    def _add(self, position: int, dim: int) -> None:
        if position in self.sums or not same(self.graph.nodes[position].shape[dim], self._empty.extent):
            raise Impossible
        if self.dims.setdefault(position, dim) != dim:
            raise Impossible
        self._new.append(position)

    def _take_user(self, operand: int, user: int) -> None:
        """A node that reads a large one: row by row too, or a sum over all rows."""
        if user in self.dims or user in self.sums:
            return
        dim = result_dim(self.graph, user, operand, self.dims[operand])
        if dim is not None:
            self._add(user, dim)
        else:
            self.sums[user] = None
            self._new.append(user)

    def _take_operands(self, position: int) -> None:
        """Operands that have to be computed here as well: they depend on what is, or are as large and no less work."""
        for slot, a in enumerate(self.graph.nodes[position].args):
            dim = self._wanted(position, slot)
            if a in self.dims:
                if dim != self.dims[a]:
                    raise Impossible
            elif a in self._heavy or self._is_of_large(a) or not self.graph.ancestors[a].isdisjoint(self.dims):
                if dim is None:
                    raise Impossible
                self._add(a, dim)

    def _wanted(self, position: int, slot: int) -> int | None:
        if position in self.sums:
            return summed_dim(self.graph, position, slot, self.dims)
        return operand_dim(self.graph, position, slot, self.dims[position])


# Rows of results and rows of operands.


def operand_dim(graph: Graph, position: int, slot: int, dim: int) -> int | None:
    """The dim of an operand of which a block is read for a block of a node's dim; None where all of it is.

    Raises:
        Impossible: neither is so.
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
        found = dim - len(node.shape) + len(operand.shape)
        is_whole = found < 0 or (same(operand.shape[found], 1) and not same(node.shape[dim], 1))
        return None if is_whole and node.family is not Family.INDEXING else _along(node, dim, found)
    if node.family in (Family.REDUCTION, Family.SCAN) or node.op in (Op.SLICE, Op.CONCAT):
        return _along(node, dim, dim)
    raise Impossible


def _along(node: Node, dim: int, found: int) -> int:
    """A dim along which a node does the same for each row.

    Raises:
        Impossible: it does something else.
    """
    dims = cast(tuple[int, ...], dict(node.attrs).get("dims", ())) if node.family is Family.REDUCTION else ()
    is_moved = dict(node.attrs).get("dim") == dim or (node.family is Family.SCAN and dim == len(node.shape) - 1)
    if is_moved or dim in dims:
        raise Impossible
    return found


def _matmul_dim(node: Node, operand: Node, slot: int, dim: int) -> int | None:
    last = len(node.shape) - 1
    if dim >= last - 1:
        of_rows = dim == last - 1
        return len(operand.shape) - 2 + (not of_rows) if of_rows == (slot == 0) else None
    found = dim - len(node.shape) + len(operand.shape)
    return None if found < 0 or same(operand.shape[found], 1) else found


def _reshaped_dim(node: Node, operand: Node, dim: int) -> int:
    for source, result in reshape_blocks(operand.shape, node.shape):
        real = [[d for d in dims if not same(shape[d], 1)] for dims, shape in ((source, operand.shape), (result, node.shape))]
        if dim in result and real[1] == [dim] and len(real[0]) == 1:
            return real[0][0]
    raise Impossible


def summed_dim(graph: Graph, position: int, slot: int, dims: Mapping[int, int]) -> int | None:
    """The dim of an operand over which a node adds up all rows.

    Args:
        dims: of what is computed row by row.

    Raises:
        Impossible: it does not add up.
    """
    node = graph.nodes[position]
    operand = node.args[slot]
    if node.op is Op.MATMUL:
        return len(graph.nodes[operand].shape) - (1 if slot == 0 else 2)
    return dims[operand]


def result_dim(graph: Graph, position: int, operand: int, dim: int) -> int | None:
    """The dim of a node that goes with a dim of one of its operands; None where the node adds up over it.

    Raises:
        Impossible: there is none.
    """
    slots = [slot for slot, a in enumerate(graph.nodes[position].args) if a == operand]
    first, *others = (_followed(graph, position, slot, dim) for slot in slots)
    if any(other != first for other in others):
        raise Impossible
    return first


def _followed(graph: Graph, position: int, slot: int, dim: int) -> int | None:
    node = graph.nodes[position]
    operand = graph.nodes[node.args[slot]]
    rank, own = len(operand.shape), len(node.shape)
    if node.op is Op.MATMUL:
        summed = rank - (1 if slot == 0 else 2)
        return None if dim == summed else own - rank + dim
    if node.op is Op.PERMUTE:
        return cast(tuple[int, ...], node.attr("dims")).index(dim)
    if node.op is Op.RESHAPE:
        return _reshaped_dim(operand, node, dim)
    if node.op is Op.SUM and dim in cast(tuple[int, ...], node.attr("dims")):
        return None
    if node.family is Family.POINTWISE or node.op is Op.EXPAND:
        return own - rank + dim
    if node.family in (Family.REDUCTION, Family.SCAN, Family.INDEXING) or node.op in (Op.SLICE, Op.CONCAT):
        return _along(node, dim, dim)
    raise Impossible
