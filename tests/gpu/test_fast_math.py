"""The approximate functions of the hardware keep the errors that `explain` states, and differ from the accurate ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg

Function = Callable[[Tensor], Tensor]
COUNT = 1 << 22
UNIT = 2.0**-23  # in the last place, relative to a value; at most that


@dataclass(frozen=True)
class Case:
    """A function, the range of its arguments, its documented error by argument and exact result, how float64 computes it."""

    function: Function
    lowest: float
    highest: float
    error: Callable[[Tensor, Tensor], Tensor]
    exactly: Function | None = None

    def arguments(self) -> Tensor:
        """Evenly spread, and, where they are positive, evenly by magnitude as well."""
        x = torch.linspace(self.lowest, self.highest, COUNT, dtype=torch.float64, device="cuda")
        if self.lowest > 0:
            x = torch.cat([x, self.lowest * (self.highest / self.lowest) ** torch.linspace(0, 1, COUNT, device="cuda").double()])
        return x.float()


def near_one(x: Tensor, absolute: float, relative: Tensor) -> Tensor:
    """An error that is absolute for arguments from 0.5 to 2, and relative elsewhere."""
    return torch.where((x > 0.5) & (x < 2), absolute, relative)


def gelu_without_cancellation(x: Tensor) -> Tensor:
    """GELU of float64; torch's adds 1 to the error function, which leaves nothing of it at -8."""
    return 0.5 * x * torch.special.erfc(-x / math.sqrt(2))


CASES = {
    "exp": Case(torch.exp, -87, 88, lambda x, y: (2 + 1.2 * x.abs()) * UNIT * y),
    "exp2": Case(torch.exp2, -126, 127.9, lambda x, y: 2 * UNIT * y),
    "log": Case(torch.log, 1e-37, 1e38, lambda x, y: near_one(x, 2.0**-22, 3 * UNIT * y.abs())),
    "log near 1": Case(torch.log, 0.5, 2, lambda x, y: torch.full_like(y, 2.0**-22)),
    "expm1": Case(torch.expm1, -87, 88, lambda x, y: (2.0**-18 + 1.2 * x.abs() * UNIT) * y.abs()),
    "expm1 near 0": Case(torch.expm1, -1, 1, lambda x, y: 2.0**-18 * y.abs()),
    "log1p": Case(torch.log1p, 1e-37, 1e38, lambda x, y: 2.0**-18 * y),
    "log1p near 0": Case(torch.log1p, -0.999, 1, lambda x, y: 2.0**-18 * y.abs()),
    "log2": Case(torch.log2, 1e-37, 1e38, lambda x, y: near_one(x, 2.0**-22, 2.0**-22 * y.abs())),
    "log2 near 1": Case(torch.log2, 0.5, 2, lambda x, y: torch.full_like(y, 2.0**-22)),
    "sin": Case(torch.sin, -(2**17), 2**17, lambda x, y: torch.full_like(y, 2.0**-20)),
    "sin of one turn": Case(torch.sin, -3.2, 3.2, lambda x, y: torch.full_like(y, 2.0**-20)),
    "cos": Case(torch.cos, -(2**17), 2**17, lambda x, y: torch.full_like(y, 2.0**-20)),
    "tanh": Case(torch.tanh, -10, 10, lambda x, y: 2.0**-11 * y.abs()),
    "sqrt": Case(torch.sqrt, 1e-37, 1e38, lambda x, y: 2.0**-23 * y),
    "rsqrt": Case(torch.rsqrt, 1e-37, 1e38, lambda x, y: 2.0**-22.9 * y),
    "division": Case(lambda x: 3 / x, 1e-30, 1e30, lambda x, y: 2 * UNIT * y),
    "sigmoid": Case(torch.sigmoid, -85, 85, lambda x, y: (4 + 1.2 * x.abs()) * UNIT * y),
    "gelu": Case(F.gelu, -8, 8, lambda x, y: (2.0**-19 + 2.0**-22 * (1 + x * x)) * y.abs(), gelu_without_cancellation),
}
THE_SAME = ("exp2", "rsqrt")
"""Functions for which CUDA takes the approximate instruction anyway."""


def kernel_of(function: Function, *, fast_math: bool) -> Function:
    return fg.kernel(lambda x: function(x), fast_math=fast_math)


def errors(case: Case, *, fast_math: bool) -> tuple[Tensor, Tensor]:
    """The error of each result, and the one that is documented for the approximate function."""
    x = case.arguments()
    exact = (case.exactly or case.function)(x.double())
    return (kernel_of(case.function, fast_math=fast_math)(x).double() - exact).abs(), case.error(x.double(), exact)


@pytest.mark.parametrize("name", CASES)
def test_errors_are_within_what_is_documented(name: str) -> None:
    found, documented = errors(CASES[name], fast_math=True)
    worst = (found / documented).nan_to_num(0.0).max().item()
    assert worst <= 1, f"{worst:.3f} of the documented error"


@pytest.mark.parametrize("name", [name for name in CASES if name not in THE_SAME])
def test_results_are_not_those_of_the_accurate_function(name: str) -> None:
    x = CASES[name].arguments()
    asked, plain = (kernel_of(CASES[name].function, fast_math=each)(x) for each in (True, False))
    assert not torch.equal(asked, plain)


def test_masks_infinities_and_nan_are_what_they_are_without() -> None:
    scores = torch.randn(256, 1000, device="cuda")
    mask = torch.zeros(256, 1000, device="cuda")
    for row, value in enumerate((-1e30, torch.finfo(torch.float32).min, -torch.inf)):
        mask[row::8, 100:] = value
        mask[row + 4 :: 8] = value  # all of a row
    scores[7, 3] = torch.nan
    scores[15, 3] = torch.inf
    kernels = [fg.kernel(lambda x, m: torch.softmax((x + m) * 0.125, -1), fast_math=each) for each in (True, False)]
    asked, plain = (kernel(scores, mask) for kernel in kernels)
    assert torch.equal(asked.isnan(), plain.isnan())
    torch.testing.assert_close(asked, plain, equal_nan=True, rtol=1e-4, atol=1e-6)


def test_gradients_are_near_those_without() -> None:
    x, y = (torch.randn(512, 1024, device="cuda", requires_grad=True) for _ in range(2))

    def gradients(*, fast_math: bool) -> tuple[Tensor, ...]:
        result = fg.kernel(lambda x, y: torch.softmax(F.gelu(x) * y, -1), fast_math=fast_math)(x, y)
        return torch.autograd.grad(result.square().sum(), (x, y))

    torch.testing.assert_close(gradients(fast_math=True), gradients(fast_math=False), rtol=1e-3, atol=1e-5)
