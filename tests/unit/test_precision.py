"""Where approximate functions may stand when a program has several kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg


def approximate(function: Callable[..., Any], dtype: torch.dtype = torch.bfloat16) -> list[bool]:
    """For each kernel that computes an exponential, whether it approximates it."""
    x, s = torch.empty(300, 200, dtype=dtype, device="meta"), torch.empty(200, dtype=dtype, device="meta")
    sources = fg.kernel(function).lower(x, s, target="sm_90a").sources
    math = [part for source in sources for part in source.math.split("\nnamespace ")]
    assert len(math) > 1, "this test wants several kernels"
    return ["fast_exp(" in text for text in math if "exp" in text]


def columns_and_rows(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.exp(x * s)
    return y, y.amax(0), y.sum(-1, keepdim=True)


def test_kernels_of_which_only_16_bits_are_seen_approximate_all() -> None:
    def function(x: Tensor, s: Tensor) -> Tensor:
        y, columns, rows = columns_and_rows(x, s)
        return (columns - y).sqrt() / rows

    assert all(approximate(function)) and not any(approximate(function, torch.float32))


def test_kernels_that_share_a_value_approximate_alike() -> None:
    def function(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        y, columns, rows = columns_and_rows(x, s)
        return (columns - y).sqrt() / rows, torch.sigmoid(x.float())

    assert approximate(function) == [False, False]


def test_what_a_later_kernel_compares_is_exact() -> None:
    def function(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        columns = torch.exp(x * s).amax(0)
        return torch.where(columns * 2 > x, x + x.amax(-1, keepdim=True), 0), columns

    assert approximate(function) == [False]


def test_scales_of_16_bits_may_be_of_approximate_values() -> None:
    def function(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        y = F.silu(x).float()
        largest = y.abs().amax(0)
        return largest, (y * (s.float() / largest)).clamp(-448, 448).to(torch.float8_e4m3fn)

    def widened(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        y = F.silu(x.float())
        largest = y.abs().amax(0)
        return largest, (y * (s.float() / largest)).clamp(-448, 448).to(torch.float8_e4m3fn)

    assert all(approximate(function)) and not any(approximate(widened))


def test_kernels_that_share_nothing_are_judged_apart() -> None:
    def function(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return F.silu(x), (s.float().exp() * 3).sum(-1)

    assert sorted(approximate(function)) == [False, True]


def test_angles_are_exact() -> None:
    """A unit in the last place of a position's angle is a part of a turn."""
    x, position = torch.empty(300, dtype=torch.float16, device="meta"), torch.empty(300, dtype=torch.int64, device="meta")
    low = fg.kernel(lambda x, i: (x * torch.cos(i.float() / 3.7)).half()).lower(x, position, target="sm_90a")
    assert " / 3.7f" in low.sources[0].math


def test_results_in_integers_of_8_bits_are_rounded_as_floats_are() -> None:
    """The exponential decides about the scale as well, but for an extreme of 16 bits."""

    def function(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        y = F.silu(x).float()
        largest = y.abs().amax(0)
        return largest, (y * (s.float() / largest)).clamp(-127, 127).round().to(torch.int8)

    def read_again(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        largest, q = function(x, s)
        return q, (q.float() * largest - x).bfloat16()

    assert all(approximate(function)) and not any(approximate(read_again))


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, True), (torch.float32, False)])
def test_what_a_backward_pass_in_16_bits_saves_is_approximate(dtype: torch.dtype, expected: bool) -> None:
    """The saved sum of exponentials has 32 bits, but nobody sees it."""
    x, target = torch.empty(64, 512, dtype=dtype, device="meta"), torch.empty(64, dtype=torch.int64, device="meta")
    forward = fg.vjp(fg.kernel(F.cross_entropy), x, target, target="sm_90a").forward.lower()
    (math,) = (source.math for source in forward.sources if "exp" in source.math)
    assert ("fast_exp(" in math) is expected


def test_what_a_backward_pass_compares_is_exact() -> None:
    def function(x: Tensor, s: Tensor) -> Tensor:
        peak = torch.exp(x.float()).sum(-1, keepdim=True)
        return (x * torch.maximum(peak, s.float())).to(x.dtype)

    x, s = (torch.empty(64, 512, dtype=torch.bfloat16, device="meta") for _ in range(2))
    forward = fg.vjp(fg.kernel(function), x, s, target="sm_90a").forward.lower()
    assert not any("fast_exp(" in source.math for source in forward.sources)
