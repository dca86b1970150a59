"""Reductions whose state has several components: places of extreme values, moments, sums of exponentials; on the CPU and in the
emulator."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fusegen as fg
from tests.unit.eager import agree, randn
from tests.unit.gate import some

BF16, F16, F32, F64, I32 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32
INF, NAN = math.inf, math.nan
LENGTHS = [1, 3, 33, 1000, 4097]
HARD = torch.tensor(
    [
        [1.0, NAN, 3.0, NAN, 2.0],
        [3.0, 3.0, 1.0, -INF, 3.0],
        [-INF, -INF, -INF, -INF, -INF],
        [INF, 0.0, INF, -0.0, 0.0],
        [0.0, -0.0, 0.0, -0.0, -0.0],
        [NAN, NAN, NAN, NAN, NAN],
    ]
)


def ties(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Few distinct values, so that many are equal."""
    return torch.randint(-3, 3, shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def places(x: Tensor) -> tuple[Tensor, ...]:
    return (x.argmax(-1), x.argmin(-1, keepdim=True), *x.max(-1), *x.min(-1, keepdim=True))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("length", some(LENGTHS, [3, 1000, 4097]))
@pytest.mark.parametrize("dtype", some([F32, BF16, I32], [F32]))
def test_the_first_of_equal_values(length: int, dtype: torch.dtype) -> None:
    agree(places, (ties(3, length, dtype=dtype),), (torch.zeros(2, length, dtype=dtype),))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", some([F32, F64, F16], [F32]))
def test_nan_and_infinities(dtype: torch.dtype) -> None:
    hard = HARD.to(dtype)
    agree(lambda x: (*places(x), x.argmax(0), x.argmin(0), *x.max(0), x.argmax(), x.argmin()), (hard,), (hard.repeat(1, 30),))


@pytest.mark.usefixtures("either")
def test_places_over_rows_of_columns() -> None:
    """Blocks leave partial states, which another kernel combines; the first index wins across blocks as well."""
    agree(lambda x: (x.argmax(0), *x.min(0)), (ties(700, 9),), (ties(70, 130, dtype=BF16),), (torch.zeros(300, 3),))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("length", some(LENGTHS, [33, 4097]))
def test_sums_of_exponentials(length: int) -> None:
    agree(
        lambda x: (x.logsumexp(-1), x.logsumexp(0)),
        (randn(3, length) * 30,),
        (randn(3, length, dtype=BF16),),
        (randn(2, length) - 200,),
    )


@pytest.mark.usefixtures("either")
def test_sums_of_exponentials_of_infinities() -> None:
    agree(lambda x: (x.logsumexp(-1), x.logsumexp(0), x.logsumexp((0, 1))), (HARD,), (HARD.double(),), (torch.full((3, 5), -INF),))
    agree(lambda x: x - x.logsumexp(-1, keepdim=True), (randn(5, 70),))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", some([F32, BF16, F16, F64], [BF16]))
def test_moments_of_columns(dtype: torch.dtype) -> None:
    agree(
        lambda x: (x.var(0), x.std(0), *torch.var_mean(x, 0, correction=0)),
        (randn(70, 41, dtype=dtype),),
        (randn(300, 3, dtype=dtype),),
    )
    agree(lambda x: x.var((0, 1), correction=0), (randn(7, 5, 33, dtype=dtype),))


@pytest.mark.usefixtures("either")
def test_moments_far_from_zero() -> None:
    """As accurate as two passes; and the variance of equal values is 0."""
    agree(lambda x: x.var(0), (randn(700, 4) + 1e4,), (torch.full((50, 33), 3.3),), (torch.full((50, 33), 1e30),))
    equal = fg.kernel(lambda x: x.var(0))(torch.full((129, 9), 3.3))
    assert torch.equal(equal, torch.zeros(9))
