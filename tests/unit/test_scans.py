"""cumsum and cumprod: along rows of every length, with math before and behind, on the CPU and in the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.families.pointwise.lower import POINTWISE
from fusegen.families.scan import SCAN
from fusegen.fusion import GroupKind
from tests.unit.eager import agree, ints, randn
from tests.unit.gate import some

BF16, F16 = torch.bfloat16, torch.float16
INF, NAN = math.inf, math.nan


def kinds(function: Callable[..., Any], *arguments: Tensor) -> list[GroupKind]:
    return [group.kind for group in fg.kernel(function).lower(*arguments, target="sm_90a").groups]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("length", some([1, 3, 33, 1000, 4097], [33, 1000, 4097]))
def test_rows_of_every_length(length: int) -> None:
    agree(lambda x: x.cumsum(-1), (randn(3, length),), (randn(2, length, dtype=BF16),), (ints(3, length),))
    agree(lambda x: (1 + 0.01 * x).cumprod(-1), (randn(2, length),))


def test_errors_do_not_grow_along_a_row() -> None:
    """As in torch, which sums in float64 on a CPU."""
    x = torch.rand(4, 20000) * 0.1 + 0.95
    for function in (lambda x: x.cumsum(-1), lambda x: x.cumprod(-1)):
        torch.testing.assert_close(fg.kernel(function)(x), function(x.double()).float(), rtol=3e-7, atol=0)


@pytest.mark.usefixtures("either")
def test_dtypes_are_torch_s() -> None:
    for dtype in (torch.int8, torch.bool, F16):
        agree(lambda x: (x.cumsum(0), x.cumprod(-1)), (ints(3, 5, low=0, high=3).to(dtype),))
    agree(
        lambda x: (x.cumsum(-1, dtype=torch.float64), torch.cumsum(x, dim=0, dtype=torch.int32), x.cumprod(0, dtype=torch.float32)),
        (ints(3, 5),),
    )


@pytest.mark.usefixtures("either")
def test_what_is_not_finite() -> None:
    x = torch.tensor([[1.0, INF, 2, -INF, 3], [NAN, 1, 2, 3, 4], [0, 0, -0.0, INF, INF]])
    agree(lambda x: (x.cumsum(-1), x.cumsum(0), x.cumprod(-1)), (x,), (x.repeat(1, 20),))


@pytest.mark.usefixtures("either")
def test_math_before_and_behind() -> None:
    def function(x: Tensor, scale: Tensor, s: float) -> Tensor:
        return (x.exp() * s).cumsum(-1) / (scale + torch.arange(x.shape[-1])) - x * x.abs().cumsum(-1)

    agree(function, (randn(3, 40), randn(3, 1).abs() + 1, 0.5), (randn(3, 1000), randn(1000).abs() + 1, 2.5))
    assert kinds(function, randn(3, 40), randn(3, 1), 0.5) == [SCAN]


@pytest.mark.usefixtures("either")
def test_scans_of_scans() -> None:
    agree(lambda x: x.cumsum(-1).cumsum(-1) + x.cumsum(-1), (randn(3, 40),))


def test_what_is_read_elsewhere_lies_in_memory() -> None:
    def normalized(x: Tensor) -> Tensor:
        total = x.cumsum(-1)
        return total / total[..., -1:]

    agree(normalized, (randn(3, 40).abs(),))
    assert kinds(normalized, randn(3, 40)) == [SCAN, POINTWISE]


# Running extrema and logarithms of sums.


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("length", some([1, 3, 33, 1000, 4097], [33, 4097]))
def test_running_extrema(length: int) -> None:
    """Among equal values the last index wins, as in torch."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (*x.cummax(-1), torch.cummin(x, -1).indices)

    agree(function, (ints(2, length).float(),), (randn(1, length, dtype=BF16),))


@pytest.mark.usefixtures("either")
def test_running_extrema_of_columns_and_integers() -> None:
    agree(lambda x: (*x.cummin(0), *x.cummax(dim=1)), (ints(9, 5),), (randn(9, 5) > 0,), (ints(9, 5, low=0).to(torch.uint8),))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("length", some([1, 33, 2049], [33, 2049]))
def test_running_logarithms_of_sums(length: int) -> None:
    agree(lambda x: x.logcumsumexp(-1), (randn(2, length) * 20,), (randn(1, length, dtype=F16) - 500,))
    agree(lambda x: x.logcumsumexp(0), (randn(length, 2).double() * 300,))


@pytest.mark.usefixtures("either")
def test_running_extrema_of_what_is_not_finite() -> None:
    x = torch.tensor([[1.0, INF, 2, -INF, INF], [0, NAN, 1, NAN, 4], [-INF, -INF, 0.0, -0.0, 1]])
    agree(lambda x: (*x.cummax(-1), *x.cummin(-1), x.logcumsumexp(-1), *x.cummax(0)), (x,), (x.repeat(1, 20),))


def test_running_extrema_of_one_number() -> None:
    agree(lambda x: (*x.cummax(0), *x.cummin(-1), x.logcumsumexp(0)), (torch.tensor(2.0),))


def test_a_running_extremum_and_its_place_are_of_one_kernel_each() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = (x * 2).cummax(-1)
        return values.exp(), indices + 1

    agree(function, (randn(3, 40),))
    assert kinds(function, randn(3, 40)) == [SCAN, SCAN]
