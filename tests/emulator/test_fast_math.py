"""Kernels with ``fast_math=True`` in the emulator: special values and the emitted text, not the hardware's errors. The emulator's
versions of the approximate instructions flush subnormals as these do, and are otherwise correct but for rounding."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.unit.eager import randn
from tests.unit.one_number import PROGRAMS, Program, check, check_equal_squares

pytestmark = pytest.mark.usefixtures("emulated")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "expm1": torch.expm1,
    "log1p": lambda x: torch.log1p(x.abs()),
    "log2": torch.log2,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "division": lambda x: 3 / x,
}
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-3, 90.0, -90.0, 1e4, -1e5, 1e30)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_special_and_of_other_values(name: str) -> None:
    function = FUNCTIONS[name]
    x = torch.cat([torch.tensor(SPECIAL), randn(51)])
    x = x.abs() if name in ("log", "log2", "sqrt", "rsqrt") else x[x.abs() < 2**17] if name in ("sin", "cos") else x
    kernel = fg.kernel(lambda x: function(x), fast_math=True)
    torch.testing.assert_close(kernel(x), function(x.double()).float(), rtol=2e-5, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("value", [-1e30, torch.finfo(torch.float32).min, -torch.inf])
def test_masked_rows_are_what_torch_gives(value: float) -> None:
    mask = torch.zeros(4, 96)
    mask[1, 40:] = value
    mask[2] = value
    scores = randn(4, 96)
    scores[3, 5] = torch.nan
    kernel = fg.kernel(lambda x, m: torch.softmax((x + m) * 0.125, -1), fast_math=True)
    expected = torch.softmax((scores + mask) * 0.125, -1)
    torch.testing.assert_close(kernel(scores, mask), expected, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_a_contracted_product_rounds_once() -> None:
    x = torch.full((4,), 1 + 2.0**-12)
    kernel = fg.kernel(lambda x, y: x * x - y, fast_math=True)
    exact = x.double() * x.double() - (1 + 2.0**-11)
    assert torch.equal(kernel(x, torch.full((4,), 1 + 2.0**-11)).double(), exact)  # twice rounded, it is 0


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_value_is_one_number_all_the_same(program: Program) -> None:
    check(program, 13, 77, torch.float32, fast_math=True)


def test_a_difference_of_equal_squares_is_nothing() -> None:
    check_equal_squares(1003, torch.float32, fast_math=True)


def test_gradients_through_a_call() -> None:
    x, y = (randn(4, 64).requires_grad_() for _ in range(2))
    found, expected = (
        torch.autograd.grad(function(x, y).square().sum(), (x, y))
        for function in (fg.kernel(lambda x, y: torch.tanh(x * y) + x, fast_math=True), lambda x, y: torch.tanh(x * y) + x)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
