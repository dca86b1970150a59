"""Pointwise groups: one pass, one function, vectors along the last axis."""

from __future__ import annotations

from fusegen.ir.formula import ceil_div
from fusegen.ir.symbolic import Axes, Index, axis_symbol, product
from fusegen.passes.fuse.cone import domain_axes
from fusegen.schedule.access import Access, merge_axes
from fusegen.schedule.bodies import PointwiseBody
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.heuristics.pointwise import pointwise_plans
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.fragments import Fragments
from fusegen.schedule.lower.leaves import Leaves, leaves_of
from fusegen.schedule.lower.shifted import may_wrap, wrapped
from fusegen.schedule.program import Launch
from fusegen.schedule.terms import Read


def lower_pointwise(context: Context) -> Launch:
    """The launch of a pointwise group."""
    axes = domain_axes(context.group.domain)
    evaluator = Evaluator(context.graph, axes, context.stored, lambda position, index: None, context.rounded)
    roots: list[int] = []
    stores: list[tuple[int, Index]] = []
    for output in context.group.outputs:
        root = evaluator.value(output, axes.symbols)
        for store in context.stores(output, axes.symbols, axes):
            roots.append(root)
            stores.append((store.buffer, evaluator.place(store.offset, store.gathers)))
    leaves = leaves_of(evaluator.terms, roots, evaluator.checks())
    merged, replaced = merge_axes(axes, [*leaves.expressions(), *(offset for _, offset in stores)], "position")
    if not merged.symbols:
        merged = Axes((axis_symbol("position"),), (1,))
    return _launch(
        context, evaluator, roots, leaves.moved(replaced), [(b, substitute(o, dict(replaced))) for b, o in stores], merged
    )


def _launch(
    context: Context, evaluator: Evaluator, roots: list[int], leaves: Leaves, stores: list[tuple[int, Index]], axes: Axes
) -> Launch:
    lane_axis = axes.symbols[-1]
    touched = [*((r.buffer, r.offset) for r in leaves.reads.values()), *stores]
    itemsizes, offsets = [context.dtype(b).itemsize for b, _ in touched], [o for _, o in touched]
    wraps = may_wrap(context, touched, stores, axes) and not leaves.checks
    plan = context.chosen(pointwise_plans(axes, itemsizes, offsets, context.target, context.multiples, may_wrap=wraps))

    def access(name: str, read: Read) -> Access:
        found = context.access(name, read.buffer, read.offset, lane_axis, plan.lanes, read.conditions)
        return wrapped(context, found, axes, plan.lanes) if plan.wraps else found

    fragments = Fragments(context, evaluator.terms, leaves, access, [offset for _, offset in stores])
    writes = tuple(access(context.names.take("result"), Read(b, o)) for b, o in stores)
    call = fragments.call(context.name, [(w.name, root) for w, root in zip(writes, roots, strict=True)])
    body = PointwiseBody(axes, tuple(fragments.reads.values()), writes, fragments.checks, call, plan)
    grid = ceil_div(product(axes.extents), plan.threads * plan.lanes * plan.unroll)
    kernel = fragments.kernel(body, writes, [axes])
    return Launch(kernel, context.group, (), grid, plan.threads, 0, context.traffic(), candidates=context.candidates)
