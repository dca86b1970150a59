"""A value is one number wherever it is used, on a GPU: nothing is contracted, and kernels approximate alike."""

from __future__ import annotations

import pytest
import torch

import fusegen as fg
from tests.unit.one_number import PROGRAMS, Program, check, check_equal_squares, check_stored_maxima

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(("rows", "columns"), [(50, 77), (300, 1000)])
def test_a_value_is_one_number(program: Program, rows: int, columns: int, dtype: torch.dtype) -> None:
    check(program, rows, columns, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_maximum_that_is_a_result_is_compared_unrounded(dtype: torch.dtype) -> None:
    check_stored_maxima(300, 200, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_difference_of_equal_squares_is_nothing(dtype: torch.dtype) -> None:
    check_equal_squares(1000, dtype, "cuda")


def test_integers_wrap() -> None:
    x = torch.tensor([2**63 - 1, -(2**63), -1, 0, 5], device="cuda")
    grows, negated, size, product = fg.kernel(lambda x: (x + 1 > x, -x, x.abs(), x * x))(x)
    assert grows.tolist() == [False, True, True, True, True]
    for got, wanted in ((negated, -x), (size, x.abs()), (product, x * x)):
        assert torch.equal(got, wanted)
