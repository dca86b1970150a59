"""Pointwise kernels: one pass over an iteration space, by vectors or by tiles."""

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
from fusegen.families.rows.cost import LANE_COSTS, PointwiseWork, pointwise_time
from fusegen.families.rows.match import merge_rows, reduction_group, union
from fusegen.fusion.groups import Domain, Group, Materialized
from fusegen.fusion.matcher import Decision
from fusegen.fusion.producers import Producers, domain_axes, walk
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import literal
from fusegen.schedule.choices import extents
from fusegen.schedule.context import Context
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch, Step
from fusegen.target import Target

_BUSY = 512  # threads that keep an SM busy


class PointwiseFamily(KernelFamily):
    """Kernels that compute each element of an iteration space independently."""

    kinds = (POINTWISE,)
    cuda: ClassVar[Emitters] = {PointwiseBody: emit_cuda, TileBody: emit_tiles}
    cpu: ClassVar[Emitters] = {PointwiseBody: emit_cpp}

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        return pointwise_group(graph, root, decision.materialized)

    def merged(self, graph: Graph, group: Group, other: int, materialized: Materialized) -> Group | None:
        """Returns a group over the same shape with another output, or a row group if the other value reduces rows of that shape."""
        grown = reduction_group(graph, other, materialized)
        if grown is not None:
            return merge_rows(graph, grown, group.outputs[0], materialized) if len(group.outputs) == 1 else None
        node = graph.nodes[other]
        is_elementwise = node.family in (Family.POINTWISE, Family.INDEXING) or node.op is Op.CONCAT
        if not is_elementwise or Domain(node.shape) != group.domain:
            return None
        outputs = (*group.outputs, other)
        groups = [pointwise_group(graph, output, materialized.difference(outputs)) for output in outputs]
        return replace(group, outputs=outputs, inputs=union(*(member.inputs for member in groups)))

    def lower(self, context: Context) -> Sequence[Step]:
        return [lower_pointwise(context)]

    def times(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Mapping[Plan, float]:
        """Uses the cost model of elements. It does not cover tiles, nor plans that hoist math out of a loop."""
        costs, body = LANE_COSTS.get(target.card), launch.kernel.body
        if costs is None or not isinstance(body, PointwiseBody):
            return {}
        if any(isinstance(plan, TilePlan) for plan in launch.candidates):
            return {}
        plans = [plan for plan in launch.candidates if isinstance(plan, PointwisePlan) and not (plan.wraps and _is_short(body))]
        if any(plan.repeats > 1 for plan in plans):
            return {}
        work = _work(launch, body, sizes)
        return {plan: pointwise_time(costs.points, plan, work, target.sms) for plan in plans}

    def preferred(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Plan | None:
        """Chooses by time. For tiles and plans that hoist math, the choice depends on the number of busy SMs."""
        body, first = launch.kernel.body, next(iter(launch.candidates), None)
        if isinstance(body, TileBody):
            return _tiled(body, launch.candidates, sizes, target.sms)
        if isinstance(body, PointwiseBody) and isinstance(first, PointwisePlan) and first.repeats > 1:
            return _repeated(body, launch.candidates, sizes, target.sms)
        return super().preferred(launch, sizes, target)

    def with_threads(self, launch: Launch, threads: int) -> Plan | None:
        plan = launch.plan
        if not isinstance(plan, PointwisePlan) or plan.threads == threads:
            return None
        requested = replace(plan, threads=threads)
        plans = (candidate for candidate in launch.candidates if isinstance(candidate, PointwisePlan))
        return next((candidate for candidate in plans if replace(candidate, blocks_per_sm=plan.blocks_per_sm) == requested), None)


def pointwise_group(graph: Graph, root: int, materialized: Materialized) -> Group:
    domain = Domain(graph.nodes[root].shape)
    producers = Producers()
    axes = domain_axes(domain)
    walk(graph, root, axes.symbols, axes, lambda position, at, _bounds: False, producers, materialized)
    return Group(POINTWISE, (root,), tuple(sorted(producers.inputs)), domain)


def _tiled(body: TileBody, candidates: Sequence[Plan], sizes: Mapping[str, int], sms: int) -> Plan:
    """Returns the first plan whose tiles keep all SMs busy, else the one with most tiles. Short axes get a plan without tiles."""
    extents = {axis: formula(extent)(sizes) for axis, extent in zip(body.axes.symbols, body.axes.extents, strict=True)}
    rows, columns = extents[body.row_axis], extents[body.column_axis]
    if min(rows, columns) < FEWEST:
        return next((plan for plan in candidates if not isinstance(plan, TilePlan)), candidates[0])
    batches = math.prod(extents.values()) // (rows * columns)
    plans = [plan for plan in candidates if isinstance(plan, TilePlan)]
    tiles = {plan: math.ceil(rows / plan.rows) * math.ceil(columns / plan.columns) * batches for plan in plans}
    return next((plan for plan in plans if tiles[plan] >= sms), max(plans, key=lambda plan: tiles[plan]))


def _repeated(body: PointwiseBody, candidates: Sequence[Plan], sizes: Mapping[str, int], sms: int) -> Plan:
    """Returns the first plan whose threads keep all SMs busy, else a plan without repetition."""
    elements = math.prod(formula(extent)(sizes) for extent in body.axes.extents)
    plans = [plan for plan in candidates if isinstance(plan, PointwisePlan)]
    enough = sms * _BUSY
    return next((plan for plan in plans if plan.repeats == 1 or elements >= enough * plan.vec * plan.repeats), candidates[0])


def _is_short(body: PointwiseBody) -> bool:
    """True if rows are so short that vectors often wrap: the cost model does not cover this."""
    columns = literal(body.axes.extents[-1])
    return columns is not None and columns < SHORT


def _work(launch: Launch, body: PointwiseBody, sizes: Mapping[str, int]) -> PointwiseWork:
    rows, columns = extents(launch, sizes)
    in_memory = {pointer.buffer for pointer in launch.kernel.pointers if pointer.stream is None}
    reads = [access for access in body.reads if access.buffer in in_memory]
    return PointwiseWork(rows * columns, launch.traffic.moved(sizes), len(reads) + len(body.writes))
