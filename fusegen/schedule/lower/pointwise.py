"""Pointwise groups: one pass, one function, vectors along the last axis."""

from __future__ import annotations

from fusegen.ir.formula import ceil_div
from fusegen.ir.symbolic import Axes, Index, axis_symbol, product
from fusegen.passes.fuse.cone import domain_axes
from fusegen.schedule.access import Access, merge_axes
from fusegen.schedule.bodies import PointwiseBody
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.functions import cut
from fusegen.schedule.heuristics.pointwise import pointwise_plan
from fusegen.schedule.indices import has_checks
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.lower.context import Context, scalar_parameter
from fusegen.schedule.lower.leaves import Leaves, bound_index, leaves_of
from fusegen.schedule.math import Argument, Call, Coordinate, Parameter
from fusegen.schedule.program import Launch


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
    itemsizes = [context.dtype(b).itemsize for b in (*(r.buffer for r in leaves.reads.values()), *(b for b, _ in stores))]
    offsets = [*(r.offset for r in leaves.reads.values()), *(o for _, o in stores)]
    plan = pointwise_plan(axes, itemsizes, offsets, context.target, context.multiples)
    reads = {
        t: context.access(context.read_name(r), r.buffer, r.offset, lane_axis, plan.lanes, r.conditions)
        for t, r in leaves.reads.items()
    }
    coordinates = {t: Coordinate(context.names.take("coordinate"), v) for t, v in leaves.coordinates.items()}
    writes = tuple(context.access(context.names.take("result"), b, o, lane_axis, plan.lanes) for b, o in stores)
    call = _call(context, evaluator, roots, reads, coordinates, writes)
    checks = leaves.checks_apart([offset for _, offset in stores])
    expressions = [*(a.offset for a in (*reads.values(), *writes)), *map(bound_index, leaves.coordinates.values()), *axes.extents]
    expressions += [e for r in reads.values() for b in r.conditions for e in (b.index, b.lower or 0, b.upper or 0)]
    expressions += [e for check in checks for e in check.expressions()]
    kernel = Kernel(
        name=context.name,
        pointers=context.pointers((a.buffer for a in reads.values()), (a.buffer for a in writes), expressions),
        sizes=context.sizes(expressions, axes.symbols),
        scalars=context.scalars(evaluator.terms, evaluator.terms.below(tuple(roots))),
        body=PointwiseBody(axes, tuple(reads.values()), writes, tuple(coordinates.values()), checks, call, plan),
        wide=context.wide,
        checks=has_checks(expressions),
    )
    grid = ceil_div(product(axes.extents), plan.threads * plan.lanes * plan.unroll)
    return Launch(kernel, context.group, (), grid, plan.threads, 0, context.traffic())


def _call(
    context: Context,
    evaluator: Evaluator,
    roots: list[int],
    reads: dict[int, Access],
    coordinates: dict[int, Coordinate],
    writes: tuple[Access, ...],
) -> Call:
    terms = evaluator.terms
    given: dict[int, Parameter] = {t: Parameter(a.name, terms.items[t].dtype) for t, a in reads.items()}
    given |= {t: Parameter(c.name, terms.items[t].dtype) for t, c in coordinates.items()}
    scalars = {t: terms.items[t] for t in leaves_of(terms, roots).scalars}
    given |= {t: scalar_parameter(str(term.payload), term.dtype) for t, term in scalars.items()}
    kinds = {t: "read" for t in reads} | {t: "coordinate" for t in coordinates} | {t: "scalar" for t in scalars}
    named = [(w.name, root) for w, root in zip(writes, roots, strict=True)]
    function, used = cut(terms, context.name, named, given, fast=context.fast)
    return Call(function, tuple(Argument(kinds[t], given[t].name) for t in used))
