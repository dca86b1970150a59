"""Kernels over points: one pass over an iteration space, straight or by tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from fusegen.families.base import Emitters, KernelFamily
from fusegen.families.pointwise.cpu import emit_cpp
from fusegen.families.pointwise.cuda import emit_cuda, emit_tiles
from fusegen.families.pointwise.heuristics import FEWEST, SHORT
from fusegen.families.pointwise.lower import POINTWISE, lower_pointwise
from fusegen.families.pointwise.plan import PointwiseBody, PointwisePlan, TileBody, TilePlan
from fusegen.families.rows.cost import LANE_COSTS, PointWork, point_time
from fusegen.families.rows.match import merge_rows, reduction_group, union
from fusegen.fusion.groups import Domain, Group, Materialized
from fusegen.fusion.matcher import Decision
from fusegen.fusion.producers import Producers, domain_axes, walk
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import literal
from fusegen.schedule.context import Context
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch, Step, extents
from fusegen.target import Target

_BUSY = 512  # threads of a multiprocessor


class PointwiseFamily(KernelFamily):
    """Kernels that compute each point of an iteration space for itself."""

    kinds = (POINTWISE,)
    cuda: ClassVar[Emitters] = {PointwiseBody: emit_cuda, TileBody: emit_tiles}
    cpu: ClassVar[Emitters] = {PointwiseBody: emit_cpp}

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        """The group of everything that is computed with a value: any value has one."""
        return pointwise_group(graph, root, decision.kept)

    def merged(self, graph: Graph, group: Group, other: int, kept: Materialized) -> Group | None:
        """Together over one shape; or, when the other is a row reduction over that shape, as a row kernel."""
        grown = reduction_group(graph, other, kept)
        if grown is not None:
            return merge_rows(graph, grown, group.outputs[0], kept) if len(group.outputs) == 1 else None
        node = graph.nodes[other]
        is_made_by_points = node.family in (Family.POINTWISE, Family.INDEXING) or node.op is Op.CONCAT
        if not is_made_by_points or Domain(node.shape) != group.domain:
            return None
        outputs = (*group.outputs, other)
        parts = [pointwise_group(graph, output, kept.difference(outputs)) for output in outputs]
        return replace(group, outputs=outputs, inputs=union(*(part.inputs for part in parts)))

    def lower(self, context: Context) -> Sequence[Step]:
        """The launch of a group."""
        return [lower_pointwise(context)]

    def times(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Mapping[Plan, float]:
        """By the prices of points; of tiles, and of plans that compute less, nobody knows times."""
        costs, body = LANE_COSTS.get(target.name), launch.kernel.body
        if costs is None or not isinstance(body, PointwiseBody):
            return {}
        if any(isinstance(plan, TilePlan) for plan in launch.candidates):
            return {}
        points = [plan for plan in launch.candidates if isinstance(plan, PointwisePlan) and not (plan.wraps and _is_short(body))]
        if any(plan.repeats > 1 for plan in points):
            return {}
        work = _work(launch, body, sizes)
        return {plan: point_time(costs.points, plan, work, target.processors) for plan in points}

    def preferred(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Plan | None:
        """By time; of tiles, and of plans that compute less, by whether all processors are busy."""
        body, first = launch.kernel.body, next(iter(launch.candidates), None)
        if isinstance(body, TileBody):
            return _tiled(body, launch.candidates, sizes, target.processors)
        if isinstance(body, PointwiseBody) and isinstance(first, PointwisePlan) and first.repeats > 1:
            return _repeated(body, launch.candidates, sizes, target.processors)
        return super().preferred(launch, sizes, target)

    def with_threads(self, launch: Launch, threads: int) -> Plan | None:
        """As of every family."""
        plan = launch.plan
        if not isinstance(plan, PointwisePlan) or plan.threads == threads:
            return None
        wanted = replace(plan, threads=threads)
        points = (other for other in launch.candidates if isinstance(other, PointwisePlan))
        return next((other for other in points if replace(other, blocks_per_sm=plan.blocks_per_sm) == wanted), None)


def pointwise_group(graph: Graph, root: int, kept: Materialized) -> Group:
    """The pointwise group that ends in a value."""
    domain = Domain(graph.nodes[root].shape)
    producers = Producers()
    axes = domain_axes(domain)
    walk(graph, root, axes.symbols, axes, lambda position, at, _bounds: False, producers, kept)
    return Group(POINTWISE, (root,), tuple(sorted(producers.inputs)), domain)


def _tiled(body: TileBody, candidates: Sequence[Plan], sizes: Mapping[str, int], processors: int) -> Plan:
    """The first plan whose tiles keep all processors busy, else that of the most tiles; one without where an axis is too short."""
    extents = {axis: formula(extent)(sizes) for axis, extent in zip(body.axes.symbols, body.axes.extents, strict=True)}
    rows, columns = extents[body.row_axis], extents[body.column_axis]
    if min(rows, columns) < FEWEST:
        return next((plan for plan in candidates if not isinstance(plan, TilePlan)), candidates[0])
    others = math.prod(extents.values()) // (rows * columns)
    plans = [plan for plan in candidates if isinstance(plan, TilePlan)]
    tiles = {plan: math.ceil(rows / plan.rows) * math.ceil(columns / plan.columns) * others for plan in plans}
    return next((plan for plan in plans if tiles[plan] >= processors), max(plans, key=lambda plan: tiles[plan]))


def _repeated(body: PointwiseBody, candidates: Sequence[Plan], sizes: Mapping[str, int], processors: int) -> Plan:
    """The first plan whose threads keep all processors busy; one that does not repeat where none does."""
    points = math.prod(formula(extent)(sizes) for extent in body.axes.extents)
    plans = [plan for plan in candidates if isinstance(plan, PointwisePlan)]
    enough = processors * _BUSY
    return next((plan for plan in plans if plan.repeats == 1 or points >= enough * plan.lanes * plan.repeats), candidates[0])


def _is_short(body: PointwiseBody) -> bool:
    """True if points lie in rows that a group of lanes would wrap around often, which nobody has measured."""
    columns = literal(body.axes.extents[-1])
    return columns is not None and columns < SHORT


def _work(launch: Launch, body: PointwiseBody, sizes: Mapping[str, int]) -> PointWork:
    """The work of a launch; what is drawn is not read."""
    rows, columns = extents(launch, sizes)
    in_memory = {pointer.buffer for pointer in launch.kernel.pointers if pointer.stream is None}
    reads = [access for access in body.reads if access.buffer in in_memory]
    return PointWork(rows * columns, launch.traffic.moved(sizes), len(reads) + len(body.writes))
