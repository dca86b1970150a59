"""Elementary functions: angles, logarithms, signs, at numbers of all sizes, zeros of both signs, infinities and NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen.errors import TraceError
from tests.unit.eager import agree, ints, randn, refused

SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 3e38, -3e38, 2.5, -7.0, 0.999, 1.0001, 1e10]
)
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (torch.atan, torch.asin, torch.acos, torch.asinh, torch.acosh, torch.atanh, torch.log10, torch.deg2rad,
                            torch.rad2deg, torch.sinc, torch.sgn, torch.special.entr)
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f for f in (torch.atan2, torch.hypot, torch.fmax, torch.fmin, torch.logaddexp2, torch.heaviside, torch.isclose,
                            torch.special.xlog1py)
}  # fmt: skip


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All pairs of special values."""
    first, second = torch.meshgrid(SPECIAL, SPECIAL, indexing="ij")
    return first.to(dtype).contiguous(), second.to(dtype).contiguous()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_a_number(name: str, dtype: torch.dtype) -> None:
    agree(lambda x: UNARY[name](x), (torch.cat([SPECIAL, randn(300), torch.rand(100) * 2 - 1]).to(dtype),))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name: str, dtype: torch.dtype) -> None:
    agree(lambda x, y: BINARY[name](x, y), pairs(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_signs(dtype: torch.dtype) -> None:
    """Of zeros, too; the sign of a NaN is not known."""
    x, y = pairs(dtype)
    x, y = x[~y.isnan()], y[~y.isnan()]
    agree(lambda x, y: (torch.signbit(y), torch.copysign(x, y), torch.copysign(x, -1.0), 1 / torch.copysign(y * 0, y)), (x, y))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_functions_of_integers(dtype: torch.dtype) -> None:
    x, y = torch.tensor([0, 1, 3, 1]).to(dtype), torch.tensor([1, 1, 0, 2]).to(dtype)
    agree(
        lambda x: (x.atan(), x.asin(), x.acos(), x.asinh(), x.acosh(), x.atanh(), x.log10(), x.sinc(), x.sgn(), x.signbit()), (x,)
    )
    agree(lambda x, y: (torch.atan2(x, y), torch.copysign(x, y), torch.fmax(x, y), torch.fmin(x, y), torch.heaviside(x, y)), (x, y))
    agree(lambda x, y: torch.isclose(x, y), (x, y))


@pytest.mark.parametrize("dtype", FLOATS)
def test_powers_and_distances(dtype: torch.dtype) -> None:
    x, y = randn(5, 3, dtype=dtype), randn(5, 3, dtype=dtype)
    agree(lambda x, y: (torch.float_power(x, 2), torch.float_power(x.abs(), y), torch.dist(x, y), torch.dist(x, y, 1)), (x, y))
    agree(lambda x, n: torch.ldexp(x, n), (x, ints(5, 3)))
    agree(lambda x, y: torch.isclose(x, y, rtol=0.5, atol=0.1), (x, y))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_closeness_of_integers_does_not_wrap(dtype: torch.dtype) -> None:
    every = torch.arange(256).to(dtype)
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


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: torch.heaviside(x, x.double()), "heaviside of float32 and float64"),
        (lambda x: torch.isclose(x, x.double()), "isclose of float32 and float64"),
        (lambda x: torch.hypot(x.int(), x.int()), "hypot of int32"),
    ],
)
def test_what_torch_refuses(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(RuntimeError):
        function(randn(3))
    refused(function, randn(3), error=TraceError, says=says)
