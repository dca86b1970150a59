"""Storage of an output that a kernel can write in one layout only; copies serve all other layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fusegen.families.pointwise.lower import POINTWISE, lower_pointwise
from fusegen.fusion import Domain, Group
from fusegen.fusion.order import with_write_indices
from fusegen.ir.formula import formula
from fusegen.ir.index_map import Position, StridedView, flat_offset, memory_shape, memory_strides
from fusegen.ir.symbolic import Axes, Dim, Index, literal, same
from fusegen.program.call import TensorMapSpec
from fusegen.schedule.context import Context
from fusegen.schedule.evaluate import Evaluator
from fusegen.schedule.indices import remaining_checks
from fusegen.schedule.memory import Store, formulas
from fusegen.schedule.program import Launch


@dataclass(frozen=True)
class Placement:
    """The buffer and the element's offset that a kernel writes, and the launches that copy the value elsewhere."""

    buffer: int
    offset: Index
    copies: tuple[Launch, ...] = ()


def place_output(context: Context, node: int, index: Position, axes: Axes, fits: Callable[[Store], bool]) -> Placement:
    """Chooses a storage location of an output whose offset fits the kernel; copies write the others.

    If there are several locations, the chosen one has the value's own order, since the copies read it. If none fits, the kernel
    writes to a new buffer.
    """
    stores, own = context.stores(node, index, axes), flat_offset(index, memory_strides(context.graph, node))
    located = [_with_read_indices(context, store, axes) for store in stores]
    first = next((s for s in located if s is not None and fits(s) and (len(stores) == 1 or same(s.offset, own))), None)
    if first is None:
        dtype = context.memory.spec(stores[0].buffer).dtype
        first = Store(context.memory.add(f"value_{node}", dtype, formulas(memory_shape(context.graph, node))), own)
    further = tuple(s for s in stores if s.buffer != first.buffer)
    return Placement(first.buffer, first.offset, (_copy(context, node, first.buffer),) if further else ())


def _with_read_indices(context: Context, store: Store, axes: Axes) -> Store | None:
    """Returns the location of a write in place with the indices that it reads; None if one must be checked elsewhere."""
    if not store.gathers:
        return store
    evaluator = Evaluator(context.graph, axes, context.stored, lambda position, index: None)
    offset = evaluator.write_offset(store.offset, store.gathers)
    return None if remaining_checks(evaluator.checks(), [(offset, ())]) else Store(store.buffer, offset)


def _copy(context: Context, node: int, source: int) -> Launch:
    domain = Domain(context.graph.nodes[node].shape)
    group = Group(POINTWISE, (node,), (node,), domain, reason="the value is also stored in another layout")
    group = with_write_indices(context.graph, group)
    outputs = context.group.outputs
    name = f"{context.name}_copy" if len(outputs) == 1 else f"{context.name}_copy_{outputs.index(node)}"
    reads = {**context.reads, node: source}
    return lower_pointwise(replace(context, group=group, name=name, reads=reads, written=source))


# Tensor maps of strided views.


def tensor_map(buffer: int, view: StridedView, box: tuple[int, ...], *, writable: bool = False) -> TensorMapSpec:
    """Returns the tensor map of a view whose last dim is contiguous."""
    shape, strides = tuple(map(formula, view.shape)), tuple(map(formula, _strides(view)))
    return TensorMapSpec(buffer, shape, strides, formula(view.offset), box, writable)


def _strides(view: StridedView) -> list[Dim]:
    """Returns strides for a tensor map: a dim of extent 1 must not have stride 0 (TMA)."""
    strides = list(view.strides)
    for d in range(len(strides) - 2, -1, -1):
        if literal(view.shape[d]) == 1:
            strides[d] = strides[d + 1] * view.shape[d + 1]
    return strides
