"""The accuracy rule lets nothing wrong pass: planted errors fail, each for its reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusegen.verify.accuracy import ENOUGH, judge
from tests.naming import case

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def exact() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(300, 300, dtype=torch.float64, generator=generator)


def test_the_rounded_result_passes(exact: Tensor) -> None:
    for dtype in DTYPES:
        with case(dtype):
            rounded = exact.to(dtype)
            verdict = judge(rounded, rounded, exact)
            assert not verdict.failure and verdict.errors.compared == exact.numel() >= ENOUGH
            assert verdict.errors.rms == verdict.errors.eager_rms > 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_of_eight_bits_few_are_a_step_beside(exact: Tensor, dtype: torch.dtype) -> None:
    rounded = exact.to(dtype)
    assert not judge(rounded, rounded, exact).failure
    few = rounded.view(torch.uint8).clone()
    few[0, 0] += 1
    assert not judge(few.view(dtype), rounded, exact).failure
    few[0, 0] += 7
    assert "more than a step" in judge(few.view(dtype), rounded, exact).failure
    many = rounded.view(torch.uint8).clone()
    many[:100] += 1
    assert "are not the rounded exact result" in judge(many.view(dtype), rounded, exact).failure
    few[0, 0] = 0x7F
    assert "at (0, 0)" in judge(few.view(dtype), rounded, exact).failure


def test_a_few_other_roundings_pass() -> None:
    """Where an explicit cast is the last step, all errors are elements that are rounded to the other side."""
    exact = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).double()
    eager, got = exact.to(torch.bfloat16), exact.to(torch.bfloat16)
    eager.view(-1)[:1] *= 1 + 2**-7
    got.view(-1)[1:4] *= 1 + 2**-7
    assert not judge(got, eager, exact).failure
    got.view(-1)[:900] *= 1 + 2**-7
    assert "root mean square" in judge(got, eager, exact).failure


def test_a_wrong_last_element_fails(exact: Tensor) -> None:
    for dtype in DTYPES:
        with case(dtype):
            got = exact.to(dtype)
            got[-1, -1] += 0.05
            assert "more than twice eager's greatest" in judge(got, exact.to(dtype), exact).failure


def test_a_nan_or_an_infinity_too_many_fails(exact: Tensor) -> None:
    for dtype in DTYPES:
        for value in (math.nan, math.inf, -math.inf):
            with case((dtype, value)):
                got = exact.to(dtype)
                got[7, 3] = value
                assert "at (7, 3)" in judge(got, exact.to(dtype), exact).failure


def test_nan_and_infinities_stand_where_they_should(exact: Tensor) -> None:
    for given in (math.nan, -math.inf, 0.0):
        for wanted in (math.nan, math.inf):
            with case((given, wanted)):
                exact[5] = wanted
                got, eager = exact.half(), exact.half()
                got[5] = given
                verdict = judge(got, eager, exact)
                same = wanted == given or (math.isnan(wanted) and math.isnan(given))
                assert bool(verdict.failure) is not same


def test_a_lost_cast_fails(exact: Tensor) -> None:
    """An intermediate value is rounded to a narrower type than the arithmetic's."""
    for dtype in DTYPES:
        with case(dtype):
            narrow = torch.float16 if dtype is torch.float32 else dtype
            other = exact.flip(0)
            got = (exact.to(narrow).double() + other).to(dtype)
            assert judge(got, (exact + other).to(dtype), exact + other).failure


def test_a_larger_mean_error_fails(exact: Tensor) -> None:
    """Errors of the same greatest size, but of a larger mean."""
    for dtype, factor in ((torch.float32, 1.3), (torch.float16, 1.15), (torch.bfloat16, 1.15)):
        with case((dtype, factor)):
            error = torch.finfo(dtype).eps / 4 * torch.randn(exact.shape, dtype=torch.float64).clamp(-1, 1)
            eager = (exact + error).to(dtype)
            worse = (exact + factor * 1.6 * error).to(dtype)
            assert "root mean square" in judge(worse, eager, exact).failure


def test_few_elements_have_no_root_mean_square() -> None:
    exact = 1 + torch.rand(10, dtype=torch.float64) / 4
    assert not judge((exact * (1 + 1e-3)).half(), exact.half(), exact).failure
    many = exact.repeat(10000)
    assert "root mean square" in judge((many * (1 + 1e-3)).half(), many.half(), many).failure


def test_what_repeats_itself_is_seen_once() -> None:
    """One row's rounding has no root mean square either, however often it is seen."""
    exact = torch.linspace(1, 2, 1000, dtype=torch.float64)
    worse = exact * (1 + 2**-23)
    assert not judge(worse.float().expand(100, -1), exact.float().expand(100, -1), exact.expand(100, -1)).failure
    apart = torch.linspace(1, 2, 100_000, dtype=torch.float64).view(100, 1000)
    assert "root mean square" in judge((apart * (1 + 2**-23)).float(), apart.float(), apart).failure


def test_shape_and_dtype_are_those_of_eager() -> None:
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float16)):
        with case(other):
            exact = torch.zeros(3, dtype=torch.float64)
            assert "instead of" in judge(other, torch.zeros(3), exact).failure


# Eager itself overflows.


def test_float32_takes_the_place_of_an_eager_that_overflows() -> None:
    exact = torch.full((10,), 3.0, dtype=torch.float64)
    eager = torch.full((10,), math.inf).half()
    right, wrong = exact.half(), exact.half() + 0.1
    assert judge(right, eager, exact, wider=lambda: right).failure == ""
    assert judge(wrong, eager, exact, wider=lambda: right).failure
    verdict = judge(eager, eager, exact, wider=lambda: right)
    assert verdict.overflows and not verdict.failure, "no worse than eager"
    assert judge(eager, eager, exact, wider=lambda: eager).overflows
    assert not judge(right, eager, exact, wider=lambda: right).overflows


def test_overflow_of_one_element_excuses_no_other() -> None:
    exact = torch.full((10,), 3.0, dtype=torch.float64)
    eager = exact.half()
    eager[0] = math.inf
    got = eager.clone()
    assert judge(got, eager, exact, wider=exact.half).overflows
    got[1] = math.inf
    assert "at (1,)" in judge(got, eager, exact, wider=exact.half).failure


def test_an_eager_without_anything_finite_passes_nothing() -> None:
    exact = torch.full((10,), 3.0, dtype=torch.float64)
    assert "no finite element" in judge(exact.float() + 5, torch.full((10,), math.nan), exact).failure


def test_what_eager_alone_has_not_finite_is_compared_all_the_same() -> None:
    exact = torch.ones(10, dtype=torch.float64)
    eager = exact.float()
    eager[3] = math.inf
    got = exact.float()
    assert not judge(got, eager, exact).failure
    got[3] = 2.0
    assert "error of 1.000e+00" in judge(got, eager, exact).failure


def test_only_inputs_near_overflow_excuse_a_result() -> None:
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    eager, got = torch.zeros(100), torch.full((100,), math.nan)
    assert judge(got, eager, exact, may_overflow=True).overflows
    assert judge(got, eager, exact).failure
    assert judge(got, exact.float(), exact, may_overflow=True).failure, "eager is right"


def test_either_side_of_the_greatest_number_is_a_matter_of_the_error() -> None:
    exact = torch.tensor([65519.0, 65521.0, -65521.0], dtype=torch.float64)
    eager = exact.half()
    other = torch.tensor([math.inf, 65504.0, -65504.0]).half()
    assert not judge(other, eager, exact).failure
    assert judge(other, eager, exact / 2).failure
    assert judge(torch.tensor([math.inf, 1.0, -65504.0]).half(), eager, exact).failure
