"""The buffers of a program, and the storage locations of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.fusion.decide import elementwise_ends
from fusegen.fusion.groups import READ, Group, strip_views
from fusegen.ir.blocks import value_name
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import (
    Position,
    address,
    buffer_strides,
    first_version,
    flat_offset,
    gather_indices,
    identity_axes,
    memory_shape,
    memory_strides,
)
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Index, Shape, delinearize, linearize, same
from fusegen.program.call import Role
from fusegen.program.formula import Formula
from fusegen.schedule.names import Namer
from fusegen.schedule.program import BufferSpec
from fusegen.threads import cached_property

_ROUNDED = (Op.ATTENTION, Op.ATTENTION_BACKWARD, Op.TOPK)
"""Operations whose results torch returns in the operands' dtype."""


@dataclass(frozen=True)
class Store:
    """A storage location of a value; its offset may contain gathers, each with its value's node and index."""

    buffer: int
    offset: Index
    gathers: tuple[tuple[int, int, Position], ...] = ()


class Memory:
    """The buffers of a program: one for each graph input, result, and value that is passed between groups.

    A buffer holds a node in the node's shape; an input's buffer also holds its later versions. A computed value may be stored as a
    view of itself if readers need the view. `reads` maps materialized nodes to their readers' buffer.
    """

    def __init__(self, graph: Graph, groups: tuple[Group, ...]) -> None:
        self.graph = graph
        self.groups = groups
        self.reads: dict[int, int] = {}
        self.seeds: dict[int, str] = {}  # names of the pointers to random keys, by buffer
        self.results: list[int] = []
        self._specs: list[BufferSpec] = []
        self._writes: dict[int, list[tuple[int, int]]] = {}  # value to (buffer, node that it holds)
        self._names = Namer(reserved=False)
        for position, node in graph:
            if node.op is Op.INPUT:
                self.reads[position] = self._add_node(position, str(node.attr("name")), node.dtype, Role.INPUT)
            elif node.op is Op.RANDOM:
                self.reads[position] = self._add_node(position, "random", node.dtype, Role.RANDOM)
                self.seeds[self.reads[position]] = self._names.take("seed")
        for put in graph.puts:
            self.reads[put] = self.reads[first_version(graph, put)]
            self._record_write(self.reads[put], put)
        self._add_results()
        for position in sorted(self.read_later):
            self._add_temporary(position)

    @property
    def specs(self) -> tuple[BufferSpec, ...]:
        return tuple(self._specs)

    def spec(self, key: int) -> BufferSpec:
        return self._specs[key]

    def add(self, name: str, dtype: DType, shape: Sequence[Formula]) -> int:
        """Adds a temporary buffer and returns its key."""
        return self._add(name, dtype, tuple(shape), Role.TEMPORARY, None)

    def dtype(self, position: int) -> DType:
        """Returns the element type of a materialized node in memory."""
        key = self.reads[position] if position in self.reads else self._writes[position][0][0]
        return self._specs[key].dtype

    def stores(self, position: int, index: Position, axes: Axes) -> tuple[Store, ...]:
        """Returns the storage locations of a group's output at an index over the axes."""
        return tuple(self._store(key, node, position, index, axes) for key, node in self._writes.get(position, ()))

    # Materialized values.

    @cached_property
    def read_later(self) -> frozenset[int]:
        return frozenset(p for group in self.groups for p in group.inputs if self.graph.nodes[p].op not in (*READ, Op.PUT))

    @cached_property
    def _read_by_products(self) -> frozenset[int]:
        """Nodes that a matmul reads, in their logical dtype."""
        return frozenset(p for group in self.groups if group.kind.reads_logical_dtype for p in group.inputs)

    @cached_property
    def _wide(self) -> frozenset[int]:
        """Values stored in their computing type: statistics, and 16-bit results of the library, except matmuls that torch rounds
        too."""
        products = {p for group in self.groups if group.kind.is_library for p in group.outputs}
        products -= {p for p in products if self.graph.nodes[p].op in _ROUNDED}
        halves = {p for p in products if self.graph.nodes[p].dtype.is_half and not _is_rounded_anyway(self.graph, p)}
        sums = {p for p, node in self.graph if node.family is Family.REDUCTION or node.op is Op.RUN_SUM}
        return frozenset(halves | sums)

    def _temporary_dtype(self, position: int) -> DType:
        node = self.graph.nodes[position]
        is_wide = strip_views(self.graph, position) in self._wide and position not in self._read_by_products
        return node.dtype.compute if is_wide else node.dtype

    def _add_results(self) -> None:
        """Adds a buffer for each result. Results share no memory with each other; a result shares an input's memory only if it is
        that input."""
        names = self._result_names()
        for number, result in enumerate(self.graph.outputs):
            if self.graph.nodes[result].op is Op.PUT:
                self.results.append(self.reads[result])
                continue
            dtype = self.graph.nodes[result].dtype
            self.results.append(self._add_node(result, names[number], dtype, Role.OUTPUT))
            self._record_write(self.results[-1], result)

    def _result_names(self) -> list[str]:
        """Returns the names of several results in the function that returns them, or of the variables that hold them."""
        graph, inputs = self.graph, {spec.name for spec in self._specs}
        if len(graph.outputs) == 1:
            return ["out"]
        names = [*graph.result_names, *[""] * len(graph.outputs)][: len(graph.outputs)]
        held = [graph.variables.get(_unconverted(graph, result), "") for result in graph.outputs]
        variables = [name or variable for name, variable in zip(names, held, strict=True)]
        count = Counter([*variables, *inputs])
        if any(count[name] > 1 or not name for name in variables):  # a helper's variable for one result alone would mislead
            variables, count = names, Counter([*names, *inputs])
        return [name if name and count[name] == 1 else f"out_{number}" for number, name in enumerate(variables)]

    def _add_temporary(self, position: int) -> None:
        """Chooses the buffer from which a node is read: one with the same elements in the same order, or a new one."""
        dtype = self._temporary_dtype(position)
        value = strip_views(self.graph, position)
        is_statistic = self.graph.nodes[value].family is Family.REDUCTION
        for key, node in self._writes.get(value, ()):
            # A matmul that is a result is read from the result's buffer. A statistic is not, because it would be compared with
            # recomputed values, which are not rounded.
            is_usable = self._specs[key].dtype is dtype or (self._specs[key].role is Role.OUTPUT and not is_statistic)
            if is_usable and self._has_same_layout(node, position, value):
                self.reads[position] = key
                return
        name = self.graph.variables.get(position) or self.graph.variables.get(value) or self.graph.returned.get(value)
        name = name or value_name(self.graph, value)
        self.reads[position] = self._add_node(position, name, dtype, Role.TEMPORARY)
        self._record_write(self.reads[position], position)

    def _has_same_layout(self, viewed: int, view: int, value: int) -> bool:
        axes = identity_axes(self.graph.nodes[value].shape)
        return same(*(self._offset(node, value, axes.symbols, axes) for node in (viewed, view)))

    def _record_write(self, key: int, node: int) -> None:
        self._writes.setdefault(strip_views(self.graph, node), []).append((key, node))

    def _add_node(self, position: int, name: str, dtype: DType, role: Role) -> int:
        return self._add(name, dtype, formulas(memory_shape(self.graph, position)), role, position)

    def _add(self, name: str, dtype: DType, shape: tuple[Formula, ...], role: Role, node: int | None) -> int:
        self._specs.append(BufferSpec(len(self._specs), self._names.take(name), dtype, shape, role, node))
        return len(self._specs) - 1

    # Offsets.

    def _store(self, key: int, node: int, position: int, index: Position, axes: Axes) -> Store:
        """Returns the storage location of a value in a buffer that holds a view of it, or that is written in place."""
        if self.graph.nodes[node].op is not Op.PUT:
            return Store(key, self._offset(node, position, index, axes))
        view_index = self._through_views(self.graph.nodes[node].args[1], position, index, axes)
        offset = flat_offset(address(self.graph, node, view_index, axes), buffer_strides(self.graph, node))
        return Store(key, offset, gather_indices(self.graph, node, view_index, axes))

    def _offset(self, node: int, position: int, index: Position, axes: Axes) -> Index:
        """Returns the offset, in a node's buffer, of an element of the value that the node views."""
        view_index = self._through_views(node, position, index, axes)
        return flat_offset(view_index, memory_strides(self.graph, node))

    def _through_views(self, view: int, position: int, index: Position, axes: Axes) -> Position:
        views = []
        while view != position:
            views.append(self.graph.nodes[view])
            view = views[-1].args[0]
        for node in reversed(views):
            if node.op is Op.PERMUTE:
                dims = node.attr("dims")
                assert isinstance(dims, tuple)
                index = tuple(index[d] for d in dims)
            else:
                index = delinearize(linearize(index, self.graph.nodes[node.args[0]].shape), node.shape, axes)
        return index


def _unconverted(graph: Graph, position: int) -> int:
    """Returns the value of which a node is a view or a conversion."""
    while (value := strip_views(graph, position)) != position or graph.nodes[position].op is Op.CAST:
        position = graph.nodes[position].args[0] if value == position else value
    return position


def formulas(shape: Shape) -> tuple[Formula, ...]:
    return tuple(map(formula, shape))


def total_bytes(parts: list[tuple[Index, int]]) -> Formula:
    """Returns the total bytes of (element count, item size) pairs."""
    total: Index = 0
    for count, itemsize in parts:
        total = total + count * itemsize
    return formula(total)


def _is_rounded_anyway(graph: Graph, product: int) -> bool:
    """True if a matmul with a matrix has no epilogue (before a norm or a copy): torch then rounds its result as well."""
    ends = [end for end in elementwise_ends(graph, product) if graph.nodes[end].op is not Op.COPY]
    return len(graph.operands(product)[1].shape) == 2 and not ends
