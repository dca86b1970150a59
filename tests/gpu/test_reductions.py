"""Reductions of several components and scans on a GPU: in every layout of a row, of columns, and twice the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusegen as fg

from .accuracy import check_function

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1, 1), (5, 3), (64, 33), (33, 1000), (16, 4097), (8, 50257), (4, 200000), (3, 300001)]


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_of_equal_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """torch's own index on a GPU is that of any of equal values."""
    few = torch.randint(-9, 9, shape, device="cuda").to(dtype)
    for x in (few, torch.zeros_like(few), randn(*shape, dtype=dtype)):
        values, indices = fg.kernel(lambda x: tuple(x.max(-1)))(x)
        wanted = x.amax(-1)
        first = (torch.arange(shape[1], device="cuda").masked_fill(x != wanted[:, None], shape[1])).amin(-1)
        assert torch.equal(values, wanted) and torch.equal(indices, first)


def test_the_first_nan() -> None:
    x = randn(16, 5000, dtype=F32)
    x[:, 4000], x[:, 77], x[3] = float("nan"), float("nan"), float("-inf")
    wanted = torch.full((16,), 77, device="cuda")
    wanted[3] = 0
    assert torch.equal(fg.kernel(lambda x: x.argmax(-1))(x), wanted)


def test_places_over_rows() -> None:
    x = torch.randint(-9, 9, (20000, 130), device="cuda").float()
    first = torch.arange(20000, device="cuda")[:, None].masked_fill(x != x.amax(0), 20000).amin(0)
    assert torch.equal(fg.kernel(lambda x: x.argmax(0))(x), first)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_exponentials(shape: tuple[int, int], dtype: torch.dtype) -> None:
    function: Callable[[Tensor], Tensor] = lambda x: x.logsumexp(-1)  # noqa: E731
    check_function(fg.kernel(function), function, (randn(*shape, dtype=dtype) * 5,))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(8192, 4096), (70000, 33), (300, 5)])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_moments_of_columns(shape: tuple[int, int], dtype: torch.dtype, offset: float) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return torch.var_mean(x, 0)

    check_function(fg.kernel(function), function, (randn(*shape, dtype=dtype) + offset,))


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_moments_of_long_rows(offset: float) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return torch.var_mean(x, -1)

    check_function(fg.kernel(function), function, (randn(64, 200000, dtype=F32) + offset,))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_so_far(shape: tuple[int, int], dtype: torch.dtype) -> None:
    function: Callable[[Tensor], Tensor] = lambda x: x.cumsum(-1)  # noqa: E731
    check_function(fg.kernel(function), function, (randn(*shape, dtype=dtype),))


def test_integers_are_exact_and_runs_are_equal() -> None:
    x = torch.randint(-1000, 1000, (7, 123457), device="cuda", dtype=torch.int32)
    kernel = fg.kernel(lambda x: (x.cumsum(-1), x.cumsum(0)))
    assert all(torch.equal(a, b) for a, b in zip(kernel(x), (x.cumsum(-1), x.cumsum(0)), strict=True))
    y = randn(7, 123457, dtype=F32)
    both = fg.kernel(lambda y: (y.cumsum(-1), y.logsumexp(-1), y.var(-1), y.var(0)))
    assert all(torch.equal(a, b) for a, b in zip(both(y), both(y), strict=True))
