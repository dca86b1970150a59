"""The body of a loop: a region of a graph for a block of its rows, as a graph of whole operands."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from fusegen.dtypes import DType
from fusegen.ir.blocks import Blocks, rows_of, start_of
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.index_map import owner, row_major
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import nominal, product
from fusegen.passes.blocks.region import BlockRegion, operand_dim, summed_dim

_BROADCAST = 8  # times as many elements as the largest operand


@dataclass(frozen=True)
class GraphLoop:
    """A loop of a graph.

    Attributes:
        blocks: what it does.
        operands: values that it reads, as `Blocks.operands`.
        results: values that it makes, as `Blocks.results`, which may be wider.
    """

    blocks: Blocks
    operands: tuple[int, ...]
    results: tuple[int, ...]


def loop_of(graph: Graph, region: BlockRegion, name: str, depth: int) -> GraphLoop:
    """A region as a loop.

    Args:
        name: of its body.
        depth: how many loops it is in.
    """
    made = _Body(graph, region, name, depth)
    rows = [p for p in sorted(region.dims) if made.is_wanted(p)]
    sums = sorted(region.sums)
    puts = [*map(made.put_rows, rows), *map(made.put_sum, sums)]
    flags = (False,) * len(rows) + (True,) * len(sums)
    blocks = Blocks(made.builder.build([], puts), region.extent, made.start, made.rows, flags)
    return GraphLoop(blocks, tuple(made.operands), (*rows, *sums))


class _Body:
    """The body in the making.

    Attributes:
        builder: holds it.
        operands: values of the graph that are its inputs.
        start, rows: of a block.
    """

    def __init__(self, graph: Graph, region: BlockRegion, name: str, depth: int) -> None:
        self.graph, self.region = graph, region
        self.start, self.rows = start_of(depth), rows_of(depth)
        self.builder = GraphBuilder.like(graph, name)
        self.builder.inputs = []
        self.operands: list[int] = []
        self._whole: dict[int, int] = {}
        self._blocks: dict[int, int] = {}
        self._names = {*(spec.name for spec in graph.inputs), *(name for name, _ in graph.scalars)}
        for position in sorted({*region.dims, *region.sums}):
            self._blocks[position] = self._block(position)

    def is_wanted(self, position: int) -> bool:
        """True if something else than the loop reads a value."""
        users = self.graph.users[position]
        return position in self.graph.outputs or any(u not in self._blocks for u in users)

    def put_rows(self, position: int) -> int:
        """Stores rows of a value."""
        node = self.graph.nodes[position]
        dtype = node.dtype.compute if self._is_read_wide(position) else node.dtype
        place = self._slice(self._result(node, dtype), self.region.dims[position])
        return self.builder.add(Op.PUT, [place, self._cast(self._blocks[position], dtype)], shape=node.shape)

    def _is_read_wide(self, position: int) -> bool:
        """True if a product in 16 bits is wanted as wide as it is computed, and only so."""
        node = self.graph.nodes[position]
        users = [self.graph.nodes[u] for u in self.graph.users[position] if u not in self._blocks]
        is_wide = all(user.op is Op.CAST and user.dtype is node.dtype.compute for user in users)
        return node.op is Op.MATMUL and node.dtype.is_half and is_wide and position not in self.graph.outputs

    def put_sum(self, position: int) -> int:
        """Adds to a value, as wide as it is computed."""
        node = self.graph.nodes[position]
        dtype = node.dtype.compute if node.dtype.is_float else node.dtype
        result = self._result(node, dtype)
        part = self._cast(self._blocks[position], dtype)
        total = self.builder.add(Op.ADD, [result, part], location=self.graph.locations[position])
        return self.builder.add(Op.PUT, [result, total], shape=node.shape)

    def _result(self, node: Node, dtype: DType) -> int:
        return self.builder.input(row_major(self._named("result"), node.shape, dtype))

    def _named(self, stem: str) -> str:
        """A name that no input has: the caller's are kept, since strides are named after them."""
        name = next(name for number in itertools.count() if (name := f"{stem}_{number}") not in self._names)
        self._names.add(name)
        return name

    def _cast(self, position: int, dtype: DType) -> int:
        is_so = self.builder.nodes[position].dtype is dtype
        return position if is_so else self.builder.add(Op.CAST, [position], location=self.builder.locations[position], dtype=dtype)

    def _block(self, position: int) -> int:
        """A node for the rows of a block, of the dtype that it has."""
        node, dim = self.graph.nodes[position], self.region.dims.get(position)
        args = tuple(self._argument(position, slot) for slot in range(len(node.args)))
        shape = node.shape if dim is None else (*node.shape[:dim], self.rows, *node.shape[dim + 1 :])
        attrs = tuple((name, shape if name == "shape" else value) for name, value in node.attrs)
        return self.builder.put(replace(node, args=args, attrs=attrs, shape=shape), self.graph.locations[position])

    def _argument(self, position: int, slot: int) -> int:
        a = self.graph.nodes[position].args[slot]
        if a in self._blocks:
            return self._blocks[a]
        dims = self.region.dims
        dim = operand_dim(self.graph, position, slot, dims[position]) if position in dims else None
        if position in self.region.sums:
            dim = summed_dim(self.graph, position, slot, dims)
        whole = self._taken_whole(a)
        return whole if dim is None else self._slice(whole, dim)

    def _slice(self, whole: int, dim: int) -> int:
        return self.builder.add(Op.SLICE, [whole], dim=dim, start=self.start, length=self.rows, step=1)

    def _taken_whole(self, position: int) -> int:
        """A value of which the loop computes nothing, whole: an operand; or, where it is as large as the loop's own values or costs
        nothing, what each block computes as far as it needs it."""
        needed, stack = {position}, [position]
        while stack:
            last = stack.pop()
            new = [a for a in self.graph.nodes[last].args if self._is_computed_again(last) and a not in needed]
            needed.update(new)
            stack += new
        for p in sorted(needed - self._whole.keys()):
            self._whole[p] = self._again(p) if self._is_computed_again(p) else self._operand(p)
        return self._whole[position]

    def _is_computed_again(self, position: int) -> bool:
        node = self.graph.nodes[position]
        if node.op in (Op.INPUT, Op.PUT):
            return False
        if node.weak or node.family in (Family.LEAF, Family.VIEW):
            return True
        return node.family is Family.POINTWISE and (self.region.is_large(self.graph, position) or self._is_broadcast(position))

    def _is_broadcast(self, position: int) -> bool:
        """True if a value is much larger than all that it is made of, as a mask of positions is."""
        sizes = (nominal(product(operand.shape)) for operand in self.graph.operands(position))
        return nominal(product(self.graph.nodes[position].shape)) >= _BROADCAST * max(sizes)

    def _again(self, position: int) -> int:
        node = self.graph.nodes[position]
        return self.builder.put(replace(node, args=tuple(self._whole[a] for a in node.args)), self.graph.locations[position])

    def _operand(self, position: int) -> int:
        node = self.graph.nodes[position]
        self.operands.append(position)
        if node.op not in (Op.INPUT, Op.PUT):
            return self.builder.input(row_major(self._named("operand"), node.shape, node.dtype))
        spec = self.graph.input_spec(str(self.graph.nodes[owner(self.graph, position)].attr("name")))
        return self.builder.input(spec if node.op is Op.INPUT else replace(spec, name=self._named("operand")))
