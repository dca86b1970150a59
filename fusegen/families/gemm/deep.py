"""Deep fusion: two matmuls of few rows in one launch, the second of the first's result."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeGuard, cast

from fusegen.families.gemm.epilogue import plain_group
from fusegen.families.gemm.heuristics import ExpectedSizes, candidates, shape_of
from fusegen.families.gemm.plan import ContractionBody, DeepPlan, FewRowsPlan
from fusegen.fusion.groups import Group
from fusegen.fusion.order import written_by
from fusegen.schedule.choices import Choice, Measured, choice_of
from fusegen.schedule.kernel import Implementation, Plan
from fusegen.schedule.program import Launch, LibraryMatmul, Program, Step

SEPARATE = Implementation("two launches")


@dataclass(frozen=True)
class DeepFusion:
    """Two groups that one launch computes."""

    first: Group
    second: Group
    plan: DeepPlan

    @property
    def plans(self) -> tuple[tuple[Group, FewRowsPlan], ...]:
        return (self.first, self.plan.first), (self.second, self.plan.second)


def measured_fusions(
    program: Program, expected: ExpectedSizes, sizes: Mapping[str, int], measured: Measured
) -> Iterator[DeepFusion]:
    """Yields the pairs of consecutive matmuls of few rows that are measured or pinned to become one launch. The second one may be
    the library's, if it has no epilogue. Neither writes to an argument. Only Hopper's kernels request weights for L2."""
    if not program.target.wgmma:
        return
    taken: Step | None = None
    for first, second in pairwise(program.steps):
        if not isinstance(first, Launch) or first is taken or first.part or not _reads_stored_weights(first):
            continue
        group = _second(program, second) if _multiplies(first, second) else None
        if group is None or any(written_by(program.graph, each) for each in (first.group, group)):
            continue
        if (plan := _few_rows_plan(program, second, group, expected)) is not None:
            choice = _choice(program, first, group, deep_plans(cast(FewRowsPlan, first.plan), plan), sizes)
            chosen = measured(choice)
            if isinstance(chosen, DeepPlan) and chosen in choice.candidates:
                taken = second
                yield DeepFusion(first.group, group, chosen)


def with_fusions(groups: Iterable[Group], deep: Collection[DeepFusion]) -> tuple[Group, ...]:
    """Returns the groups; those of the library that become parts of a launch are replaced."""
    seconds = {each.second.outputs: each.second for each in deep}
    return tuple(seconds.get(group.outputs, group) for group in groups)


def _multiplies(first: Launch, second: Step) -> bool:
    """True if a matmul reads a result of a launch as its first operand, and does not read another one as weights."""
    written = {pointer.buffer for pointer in first.kernel.pointers if pointer.writable}
    if isinstance(second, LibraryMatmul):
        return second.a.buffer in written and second.b.buffer not in written and not second.adds
    if not isinstance(second, Launch) or second.part or not isinstance(second.kernel.body, ContractionBody):
        return False
    a, *b = second.kernel.body.matrices or (None,)
    return a in written and written.isdisjoint(b)


def _second(program: Program, step: Step) -> Group | None:
    return step.group if isinstance(step, Launch) else plain_group(program.graph, step.group.core_nodes[0], program.target)


def _reads_stored_weights(launch: Launch) -> bool:
    """True for a matmul of few rows whose weights are stored along the depth, and that computes no operand on load."""
    plan, body = launch.plan, launch.kernel.body
    if not isinstance(body, ContractionBody) or body.rows is not None:
        return False
    return _has_layouts(plan) and not any(part.weights for part in body.parts)


def _has_layouts(plan: Plan | None) -> TypeGuard[FewRowsPlan]:
    """True for a plan for few rows that deep fusion has layouts for."""
    return isinstance(plan, FewRowsPlan) and plan.b_major == "k" and plan.tile_m // _FRAGMENT in _LAYOUTS


def _few_rows_plan(program: Program, step: Step, group: Group, expected: ExpectedSizes) -> FewRowsPlan | None:
    if isinstance(step, Launch):
        return cast(FewRowsPlan, step.plan) if _reads_stored_weights(step) else None
    plans = candidates(shape_of(program.graph, group, expected), program.target)
    return next((plan for plan in plans if _has_layouts(plan)), None)


def _choice(program: Program, first: Launch, second: Group, plans: tuple[DeepPlan, ...], sizes: Mapping[str, int]) -> Choice:
    name = f"{first.kernel.name} and the next matmul"
    one, two = (choice_of(name, program.graph, group, sizes, ()) for group in (first.group, second))
    digest = hashlib.sha256(f"deep {one.digest} {two.digest}".encode()).hexdigest()[:32]
    return Choice(name, digest, (*one.extents, *two.extents), (SEPARATE, *plans), joins=True)


_SLAB, _FRAGMENT = 16, 8  # columns and rows of an instruction
_LAYOUTS = {
    1: ((8, 3, 1, 2, 1, 4), (8, 3, 1, 2, 1, 0), (8, 4, 1, 1, 2, 4), (8, 2, 2, 3, 1, 4)),
    2: ((8, 2, 1, 3, 1, 4), (8, 2, 1, 3, 1, 0), (8, 2, 1, 2, 2, 4)),
}
"""By fragments of rows: warps, blocks per SM, stages of both matmuls, slabs and chunks ahead of the second one."""


def deep_plans(first: FewRowsPlan, second: FewRowsPlan) -> tuple[DeepPlan, ...]:
    """Returns the candidates for one launch. A tile keeps the columns that its epilogue combines."""
    plans = []
    for warps, blocks, stages, second_stages, slabs, ahead in _LAYOUTS[first.tile_m // _FRAGMENT]:
        tile_n = second.tile_n if second.shift or second.products > 1 else slabs * _SLAB
        one = replace(first, warps=warps, blocks_per_sm=blocks, stages=stages)
        two = replace(second, warps=warps, blocks_per_sm=blocks, stages=second_stages, tile_n=tile_n, ahead=ahead)
        plans.append(DeepPlan(one, two))
    return tuple(dict.fromkeys(plans))
