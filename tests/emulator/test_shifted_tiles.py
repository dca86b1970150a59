"""Sums of columns of rows that do not start at aligned places: groups of lanes do all the same, in every plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.compiler import backends
from fusegen.compiler.emulator import EARLY, EmulatedTiming
from fusegen.families.rows.plan import RowPlan
from fusegen.schedule import context
from tests.naming import case
from tests.unit.eager import agree, randn

BF16, F16 = torch.bfloat16, torch.float16
emulated = pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")


@pytest.fixture
def unaligned(monkeypatch: pytest.MonkeyPatch) -> list[RowPlan]:
    """Kernels of tiles have no plans but those that these tests are about, of one width; those that they have."""
    found: list[RowPlan] = []

    def choose(self: context.Context, candidates: tuple[Any, ...]) -> Any:
        tiles = [p for p in candidates if getattr(p, "tiled", False) and p.unaligned and p.cluster in (1, 2, 16)]
        self.candidates = tuple(p for p in tiles if p.threads == tiles[0].threads) or candidates
        found.extend(tiles)
        return self.candidates[0]

    monkeypatch.setattr(context.Context, "choose", choose)
    return found


def summed(x: Tensor) -> Tensor:
    return x.sum(0)


def gradients(x: Tensor, y: Tensor, m: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    return (y * (x - m) * r).sum(0), y.sum(0)


def spread(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.var(0), x.amax(0), x.argmax(0)


def weighted(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x * w
    return scaled, scaled.sum(0)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a norm's weights": (gradients, (randn(53, 777, dtype=BF16), randn(53, 777, dtype=BF16), randn(53, 1), randn(53, 1))),
    "float32": (summed, (randn(77, 133),)),
    "several components": (spread, (randn(45, 135),)),
    "fewer rows than threads have": (summed, (randn(3, 515, dtype=BF16),)),
    "results of rows too": (weighted, (randn(37, 268, dtype=F16), randn(268, dtype=F16))),
    "what all rows share first": (lambda w, x: (w * x).sum(0), (randn(301, dtype=BF16), randn(30, 301, dtype=BF16))),
    "parts of rows": (summed, (randn(30, 344, dtype=BF16)[:, :299],)),
    "rows that overlap": (summed, (randn(339).as_strided((9, 331), (1, 1)),)),
}


@emulated
@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("name", CASES)
def test_every_plan(name: str, unaligned: list[RowPlan]) -> None:
    function, inputs = CASES[name]
    for launch in fg.tune(fg.kernel(function), *inputs).launches:
        assert not [each.error for each in launch.candidates if each.error]
    agree(function, inputs)
    assert unaligned


@emulated
@pytest.mark.parametrize("timing", [EmulatedTiming.LATE, EmulatedTiming.LATE | EmulatedTiming.BACKWARDS])
@pytest.mark.parametrize("name", ["a norm's weights", "results of rows too"])
def test_whenever_things_arrive(
    name: str, timing: EmulatedTiming, unaligned: list[RowPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = backends.emulated_machine
    monkeypatch.setattr(backends, "emulated_machine", lambda target, _=EARLY: machine(target, timing))
    agree(*CASES[name])
    assert unaligned


# What is offered.


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def plans(function: Callable[..., Any], *inputs: Tensor) -> list[RowPlan]:
    """Those whose groups of lanes start at aligned places."""
    launch = fg.kernel(function).lower(*inputs, target="sm_90a").program.launches[0]
    return [plan for plan in launch.candidates if isinstance(plan, RowPlan) and plan.unaligned]


OTHERS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "aligned": (summed, (meta(64, 3008),)),
    "short": (summed, (meta(64, 255),)),
    "an odd start": (summed, (meta(64 * 3001 + 1)[1:].view(64, 3001),)),
    "parts of odd rows": (summed, (meta(64, 3003)[:, :3001],)),
    "that lie otherwise": (lambda x, y: (x * y).sum(0), (meta(64, 3001), meta(64, 3003)[:, :3001])),
    "of two tensors": (lambda x, y: (torch.cat([x, y]) * 2).sum(0), (meta(64, 3001), meta(64, 3001))),
    "in unequal steps": (lambda x: x.sum((0, 1)), (meta(8, 9, 3001)[:, 1:],)),
}


def test_others_keep_their_lanes() -> None:
    for name, (function, inputs) in OTHERS.items():
        with case(name):
            assert not plans(function, *inputs)
