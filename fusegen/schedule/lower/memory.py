"""Which buffers a program has, and where a kernel stores a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fusegen.dtypes import DType
from fusegen.ir.formula import Formula, formula
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position
from fusegen.ir.ops import Family, Op
from fusegen.ir.strided import contiguous_strides, flat_offset
from fusegen.ir.symbolic import Axes, Index, delinearize, linearize
from fusegen.passes.fuse import Group, GroupKind
from fusegen.passes.fuse.groups import strip_views
from fusegen.schedule.names import Namer
from fusegen.schedule.program import BufferSpec, ResultView, Role


@dataclass(frozen=True)
class Store:
    """Where a value goes: a buffer, and the offset of the element."""

    buffer: int
    offset: Index


class Memory:
    """The buffers of a program: one a graph input, a result, and a value that one group leaves for another."""

    def __init__(self, graph: Graph, groups: tuple[Group, ...]) -> None:
        self.graph = graph
        self.groups = groups

    @cached_property
    def read_later(self) -> frozenset[int]:
        """Values that some group reads from memory."""
        return frozenset(p for group in self.groups for p in group.inputs if not self.is_input(p))

    @cached_property
    def read_by_products(self) -> frozenset[int]:
        """Values that a matrix product reads, in their logical dtype."""
        kinds = (GroupKind.LIBRARY, GroupKind.CONTRACTION, GroupKind.ATTENTION)
        return frozenset(p for group in self.groups if group.kind in kinds for p in group.inputs)

    @cached_property
    def results(self) -> tuple[tuple[int, int], ...]:
        """Each result's node with the key of its own buffer: equal results never share memory, nor does one with an input, nor one
        with a value that is kept in another dtype."""
        found: list[tuple[int, int]] = []
        for position in self.graph.outputs:
            before = sum(p == position for p, _ in found)
            elsewhere = before + (self.is_input(position) or self._is_kept_wide(position))
            found.append((position, position + elsewhere * len(self.graph.nodes)))
        return tuple(found)

    def _is_stored_as_result(self, position: int) -> bool:
        """Whether the only buffer of a value is a result's; what is read later has one of its own beside that of a view of it."""
        if position in self.graph.outputs:
            return True
        return position not in self.read_later and position in {strip_views(self.graph, r) for r in self.graph.outputs}

    def is_input(self, position: int) -> bool:
        """Whether a node is an input of the graph."""
        return self.graph.nodes[position].op is Op.INPUT

    @cached_property
    def _library_products(self) -> frozenset[int]:
        """Products of 16-bit floats that the library computes."""
        products = (p for group in self.groups if group.kind is GroupKind.LIBRARY for p in group.outputs)
        return frozenset(p for p in products if self.graph.nodes[p].dtype.is_half)

    def dtype(self, position: int) -> DType:
        """The element type of a value that groups leave for others: statistics and products stay as wide as they were computed."""
        node = self.graph.nodes[position]
        wide = node.family is Family.REDUCTION or position in self._library_products
        if self._is_kept_wide(position):
            return node.dtype.compute
        if wide and not self._is_stored_as_result(position) and position not in self.read_by_products:
            return node.dtype.compute
        return node.dtype

    def _is_kept_wide(self, position: int) -> bool:
        """Whether a result is stored twice: a statistic that a later group compares with what it computes again, unrounded."""
        node = self.graph.nodes[position]
        is_statistic = node.family is Family.REDUCTION and node.dtype.is_half
        return is_statistic and position in self.graph.outputs and position in self.read_later - self.read_by_products

    def stores(self, position: int, index: Position, axes: Axes) -> tuple[Store, ...]:
        """All places where a group must store a value that it computes at an index.

        Args:
            position: an output of the group.
            index: the element's index in the value's shape, over the axes.
        """
        found: list[Store] = []
        for result, key in self.results:
            if result == position or strip_views(self.graph, result) == position:
                moved = self._through_views(result, position, index, axes)
                shape = self.graph.nodes[result].shape
                found.append(Store(key, flat_offset(moved, contiguous_strides(shape))))
        if position in self.read_later and all(s.buffer != position for s in found):
            found.append(Store(position, flat_offset(index, contiguous_strides(self.graph.nodes[position].shape))))
        return tuple(found)

    def _through_views(self, result: int, position: int, index: Position, axes: Axes) -> Position:
        """The index in a result's shape of an element of the value that it is a view of."""
        if result == position:
            return index
        node = self.graph.nodes[result]
        inner = self._through_views(node.args[0], position, index, axes)
        if node.op is Op.PERMUTE:
            dims = node.attr("dims")
            assert isinstance(dims, tuple)
            return tuple(inner[d] for d in dims)
        return delinearize(linearize(inner, self.graph.nodes[node.args[0]].shape), node.shape, axes)

    def buffers(self) -> tuple[BufferSpec, ...]:
        """All buffers but workspace."""
        names = Namer(reserved=False)
        specs = [self._spec(p, names.take(str(n.attr("name"))), Role.INPUT) for p, n in self.graph if n.op is Op.INPUT]
        single = len(self.results) == 1
        for number, (result, key) in enumerate(self.results):
            spec = self._spec(result, names.take("out" if single else f"out_{number}"), Role.OUTPUT)
            specs.append(replace(spec, key=key, dtype=self.graph.nodes[result].dtype))
        for position in sorted(self.read_later - {key for _, key in self.results}):
            specs.append(self._spec(position, names.take(f"value_{position}"), Role.TEMPORARY))
        return tuple(specs)

    def _spec(self, position: int, name: str, role: Role) -> BufferSpec:
        shape = tuple(formula(d) for d in self.graph.nodes[position].shape)
        return BufferSpec(position, name, self.dtype(position), shape, role)

    def result_views(self) -> tuple[ResultView, ...]:
        """The results as the caller gets them."""
        return tuple(ResultView(key, tuple(formula(d) for d in self.graph.nodes[o].shape)) for o, key in self.results)


def total_bytes(parts: list[tuple[Index, int]]) -> Formula:
    """The bytes of some numbers of elements."""
    total: Index = 0
    for count, itemsize in parts:
        total = total + count * itemsize
    return formula(total)
