"""Where a kernel with one output writes, when it can write only in one way: copies serve whatever else is wanted of the value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fusegen.ir.formula import formula
from fusegen.ir.index_map import Position
from fusegen.ir.symbolic import Axes, Index, linearize
from fusegen.passes.fuse import Domain, Group, GroupKind
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.memory import Memory, Store
from fusegen.schedule.lower.pointwise import lower_pointwise
from fusegen.schedule.program import BufferSpec, Launch, Role


@dataclass(frozen=True)
class Placement:
    """Where the value goes.

    Attributes:
        buffer: the key of the buffer that the kernel writes.
        offset: of the element.
        added: the buffer, when the program would not have it otherwise.
        copies: launches that bring the value to all other places.
    """

    buffer: int
    offset: Index
    added: tuple[BufferSpec, ...] = ()
    copies: tuple[Launch, ...] = ()


class _Elsewhere(Memory):
    """The buffers of a program for the copy of a value: every place but its own."""

    def stores(self, position: int, index: Position, axes: Axes) -> tuple[Store, ...]:
        """All other places where the value is wanted."""
        return tuple(s for s in super().stores(position, index, axes) if s.buffer != position)


def place(context: Context, node: int, index: Position, axes: Axes, fits: Callable[[Index], bool]) -> Placement:
    """The place of a kernel's only output.

    Args:
        node: the output.
        index: the element, over the axes.
        fits: whether the kernel can write to an offset.
    """
    stores = context.memory.stores(node, index, axes)
    if len(stores) == 1 and fits(stores[0].offset):
        return Placement(stores[0].buffer, stores[0].offset)
    own = next((s for s in stores if s.buffer == node), None)
    added = () if own else (_own_buffer(context, node),)
    context.buffer_names.update({spec.key: spec.name for spec in added})
    return Placement(node, linearize(index, context.graph.nodes[node].shape), added, (_copy(context, node),))


def _own_buffer(context: Context, node: int) -> BufferSpec:
    shape = tuple(formula(d) for d in context.graph.nodes[node].shape)
    return BufferSpec(node, f"value_{node}", context.dtype(node), shape, Role.TEMPORARY)


def _copy(context: Context, node: int) -> Launch:
    """The launch that reads the value and writes it to the other places."""
    domain = Domain(context.graph.nodes[node].shape)
    group = Group(GroupKind.POINTWISE, (node,), (node,), domain, reason="the value is also wanted in another place")
    memory = _Elsewhere(context.graph, context.memory.groups)
    return lower_pointwise(replace(context, group=group, memory=memory, name=f"{context.name}_copy"))
