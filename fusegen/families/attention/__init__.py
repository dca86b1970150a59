"""Streaming attention: two matmuls with a recurrence in between. The scores are never materialized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from fusegen.families.attention.cost import evenly_split, plan_times
from fusegen.families.attention.cuda import emit_cuda
from fusegen.families.attention.lower import lower_attention
from fusegen.families.attention.match import ATTENTION, attention_group, match_recurrence, rejection_reason
from fusegen.families.attention.plan import AttentionBody, FewQueriesPlan
from fusegen.families.base import Emitters, KernelFamily
from fusegen.fusion.decide import elementwise_ends
from fusegen.fusion.groups import Group, matmuls_of
from fusegen.fusion.matcher import Claims, Decision
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family
from fusegen.schedule.context import Context
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch, Step
from fusegen.target import Target


class AttentionFamily(KernelFamily):
    """The family of attention kernels."""

    kinds = (ATTENTION,)
    needs = (Family.CONTRACTION,)
    cuda: ClassVar[Emitters] = {AttentionBody: emit_cuda}

    def claim(self, graph: Graph, target: Target, claims: Claims) -> None:
        """Claims both matmuls of each attention, together with its last value."""
        for matmul in matmuls_of(graph):
            _claim_attention(graph, matmul, target, claims)

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        return attention_group(graph, root, target, decision.materialized) if root in decision.ends else None

    def lower(self, context: Context) -> Sequence[Step]:
        return lower_attention(context)

    def times(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Mapping[Plan, float]:
        return {} if len(launch.candidates) < 2 or not target.wgmma else plan_times(launch, sizes, target)

    def preferred(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Plan | None:
        return super().preferred(launch, sizes, target) if target.wgmma else evenly_split(launch, sizes, target)

    def contenders(self, launch: Launch, sizes: Mapping[str, int]) -> Sequence[Plan]:
        """Returns the candidates without tiles that hold more queries than the smallest one that holds all: they read the same
        keys and values, and compute more rows."""
        queries = launch.extra[2](sizes)
        tiles = {plan.queries for plan in launch.candidates if isinstance(plan, FewQueriesPlan)}
        most = min((tile for tile in tiles if tile >= queries), default=max(tiles, default=0))
        return [plan for plan in launch.candidates if not isinstance(plan, FewQueriesPlan) or plan.queries <= most]


def matmuls_of_attention(graph: Graph, target: Target) -> frozenset[int]:
    """Returns the matmuls that attention kernels compute without materialized scores."""
    claims = Claims()
    AttentionFamily().claim(graph, target, claims)
    return frozenset(claims.fused_matmuls)


def _claim_attention(graph: Graph, product: int, target: Target, claims: Claims) -> None:
    recurrence = match_recurrence(graph, product)
    if recurrence is None or not target.products:
        return
    for end in (*elementwise_ends(graph, product), product):
        group = attention_group(graph, end, target, claims.ends)
        if group is not None and product in group.core_nodes:
            claims.ends.add(end)
            claims.fused_matmuls.update((recurrence.score_product, product))
            claims.streamed.add(product)
            claims.operands.update(dict.fromkeys((recurrence.score_product, product), group.match.reads))
            return
    reason = rejection_reason(graph, recurrence, product, target) or "its scores depend on values that the kernel cannot compute"
    claims.refusals.update(dict.fromkeys((recurrence.score_product, product), f"no attention kernel: {reason}"))
