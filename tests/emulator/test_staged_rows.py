"""Rows that wait in shared memory while others are worked on: of one block or of a cluster, with what all rows share kept, or asked
for ahead of its use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen.compiler import backends
from fusegen.compiler.emulator import EARLY, EmulatedTiming
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.schedule import context
from tests.emulator.test_clusters import greatest, norm_gelu_add, norm_inputs, rms_norm, several
from tests.unit.eager import agree, randn

BF16 = torch.bfloat16
Way = Callable[[RowPlan], RowPlan]

WAYS: dict[str, Way] = {
    "as the rules have it": lambda plan: plan,
    "held in shared memory": lambda plan: replace(plan, stage_to_registers=False),
    "asked for ahead": lambda plan: replace(
        plan, cache_weights=False, stage_to_registers=False, prefetch=min(2, plan.vectors_per_thread)
    ),
    "one ahead": lambda plan: replace(plan, cache_weights=False, stage_to_registers=True, prefetch=1),
}
"""What a staged plan is made of."""


def of_greatest(x: Tensor) -> Tensor:
    normalized = torch.nn.functional.layer_norm(x, (x.shape[-1],))
    return normalized / normalized.amax(-1, keepdim=True)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int, tuple[str, ...]]] = {
    "norm": (norm_gelu_add, norm_inputs(19, 3072, BF16), 2, tuple(WAYS)),
    "odd norm": (norm_gelu_add, norm_inputs(41, 3001, BF16), 4, ("as the rules have it", "asked for ahead")),
    "several": (several, (randn(13, 3001, dtype=BF16),), 2, ("held in shared memory",)),
    "greatest": (greatest, (randn(13, 3000),), 4, ("as the rules have it",)),
    "three reductions by three warps": (of_greatest, (randn(13, 1056),), 1, ("as the rules have it",)),
    "weights of odd rows": (rms_norm, (randn(50, 2001, dtype=BF16), randn(2001, dtype=BF16)), 2, ("as the rules have it",)),
}
"""A function, its arguments, blocks that share a row, and ways to stage it."""


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Way], list[RowPlan]]:
    """Kernels take a staged plan of some blocks a row, made over in a way; gives those that were taken."""

    def take(cluster: int, way: Way) -> list[RowPlan]:
        taken: list[RowPlan] = []

        def choose(self: context.Context, candidates: tuple[RowPlan, ...]) -> RowPlan:
            self.candidates = candidates
            found = [
                p for p in candidates if p.persistence is Persistence.STAGED and p.vectors_per_thread > 1 and p.cluster == cluster
            ]
            taken.append(way(found[-1]))
            return taken[-1]

        monkeypatch.setattr(context.Context, "choose", choose)
        return taken

    return take


@pytest.mark.usefixtures("own_cache", "emulated", "made_up_times", "small_clusters")
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, case in CASES.items() for way in case[3]])
@pytest.mark.parametrize(
    ("shares", "timing"), [(False, EARLY), (True, EmulatedTiming.LATE | EmulatedTiming.BACKWARDS)], ids=["a block", "blocks"]
)
def test_staged_rows(
    name: str, way: str, shares: bool, timing: EmulatedTiming, staged: Callable[..., list[RowPlan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = backends.emulated_machine
    monkeypatch.setattr(backends, "emulated_machine", lambda target, _=EARLY: machine(target, timing))
    function, inputs, cluster, _ = CASES[name]
    taken = staged(cluster if shares else 1, WAYS[way])
    agree(function, inputs)
    assert taken and all(plan.persistence is Persistence.STAGED for plan in taken)


@pytest.mark.usefixtures("own_cache", "emulated", "made_up_times", "small_clusters")
def test_what_only_the_last_phase_needs_is_read_there(staged: Callable[..., list[RowPlan]]) -> None:
    taken = staged(2, lambda plan: replace(plan, late_loads=True, cache_weights=False, prefetch=1, stage_to_registers=False))
    agree(norm_gelu_add, norm_inputs(19, 3072, BF16))
    assert taken and all(plan.late_loads for plan in taken)
