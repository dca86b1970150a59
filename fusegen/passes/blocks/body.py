"""The body of a loop: the graph of one block of a region's rows, with complete operands as inputs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from fusegen.dtypes import DType
from fusegen.ir.blocks import Blocks, rows_of, start_of, value_name
from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.index_map import first_version, row_major
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import nominal, product
from fusegen.passes.blocks.region import BlockRegion, operand_dim, summed_dim
from fusegen.program.names import ascii_name

_BROADCAST = 8  # ratio of elements to the largest operand's


@dataclass(frozen=True)
class GraphLoop:
    """A loop of a graph, and the values that it reads and computes, in the order of `Blocks`; results may be wider there."""

    blocks: Blocks
    operands: tuple[int, ...]
    results: tuple[int, ...]


def loop_of(graph: Graph, region: BlockRegion, name: str, depth: int) -> GraphLoop:
    """Converts a region to a loop; `depth` is the number of enclosing loops."""
    body = _Body(graph, region, name, depth)
    rows = [p for p in sorted(region.dims) if body.is_read_outside(p)]
    sums = sorted(region.sums)
    puts = [*map(body.put_rows, rows), *map(body.put_sum, sums)]
    flags = (False,) * len(rows) + (True,) * len(sums)
    blocks = Blocks(body.builder.build([], puts), region.extent, body.start, body.rows, flags)
    return GraphLoop(blocks, tuple(body.operands), (*rows, *sums))


class _Body:
    def __init__(self, graph: Graph, region: BlockRegion, name: str, depth: int) -> None:
        self.graph, self.region = graph, region
        self.start, self.rows = start_of(depth), rows_of(depth)
        self.builder = GraphBuilder.like(graph, name)
        self.builder.inputs, self.builder.result_names = [], ()
        self.operands: list[int] = []
        self._complete: dict[int, int] = {}
        self._blocks: dict[int, int] = {}
        self._names = {*(spec.name for spec in graph.inputs), *(name for name, _ in graph.scalars)}
        for position in sorted({*region.dims, *region.sums}):
            self._blocks[position] = self._block(position)

    def is_read_outside(self, position: int) -> bool:
        users = self.graph.users[position]
        return position in self.graph.outputs or any(u not in self._blocks for u in users)

    def put_rows(self, position: int) -> int:
        node = self.graph.nodes[position]
        dtype = node.dtype.compute if self._is_read_unrounded(position) else node.dtype
        target = self._slice(self._result(position, dtype), self.region.dims[position])
        return self.builder.add(Op.PUT, [target, self._cast(self._blocks[position], dtype)], shape=node.shape)

    def _is_read_unrounded(self, position: int) -> bool:
        """True if all users of a 16-bit matmul or sum cast it back to the computing type, e.g. a sum over enclosing blocks."""
        node = self.graph.nodes[position]
        users = [self.graph.nodes[u] for u in self.graph.users[position] if u not in self._blocks]
        is_cast = all(user.op is Op.CAST and user.dtype is node.dtype.compute for user in users)
        return node.op in (Op.MATMUL, Op.SUM) and node.dtype.is_half and is_cast and position not in self.graph.outputs

    def put_sum(self, position: int) -> int:
        """Accumulates a value in its computing type."""
        node = self.graph.nodes[position]
        dtype = node.dtype.compute if node.dtype.is_float else node.dtype
        result = self._result(position, dtype)
        addend = self._cast(self._blocks[position], dtype)
        total = self.builder.add(Op.ADD, [result, addend], location=self.graph.locations[position])
        return self.builder.add(Op.PUT, [result, total], shape=node.shape)

    def _result(self, position: int, dtype: DType) -> int:
        node = self.graph.nodes[position]
        return self.builder.input(row_major(self._named(position), node.shape, dtype))

    def _named(self, position: int) -> str:
        """A new input name. The caller's names are reserved, because stride symbols derive from them."""
        stem = ascii_name(value_name(self.graph, position))
        names = (stem if number == 1 else f"{stem}_{number}" for number in itertools.count(1))
        name = next(name for name in names if name not in self._names)
        self._names.add(name)
        return name

    def _cast(self, position: int, dtype: DType) -> int:
        is_same = self.builder.nodes[position].dtype is dtype
        return (
            position if is_same else self.builder.add(Op.CAST, [position], location=self.builder.locations[position], dtype=dtype)
        )

    def _block(self, position: int) -> int:
        node, dim = self.graph.nodes[position], self.region.dims.get(position)
        args = tuple(self._argument(position, slot) for slot in range(len(node.args)))
        shape = node.shape if dim is None else (*node.shape[:dim], self.rows, *node.shape[dim + 1 :])
        attrs = tuple((name, shape if name == "shape" else value) for name, value in node.attrs)
        return self.builder.add_node(replace(node, args=args, attrs=attrs, shape=shape), self.graph.locations[position])

    def _argument(self, position: int, slot: int) -> int:
        a = self.graph.nodes[position].args[slot]
        if a in self._blocks:
            return self._blocks[a]
        dims = self.region.dims
        dim = operand_dim(self.graph, position, slot, dims[position]) if position in dims else None
        if position in self.region.sums:
            dim = summed_dim(self.graph, position, slot, dims)
        complete = self._complete_value(a)
        return complete if dim is None else self._slice(complete, dim)

    def _slice(self, value: int, dim: int) -> int:
        return self.builder.add(Op.SLICE, [value], dim=dim, start=self.start, length=self.rows, step=1)

    def _complete_value(self, position: int) -> int:
        """Returns a value of all rows in the body: an operand of the loop, or recomputed in each block if it is large or cheap."""
        needed, stack = {position}, [position]
        while stack:
            current = stack.pop()
            unseen = [a for a in self.graph.nodes[current].args if self._is_recomputed(current) and a not in needed]
            needed.update(unseen)
            stack += unseen
        for p in sorted(needed - self._complete.keys()):
            self._complete[p] = self._recomputed(p) if self._is_recomputed(p) else self._operand(p)
        return self._complete[position]

    def _is_recomputed(self, position: int) -> bool:
        node = self.graph.nodes[position]
        if node.op in (Op.INPUT, Op.PUT):
            return False
        if node.weak or node.family in (Family.LEAF, Family.VIEW):
            return True
        return node.family is Family.POINTWISE and (self.region.is_large(self.graph, position) or self._is_broadcast(position))

    def _is_broadcast(self, position: int) -> bool:
        """True if a value is much larger than its operands, e.g. a mask of positions."""
        sizes = (nominal(product(operand.shape)) for operand in self.graph.operands(position))
        return nominal(product(self.graph.nodes[position].shape)) >= _BROADCAST * max(sizes)

    def _recomputed(self, position: int) -> int:
        node = self.graph.nodes[position]
        return self.builder.add_node(
            replace(node, args=tuple(self._complete[a] for a in node.args)), self.graph.locations[position]
        )

    def _operand(self, position: int) -> int:
        node = self.graph.nodes[position]
        self.operands.append(position)
        if node.op not in (Op.INPUT, Op.PUT):
            return self.builder.input(row_major(self._named(position), node.shape, node.dtype))
        spec = self.graph.input_spec(str(self.graph.nodes[first_version(self.graph, position)].attr("name")))
        return self.builder.input(spec if node.op is Op.INPUT else replace(spec, name=self._named(position)))
