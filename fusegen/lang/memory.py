"""Which traced tensors share memory, so that an operation in place is seen under every name of a value, or refused.

In place, a value of the function's own becomes a new value of the graph, which all names of the same Python object then mean. Other
objects over the same memory (a view, what it is a view of) are out of date from then on, and using one is an error.

A parameter that the kernel declares to write to is the caller's memory. Its objects are views of the version that lies there: after
a write they are views of the next one. A write to the whole of it makes no version at first, so that what follows computes with the
value as it is; it does when a part is written, or when the function ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from fusegen.errors import UnsupportedError
from fusegen.ir.graph import Graph, GraphBuilder, Location
from fusegen.ir.ops import Family, Op
from fusegen.ir.strided import contiguous_strides, strided_view
from fusegen.ir.symbolic import same
from fusegen.lang.gradients import Recording, note_write
from fusegen.lang.places import here, location


class Memory:
    """The memory that a value and its views would lie in.

    Args:
        parameter: whose memory it is; empty for what the function computes.
        declared: whether the kernel says that it writes to it.
        position: of the parameter.

    Attributes:
        writes: how often something was written to it.
        value: the node that the whole of it is now.
        version: the node that lies in the caller's memory: another one where the whole has a value that no write has stored yet.
    """

    def __init__(self, parameter: str = "", *, declared: bool = False, position: int = -1) -> None:
        self.parameter, self.declared = parameter, declared
        self.writes = 0
        self.value = self.version = self._first = position
        self.location: Location | None = None  # of the last write to the whole

    @property
    def is_written(self) -> bool:
        """Whether something is stored in the caller's memory."""
        return self.version != self._first


class _Tracer(Recording, Protocol):
    builder: GraphBuilder


class _Value(Protocol):
    @property
    def _tracer(self) -> _Tracer: ...

    _position: int
    _memory: Memory
    _writes: int
    _root: int  # the node that the whole of the memory was when the value was up to date


def require_current(value: _Value) -> None:
    """Brings a value up to date whose memory was written to through another one.

    Raises:
        UnsupportedError: torch would give the new elements, which this value does not know.
    """
    memory = value._memory
    if value._writes == memory.writes:
        return
    if not memory.declared:
        raise UnsupportedError(
            "a tensor is used after a view of it, or what it is a view of, was changed in place",
            where=here(),
            mend="write y = y + 1 in place of y += 1, and put parts together with torch.cat or torch.where",
        )
    value._position = _rebased(value._tracer.builder, value._position, value._root, memory.value)
    value._root, value._writes = memory.value, memory.writes


def overwrite(target: _Value, result: _Value) -> None:
    """Makes a value mean what was written to it.

    Args:
        result: of the target's shape and dtype.

    Raises:
        UnsupportedError: the target is a parameter, or a view of one, that the kernel does not declare to write to.
    """
    memory = target._memory
    if memory.declared:
        require_current(target)
        put(target, target._position, result)
        return
    require_own(memory)
    note_write(target._tracer, target._tracer.builder.nodes[target._position])
    target._position = result._position
    memory.writes += 1
    target._writes = memory.writes


def require_own(memory: Memory) -> None:
    """Refuses a parameter's memory.

    Raises:
        UnsupportedError: it is one.
    """
    if memory.parameter:
        raise UnsupportedError(
            f"the kernel writes to its parameter {memory.parameter!r}, and does not say so",
            where=here(),
            mend=f"declare it: @fg.kernel(mutates=({memory.parameter!r},)), or compute a new value: y = x + 1 in place of x += 1",
        )


def put(target: _Value, place: int, result: _Value) -> None:
    """Writes to a place in the memory of a declared parameter.

    Args:
        target: a value in that memory.
        place: the node that reading the place gives, made of views and gathers of the memory as it is.
        result: what is written, of the place's shape and dtype.

    Raises:
        UnsupportedError: several elements of the place are one in memory.
    """
    builder, memory = target._tracer.builder, target._memory
    if 0 in builder.nodes[place].shape or result._position == place:
        return
    if place == memory.value:
        memory.value, memory.location = result._position, location()
    else:
        _require_distinct(builder, place, memory.value)
        before = memory.value
        store(builder, memory)
        where = _rebased(builder, place, before, memory.version)
        memory.value = memory.version = _put(builder, where, result._position, memory, location())
    memory.writes += 1
    require_current(target)


def store(builder: GraphBuilder, memory: Memory) -> None:
    """Lets the caller's memory have the value of the whole."""
    if memory.value != memory.version:
        memory.value = memory.version = _put(builder, memory.version, memory.value, memory, memory.location)


def _put(builder: GraphBuilder, place: int, value: int, memory: Memory, where: Location | None) -> int:
    return builder.add(Op.PUT, [place, value], location=where, shape=builder.nodes[memory.version].shape)


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
    """The same view of another root."""
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
                mend="write to the tensor before it is expanded, as torch asks as well",
            )


# What torch copies.


def lies_in(builder: GraphBuilder, position: int, memory: Memory, *, contiguous: bool = False) -> bool:
    """Whether a view, or a reshape, of a declared parameter is a view for torch, which copies where strides cannot say it.

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
