"""Memory shared by traced tensors, so that an in-place operation is visible through every alias of a value, or refused.

For tensors that the function computes, an in-place operation creates a new graph value. All tensors on the same memory, a base and
its views, become views of that value. If torch may have copied (depending on strides), using an alias afterwards is an error.

A parameter that the kernel declares to mutate is the caller's memory. Its objects are views of the current version; after a write
they are views of the next one. A write to all of it is deferred: later operations use the value directly, and the version is
created when a part is written, or when the function ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from fusegen.dtypes import DType
from fusegen.errors import UnsupportedError
from fusegen.ir.graph import Graph, GraphBuilder, Location, Node
from fusegen.ir.index_map import contiguous_strides, strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape, literal, product, same, simplify_dim
from fusegen.trace.modes import GradientState, note_write
from fusegen.trace.user import location, user_line


class TracedMemory:
    """The memory of a value and its views.

    Args:
        parameter: the owning parameter; empty for computed values.
        declared: True if the kernel declares that it mutates the parameter.
        captured: True for a captured tensor.
        position: the node of the parameter or of the computed value.

    Attributes:
        value: the node that holds the current contents.
        version: the node stored in the caller's memory; differs from `value` while a write is deferred.
    """

    def __init__(self, parameter: str = "", *, declared: bool = False, captured: bool = False, position: int = -1) -> None:
        self.parameter, self.declared, self.captured = parameter, declared, captured
        self.writes = 0
        self.value = self.version = self._first = position
        self.unfilled = False  # uninitialized
        self.is_ambiguous = False  # a write may or may not have changed this memory
        self._possible_aliases: list[TracedMemory] = []  # memories that may be the same one, including this one
        self.location: Location | None = None  # the last write to all of it

    @classmethod
    def possible_alias(cls, other: TracedMemory, position: int) -> TracedMemory:
        """Returns memory that is a copy or a view of other memory; unknown strides decide which."""
        memory = cls(position=position)
        memory._possible_aliases = other._possible_aliases = other._possible_aliases or [other]
        memory._possible_aliases.append(memory)
        return memory

    def invalidate_aliases(self) -> None:
        """Marks possible aliases as ambiguous after a write to this memory."""
        for memory in self._possible_aliases:
            memory.is_ambiguous |= memory is not self

    @property
    def is_written(self) -> bool:
        """True if a write is stored in the caller's memory."""
        return self.version != self._first


class _Tracer(GradientState, Protocol):
    builder: GraphBuilder


class _Value(Protocol):
    @property
    def _tracer(self) -> _Tracer: ...

    _position: int
    _memory: TracedMemory
    _writes: int
    _root: int  # the memory's contents when the value was current


def require_current(value: _Value) -> None:
    """Updates a value after a write through an alias. Refuses the value if torch may have copied it instead."""
    memory = value._memory
    if value._writes == memory.writes and not memory.is_ambiguous:
        return
    if memory.is_ambiguous or not (memory.declared or _are_views(value._tracer.builder, value._position, value._root)):
        raise UnsupportedError(
            "a tensor is used after a possible alias of it was changed in place: torch may have made a copy instead",
            where=user_line(),
            hint="write y = y + 1 instead of y += 1, or reshape the tensor after the change",
        )
    value._position = _rebased(value._tracer.builder, value._position, value._root, memory.value)
    value._root, value._writes = memory.value, memory.writes


def require_filled(value: _Value) -> None:
    """Refuses to read uninitialized memory of ``torch.empty``."""
    if value._memory.unfilled:
        message = "a tensor from torch.empty, empty_like or new_empty is read before it is written"
        raise UnsupportedError(message, where=user_line(), hint="write to it first, or use torch.zeros")


def overwrite(target: _Value, result: _Value) -> None:
    """Writes a result to a value; refuses undeclared parameters."""
    require_current(target)
    put(target, target._position, result)


def require_own(memory: TracedMemory) -> None:
    if memory.captured:
        message = f"the kernel writes to the captured tensor {memory.parameter!r}"
        raise UnsupportedError(message, where=user_line(), hint="pass it as a parameter, and declare it: @fg.kernel(mutates=(...))")
    if memory.parameter:
        raise UnsupportedError(
            f"the kernel writes to its parameter {memory.parameter!r} without declaring it",
            where=user_line(),
            hint=f"declare it: @fg.kernel(mutates=({memory.parameter!r},)), or compute a new value: y = x + 1 instead of x += 1",
        )


def put(target: _Value, region: int, result: _Value) -> None:
    """Writes to a region of the memory of a declared parameter or of a computed value.

    Args:
        target: a value in that memory.
        region: the node that reads the region: views and gathers of the current contents.
        result: the written value, of the region's shape and dtype.
    """
    builder, memory = target._tracer.builder, target._memory
    if not memory.declared:
        require_own(memory)
        note_write(target._tracer, builder.nodes[target._position])
        memory.unfilled = False
    if 0 in builder.nodes[region].shape or result._position == region:
        return
    _require_distinct(builder, region, memory.value)
    memory.invalidate_aliases()
    if not memory.declared and not _are_views(builder, target._position, memory.value, written=True):
        _give_own_memory(target, with_value(builder, region, target._position, result._position))
        return
    if region == memory.value:
        memory.value, memory.location = result._position, location()
    elif not memory.declared:
        memory.value = with_value(builder, region, memory.value, result._position)
    else:
        before = memory.value
        store(builder, memory)
        target_region = _rebased(builder, region, before, memory.version)
        memory.value = memory.version = _put(builder, target_region, result._position, memory, location())
    memory.writes += 1
    require_current(target)


def with_value(builder: GraphBuilder, region: int, root: int, value: int) -> int:
    """Returns a copy of a tensor with a value written to a region. For duplicate indices the last element wins.

    Args:
        region: views and gathers of the tensor.
        root: the tensor.
        value: the written value, of the region's shape and dtype.
    """
    if 0 in builder.nodes[region].shape:
        return root
    nodes = _Nodes(builder, location())
    for step in _views(builder, region, root) or ():
        node = builder.nodes[step]
        if node.op not in _INVERSE:
            raise UnsupportedError(
                f"writing to {node.op.row.name} of a tensor that the kernel computes cannot be traced",
                hint="compute a new value with torch.where or torch.cat",
            )
        value = _INVERSE[node.op](nodes, node, node.args[0], value)
    return value


def store(builder: GraphBuilder, memory: TracedMemory) -> None:
    """Stores a deferred write in the caller's memory."""
    if memory.value != memory.version:
        memory.value = memory.version = _put(builder, memory.version, memory.value, memory, memory.location)


def _put(builder: GraphBuilder, region: int, value: int, memory: TracedMemory, line: Location | None) -> int:
    return builder.add(Op.PUT, [region, value], location=line, shape=builder.nodes[memory.version].shape)


def _give_own_memory(target: _Value, value: int) -> None:
    """Gives a written view its own memory. In torch the view may be a copy, so reading its former base becomes an error."""
    former, target._memory = target._memory, TracedMemory(position=value)
    former.is_ambiguous = True
    target._memory.writes = target._writes = former.writes + 1
    target._position = target._root = value


def _are_views(builder: GraphBuilder, position: int, root: int, *, written: bool = False) -> bool:
    """True if a value is empty, or torch makes it a view of a computed tensor for all strides; with `written`, a writable one."""
    steps = _views(builder, position, root)
    if steps is None:
        return 0 in builder.nodes[position].shape
    for step in steps:
        node = builder.nodes[step]
        if node.op is Op.CONCAT or (written and node.op is Op.DETACH):
            return False
        if node.op is Op.RESHAPE and not _only_splits(builder.nodes[node.args[0]].shape, node.shape):
            return False
    return True


def _only_splits(source: Shape, result: Shape) -> bool:
    """True if a reshape only splits dims, and adds or drops dims of size 1: a view for any strides."""
    sizes = [size for size in result if not same(size, 1)]
    for size in (size for size in source if not same(size, 1)):
        extent: Dim = 1
        while sizes and not same(extent, size):
            extent = simplify_dim(extent * sizes.pop(0))
        if not same(extent, size):
            return False
    return not sizes


def _views(builder: GraphBuilder, position: int, root: int) -> list[int] | None:
    """The views and gathers from a memory's root to a value, the last first; None for an empty value."""
    steps: list[int] = []
    while position != root:
        if builder.nodes[position].family not in (Family.VIEW, Family.INDEXING):
            return None
        steps.append(position)
        position = builder.nodes[position].args[0]
    return steps


def _rebased(builder: GraphBuilder, position: int, root: int, rebased_root: int) -> int:
    views = _views(builder, position, root)
    if views is None:
        return position
    for view in reversed(views):
        node = builder.nodes[view]
        rebased_root = builder.add_node(replace(node, args=(rebased_root, *node.args[1:])), builder.locations[view])
    return rebased_root


def _require_distinct(builder: GraphBuilder, region: int, root: int) -> None:
    for view in _views(builder, region, root) or ():
        node = builder.nodes[view]
        if node.op is Op.EXPAND and node.shape != builder.nodes[node.args[0]].shape:
            raise UnsupportedError(
                "cannot write to an expanded tensor: several of its elements share one memory location",
                where=user_line(),
                hint="write to the tensor before it is expanded, as torch requires too",
            )


def is_torch_view(builder: GraphBuilder, position: int, memory: TracedMemory, *, contiguous: bool = False) -> bool:
    """True if torch implements a view or reshape of a declared parameter as a (contiguous) view instead of a copy."""
    if _views(builder, position, memory.value) is None:
        return True
    rebased = _rebased(builder, position, memory.value, memory.version)
    graph = Graph(builder.name, tuple(builder.inputs), (), tuple(builder.nodes), ())
    view = strided_view(graph, rebased)
    if view.base != memory.version:
        return False
    dense = zip(view.shape, view.strides, contiguous_strides(view.shape), strict=True)
    return not contiguous or all(same(extent, 1) or same(stride, expected) for extent, stride, expected in dense)


# Writes to computed tensors, as new values. The views that lead to the written region are inverted, the last one first: each
# rule returns the operand of its view after the write.


@dataclass(frozen=True)
class _Nodes:
    builder: GraphBuilder
    line: Location | None

    def add(self, op: Op, *args: int, **attrs: object) -> int:
        return self.builder.add(op, args, location=self.line, **attrs)

    def shape(self, position: int) -> Shape:
        return self.builder.nodes[position].shape

    def reshaped(self, position: int, shape: Sequence[Dim]) -> int:
        shape_before = self.shape(position)
        if len(shape_before) == len(shape) and all(map(same, shape_before, shape)):
            return position
        return self.add(Op.RESHAPE, position, shape=tuple(shape))

    def part(self, position: int, dim: int, start: Dim, length: Dim) -> list[int]:
        """A slice of a dim, as a list; empty for length 0."""
        if same(length, 0):
            return []
        is_all = same(length, self.shape(position)[dim])
        return [position if is_all else self.add(Op.SLICE, position, dim=dim, start=start, length=length, step=1)]

    def joined(self, slices: Sequence[int], dim: int) -> int:
        return slices[0] if len(slices) == 1 else self.add(Op.CONCAT, *slices, dim=dim)

    def iota(self, size: Dim) -> int:
        return self.add(Op.IOTA, shape=(size,), dtype=DType.INT64)


def _slice(nodes: _Nodes, node: Node, operand: int, value: int) -> int:
    dim, start, step = cast(int, node.attr("dim")), cast(Dim, node.attr("start")), cast(int, node.attr("step"))
    length, size = node.shape[dim], nodes.shape(operand)[dim]
    if step != 1 and _takes_one_per_block(size, start, length, step):
        return _write_one_per_block(nodes, operand, dim, cast(int, start), step, value)
    if step != 1:
        value, length = _interleaved(nodes, operand, dim, (start, length, step), value)
    end = simplify_dim(start + length)
    neighbours = nodes.part(operand, dim, 0, start), nodes.part(operand, dim, end, simplify_dim(size - end))
    return nodes.joined([*neighbours[0], value, *neighbours[1]], dim)


def _takes_one_per_block(size: Dim, start: Dim, length: Dim, step: int) -> bool:
    known = literal(start)
    return step > 1 and known is not None and known < step and same(simplify_dim(length * step), size)


def _write_one_per_block(nodes: _Nodes, operand: int, dim: int, start: int, step: int, value: int) -> int:
    shape, length = nodes.shape(operand), nodes.shape(value)[dim]
    blocks = nodes.reshaped(operand, (*shape[:dim], length, step, *shape[dim + 1 :]))
    single = nodes.reshaped(value, (*shape[:dim], length, 1, *shape[dim + 1 :]))
    neighbours = nodes.part(blocks, dim + 1, 0, start), nodes.part(blocks, dim + 1, start + 1, step - start - 1)
    return nodes.reshaped(nodes.joined([*neighbours[0], single, *neighbours[1]], dim + 1), shape)


def _interleaved(nodes: _Nodes, operand: int, dim: int, steps: tuple[Dim, Dim, int], value: int) -> tuple[int, Dim]:
    """The value interleaved with the elements that a strided slice skips, and its length."""
    start, length, step = steps
    if step < 0:
        raise UnsupportedError("writing to a reversed view cannot be traced", hint="write the reversed value to the tensor itself")
    span = simplify_dim((length - 1) * step + 1)
    shape = nodes.shape(value)
    first = nodes.part(value, dim, 0, simplify_dim(length - 1))
    last = nodes.part(value, dim, simplify_dim(length - 1), 1)
    if not first:
        return value, span
    (run,) = nodes.part(operand, dim, start, simplify_dim(span - 1))
    blocks = nodes.reshaped(run, (*shape[:dim], simplify_dim(length - 1), step, *shape[dim + 1 :]))
    single = nodes.reshaped(first[0], (*shape[:dim], simplify_dim(length - 1), 1, *shape[dim + 1 :]))
    mixed = nodes.joined([single, *nodes.part(blocks, dim + 1, 1, step - 1)], dim + 1)
    return nodes.joined([nodes.reshaped(mixed, (*shape[:dim], simplify_dim(span - 1), *shape[dim + 1 :])), *last], dim), span


def _permute(nodes: _Nodes, node: Node, _: int, value: int) -> int:
    dims = cast(tuple[int, ...], node.attr("dims"))
    return nodes.add(Op.PERMUTE, value, dims=tuple(dims.index(d) for d in range(len(dims))))


def _reshape(nodes: _Nodes, _: Node, operand: int, value: int) -> int:
    return nodes.reshaped(value, nodes.shape(operand))


_FEW = 8  # indices that are compared with each element; costs no more than reading and writing it


def _gather(nodes: _Nodes, node: Node, operand: int, value: int) -> int:
    """Writes elements at indices along the dim. If indices are equal, the last element wins."""
    dim, wraps = cast(int, node.attr("dim")), bool(node.attr("wraps"))
    shape, size = nodes.shape(operand), nodes.shape(operand)[dim]
    rows = _vector_index(nodes.builder, node, shape, dim)
    if rows is None:
        return _write_elements(nodes, node, operand, value)
    number = _checked_index(nodes, nodes.reshaped(rows, (node.shape[dim],)), size, wraps=wraps)
    count = literal(node.shape[dim])
    if count is not None and count <= _FEW:
        return _write_by_comparison(nodes, operand, dim, number, value, count)
    last = nodes.add(Op.LAST, number, length=size)
    along = nodes.reshaped(last, [size if d == dim else 1 for d in range(len(shape))])
    return _select(nodes, operand, dim, along, value)


def _vector_index(builder: GraphBuilder, node: Node, shape: Shape, dim: int) -> int | None:
    """The one-dimensional index of a gather that takes complete slices along the dim; None for others."""
    index = builder.nodes[node.args[1]]
    if len(shape) == 1:
        return node.args[1]
    if index.op is not Op.EXPAND or not all(
        same(a, b) for d, (a, b) in enumerate(zip(index.shape, shape, strict=True)) if d != dim
    ):
        return None
    below = builder.nodes[index.args[0]].shape
    is_vector = len(below) == len(shape) and all(same(size, 1) for d, size in enumerate(below) if d != dim)
    return index.args[0] if is_vector else None


def _checked_index(nodes: _Nodes, index: int, size: Dim, *, wraps: bool) -> int:
    """The index as a non-negative number. It is gathered from a range, whose bounds check then applies to it."""
    return nodes.add(Op.GATHER, nodes.iota(size), index, dim=0, wraps=wraps)


def _write_by_comparison(nodes: _Nodes, operand: int, dim: int, number: int, value: int, count: int) -> int:
    shape = nodes.shape(operand)
    positions = nodes.reshaped(nodes.iota(shape[dim]), [shape[dim] if d == dim else 1 for d in range(len(shape))])
    for n in range(count):
        (index,), (element,) = nodes.part(number, 0, n, 1), nodes.part(value, dim, n, 1)
        is_match = nodes.add(Op.EQ, positions, nodes.reshaped(index, [1] * len(shape)))
        operand = nodes.add(Op.WHERE, is_match, element, operand)
    return operand


def _select(nodes: _Nodes, operand: int, dim: int, last: int, value: int) -> int:
    """Selects the value's elements at the positions `last` along the dim; -1 keeps the old element."""
    is_absent = nodes.add(Op.LT, last, nodes.builder.constant(0))
    expanded = nodes.add(Op.EXPAND, last, shape=nodes.shape(operand))
    gathered = nodes.add(Op.GATHER, value, expanded, dim=dim, wraps=True)  # -1 reads the last element, which is discarded
    return nodes.add(Op.WHERE, is_absent, operand, gathered)


def _write_elements(nodes: _Nodes, node: Node, operand: int, value: int) -> int:
    dim, shape = cast(int, node.attr("dim")), nodes.shape(operand)
    index = nodes.reshaped(node.args[1], (simplify_dim(product(node.shape)),))
    number = nodes.reshaped(_checked_index(nodes, index, shape[dim], wraps=bool(node.attr("wraps"))), node.shape)
    strides, total = contiguous_strides(shape), simplify_dim(product(shape))
    flat = nodes.add(Op.MUL, number, nodes.builder.size(strides[dim]))
    for d in (d for d in range(len(shape)) if d != dim):
        dim_index = nodes.reshaped(nodes.iota(node.shape[d]), (node.shape[d], *(1,) * (len(shape) - 1 - d)))
        flat = nodes.add(Op.ADD, flat, nodes.add(Op.MUL, dim_index, nodes.builder.size(strides[d])))
    count = (simplify_dim(product(node.shape)),)
    last = nodes.add(Op.LAST, nodes.reshaped(flat, count), length=total)
    result = _select(nodes, nodes.reshaped(operand, (total,)), 0, last, nodes.reshaped(value, count))
    return nodes.reshaped(result, shape)


_INVERSE: dict[Op, Callable[[_Nodes, Node, int, int], int]] = {
    Op.SLICE: _slice,
    Op.PERMUTE: _permute,
    Op.RESHAPE: _reshape,
    Op.GATHER: _gather,
}
