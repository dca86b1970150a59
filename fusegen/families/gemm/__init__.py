"""Matmuls on tensor cores with epilogues; matmuls that share their first operand run in one launch."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import ClassVar

from fusegen.families.base import Emitters, KernelFamily
from fusegen.families.gemm.choice import choose
from fusegen.families.gemm.cost import COSTS
from fusegen.families.gemm.cuda import emit_cuda
from fusegen.families.gemm.epilogue import (
    CONTRACTION,
    epilogue_inputs,
    group_ending_at,
    merged_launch,
    operands_in_memory,
    plain_group,
    width_rejections,
    with_outputs,
)
from fusegen.families.gemm.heuristics import ExpectedSizes
from fusegen.families.gemm.lower import lower_contraction
from fusegen.families.gemm.pipelines import computes_on_load, has_pairs, pipeline_named
from fusegen.families.gemm.plan import ContractionBody
from fusegen.fusion.decide import derived_from, elementwise_ends, fits_epilogue, matmul_ends
from fusegen.fusion.groups import Group, Materialized, matmuls_of
from fusegen.fusion.matcher import Claims, Decision
from fusegen.fusion.order import depends_on, workspace_bytes
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import nominal, product
from fusegen.schedule.context import Context
from fusegen.schedule.program import Step
from fusegen.target import Target

_MOST_PARTS = 8  # each part adds tensor maps to the kernel's parameters


class GemmFamily(KernelFamily):
    """The family of matmul kernels with epilogues."""

    kinds = (CONTRACTION,)
    needs = (Family.CONTRACTION,)
    cuda: ClassVar[Emitters] = {ContractionBody: emit_cuda}

    def claim(self, graph: Graph, target: Target, claims: Claims) -> None:
        """Claims each matmul together with the last value that its epilogue can compute."""
        for matmul in matmuls_of(graph):
            if matmul not in claims.fused_matmuls:
                _claim_epilogue(graph, matmul, target, claims)

    def extra_outputs(self, graph: Graph, target: Target, claims: Claims, stored: Materialized) -> Mapping[int, int]:
        """Maps each materialized pointwise value to the result whose epilogue can store it too."""
        merged: dict[int, int] = {}
        ends = matmul_ends(matmuls_of(graph), claims)
        for end in ends:
            for value in [] if end in merged else _candidates(graph, end, stored - claims.ends | claims.epilogues, claims):
                operands = {p for p in _operands_besides(graph, value, end, stored) if merged.get(p) != end}
                if value in merged or end in _needed(graph, operands, merged):
                    continue  # another kernel must run in between
                matmuls = [p for p in operands if p in ends and p not in merged and p not in merged.values()]
                group = _group_with_values(graph, end, [v for v, e in merged.items() if e == end], target, claims.ends)
                for more in (*([m, value] for m in matmuls), [value]):  # first try to take over a matmul as well
                    if group is not None and _can_store(graph, group, more, target, claims):
                        merged.update(dict.fromkeys(more, end))
                        break
        claims.ends.update(merged, merged.values())
        return merged

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        """Returns the matmul group that ends in `root`, extended by all values that its epilogue also stores."""
        if root not in decision.ends:
            return None
        group = group_ending_at(graph, root, target, decision.materialized)
        values = [value for value, end in decision.extra_outputs.items() if end == root]
        return group if group is None or not values else with_outputs(graph, group, values, decision.materialized) or group

    def joined(self, graph: Graph, groups: Sequence[Group], target: Target, decision: Decision) -> Sequence[Group]:
        """Merges pointwise groups into epilogues, and independent groups whose matmuls share the first operand, e.g. q, k and v of
        separate weights."""
        merged = list(_with_siblings(graph, groups, target, decision))
        launches = [_as_launch(graph, group, target) for group in merged]
        keys = [_key(graph, launch) for launch in launches]
        index = 0
        while index < len(merged):
            same = (n for n in range(index + 1, len(merged)) if keys[n] is not None and keys[n] == keys[index])
            partner = next((n for n in same if _can_join(graph, merged, launches, index, n)), None)
            if partner is None:
                index += 1
            else:
                merged[index] = launches[index] = merged_launch(
                    graph, [g for g in (launches[index], launches[partner]) if g is not None]
                )
                del merged[partner], launches[partner], keys[partner]
        return merged

    def lower(self, context: Context) -> Sequence[Step]:
        return lower_contraction(context)


def _claim_epilogue(graph: Graph, product: int, target: Target, claims: Claims) -> None:
    ends = elementwise_ends(graph, product)
    is_generated = _is_generated(graph, product)
    for end in (*ends, *([product] if is_generated or _is_returned_permuted(graph, product) else [])):
        group = group_ending_at(graph, end, target, claims.ends)
        if group is not None and product in group.core_nodes:
            claims.operands.update({p: operands_in_memory(graph, p) for p in group.core_nodes if _is_generated(graph, p)})
            claims.ends.add(end)
            claims.epilogues.add(end)
            claims.fused_matmuls.update(group.core_nodes)
            return
    reason = next((reason for end in ends if (reason := width_rejections(graph, end, product, target, claims.ends))), "")
    if reason:
        claims.refusals.setdefault(product, reason)


def _is_generated(graph: Graph, product: int) -> bool:
    """True if only a generated kernel reads the operands where they are."""
    return computes_on_load(graph, product) or has_pairs(graph, product)


def _is_returned_permuted(graph: Graph, product: int) -> bool:
    """True if the caller gets a matmul with permuted dims, so that the library's result would need a copy."""
    for position in graph.outputs:
        permuted = False
        while graph.nodes[position].op in (Op.RESHAPE, Op.PERMUTE):
            permuted |= graph.nodes[position].op is Op.PERMUTE
            (position,) = graph.nodes[position].args
        if permuted and position == product:
            return True
    return False


def _candidates(graph: Graph, end: int, values: Collection[int], claims: Claims) -> list[int]:
    """Returns the values that depend on a matmul's result; those that end another matmul come first."""
    return sorted(derived_from(graph, end).intersection(values), key=lambda value: (value not in claims.epilogues, value))


def _can_store(graph: Graph, group: Group, values: list[int], target: Target, claims: Claims) -> bool:
    """True if the epilogue can store more values, and takes over all matmuls that would otherwise end in them."""
    wider = with_outputs(graph, group, values, claims.ends)
    separate = [group_ending_at(graph, value, target, claims.ends) for value in values if value in claims.epilogues]
    return wider is not None and all(set(alone.core_nodes) <= set(wider.core_nodes) for alone in separate if alone is not None)


def _group_with_values(graph: Graph, end: int, values: list[int], target: Target, materialized: Collection[int]) -> Group | None:
    group = group_ending_at(graph, end, target, materialized)
    return group if group is None or not values else with_outputs(graph, group, values, materialized)


def _operands_besides(graph: Graph, value: int, end: int, stored: Materialized) -> set[int]:
    """Returns a value's operands besides `end`: materialized values, reductions and matmuls."""
    operands: set[int] = set()
    stack, seen = [*graph.nodes[value].args], {end}
    while stack:
        position = stack.pop()
        if position not in seen:
            seen.add(position)
            if position in stored or not fits_epilogue(graph, position):
                operands.add(position)
            else:
                stack += graph.nodes[position].args
    return operands


def _needed(graph: Graph, values: Collection[int], merged: Mapping[int, int]) -> set[int]:
    """Returns the values and everything that they depend on, including all values of the launches that compute these."""
    needed, pending = set[int](), list(values)
    while pending:
        position = pending.pop()
        new = {position, *graph.ancestors[position]} - needed
        needed |= new
        ends = {merged.get(p, p) for p in new}
        pending += [value for value, end in merged.items() if end in ends and value not in needed]
    return needed


def _as_launch(graph: Graph, group: Group, target: Target) -> Group | None:
    """Returns the group as a tensor-core launch, or None if no pipeline supports it."""
    if group.kind.is_library and group.outputs == group.core_nodes:
        return plain_group(graph, group.outputs[0], target)
    return group if group.kind is CONTRACTION else None


def _key(graph: Graph, group: Group | None) -> Hashable | None:
    if group is None:
        return None
    products = group.parts[0].products
    operands = group.match[products[0]]
    return group.pipeline, operands.layout, graph.nodes[products[0]].dtype, len(products)


def _can_join(graph: Graph, groups: Sequence[Group], launches: Sequence[Group | None], first: int, second: int) -> bool:
    pair = [group for group in (launches[first], launches[second]) if group is not None]
    parts = [part for group in pair for part in group.parts]
    widths = pipeline_named(pair[0].pipeline).tile_widths(math.lcm(*(part.head for part in parts)), len(parts[0].products))
    if len(parts) > _MOST_PARTS or not widths:
        return False
    return not depends_on(graph, groups, first, second) and not depends_on(graph, groups, second, first)


# Pointwise values that an epilogue stores beside its own.


def _with_siblings(graph: Graph, groups: Sequence[Group], target: Target, decision: Decision) -> Sequence[Group]:
    """Merges pointwise groups into epilogues that read all of their inputs, if that is expected to be faster, e.g. the activation
    of an MLP, for the gradient of the next weight.

    No kernel reads these inputs again. But tiles may become narrower, since a thread holds all results of its elements, and a value
    stays in memory until its reader runs. Without a cost model, or if the graph writes to its inputs, the groups stay apart.
    """
    if target.card not in COSTS or graph.puts:
        return groups
    while (merged := next(_merged(graph, groups, target, decision), None)) is not None:
        groups = merged
    return groups


def _merged(graph: Graph, groups: Sequence[Group], target: Target, decision: Decision) -> Iterator[Sequence[Group]]:
    """Yields the groups with a pointwise group merged into an epilogue, for each such pair."""
    materialized = decision.materialized.intersection(output for group in groups for output in group.outputs)
    for n, launch in enumerate(groups):
        if launch.kind is not CONTRACTION or len(launch.parts) != 1:
            continue
        read = epilogue_inputs(graph, launch.parts[0], materialized)
        for m, sibling in enumerate(groups):
            if not _is_pointwise(graph, sibling) or not sibling.inputs or not read.issuperset(sibling.inputs):
                continue
            wider = with_outputs(graph, launch, sibling.outputs, materialized)
            if wider is None or wider.core_nodes != launch.core_nodes or not set(wider.inputs) <= set(launch.inputs):
                continue
            merged = [wider if k == n else group for k, group in enumerate(groups) if k != m]
            if depends_on(graph, groups, n, m):
                continue  # the launch reads the value
            if _saves_time(graph, launch, sibling, wider, target) and _is_worth_memory(graph, groups, merged, sibling):
                yield merged


def _is_pointwise(graph: Graph, group: Group) -> bool:
    return group.kind.merges and not group.core_nodes and all(graph.nodes[o].family is Family.POINTWISE for o in group.outputs)


def _saves_time(graph: Graph, launch: Group, sibling: Group, wider: Group, target: Target) -> bool:
    """True if the wider launch is expected to be faster than the launch and a pointwise kernel, for many rows."""
    costs, sizes = COSTS[target.card], ExpectedSizes({})
    time, wider_time = (choose(graph, group, target, sizes).time for group in (launch, wider))
    moved = sum(math.prod(map(sizes.size_of, node.shape)) * node.dtype.itemsize for node in _nodes(graph, sibling))
    separate = costs.epilogue_start + moved / costs.epilogue_bandwidth
    return time is not None and wider_time is not None and wider_time < time + separate


def _nodes(graph: Graph, group: Group) -> list[Node]:
    return [graph.nodes[position] for position in (*group.inputs, *group.outputs)]


def _is_worth_memory(graph: Graph, groups: Sequence[Group], merged: Sequence[Group], sibling: Group) -> bool:
    """True if the workspace grows by no more bytes than are no longer read."""
    read = sum(nominal(product(graph.nodes[p].shape)) * graph.nodes[p].dtype.itemsize for p in sibling.inputs)
    return workspace_bytes(graph, merged) <= workspace_bytes(graph, groups) + read
