"""Pointwise groups: one pass, one function, vectors along the last axis; tiles where operands lie across each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from fusegen.ir.formula import ceil_div
from fusegen.ir.symbolic import Axes, Index, axis_symbol
from fusegen.ir.symbolic import product as volume
from fusegen.passes.fuse.unrolled import Space, unrolled
from fusegen.schedule.access import Access, divisor, merge_axes
from fusegen.schedule.bodies import Hoisted, PointwiseBody
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.heuristics.pointwise import PointFeatures, pointwise_plans
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.crossing import crossing_of, in_memory_order
from fusegen.schedule.lower.fragments import Fragments
from fusegen.schedule.lower.hoisting import Hoisting, hoisting_of
from fusegen.schedule.lower.interleaved import bytes_in_turn, interleaved
from fusegen.schedule.lower.leaves import leaves_of
from fusegen.schedule.lower.points import Points
from fusegen.schedule.lower.reuse import reused_soon
from fusegen.schedule.lower.shifted import may_wrap, wrapped
from fusegen.schedule.lower.splitting import in_parts_of
from fusegen.schedule.lower.tiles import lower_tiles, plans_of
from fusegen.schedule.math import Argument, Origin
from fusegen.schedule.plan import LanePlan, PointwisePlan, TilePlan
from fusegen.schedule.program import Launch
from fusegen.schedule.terms import Read
from fusegen.target import Backend

_LANES = 8  # of most plans


def lower_pointwise(context: Context) -> Launch:
    """The launch of a pointwise group."""
    points = _points(context)
    crossing = crossing_of(points) if points.together == 1 else None
    tiled = () if crossing is None else plans_of(context, points, crossing)
    hoisting = hoisting_of(points) if crossing is None and context.target.backend is Backend.CUDA else None
    candidates: tuple[LanePlan, ...] = (*tiled, *_plans(context, points, hoisting))
    plan = context.chosen(candidates)
    if crossing is not None and isinstance(plan, TilePlan):
        return lower_tiles(context, points, crossing, plan)
    assert isinstance(plan, PointwisePlan)
    return _launch(context, points, plan, hoisting if plan.repeats > 1 else None)


def _points(context: Context) -> Points:
    space = unrolled(context.graph, context.group)
    points = _points_over(context, space)
    apart = in_parts_of(space.axes, [offset for _, offset in points.touched])
    if apart is not None:
        axes, index = apart
        moved_to = dict(zip(space.axes.symbols, index, strict=True))
        points = _points_over(context, Space(axes, tuple(tuple(substitute(i, moved_to) for i in p) for p in space.points)))
    reads, places = [read.offset for read in points.leaves.reads.values()], [offset for _, offset in points.stores]
    ordered = _ordered(context, in_memory_order(points.axes, reads, places), points)
    merged, replaced = merge_axes(ordered, [*points.leaves.expressions(), *places], "position")
    if not merged.symbols:
        merged = Axes((axis_symbol("position"),), (1,))
    moved = tuple((buffer, substitute(offset, dict(replaced))) for buffer, offset in points.stores)
    return replace(points, leaves=points.leaves.moved(replaced), stores=moved, axes=merged)


def _ordered(context: Context, axes: Axes, points: Points) -> Axes:
    """The axes in the order in which a GPU's cache serves best. Lanes go on along the last one."""
    if context.target.backend is not Backend.CUDA or not axes.symbols or divisor(axes.extents[-1], context.multiples) % _LANES:
        return axes  # rows that groups of lanes do not divide are best one behind the other
    lanes = Axes(axes.symbols[-1:], axes.extents[-1:])
    itemsizes = [context.dtype(buffer).itemsize for buffer, _ in points.touched]
    outer = Axes(axes.symbols[:-1], axes.extents[:-1])
    outer = reused_soon(outer, lanes, [read.offset for read in points.leaves.reads.values()], itemsizes)
    return Axes((*outer.symbols, *lanes.symbols), (*outer.extents, *lanes.extents))


def _points_over(context: Context, space: Space) -> Points:
    """The points of a group, of which a thread computes some together."""
    axes = space.axes
    evaluator = Evaluator(
        context.graph, axes, context.stored, lambda position, index: None, context.rounded, context.contracted, context.inverted
    )
    roots: list[int] = []
    stores: list[tuple[int, Index]] = []
    for output, index in product(context.group.outputs, space.points):
        root = evaluator.value(output, index)
        for store in context.stores(output, index, axes):
            roots.append(evaluator.stored(root, context.dtype(store.buffer)))
            stores.append((store.buffer, evaluator.place(store.offset, store.gathers)))
    leaves = leaves_of(evaluator.terms, roots, evaluator.checks())
    return Points(evaluator.terms, tuple(roots), leaves, tuple(stores), axes, len(space.points))


def _plans(context: Context, points: Points, hoisting: Hoisting | None) -> tuple[PointwisePlan, ...]:
    touched = tuple(points.touched)
    itemsizes, offsets = [context.dtype(b).itemsize for b, _ in touched], [o for _, o in touched]
    wraps = may_wrap(context, touched, points.stores, points.axes) and not points.leaves.checks
    along = dict(zip(points.axes.symbols, points.axes.extents, strict=True))
    features = PointFeatures(
        axes=points.axes,
        itemsizes=itemsizes,
        offsets=offsets,
        may_wrap=wraps,
        in_turn=_in_turn(context, points),
        together=points.together,
        along=None if hoisting is None else along[hoisting.axis],
    )
    return pointwise_plans(features, context.target, context.multiples)


def _in_turn(context: Context, points: Points) -> int:
    """Bytes that a lane takes of the widest access to several variables in turn; 0 where there is none."""
    if context.target.backend is not Backend.CUDA:
        return 0
    reads = [Read(read.buffer, read.offset, read.conditions) for read in points.leaves.reads.values()]
    return bytes_in_turn(context, (reads, [Read(buffer, offset) for buffer, offset in points.stores]), points.axes.symbols[-1])


def _launch(context: Context, points: Points, plan: PointwisePlan, hoisting: Hoisting | None) -> Launch:
    axes = points.axes if hoisting is None else hoisting.ordered(points.axes)

    def access(name: str, read: Read) -> Access:
        found = context.access(name, read.buffer, read.offset, axes.symbols[-1], plan.lanes, read.conditions)
        return wrapped(context, found, axes, plan.lanes) if plan.wraps else found

    def joined(accesses: Sequence[Access]) -> tuple[Access, ...]:
        if context.target.backend is not Backend.CUDA or plan.wraps:
            return tuple(accesses)
        return interleaved(context, accesses, axes.symbols[-1], plan.lanes)

    fragments = Fragments(context, points.terms, points.leaves, access, [offset for _, offset in points.stores])
    writes = tuple(access(context.names.take("result"), Read(b, o)) for b, o in points.stores)
    once = frozenset[int]() if hoisting is None else hoisting.reads
    hoisted = None if hoisting is None else _hoisted(fragments, hoisting, joined([fragments.reads[t] for t in sorted(once)]))
    call = fragments.call(context.name, [(w.name, root) for w, root in zip(writes, points.roots, strict=True)])
    reads = joined([each for t, each in fragments.reads.items() if t not in once])
    body = PointwiseBody(axes, reads, joined(writes), fragments.checks, call, plan, hoisted)
    grid = ceil_div(volume(body.threads.extents), plan.threads * plan.lanes * (plan.unroll if hoisting is None else 1))
    kernel = fragments.kernel(body, writes, [axes])
    return Launch(kernel, context.group, (), grid, plan.threads, 0, context.traffic(), candidates=context.candidates)


def _hoisted(fragments: Fragments, hoisting: Hoisting, reads: tuple[Access, ...]) -> Hoisted:
    """The values that are computed before a loop, which calls in the loop take."""
    context = fragments.context
    roots = [(context.names.take("hoisted"), term) for term in hoisting.terms]
    call = fragments.call(f"{context.name}_once", roots) if roots else None
    fragments.values |= {term: Argument(Origin.LANES, name) for name, term in roots}
    return Hoisted(hoisting.axis, reads, call)
