"""Memory that traced tensors share, so that an operation in place is seen under every name of a value, or refused.

In place, a value of the function's own becomes a new value of the graph, of which all objects over the same memory are views from
then on: a view, what it is a view of. Where it depends on strides if torch would have copied, using such a view is an error.

A parameter that the kernel declares to write to is the caller's memory. Its objects are views of the version that lies there: after
a write they are views of the next one. A write to the whole of it makes no version at first, so that what follows computes with the
value as it is; it does when a part is written, or when the function ends.
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
from fusegen.trace.user import here, location


class TracedMemory:
    """The memory that a value and its views would lie in.

    Args:
        parameter: whose memory it is; empty for what the function computes.
        declared: whether the kernel says that it writes to it.
        captured: whether it is no parameter: a tensor that the function closes over.
        position: of the parameter, or of what the function computes.

    Attributes:
        writes: how often something was written to it.
        value: the node that the whole of it is now.
        version: the node that lies in the caller's memory: another one where the whole has a value that no write has stored yet.
    """

    def __init__(self, parameter: str = "", *, declared: bool = False, captured: bool = False, position: int = -1) -> None:
        self.parameter, self.declared, self.captured = parameter, declared, captured
        self.writes = 0
        self.value = self.version = self._first = position
        self.unfilled = False  # nothing was written to it, and it has no values yet
        self.is_lost = False  # something was written which may be to this memory, or to a copy
        self._kin: list[TracedMemory] = []  # those that may be one memory, if there are any others
        self.location: Location | None = None  # of the last write to the whole

    @classmethod
    def beside(cls, other: TracedMemory, position: int) -> TracedMemory:
        """The memory of what is a copy or a view of some of another memory, as its strides have it, which are not known."""
        found = cls(position=position)
        found._kin = other._kin = other._kin or [other]
        found._kin.append(found)
        return found

    def lose_others(self) -> None:
        """Notes a write to this memory, of which those that may be the same one cannot tell whether they have it."""
        for each in self._kin:
            each.is_lost |= each is not self

    @property
    def is_written(self) -> bool:
        """True if something is stored in the caller's memory."""
        return self.version != self._first


class _Tracer(GradientState, Protocol):
    builder: GraphBuilder


class _Value(Protocol):
    @property
    def _tracer(self) -> _Tracer: ...

    _position: int
    _memory: TracedMemory
    _writes: int
    _root: int  # the node that the whole of the memory was when the value was up to date


def require_current(value: _Value) -> None:
    """Brings a value up to date whose memory was written to through another one.

    Raises:
        UnsupportedError: torch would give the new elements, or those of a copy.
    """
    memory = value._memory
    if value._writes == memory.writes and not memory.is_lost:
        return
    if memory.is_lost or not (memory.declared or _are_views(value._tracer.builder, value._position, value._root)):
        raise UnsupportedError(
            "a tensor is used after a view of it, or what it is a view of, was changed in place, which torch may have copied",
            where=here(),
            hint="write y = y + 1 in place of y += 1, or reshape the tensor after the change",
        )
    value._position = _rebased(value._tracer.builder, value._position, value._root, memory.value)
    value._root, value._writes = memory.value, memory.writes


def require_filled(value: _Value) -> None:
    """Refuses what ``torch.empty`` gave, before something was written to it."""
    if value._memory.unfilled:
        what = "a tensor that torch.empty, empty_like or new_empty gave is read before something was written to it"
        raise UnsupportedError(what, where=here(), hint="write to it first, or use torch.zeros")


def overwrite(target: _Value, result: _Value) -> None:
    """Makes a value mean what was written to it.

    Raises:
        UnsupportedError: the target is a parameter, or a view of one, that the kernel does not declare to write to.
    """
    require_current(target)
    put(target, target._position, result)


def require_own(memory: TracedMemory) -> None:
    """Refuses a parameter's memory."""
    if memory.captured:
        what = f"the kernel writes to {memory.parameter!r}, which it closes over"
        raise UnsupportedError(what, where=here(), hint="pass it as a parameter, and declare it: @fg.kernel(mutates=(...))")
    if memory.parameter:
        raise UnsupportedError(
            f"the kernel writes to its parameter {memory.parameter!r}, and does not say so",
            where=here(),
            hint=f"declare it: @fg.kernel(mutates=({memory.parameter!r},)), or compute a new value: y = x + 1 in place of x += 1",
        )


def put(target: _Value, place: int, result: _Value) -> None:
    """Writes to a place in the memory of a declared parameter, or of what the function computes.

    Args:
        target: a value in that memory.
        place: the node that reading the place gives, made of views and gathers of the memory as it is.
        result: what is written, of the place's shape and dtype.

    Raises:
        UnsupportedError: several elements of the place are one in memory, or the target is a parameter that the kernel does not
            declare to write to.
    """
    builder, memory = target._tracer.builder, target._memory
    if not memory.declared:
        require_own(memory)
        note_write(target._tracer, builder.nodes[target._position])
        memory.unfilled = False
    if 0 in builder.nodes[place].shape or result._position == place:
        return
    _require_distinct(builder, place, memory.value)
    memory.lose_others()
    if not memory.declared and not _are_views(builder, target._position, memory.value, written=True):
        _leave(target, with_value(builder, place, target._position, result._position))
        return
    if place == memory.value:
        memory.value, memory.location = result._position, location()
    elif not memory.declared:
        memory.value = with_value(builder, place, memory.value, result._position)
    else:
        before = memory.value
        store(builder, memory)
        where = _rebased(builder, place, before, memory.version)
        memory.value = memory.version = _put(builder, where, result._position, memory, location())
    memory.writes += 1
    require_current(target)


def with_value(builder: GraphBuilder, place: int, root: int, value: int) -> int:
    """A tensor with a value at a place, as a new value. If several elements of the value have one place, the last one is there.

    Args:
        place: made of views and gathers of the tensor.
        root: the tensor.
        value: of the place's shape and dtype.

    Raises:
        UnsupportedError: a step to the place cannot be followed back.
    """
    if 0 in builder.nodes[place].shape:
        return root
    made = _Made(builder, location())
    for step in _views(builder, place, root) or ():
        node = builder.nodes[step]
        if node.op not in _BACK:
            raise UnsupportedError(
                f"writing to {node.op.row.name} of a tensor that the kernel computes cannot be traced",
                hint="compute a new value with torch.where or torch.cat",
            )
        value = _BACK[node.op](made, node, node.args[0], value)
    return value


def store(builder: GraphBuilder, memory: TracedMemory) -> None:
    """Lets the caller's memory have the value of the whole, if it does not yet."""
    if memory.value != memory.version:
        memory.value = memory.version = _put(builder, memory.version, memory.value, memory, memory.location)


def _put(builder: GraphBuilder, place: int, value: int, memory: TracedMemory, where: Location | None) -> int:
    return builder.add(Op.PUT, [place, value], location=where, shape=builder.nodes[memory.version].shape)


def _leave(target: _Value, value: int) -> None:
    """Gives a value memory of its own, with what was written to it: torch may have copied what it is a view of, or not, so that
    nobody may look at that from then on."""
    left, target._memory = target._memory, TracedMemory(position=value)
    left.is_lost = True
    target._memory.writes = target._writes = left.writes + 1
    target._position = target._root = value


def _are_views(builder: GraphBuilder, position: int, root: int, *, written: bool = False) -> bool:
    """True if a value is a view of what the function computes, however that lies in memory, or has no element.

    Args:
        written: whether it must be one through which something can be written.
    """
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
    """True if a reshape only takes dims apart, and adds or drops dims of size 1: it is a view of any strides."""
    sizes = [size for size in result if not same(size, 1)]
    for size in (size for size in source if not same(size, 1)):
        found: Dim = 1
        while sizes and not same(found, size):
            found = simplify_dim(found * sizes.pop(0))
        if not same(found, size):
            return False
    return not sizes


def _views(builder: GraphBuilder, position: int, root: int) -> list[int] | None:
    """The views and gathers that lead from a memory's root to a value, the last first; None for a value that has no element."""
    found: list[int] = []
    while position != root:
        if builder.nodes[position].family not in (Family.VIEW, Family.INDEXING):
            return None
        found.append(position)
        position = builder.nodes[position].args[0]
    return found


def _rebased(builder: GraphBuilder, position: int, root: int, other: int) -> int:
    views = _views(builder, position, root)
    if views is None:
        return position
    for view in reversed(views):
        node = builder.nodes[view]
        other = builder.put(replace(node, args=(other, *node.args[1:])), builder.locations[view])
    return other


def _require_distinct(builder: GraphBuilder, place: int, root: int) -> None:
    for view in _views(builder, place, root) or ():
        node = builder.nodes[view]
        if node.op is Op.EXPAND and node.shape != builder.nodes[node.args[0]].shape:
            raise UnsupportedError(
                "several elements of an expanded tensor are one in memory, which cannot be written to",
                where=here(),
                hint="write to the tensor before it is expanded, as torch asks as well",
            )


def lies_in(builder: GraphBuilder, position: int, memory: TracedMemory, *, contiguous: bool = False) -> bool:
    """True if a view, or a reshape, of a declared parameter is a view for torch, which copies where strides cannot say it.

    Args:
        contiguous: whether it must be contiguous as well.
    """
    if _views(builder, position, memory.value) is None:
        return True
    moved = _rebased(builder, position, memory.value, memory.version)
    graph = Graph(builder.name, tuple(builder.inputs), (), tuple(builder.nodes), ())
    view = strided_view(graph, moved)
    if view.base != memory.version:
        return False
    dense = zip(view.shape, view.strides, contiguous_strides(view.shape), strict=True)
    return not contiguous or all(same(extent, 1) or same(stride, wanted) for extent, stride, wanted in dense)


# A tensor with other elements at a place, where nothing lies in memory yet: from the last step to the place to the first one, each
# says what the tensor of that step is once its elements at the place are the new ones.


@dataclass(frozen=True)
class _Made:
    """Makes nodes at a line of the user's."""

    builder: GraphBuilder
    where: Location | None

    def add(self, op: Op, *args: int, **attrs: object) -> int:
        return self.builder.add(op, args, location=self.where, **attrs)

    def shape(self, position: int) -> Shape:
        return self.builder.nodes[position].shape

    def reshaped(self, position: int, shape: Sequence[Dim]) -> int:
        own = self.shape(position)
        if len(own) == len(shape) and all(map(same, own, shape)):
            return position
        return self.add(Op.RESHAPE, position, shape=tuple(shape))

    def part(self, position: int, dim: int, start: Dim, length: Dim) -> list[int]:
        """A run of a dim; nothing where it has no element."""
        if same(length, 0):
            return []
        is_all = same(length, self.shape(position)[dim])
        return [position if is_all else self.add(Op.SLICE, position, dim=dim, start=start, length=length, step=1)]

    def joined(self, parts: Sequence[int], dim: int) -> int:
        return parts[0] if len(parts) == 1 else self.add(Op.CONCAT, *parts, dim=dim)

    def iota(self, size: Dim) -> int:
        return self.add(Op.IOTA, shape=(size,), dtype=DType.INT64)


def _slice(made: _Made, node: Node, before: int, value: int) -> int:
    dim, start, step = cast(int, node.attr("dim")), cast(Dim, node.attr("start")), cast(int, node.attr("step"))
    length, size = node.shape[dim], made.shape(before)[dim]
    if step != 1 and _is_of_blocks(size, start, length, step):
        return _one_of_blocks(made, before, dim, cast(int, start), step, value)
    if step != 1:
        value, length = _apart(made, before, dim, (start, length, step), value)
    end = simplify_dim(start + length)
    around = made.part(before, dim, 0, start), made.part(before, dim, end, simplify_dim(size - end))
    return made.joined([*around[0], value, *around[1]], dim)


def _is_of_blocks(size: Dim, start: Dim, length: Dim, step: int) -> bool:
    """True if a slice takes one element of each block of a dim."""
    known = literal(start)
    return step > 1 and known is not None and known < step and same(simplify_dim(length * step), size)


def _one_of_blocks(made: _Made, before: int, dim: int, start: int, step: int, value: int) -> int:
    shape, length = made.shape(before), made.shape(value)[dim]
    blocks = made.reshaped(before, (*shape[:dim], length, step, *shape[dim + 1 :]))
    single = made.reshaped(value, (*shape[:dim], length, 1, *shape[dim + 1 :]))
    around = made.part(blocks, dim + 1, 0, start), made.part(blocks, dim + 1, start + 1, step - start - 1)
    return made.reshaped(made.joined([*around[0], single, *around[1]], dim + 1), shape)


def _apart(made: _Made, before: int, dim: int, steps: tuple[Dim, Dim, int], value: int) -> tuple[int, Dim]:
    """The value with those elements between its own that a slice passes over, from its first element to its last one."""
    start, length, step = steps
    if step < 0:
        raise UnsupportedError("writing to a tensor that was reversed cannot be traced", hint="reverse the value")
    span = simplify_dim((length - 1) * step + 1)
    shape = made.shape(value)
    first = made.part(value, dim, 0, simplify_dim(length - 1))
    last = made.part(value, dim, simplify_dim(length - 1), 1)
    if not first:
        return value, span
    (run,) = made.part(before, dim, start, simplify_dim(span - 1))
    blocks = made.reshaped(run, (*shape[:dim], simplify_dim(length - 1), step, *shape[dim + 1 :]))
    single = made.reshaped(first[0], (*shape[:dim], simplify_dim(length - 1), 1, *shape[dim + 1 :]))
    mixed = made.joined([single, *made.part(blocks, dim + 1, 1, step - 1)], dim + 1)
    return made.joined([made.reshaped(mixed, (*shape[:dim], simplify_dim(span - 1), *shape[dim + 1 :])), *last], dim), span


def _permute(made: _Made, node: Node, _: int, value: int) -> int:
    dims = cast(tuple[int, ...], node.attr("dims"))
    return made.add(Op.PERMUTE, value, dims=tuple(dims.index(d) for d in range(len(dims))))


def _reshape(made: _Made, _: Node, before: int, value: int) -> int:
    return made.reshaped(value, made.shape(before))


_FEW = 8  # indices that are compared with each place, which costs no more than reading and writing it


def _gather(made: _Made, node: Node, before: int, value: int) -> int:
    """For each place along the dim the last of the elements that the index puts there."""
    dim, wraps = cast(int, node.attr("dim")), bool(node.attr("wraps"))
    shape, size = made.shape(before), made.shape(before)[dim]
    rows = _of_rows(made.builder, node, shape, dim)
    if rows is None:
        return _elements(made, node, before, value)
    number = _checked(made, made.reshaped(rows, (node.shape[dim],)), size, wraps=wraps)
    count = literal(node.shape[dim])
    if count is not None and count <= _FEW:
        return _compared(made, before, dim, number, value, count)
    last = made.add(Op.LAST, number, length=size)
    along = made.reshaped(last, [size if d == dim else 1 for d in range(len(shape))])
    return _chosen(made, before, dim, along, value)


def _of_rows(builder: GraphBuilder, node: Node, shape: Shape, dim: int) -> int | None:
    """The index of a gather that takes all that there is at a place along the dim, without further dims; None of others."""
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


def _checked(made: _Made, index: int, size: Dim, *, wraps: bool) -> int:
    """The index, counted from the front, as numbers that are gathered: that says which of them names no element."""
    return made.add(Op.GATHER, made.iota(size), index, dim=0, wraps=wraps)


def _compared(made: _Made, before: int, dim: int, number: int, value: int, count: int) -> int:
    shape = made.shape(before)
    places = made.reshaped(made.iota(shape[dim]), [shape[dim] if d == dim else 1 for d in range(len(shape))])
    for n in range(count):
        (at,), (one,) = made.part(number, 0, n, 1), made.part(value, dim, n, 1)
        is_here = made.add(Op.EQ, places, made.reshaped(at, [1] * len(shape)))
        before = made.add(Op.WHERE, is_here, one, before)
    return before


def _chosen(made: _Made, before: int, dim: int, last: int, value: int) -> int:
    """The value's elements by their numbers along the dim, and what was there before where there is none."""
    none = made.add(Op.LT, last, made.builder.constant(0))
    wide = made.add(Op.EXPAND, last, shape=made.shape(before))
    found = made.add(Op.GATHER, value, wide, dim=dim, wraps=True)  # of -1 the last element, which nobody takes
    return made.add(Op.WHERE, none, before, found)


def _elements(made: _Made, node: Node, before: int, value: int) -> int:
    """The same of single elements, by their numbers in row-major order."""
    dim, shape = cast(int, node.attr("dim")), made.shape(before)
    index = made.reshaped(node.args[1], (simplify_dim(product(node.shape)),))
    number = made.reshaped(_checked(made, index, shape[dim], wraps=bool(node.attr("wraps"))), node.shape)
    strides, total = contiguous_strides(shape), simplify_dim(product(shape))
    flat = made.add(Op.MUL, number, made.builder.size(strides[dim]))
    for d in (d for d in range(len(shape)) if d != dim):
        along = made.reshaped(made.iota(node.shape[d]), (node.shape[d], *(1,) * (len(shape) - 1 - d)))
        flat = made.add(Op.ADD, flat, made.add(Op.MUL, along, made.builder.size(strides[d])))
    count = (simplify_dim(product(node.shape)),)
    last = made.add(Op.LAST, made.reshaped(flat, count), length=total)
    found = _chosen(made, made.reshaped(before, (total,)), 0, last, made.reshaped(value, count))
    return made.reshaped(found, shape)


_BACK: dict[Op, Callable[[_Made, Node, int, int], int]] = {
    Op.SLICE: _slice,
    Op.PERMUTE: _permute,
    Op.RESHAPE: _reshape,
    Op.GATHER: _gather,
}
