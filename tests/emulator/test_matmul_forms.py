"""Forms of matmuls by warpgroups that only `fg.tune` chooses: clusters whose blocks share columns, and warpgroups in turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fusegen import target as targets
from fusegen.compiler.emulator import EmulatedTiming
from fusegen.families.gemm.heuristics import ExpectedSizes, MatmulChoice, MatmulShape, candidates, contraction_plan, shape_of
from fusegen.families.gemm.plan import ContractionPlan
from fusegen.fusion import Group
from fusegen.ir.graph import Graph
from fusegen.target import Target
from tests.emulator import tensor_cores
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, check
from tests.emulator.test_tensor_cores import gated, randn, residual

FORMS = {
    "shared": (256, 2, False, 2),
    "shared-and-buffered": (256, 2, False, 4),
    "shared-in-odd-parts": (192, 2, False, 3),
    "shared-between-widths": (224, 2, False, 2),
    "buffered-between-widths": (160, 2, False, 3),
    "in-turns": (128, 1, True, 2),
    "in-turns-and-shared": (128, 2, True, 2),
    "in-turns-between-widths": (160, 1, True, 2),
}
"""Columns of a tile, blocks that share them, if warpgroups take turns, and result buffers of each."""


def key(plan: ContractionPlan) -> tuple[int, int, bool, int]:
    return plan.tile_n, plan.multicast, plan.ping_pong, plan.buffers


def takes_form(monkeypatch: pytest.MonkeyPatch, form: tuple[int, int, bool, int]) -> None:
    """Kernels take the plan of a form, though others come first."""

    def chosen(graph: Graph, group: Group, target: Target, expected: ExpectedSizes) -> MatmulChoice:
        plans = candidates(shape_of(graph, group, expected), replace(target, sms=1))
        return MatmulChoice(next(p for p in plans if isinstance(p, ContractionPlan) and p.consumers == 2 and key(p) == form))

    monkeypatch.setattr(tensor_cores, "choose", chosen)


@pytest.mark.parametrize("timing", EVERY_TIMING[1:3], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_clusters_that_share_columns_and_warpgroups_that_take_turns(
    form: str, timing: EmulatedTiming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps than stages; a tile of the last cluster, and a turn of the last tile, lie outside of the result."""
    takes_form(monkeypatch, FORMS[form])
    rows, columns, depth = 264, FORMS[form][0] + 8 if FORMS[form][2] else FORMS[form][0] - 8, 328
    check(residual, randn(rows, depth), randn(columns, depth), randn(rows, columns), sms=2, timings=(timing,))


@pytest.mark.parametrize("form", [form for form in FORMS if "between" not in form])
def test_forms_of_tiles_with_one_step_and_other_layouts(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    takes_form(monkeypatch, FORMS[form])
    x, w, r = randn(64, 264), randn(64, 200), randn(264, 200)
    check(lambda x, w, r: torch.tanh(x.mT @ w) - r, x, w, r, sms=2, timings=ONCE)


@pytest.mark.parametrize("form", ["shared", "in-turns"])
def test_forms_of_two_products(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tile_n, *others = FORMS[form]
    takes_form(monkeypatch, (tile_n // 2, *others))
    check(gated, randn(200, 72), randn(72, 72), randn(72, 72), sms=2, timings=ONCE)


@pytest.mark.parametrize("form", ["shared-between-widths", "buffered-between-widths"])
def test_float32_results_between_widths(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer holds 32 columns of them, and there are more than buffers."""
    takes_form(monkeypatch, FORMS[form])
    check(lambda x, w: F.linear(x, w).float() * 0.5, randn(200, 72), randn(240, 72), sms=2, timings=ONCE)


def test_forms_beyond_the_cost_model_are_for_tuning() -> None:
    """They are candidates where tiles fill the machine, and none of them is the default."""
    shape, target = MatmulShape(8192, [12288], 4096), targets.target("sm_90a")
    plans = [plan for plan in candidates(shape, target) if isinstance(plan, ContractionPlan)]
    assert {key(plan) for plan in plans} >= {*FORMS.values(), (256, 1, False, 2)}
    assert len({plan.description for plan in plans}) == len(plans)
    assert all(plan.shared_bytes <= target.shared_bytes and plan.stages >= 3 for plan in plans)
    default = contraction_plan(shape, target)
    assert isinstance(default, ContractionPlan) and key(default)[1:] == (1, False, 2)


def test_few_tiles_have_no_other_forms() -> None:
    plans = candidates(MatmulShape(512, [1024], 4096), targets.target("sm_90a"))
    assert {key(plan)[1:] for plan in plans if isinstance(plan, ContractionPlan)} == {(1, False, 2)}
