"""Pointwise values that a matmul's epilogue stores as well, since it reads all of their inputs, e.g. the activation of an MLP,
which the gradient of the next weight needs.

The epilogue then has one more result, and no kernel reads these inputs again. But tiles may become narrower, since a thread holds
all results of its elements, and the value stays in memory until its reader runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fusegen.families.gemm.choice import choose
from fusegen.families.gemm.cost import COSTS
from fusegen.families.gemm.epilogue import CONTRACTION, epilogue_inputs, with_outputs
from fusegen.families.gemm.heuristics import ExpectedSizes
from fusegen.fusion.groups import Group
from fusegen.fusion.matcher import Decision
from fusegen.fusion.order import depends_on, workspace_bytes
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Family
from fusegen.ir.symbolic import nominal, product
from fusegen.target import Target


def with_siblings(graph: Graph, groups: Sequence[Group], target: Target, decision: Decision) -> Sequence[Group]:
    """Merges pointwise groups into epilogues that read the same elements, if that is expected to be faster. Without a cost model,
    or if the graph writes to its inputs, they stay apart."""
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
