"""Every plan that a launch could have gives what torch gives: `fg.tune` may choose any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import target as targets
from fusegen.compiler import backends
from fusegen.families.gemm.plan import MatmulPlan
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.schedule.kernel import LIBRARY
from tests.unit.eager import agree, randn

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")


def norm_gelu_add(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], w, b), approximate="tanh") + r


def softmax_and_peak(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.softmax(x, -1), x.argmax(-1)


def gradients(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    hidden = (x - x.mean(-1, keepdim=True)) * dy
    return hidden - hidden.mean(-1, keepdim=True), hidden.sum(0)


def truths(x: Tensor) -> tuple[Tensor, ...]:
    return (x > 2.9).any(-1), (x > -2.9).all(-1), (x > 1.5).any(0), (x > -1.5).all(0), (x > 3.2).any()


def scaled(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return x * 2 + y.mT * b


WEIGHTS = randn(2816, dtype=BF16), randn(2816, dtype=BF16)

CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a row that no power of two fills": (norm_gelu_add, (randn(2, 2816, dtype=BF16), *WEIGHTS, randn(2, 2816, dtype=BF16))),
    "a row of six warps": (softmax_and_peak, (randn(3, 1536),)),
    "a row that can be staged": (softmax_and_peak, (randn(3, 20480, dtype=BF16),)),
    "sums over rows beside a row": (gradients, (randn(5, 1408), randn(5, 1408))),
    "sums over rows beside an odd row": (gradients, (randn(5, 1403), randn(5, 1403))),
    "truth values along rows, over rows, and of all": (truths, (randn(5, 704),)),
    "odd rows that are written both ways": (lambda x, b: ((x + b).T.contiguous(), x * 2), (randn(63, 51), randn(51))),
    "points of several axes": (scaled, (randn(61, 40), randn(40, 61), randn(40))),
    "points that lie across": (lambda x: x.t().contiguous(), (randn(67, 40, dtype=BF16),)),
    "points of one axis": (lambda x: F.silu(x) * x, (randn(4100, dtype=BF16),)),
}


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("name", CASES)
def test_all_plans_give_one_result(name: str) -> None:
    function, inputs = CASES[name]
    assert fg.tune(fg.kernel(function), *inputs).launches
    agree(function, inputs)


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, v)


def linear_gelu(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w))


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("pipeline", ["wgmma", "mma.sync"])
@pytest.mark.parametrize("function", [linear_gelu, gated])
def test_all_plans_of_a_matmul_and_the_library_give_one_result(
    function: Callable[..., Any], pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(targets.target("sm_90a"), wgmma=pipeline == "wgmma", products=(pipeline,), sms=1)
    monkeypatch.setattr(backends, "_EMULATED", machine)
    weights = [randn(72, 128, dtype=BF16) for _ in range(function.__code__.co_argcount - 1)]
    rows = 12 if pipeline == "wgmma" else 20  # up to 16, mma.sync has a single plan
    found = fg.tune(fg.kernel(function), randn(rows, 128, dtype=BF16), *weights).launches
    plans = {each.plan for launch in found for each in launch.candidates}
    assert LIBRARY in plans and sum(isinstance(plan, MatmulPlan) for plan in plans) >= 2


def test_there_are_plans_of_every_kind() -> None:
    function, inputs = CASES["a row that can be staged"]
    plans = fg.kernel(function).lower(*inputs).program.launches[0].candidates
    assert {plan.persistence for plan in plans if isinstance(plan, RowPlan)} == set(Persistence)
    assert any(isinstance(plan, RowPlan) and plan.threads == 640 for plan in plans)
