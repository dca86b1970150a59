"""Means and sums of squares about them that are gathered at once: in every kind of plan, about as accurately as torch does it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler.passes import forget_programs
from fusegen.families.rows import heuristics
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.ir.ops import Op
from fusegen.passes import moments
from fusegen.schedule import context
from tests.naming import case
from tests.unit.eager import agree, randn

BF16, F16 = torch.bfloat16, torch.float16
Way = Callable[[RowPlan], bool]
pytestmark = pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")


@pytest.fixture
def all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any length are long ones."""
    monkeypatch.setattr(moments, "_LONG", 0)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers of one block hold no row of a few thousand elements."""
    monkeypatch.setattr(heuristics, "_MOST_REGISTERS", 2)


def norm(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """A norm and its statistics in 32 bits."""
    rstd, mean = upcast(x)
    return ((x.float() - mean) * rstd * w + b).to(x.dtype), rstd, mean


def by_hand(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(-1, keepdim=True)
    centered = x - mean
    return centered * torch.rsqrt((centered * centered).mean(-1, keepdim=True) + 1e-6), mean


def added(x: Tensor, r: Tensor) -> Tensor:
    return F.layer_norm(x + r, x.shape[-1:])


def upcast(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    return torch.rsqrt((wide - mean).square().mean(-1, keepdim=True)), mean


def with_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x, x.shape[-1:])
    return y, y.sum(0)


def inputs(rows: int, columns: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """Rows whose warps have other means each."""
    x = randn(rows, columns) + torch.linspace(-2, 3, columns)
    return x.to(dtype), randn(columns, dtype=dtype), randn(columns, dtype=dtype)


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[Way], list[RowPlan]]:
    """Kernels take the first of their plans that is of some kind; gives those that were taken."""

    def only(way: Way) -> list[RowPlan]:
        taken: list[RowPlan] = []

        def choose(self: context.Context, candidates: tuple[RowPlan, ...]) -> RowPlan:
            self.candidates = candidates
            taken.append(next(filter(way, candidates)))
            return taken[-1]

        monkeypatch.setattr(context.Context, "choose", choose)
        return taken

    return only


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "by hand": (by_hand, (randn(3, 777, dtype=F16),)),
    "made wider": (upcast, (randn(3, 1024, dtype=BF16),)),
    "of a sum": (added, (randn(4, 520, dtype=BF16), randn(4, 520, dtype=BF16))),
    "sums of columns too": (with_sums, (randn(7, 264, dtype=BF16),)),
}

PLANS: dict[str, tuple[int, Way]] = {
    "a part of a warp": (48, lambda plan: plan.threads < 32),
    "a warp": (264, lambda plan: plan.threads == 32 and plan.vectors_per_thread > 1),
    "a block": (1000, lambda plan: 32 < plan.threads < 1024 and not plan.exact),
    "at aligned places": (331, lambda plan: plan.unaligned),
    "read again": (1000, lambda plan: plan.persistence is Persistence.MULTI_PASS),
    "read again at aligned places": (331, lambda plan: plan.persistence is Persistence.MULTI_PASS and plan.unaligned),
}

LONG_PLANS: dict[str, tuple[int, Way]] = {
    "a block": (3072, lambda plan: plan.stage_vectors > 0 and plan.cluster == 1),
    "blocks": (3072, lambda plan: plan.stage_vectors > 0 and plan.cluster == 4),
    "blocks at aligned places": (3001, lambda plan: plan.stage_vectors > 0 and plan.cluster == 2),
    "blocks that hold it": (3072, lambda plan: plan.persistence is Persistence.REGISTERS and plan.cluster > 1),
}


@pytest.mark.usefixtures("all_rows")
def test_what_torch_gives() -> None:
    for name, (function, tensors) in FUNCTIONS.items():
        with case(name):
            assert "moments" in fg.kernel(function).lower(*tensors, target="sm_90a").sources[0].text
            agree(function, tensors)


@pytest.mark.usefixtures("all_rows")
def test_plans(take: Callable[[Way], list[RowPlan]]) -> None:
    for name, (columns, way) in PLANS.items():
        with case(name):
            forget_programs()
            taken = take(way)
            agree(norm, inputs(5, columns))
            assert taken


@pytest.mark.usefixtures("all_rows", "small_clusters", "no_room")
@pytest.mark.parametrize("name", LONG_PLANS)
def test_plans_of_long_rows(name: str, take: Callable[[Way], list[RowPlan]]) -> None:
    columns, way = LONG_PLANS[name]
    taken = take(way)
    agree(norm, inputs(19, columns))
    assert taken


# How accurate they are.


def outliers(x: Tensor) -> Tensor:
    x[:, 0] = 3e3  # the first values of a thread, a warp and a row
    x[:, 8::64] *= -50
    return x


VALUES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "ordinary": (lambda x: x, 1.25),
    "far from zero": (lambda x: x + 100, 1.25),
    "an outlier first": (outliers, 32),
    "sorted": (lambda x: x.sort(-1).values, 4),
    "tiny": (lambda x: x * 1e-16, 1.25),
    "huge": (lambda x: x * 1e16, 1.25),
}
"""Rows, and how many times torch's error is allowed: values of 16 bits differ by thousands of times as much."""


@pytest.mark.usefixtures("all_rows")
def test_they_are_about_as_accurate_as_torchs() -> None:
    kernel = fg.kernel(upcast)
    for columns in (40, 4096):
        for values, (made, times) in VALUES.items():
            with case((values, columns)):
                x = made(torch.randn(16, columns)).bfloat16()
                exact = torch.rsqrt(x.double().var(-1, correction=0, keepdim=True))
                got = kernel(x)[0], upcast(x)[0]
                ours, torchs = ((each.double() / exact - 1).square().mean().sqrt().item() for each in got)
                assert ours <= times * torchs + 3e-8


@pytest.mark.usefixtures("all_rows")
def test_rows_of_one_value_have_no_variance() -> None:
    for value in (0.0, 1.1, -3e38, 7e-41):
        x = torch.full((3, 777), value, dtype=BF16)
        assert not fg.kernel(by_hand)(x)[0].count_nonzero()


@pytest.mark.usefixtures("all_rows")
def test_a_sum_of_squares_is_never_negative() -> None:
    """Each square is too small for a float, and the square of the sum is not."""

    def squares(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide - wide.mean(-1, keepdim=True)).square().sum(-1)

    x = torch.full((3, 1000), 2e-23, dtype=BF16)
    x[:, ::8] = 0  # the first values of threads
    kernel = fg.kernel(squares)
    assert "moments" in kernel.lower(x, target="sm_90a").sources[0].text
    assert not kernel(x).signbit().any()


@pytest.mark.usefixtures("all_rows")
def test_what_is_no_number_stays_in_its_row() -> None:
    x = torch.randn(5, 515).bfloat16()
    x[1, 7], x[3, 0], x[4, 514] = math.nan, math.inf, -math.inf
    agree(lambda x: F.layer_norm(x, x.shape[-1:]), (x,))


@pytest.mark.usefixtures("all_rows")
def test_what_lies_around_rows_is_none_of_them(take: Callable[[Way], list[RowPlan]]) -> None:
    taken = take(lambda plan: plan.unaligned)
    around = torch.full((3, 400), math.nan, dtype=BF16)
    around[:, 11:344] = torch.randn(3, 333)
    agree(added, (around[:, 11:344], randn(3, 333, dtype=BF16)))
    assert taken


# Where they are taken.


def operations(function: Callable[..., Any], *inputs: Tensor, target: str = "sm_90a") -> Iterator[Op]:
    source = fg.kernel(function).lower(*inputs, target=target).sources[0].text
    return (op for op in (Op.MOMENTS, Op.SUM) if f"{op.row.name}_f32" in source)


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_an_outlier_first_costs_rows_of_32_bits_nothing() -> None:
    x = torch.randn(4, 40000)
    x[:, 0] = 1e4
    exact = x.double().var(-1)
    ours, torchs = ((got.double() / exact - 1).abs().max().item() for got in (fg.kernel(lambda x: x.var(-1))(x), x.var(-1)))
    assert ours <= 2 * torchs + 2.0**-22


def test_squares_about_something_else_are_sums() -> None:
    def of_a_half(x: Tensor) -> Tensor:
        centered = x - x.sum(-1, keepdim=True) * 0.5
        return x * (centered * centered).mean(-1, keepdim=True)

    def of_columns(x: Tensor) -> Tensor:
        centered = x - x.mean(0, keepdim=True)
        return (centered * centered).mean(0)

    assert Op.MOMENTS not in operations(of_a_half, meta(64, 40000))
    assert Op.MOMENTS not in operations(of_columns, meta(40000, 64))
