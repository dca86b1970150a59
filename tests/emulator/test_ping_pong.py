"""Matmuls whose warpgroups take turns: each multiplies whole tiles, and applies the epilogue while the other one multiplies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fusegen import target as targets
from fusegen.compiler.emulator import EmulatedTiming
from fusegen.families.gemm.choice import MatmulChoice
from fusegen.families.gemm.heuristics import ExpectedSizes, MatmulShape, candidates, contraction_plan, shape_of
from fusegen.families.gemm.plan import ContractionPlan
from fusegen.fusion import Group
from fusegen.ir.graph import Graph
from fusegen.target import Target
from tests.emulator import tensor_cores
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, check
from tests.emulator.test_tensor_cores import gated, randn, residual


def takes_turns(monkeypatch: pytest.MonkeyPatch, tile_n: int) -> None:
    """Kernels take the plan with tiles of these columns, though others come first."""

    def chosen(graph: Graph, group: Group, target: Target, expected: ExpectedSizes) -> MatmulChoice:
        plans = candidates(shape_of(graph, group, expected), replace(target, sms=1))
        turns = (plan for plan in plans if isinstance(plan, ContractionPlan) and plan.ping_pong)
        return MatmulChoice(next(plan for plan in turns if plan.tile_n == tile_n))

    monkeypatch.setattr(tensor_cores, "choose", chosen)


@pytest.mark.parametrize("timing", EVERY_TIMING[1:3], ids=str)
@pytest.mark.parametrize("tile_n", [128, 160])
def test_more_steps_than_stages(tile_n: int, timing: EmulatedTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the last tile lies outside of the result."""
    takes_turns(monkeypatch, tile_n)
    rows, columns, depth = 264, tile_n + 8, 328
    check(residual, randn(rows, depth), randn(columns, depth), randn(rows, columns), sms=2, timings=(timing,))


def test_rows_that_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_turns(monkeypatch, 128)
    check(residual, randn(72, 328), randn(392, 328), randn(72, 392), sms=2, timings=EVERY_TIMING[1:3])


def test_tiles_with_one_step_and_other_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_turns(monkeypatch, 128)
    x, w, r = randn(64, 264), randn(64, 200), randn(264, 200)
    check(lambda x, w, r: torch.tanh(x.mT @ w) - r, x, w, r, sms=2, timings=ONCE)


def test_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab of results is one chunk; each warpgroup has two tiles, whose chunks take both buffers in turn."""
    takes_turns(monkeypatch, 64)
    check(gated, randn(456, 72), randn(72, 72), randn(72, 72), sms=2, timings=ONCE)


def test_float32_results(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_turns(monkeypatch, 128)
    check(lambda x, w: F.linear(x, w).float() * 0.5, randn(200, 72), randn(240, 72), sms=2, timings=ONCE)


@pytest.mark.parametrize(("rows", "has_turns"), [(8192, True), (512, False)])
def test_several_waves_of_tiles_take_turns(rows: int, has_turns: bool) -> None:
    shape, target = MatmulShape(rows, [1024], 4096), targets.target("sm_90a")
    plans = [plan for plan in candidates(shape, target) if isinstance(plan, ContractionPlan)]
    assert {plan.tile_n for plan in plans if plan.ping_pong} == ({128, 160, 192} if has_turns else set())
    assert all(plan.shared_bytes <= target.shared_bytes and plan.stages >= 3 for plan in plans)


def test_turns_are_the_default_where_the_epilogue_would_take_long() -> None:
    default = contraction_plan(MatmulShape(8192, [8192], 1024), targets.target("sm_90a"))
    assert isinstance(default, ContractionPlan) and default.ping_pong
