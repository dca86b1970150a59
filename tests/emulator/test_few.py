"""The first few of rows, with softmax before and sums behind, in every kind of plan of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.schedule import context
from tests.naming import case
from tests.unit.eager import agree, randn

Way = Callable[[RowPlan], bool]
pytestmark = pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")

PLANS: dict[str, tuple[int, Way]] = {
    "a part of a warp": (64, lambda plan: plan.threads < 32),
    "a warp": (264, lambda plan: plan.threads == 32),
    "a block": (1000, lambda plan: plan.threads > 32),
    "at aligned places": (331, lambda plan: plan.unaligned),
    "read again": (1000, lambda plan: plan.persistence is Persistence.MULTI_PASS),
}


def router(x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    weights = x.softmax(-1)
    values, places = weights.topk(3)
    others = weights.gather(-1, (weights + bias).topk(2).indices)
    return values / values.sum(-1, keepdim=True), places, others


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (columns, way) in PLANS.items():

        def choose(self: context.Context, candidates: tuple[RowPlan, ...], way: Way = way) -> RowPlan:
            self.candidates = candidates
            return next(filter(way, candidates))

        with case(name):
            monkeypatch.setattr(context.Context, "choose", choose)
            agree(router, (randn(5, columns), randn(columns)))


ORDERS: dict[str, tuple[int, Way]] = {
    "a part of a warp": (48, lambda plan: plan.threads < 32),
    "a warp": (128, lambda plan: plan.threads == 32 and plan.exact),
    "groups of a warp": (264, lambda plan: plan.threads == 32 and plan.vectors_per_thread > 2),
    "a block": (1000, lambda plan: plan.threads > 64),
    "a block of single lanes": (331, lambda plan: plan.threads > 32),
}


def sorted_softmax(x: Tensor, scale: float = 2.0) -> tuple[Tensor, ...]:
    values, places = (x * (scale + 1)).softmax(-1).sort(stable=True, dim=-1, descending=True)
    return values / values.amax(-1, keepdim=True), places


def test_whole_rows_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (columns, way) in ORDERS.items():

        def choose(self: context.Context, candidates: tuple[RowPlan, ...], way: Way = way) -> RowPlan:
            self.candidates = candidates
            return next(filter(way, candidates))

        with case(name):
            monkeypatch.setattr(context.Context, "choose", choose)
            kernel = agree(sorted_softmax, (randn(5, columns),))
            assert len(kernel.lower(randn(5, columns), target="sm_90a").program.launches) == 1


def test_numbers_that_are_hard_to_order() -> None:
    row = torch.tensor([1.0, torch.nan, -torch.inf, 0.0, -0.0, torch.inf, 2.0, 1.0])
    row = torch.cat((row, row.roll(3), row.roll(5)))
    rows = torch.stack([row, row.flip(0), torch.full((24,), -torch.inf), torch.full((24,), torch.nan), -row])
    agree(lambda x: (*x[:, :8].sort(stable=True), *x[:, :8].sort(stable=True, dim=-1, descending=True)), (rows,))
    agree(lambda x: (*x.sort(stable=True), *x.sort(stable=True, dim=-1, descending=True)), (rows,))


def test_one_launch() -> None:
    low = fg.kernel(lambda x: router(x, x[0])).lower(randn(9, 64, dtype=torch.bfloat16), target="sm_90a")
    assert len(low.program.launches) == 1


def test_maxima_in_order() -> None:
    """Stored are the maxima themselves, in order, reversed, and side by side."""

    def maxima(x: Tensor) -> tuple[Tensor, ...]:
        found = [x.amax(-1, keepdim=True)]
        for _ in range(4):
            found.append(torch.where(x < found[-1], x, -1e9).amax(-1, keepdim=True))
        return torch.cat(found, -1), torch.cat(found[::-1], -1), torch.stack(found[1:4], -1)

    agree(maxima, (randn(5, 32),))


def test_the_first_few_that_are_used_again() -> None:
    def routed(x: Tensor) -> tuple[Tensor, ...]:
        values, places = x.softmax(-1).topk(3)
        return values / values.sum(-1, keepdim=True), places, values.flip(-1)

    agree(routed, (randn(5, 32),))


def test_the_first_few_as_rows() -> None:
    """From one to the next lie as many elements as there are rows."""

    def turned(x: Tensor) -> tuple[Tensor, ...]:
        values, places = x.topk(4)
        return values.t().contiguous(), places.t().contiguous()

    agree(turned, (randn(5, 32),))
