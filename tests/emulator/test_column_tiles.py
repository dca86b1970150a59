"""Sums of columns, tile by tile: every plan gives what torch gives, whoever shares the rows and whatever is left of them."""

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
from fusegen.verify.accuracy import judge
from tests.naming import case
from tests.unit.eager import agree, ints, randn

BF16, F16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.usefixtures("own_cache", "emulated", "made_up_times", "many_processors")


@pytest.fixture
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With so many multiprocessors that more blocks than a cluster has share the rows of one or two tiles."""
    monkeypatch.setattr(backends, "_EMULATED", replace(targets.target("sm_90a"), wgmma=False, sms=24))


def gradients(x: Tensor, dy: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return (dy * (x - mean[:, None]) * rstd[:, None]).sum(0), dy.sum(0)


def of_weights(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x * w
    return scaled, scaled.sum(0)


def spread(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.var(0), x.amax(0), x.argmax(0)


def dropped(x: Tensor, limit: Tensor) -> Tensor:
    return F.pad(torch.where(x > limit, x, 0), (0, 0, 2, 0)).sum(0)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "one row": (lambda x: x.sum(0), (randn(1, 300, dtype=BF16),)),
    "rows that fill no batch": (lambda x: x.sum(0), (randn(1037, 72, dtype=BF16),)),
    "few columns": (lambda x: x.sum(0), (randn(301, 5),)),
    "odd columns": (lambda x: x.sum(0), (randn(77, 709, dtype=BF16),)),
    "a norm's weights": (gradients, (randn(53, 264, dtype=BF16), randn(53, 264, dtype=BF16), randn(53), randn(53))),
    "results of rows too": (of_weights, (randn(37, 136, dtype=F16), randn(136, dtype=F16))),
    "columns of two axes": (lambda x, w: (x.mT * w).sum(0), (randn(19, 33, 12), randn(33))),
    "several components": (spread, (randn(45, 70),)),
    "under a condition": (dropped, (randn(40, 130), randn(130))),
    "integers": (lambda x: x.sum(0), (ints(50, 33, dtype=torch.int8),)),
}


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("name", CASES)
def test_every_plan_of_a_tile(name: str) -> None:
    function, inputs = CASES[name]
    for launch in fg.tune(fg.kernel(function), *inputs).launches:
        assert not [each.error for each in launch.candidates if each.error]
    agree(function, inputs)


def test_sums_are_about_as_accurate_as_torchs() -> None:
    """A thread that added up its rows one after the other, and a block its threads' sums, would have twice the error."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(0), *torch.var_mean(x, 0)

    for shape in ((300, 5), (67, 4100)):
        with case(shape):
            x = randn(*shape)
            for results in zip(fg.kernel(function)(x), function(x), function(x.double()), strict=True):
                verdict = judge(*results)
                assert not verdict.failure, verdict.failure
