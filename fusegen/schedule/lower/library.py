"""Matrix products that go to the library, and what else torch computes."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.calls.call import Role, StridedOperand
from fusegen.ir.formula import formula
from fusegen.ir.strided import StridedView, contiguous_strides, strided_view
from fusegen.ir.symbolic import linearize, same
from fusegen.passes.fuse.cone import domain_axes
from fusegen.passes.fuse.contraction import is_left_to_library
from fusegen.passes.fuse.skeletons import refusals, serving, skeletons_of
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.placement import place
from fusegen.schedule.program import LibraryProduct, LibraryStep, Step


def lower_library(context: Context) -> Sequence[Step]:
    """The library's product, and a copy where its result is wanted as another view."""
    (product,) = context.group.anchors
    shape = context.graph.nodes[product].shape
    axes = domain_axes(context.group.domain)
    placement = place(context, product, axes.symbols, axes, lambda offset: same(offset, linearize(axes.symbols, shape)))
    views = [strided_view(context.graph, p) for p in context.graph.nodes[product].args]
    a, b = (_operand(context.reads[view.base], view) for view in views)
    out = _operand(placement.buffer, StridedView(product, shape, contiguous_strides(shape), 0))
    step = LibraryProduct(a, b, out, context.group, context.traffic(), _reason(context, product))
    return [step, *placement.copies]


def lower_call(context: Context) -> Sequence[Step]:
    """A call of torch, and a copy where its result is wanted as another view."""
    (output,) = context.group.outputs
    node = context.graph.nodes[output]
    axes = domain_axes(context.group.domain)
    stores = context.stores(output, axes.symbols, axes)
    is_fresh = all(context.memory.spec(store.buffer).role is not Role.INPUT for store in stores)
    row_major = linearize(axes.symbols, node.shape)
    placement = place(context, output, axes.symbols, axes, lambda offset: is_fresh and same(offset, row_major))
    views = (strided_view(context.graph, p) for p in node.args)
    operands = tuple(_operand(context.reads[view.base], view) for view in views)
    shape = tuple(map(formula, node.shape))
    return [LibraryStep(node.op.row.name, operands, placement.buffer, shape, context.group, context.traffic()), *placement.copies]


def _operand(buffer: int, view: StridedView) -> StridedOperand:
    return StridedOperand(buffer, tuple(map(formula, view.shape)), tuple(map(formula, view.strides)), formula(view.offset))


def _reason(context: Context, product: int) -> str:
    """Why the library computes it."""
    if context.group.reason:
        return context.group.reason
    if is_left_to_library(context.graph, product):
        return "expected to be faster than a kernel of ours"
    if not skeletons_of(context.target):
        return "no tensor-core skeleton serves this target"
    if serving(context.graph, product, product, context.target) is None:
        return refusals(context.graph, product, product, context.target)
    return "a plain product: nothing is fused with it"
