"""The choice between a first operand that another kernel writes, and one that each block of a kernel for few rows computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fusegen.families.gemm.epilogue import CONTRACTION, plain_group
from fusegen.families.gemm.first_operands import can_compute_rows
from fusegen.families.gemm.heuristics import ExpectedSizes, candidates, shape_of
from fusegen.families.gemm.pipelines import computes_on_load
from fusegen.families.gemm.plan import FewRowsPlan
from fusegen.fusion.groups import Group
from fusegen.ir.graph import Graph
from fusegen.schedule.choices import Measured, choice_of
from fusegen.schedule.kernel import Implementation
from fusegen.target import Target

ROWS_IN_MEMORY = Implementation("first operand in memory")
ROWS_ON_LOAD = Implementation("first operand computed on load")
"""A candidate for few rows, e.g. of a norm: one launch less, but each block computes the operand."""


def row_launches(graph: Graph, groups: Sequence[Group], target: Target) -> Iterator[tuple[Group, Group]]:
    """Yields the groups of matmuls whose first operand a kernel for few rows can compute, as fused and as launches of matmuls."""
    for group in groups:
        is_plain = group.kind.is_library and len(group.core_nodes) == 1 and group.outputs == group.core_nodes
        launch = group if group.kind is CONTRACTION else plain_group(graph, group.outputs[0], target) if is_plain else None
        if launch is None or any(computes_on_load(graph, p) for p in launch.core_nodes):
            continue
        if can_compute_rows(graph, launch.core_nodes):
            yield group, launch


def takes_rows_on_load(
    name: str,
    graph: Graph,
    launch: Group,
    target: Target,
    expected: ExpectedSizes,
    sizes: Mapping[str, int],
    measured: Measured,
) -> bool:
    """True if a launch of few rows is measured or pinned to compute its first operand."""
    if not any(isinstance(plan, FewRowsPlan) for plan in candidates(shape_of(graph, launch, expected), target)):
        return False
    choice = choice_of(name, graph, launch, sizes, (ROWS_IN_MEMORY, ROWS_ON_LOAD))
    return measured(replace(choice, digest=f"{choice.digest} first operand")) == ROWS_ON_LOAD
