"""A value is one number wherever it is used: in a later phase, in another kernel, in a vector or in the rest of a loop."""

from __future__ import annotations

import pytest
import torch

import fusegen as fg
from tests.unit.gate import some
from tests.unit.one_number import (
    PROGRAMS,
    Program,
    check,
    check_equal_squares,
    check_stored_maxima,
    difference_of_products,
    masked_softmax,
    maxima_of_two_kernels,
    roots_of_distances,
)

DTYPES = (torch.float32, torch.bfloat16)
GATE = (masked_softmax, difference_of_products, maxima_of_two_kernels, roots_of_distances)
pytestmark = pytest.mark.usefixtures("either")


@pytest.mark.parametrize("dtype", some(DTYPES, [torch.bfloat16]), ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("program", some(PROGRAMS, GATE), ids=lambda program: program.__name__)
def test_a_value_is_one_number(program: Program, dtype: torch.dtype) -> None:
    check(program, 13, 77, dtype)


@pytest.mark.parametrize(
    "dtype", some((torch.bfloat16, torch.float16), [torch.bfloat16]), ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_a_maximum_that_is_a_result_is_compared_unrounded(dtype: torch.dtype) -> None:
    check_stored_maxima(29, 200, dtype)


@pytest.mark.parametrize(
    "dtype", some((*DTYPES, torch.float64), [torch.float32]), ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_a_difference_of_equal_squares_is_nothing(dtype: torch.dtype) -> None:
    check_equal_squares(1003, dtype)


def test_scores_of_a_hidden_row_are_one_number() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, m: torch.Tensor, s: float) -> torch.Tensor:
        return ((q @ k.mT + m) * s).softmax(-1)

    m = torch.zeros(9, 1)
    m[3] = -1e30
    weights = fg.kernel(attention)(torch.randn(2, 9, 16), torch.randn(2, 37, 16), m, 0.3)
    assert not weights.isnan().any()
    torch.testing.assert_close(weights[:, 3], torch.full((2, 37), 1 / 37))
