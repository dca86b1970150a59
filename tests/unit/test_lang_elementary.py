"""Elementary functions: angles, logarithms, signs, at numbers of all sizes, zeros of both signs, infinities and NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import TraceError, UnsupportedError
from tests.naming import case
from tests.unit.eager import agree, agree_each, function_of, ints, randn, refused

SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 3e38, -3e38, 2.5, -7.0, 0.999, 1.0001, 1e10]
)
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
UNARY = """
    x.atan() | x.asin() | x.acos() | x.asinh() | x.acosh() | x.atanh() | x.log10() | torch.deg2rad(x) | torch.rad2deg(x) | x.sinc()
    x.sgn() | torch.special.entr(x)
"""
OF_DISTRIBUTIONS = """
    x.erfc() | x.lgamma() | x.erfinv() | x.digamma()
    torch.special.ndtr(x) | torch.special.gammaln(x) | torch.special.psi(x)
    torch.special.multigammaln(x.abs() + 3, 4)
"""
BINARY = """
    torch.atan2(x, y) | torch.hypot(x, y) | torch.fmax(x, y) | torch.fmin(x, y) | torch.logaddexp2(x, y) | torch.heaviside(x, y)
    torch.isclose(x, y) | torch.special.xlog1py(x, y)
"""


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All pairs of special values."""
    first, second = torch.meshgrid(SPECIAL, SPECIAL, indexing="ij")
    return first.to(dtype).contiguous(), second.to(dtype).contiguous()


@pytest.mark.parametrize("table", [UNARY, OF_DISTRIBUTIONS], ids=["elementary", "of distributions"])
def test_functions_of_a_number(table: str) -> None:
    x = torch.cat([SPECIAL, randn(300), torch.rand(100) * 2 - 1])
    agree_each("x", table, *[(x.to(dtype),) for dtype in FLOATS])


TAILS = {
    "erfc": (lambda x: x.erfc(), -5.0, 9.0),
    "erfinv": (lambda x: torch.erfinv(x), -0.9999, 0.9999),
    "digamma": (lambda x: torch.digamma(x), 2.0, 50.0),
    "lgamma": (lambda x: torch.lgamma(x), 3.0, 50.0),
}


@pytest.mark.usefixtures("either")
def test_tails_have_all_digits() -> None:
    """Within a few units in the last place of float64's."""
    for name, (function, low, high) in TAILS.items():
        x = torch.linspace(low, high, 257)
        with case(name):
            exact = function(x.double())
            torch.testing.assert_close(fg.kernel(function)(x), exact.float(), rtol=1.5e-6, atol=0)


def test_functions_of_two_numbers() -> None:
    agree_each("x, y", BINARY, *map(pairs, FLOATS))


def test_signs() -> None:
    """Of zeros, too; the sign of a NaN is not known."""
    calls = [tuple(t[~pairs(dtype)[1].isnan()] for t in pairs(dtype)) for dtype in FLOATS]
    agree_each("x, y", "torch.signbit(y) | torch.copysign(x, y) | torch.copysign(x, -1.0) | 1 / torch.copysign(y * 0, y)", *calls)


def test_functions_of_integers() -> None:
    few = torch.tensor([0, 1, 3, 1]), torch.tensor([1, 1, 0, 2])
    table = "torch.atan2(x, y) | torch.copysign(x, y) | torch.fmax(x, y) | torch.fmin(x, y) | torch.heaviside(x, y)"
    for dtype in (torch.int64, torch.uint8, torch.bool):
        x, y = (t.to(dtype) for t in few)
        with case(dtype):
            agree_each("x", "x.atan() | x.asinh() | x.log10() | x.sinc() | x.sgn() | x.signbit()", (x,))
            agree_each("x, y", table + " | torch.isclose(x, y)", (x, y))


def test_powers_and_distances() -> None:
    calls = [(randn(5, 3, dtype=dtype), randn(5, 3, dtype=dtype), ints(5, 3)) for dtype in FLOATS]
    agree_each(
        "x, y, n",
        """
        torch.float_power(x, 2) | torch.float_power(x.abs(), y) | torch.dist(x, y) | torch.dist(x, y, 1) | torch.ldexp(x, n)
        torch.isclose(x, y, rtol=0.5, atol=0.1)
        """,
        *calls,
    )


def test_closeness_of_integers_does_not_wrap() -> None:
    every = torch.arange(256).to(torch.uint8)
    agree(lambda x, y: torch.isclose(x, y, rtol=0.1), (every[:, None].expand(256, 256), every.expand(256, 256)))
    agree(lambda x, y: torch.isclose(x, y), (torch.tensor([-(2**31)]).int(), torch.tensor([2**31 - 1]).int()))


def test_powers_of_two_that_are_out_of_range() -> None:
    agree(lambda x, n: torch.ldexp(x, n), (torch.tensor([1e-30, 1e-38, 1.0, 3.0, 0.0]), torch.tensor([130, 140, -140, 127, 500])))
    agree(lambda x, n: torch.ldexp(x, n), (torch.tensor([0.0, 1e-300, 1.0]).double(), torch.tensor([1100, 1500, -1070])))
    agree(lambda x, n: torch.ldexp(x, n), (ints(4, dtype=torch.int64), randn(4, dtype=torch.float16)))


def test_nan_may_be_close_to_itself() -> None:
    agree(lambda x, y: torch.isclose(x, y, equal_nan=True), pairs(torch.float32))


@pytest.mark.usefixtures("emulated")
def test_angles_on_a_gpu() -> None:
    agree(lambda x, y: (torch.atan2(x, y), x.atan(), (x + y).asinh()), pairs(torch.float32), pairs(torch.bfloat16))


def test_what_torch_refuses() -> None:
    for text, says in {
        "torch.heaviside(x, x.double())": "the dtypes float32 and float64 differ",
        "torch.isclose(x, x.double())": "isclose: the dtypes float32 and float64 differ",
        "torch.hypot(x.int(), x.int())": "hypot of int32",
    }.items():
        function = function_of(text, "x")
        with case(text):
            with pytest.raises(RuntimeError):
                function(randn(3))
            refused(function, randn(3), error=TraceError, says=says)


def test_functions_that_are_left_to_torch() -> None:
    for function in (torch.i0, torch.special.erfcx, torch.special.log_ndtr, lambda x: torch.polygamma(1, x)):
        refused(lambda x, function=function: function(x), randn(3), error=UnsupportedError, says="cannot be traced")


def test_a_gradient_of_the_gamma_function() -> None:
    """torch's trigamma has half the digits of float64."""
    x = (torch.rand(50, dtype=torch.float64) * 6 - 2).requires_grad_()
    fg.kernel(lambda x: torch.digamma(x))(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.polygamma(1, x.detach()), rtol=1e-6, atol=0)
