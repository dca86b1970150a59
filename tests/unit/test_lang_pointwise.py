"""Pointwise functions as torch defines them: promotion, signs, NaN, infinities, wrapping integers, run-time scalars."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ShapeError
from tests.unit.eager import agree, agree_each, agree_over, ints, randn, same

HARD = [-math.inf, -200.0, -30.0, -2.5, -1.0, -1e-6, -0.0, 0.0, 1e-6, 0.5, 1.5, 30.0, 200.0, math.nan]
_FEW = [-math.inf, -2.5, -0.0, 0.0, 1.5, math.inf, math.nan]
VALUES = {
    "bool": torch.tensor([1, 0, 1, 0, 0, 1, 1]).bool(),
    "i8": torch.tensor([-128, -5, -1, 0, 1, 3, 127], dtype=torch.int8),
    "u8": torch.tensor([0, 1, 2, 100, 200, 254, 255], dtype=torch.uint8),
    "i32": torch.tensor([-(2**31), -7, -1, 0, 2, 9, 2**31 - 1], dtype=torch.int32),
    "i64": torch.tensor([-(2**63), -7, -1, 0, 2, 9, 2**63 - 1]),
    "f16": torch.tensor(_FEW).half(),
    "bf16": torch.tensor(_FEW).bfloat16(),
    "f32": torch.tensor(_FEW),
    "f64": torch.tensor(_FEW).double(),
}
# An integer that 16 bits hold only as an infinity compares differently in torch, which rounds it first.
PAIRS = [p for p in combinations(VALUES, 2) if not (p[1] == "f16" and p[0] in ("i32", "i64"))]


def values(*names: str) -> dict[str, tuple[Tensor]]:
    """Cases of one tensor."""
    return {name: (VALUES[name],) for name in names or VALUES}


def test_promotion_of_two_tensors() -> None:
    agree_over(lambda x, y: (x + y, x < y), {f"{a}, {b}": (VALUES[a], VALUES[b]) for a, b in PAIRS}, at_once=9)


def test_numbers_change_the_category_and_never_the_width() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        results = (x + 1, x * 2.5, x + True, x == 1, x > 0.5, 2.0 * x, x / 2, 1 / x)
        return results if x.dtype is torch.bool else (*results, 3 - x)

    agree_over(function, values())


def test_zero_dimensional_tensors_change_the_category_only() -> None:
    pairs = {
        "bf16": torch.float32,
        "f32": torch.float64,
        "i8": torch.int64,
        "u8": torch.float64,
        "bool": torch.int32,
        "f16": torch.int64,
    }
    agree_over(
        lambda x, s: (x * s, s + x, x < s, torch.where(x > 0, x, s), s * s, s * 2),
        {name: (VALUES[name], torch.tensor(2, dtype=dtype)) for name, dtype in pairs.items()},
    )
    agree_each(
        "x", "x.bfloat16() * x.sum() | x.half() + torch.tensor(0.1) | x ** torch.tensor(2.0, dtype=torch.float64)", (randn(4, 8),)
    )


def test_unary_functions() -> None:
    agree_over(
        lambda x: (-x, abs(x), torch.sign(x), torch.floor(x), torch.ceil(x), torch.trunc(x), torch.round(x), x.square(), x.relu()),
        values("i8", "u8", "i64", "bf16", "f32", "f64"),
        at_once=2,
    )
    agree_over(
        lambda x: (x.exp(), x.sqrt(), x.log(), x.tanh(), x.sigmoid(), x.rsqrt(), x.reciprocal(), x.erf(), x.log1p(), x.expm1()),
        values("bool", "i32", "f16", "f32", "f64"),
        at_once=1,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_activations_at_hard_values(dtype: torch.dtype) -> None:
    agree_each(
        "x",
        """
        F.gelu(x) | F.gelu(x, approximate="tanh") | F.silu(x) | F.softplus(x) | F.softplus(x, 2.0, 5.0) | F.leaky_relu(x, 0.2)
        F.elu(x) | F.mish(x) | F.hardsigmoid(x) | F.hardswish(x) | F.logsigmoid(x) | F.relu6(x) | F.relu(x)
        torch.isnan(x) | torch.isinf(x) | torch.isfinite(x) | x.isposinf() | x.isneginf() | x.log2() | x.cosh()
        F.selu(x) | F.celu(x, 0.7) | F.hardtanh(x, -2.0, 0.5) | F.prelu(x, torch.tensor(0.25, dtype=x.dtype)) | F.hardshrink(x)
        F.softshrink(x, 0.2) | F.threshold(x, 0.1, -3.0) | F.tanhshrink(x) | torch.nan_to_num(x)
        torch.nan_to_num(x, 1.0, 2.0, 3.0)
        x.clamp(-1, 1) | x.clamp(min=0.5) | x.clamp(max=-0.5) | x.clamp(1, -1) | x.clamp(min=x * 0) | x.clamp_min(2)
        x.clamp_max(2)
        """,
        (torch.tensor(HARD, dtype=dtype),),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_hyperbolic_functions_up_to_their_own_overflow(dtype: torch.dtype) -> None:
    """Where e^x is out of range, and its half is not. Torch's own overflow early there, where they are vectorised."""
    least = 710.3 if dtype is torch.float64 else 89.0
    x = torch.tensor([least, 20.0, 1e-3, 1e-30, 0.0, -1.0, -least], dtype=dtype)
    wanted = tuple(torch.tensor([f(v) for v in x.tolist()], dtype=dtype) for f in (math.sinh, math.cosh))
    same(fg.kernel(lambda x: (x.sinh(), x.cosh()))(x), wanted)
    agree(lambda x: (x.sinh(), x.cosh()), (torch.tensor([1000.0, math.inf, -math.inf, -1000.0, -0.0, math.nan], dtype=dtype),))


def test_integers_between_bounds() -> None:
    agree(lambda x: (x.clamp(0, 5), x.clamp(0.5, 2.5)), (ints(20),))
    agree(lambda x, w: (F.prelu(x, w), F.prelu(x.sum(), w[:1]), F.glu(x, 1), F.glu(x)), (randn(2, 4, 6), randn(4)))


def test_functions_of_two_tensors_at_hard_values() -> None:
    table = "torch.fmod(x, y) | torch.logaddexp(x, y) | torch.xlogy(x, y) | torch.addcdiv(x, y, y, value=0.5)"
    agree_each("x, y", table, (torch.tensor(HARD), torch.tensor(HARD[::-1])))
    agree_each(
        "x", "x.sinh() | x.tan() | x.frac() | x.round(decimals=1) | torch.logit(x.sigmoid()) | torch.logit(x, 0.01)", (randn(63),)
    )
    agree(lambda x, y: torch.fmod(x, y), (torch.tensor([-1.5, 2.0, 0.5]), torch.tensor([True, True, False])))
    least = torch.tensor([-(2**63), 5, -7])
    agree(lambda x, y: (torch.fmod(x, 2.5), torch.fmod(x, y)), (least, torch.full((3,), 7.0, dtype=torch.float64)))


def test_logarithms_beside_float64_are_taken_in_float64() -> None:
    def logarithms(x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return torch.xlogy(x, y), torch.special.xlog1py(x, y), torch.xlogy(x, n), torch.special.xlog1py(x, n)

    x, y, n = torch.rand(5, dtype=torch.float64), torch.rand(5), torch.arange(1, 6)
    torch.testing.assert_close(fg.kernel(logarithms)(x, y, n), logarithms(x, y, n), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logarithms_of_integers_beside_narrow_floats(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 0.5, 2.0, -1.5], dtype=dtype)
    for n in (
        torch.tensor([0, 1, 3, 255], dtype=torch.uint8),
        torch.tensor([0, 1, -3, 200]),
        torch.tensor([True, False, True, True]),
    ):
        agree(lambda x, n: (torch.xlogy(x, n), torch.special.xlog1py(x, n)), (x, n))


def test_signs_of_zero_survive() -> None:
    agree(lambda x: (1 / (x * 0.0), 1 / -x, 1 / (0.0 - x), 1 / x.neg().neg()), (torch.tensor([-1.0, 1.0, -0.0, 0.0]),))


def test_division_has_the_signs_of_python() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        results = [x // y, x % y, torch.floor_divide(x, y), torch.remainder(x, y), x / y, x // 3, x % 3, x // 2.5, x % 2.5]
        if x.dtype is not torch.uint8:
            results += [x // -3, x % -3, 7 // y, -7 % y]
        if x.is_floating_point():
            results += [torch.div(x, 1.5, rounding_mode="floor"), torch.div(x, 1.5, rounding_mode="trunc")]
        return results

    names = ("i8", "u8", "i32", "f32", "f64")
    agree_over(function, {n: (VALUES[n].flip(0), torch.where(VALUES[n] == 0, 1, VALUES[n])) for n in names})


def test_powers() -> None:
    agree_over(lambda x: (x**2, x**3, x**0, x**1, x**2.0, x**0.5, x**-1.0, x**1.5), values("i8", "u8", "i32", "bf16", "f32", "f64"))
    agree(lambda i, j, x: (2**i, 2.0**i, j**i, x**i, x**x), (ints(9, low=0, high=5), ints(9), randn(9).abs()))


def test_the_ends_of_int64_are_constants() -> None:
    table = "torch.maximum(x, torch.full_like(x, -(2**63))) | x > -(2**63) | x.masked_fill(x > 0, torch.iinfo(torch.int64).max)"
    agree_each("x", table, (ints(9).long(),))


def test_casts_wrap_round_and_decide() -> None:
    x = torch.tensor([-300.7, -1.5, -0.0, 0.0, 0.4, 1.5, 127.9, 300.2, math.nan])
    agree(lambda x: (x.bool(), x.half(), x.bfloat16().float(), x.double(), x.to(torch.float32), x.type_as(x.half())), (x,))
    agree(
        lambda x: (x.int(), x.long(), x.to(torch.int16), x.bool(), x.to(torch.int8), x.to(torch.uint8)),
        (ints(30, low=-999, high=999),),
    )
    numbers = "x * torch.tensor(300).to(torch.int8) | x * torch.tensor(-1).to(torch.uint8) | x * torch.tensor(2.7).int()"
    agree_each("x", numbers, (randn(5),))


def test_bools() -> None:
    a, b = randn(6, 8) > 0, randn(6, 8) > 0
    agree(
        lambda a, b: (a & b, a | b, a ^ b, ~a, a + b, a * b, a < b, a == b, a.logical_not(), torch.where(a, b, ~b), a.sum(0)),
        (a, b),
    )


def test_where_and_masks() -> None:
    x = randn(6, 8)
    agree_each(
        "x, m",
        """
        torch.where(x > 0, 1.0, 0.0) | torch.where(x > 0, 1, 0) | torch.where(x > 0, True, False) | torch.where(x > 0, x.int(), 0.5)
        x.masked_fill(x > 0, -math.inf) | x.half().masked_fill(x > 0, 3) | x.int().masked_fill(x > 0, -1)
        torch.tril(m) | torch.triu(m, 1) | torch.tril(x, -1) | torch.triu(x, 2)
        """,
        (x, x > 0),
    )
    large = torch.tensor([2**53 + 1, 2**62 + 3, -(2**60) - 1, 5])
    agree(lambda x: (x.masked_fill(x == 5, 0.0), x.masked_fill(x == 5, 7)), (large,))


def test_a_comparison_happens_in_the_precision_of_the_tensor() -> None:
    agree(lambda x, s: (x == 0.1, x < 0.1, x >= 0.1, x == s), (torch.tensor([0.1, 0.2, 0.0]).bfloat16(), 0.1))


def test_a_power_of_two_that_is_moved_changes_no_type() -> None:
    i, j = ints(20) * 100000, ints(20) * 1000
    agree(lambda i, j: ((2.0 * i) * (0.5 * j), (2.0 * i) * (2.0 * j)), (i, j))
    agree(lambda x: (x * 2.0**-100) * (x * 2.0**-100) * 2.0**100 * 2.0**100, (randn(9),))


def test_run_time_scalars_in_every_position() -> None:
    x = randn(6, 8)
    agree_each(
        "x, s",
        """
        x * s | s - x | x / s | s / x | x.abs() ** s | s**x | x % s | x // s | x < s | s < x | torch.where(x > s, x, s)
        x.clamp(s) | x.clamp(max=s) | x.masked_fill(x > 0, s) | torch.add(x, x, alpha=s) | torch.lerp(x, x * 2, s)
        torch.full_like(x, s) | abs(-s) * x | x + s**2
        """,
        *[(x, s) for s in (0.75, 1.5, 2, 3)],
    )
    agree(lambda x, s: (x * s, x + s, x // s, x % s, s - x, x == s), (ints(20), 3), (ints(20), 2.5), (ints(20).to(torch.int8), 7))
    agree(lambda x, s: x * s, (x, math.nan), (x, math.inf), (x, -0.0), (x, True), (x, np.float64(2)), (x, np.float32(2)))
    agree(lambda x, s: (x * s, x * (1 - s) + s**2), (randn(9).double(), 0.1))


def test_filled_tensors() -> None:
    def function(x: Tensor) -> list[Tensor]:
        choices: list[Any] = [True, 3, 1e16, 2.5]
        return [t for v in choices for t in (torch.full_like(x, v), torch.full((3,), v, dtype=x.dtype))]

    agree_over(function, {str(t.dtype): (t,) for t in (ints(4).long(), randn(4), randn(4) > 0)})


def test_tensors_made_of_nothing() -> None:
    agree_each(
        "x",
        """
        x + torch.arange(8) | x[:, :2] + torch.arange(1, 3) | x * torch.arange(0, 16, 2, dtype=torch.float64) | torch.ones_like(x)
        torch.zeros(3) | torch.full((2, 2), 3) | torch.zeros(x.shape) + x | torch.zeros_like(x, dtype=torch.int32)
        x.new_zeros(3) | x.new_ones((2, 2)) | x.new_full((2,), 3)
        torch.zeros(size=(4, 6), device=x.device, requires_grad=False) | torch.zeros_like(x, memory_format=torch.preserve_format)
        F.one_hot(x.long().abs() % 4, 4)
        """,
        (randn(6, 8),),
    )


def test_the_binary_logarithm_of_a_power_of_two_is_whole() -> None:
    agree(lambda x: torch.floor(torch.log2(x)), (2.0 ** torch.arange(-126, 128),))


def test_bits_of_integers() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        bits = (x & y, x | y, x ^ y, ~x, x << y, x >> y, x & 3, 3 & x, x | -1, x << 2, x >> 70, 1 << y)
        return *bits, torch.div(x, y + 1, rounding_mode="trunc"), torch.fmod(x, y + 1)

    cases = {}
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        few = torch.tensor([limits.min, limits.max, 0, 1, 77, 100]).to(dtype)
        cases[str(dtype)] = few, torch.tensor([0, 1, 3, 7, 9, 100]).to(dtype)
    agree_over(function, cases)
    i, u, b = ints(9), ints(9, low=0, dtype=torch.uint8), ints(9, low=0, high=2).bool()
    agree(lambda i, u, b: (i & u, i | b, b & u, b & True, b ^ 1, b | (i > 0), b << 1), (i, u, b))


def test_numbers_that_16_bits_round_beside_a_reduction() -> None:
    """Each is a value of the row's of its own, of which nothing is to be read."""
    for dtype in (torch.float16, torch.bfloat16):
        agree(
            lambda x: (torch.where(x > 0.1, x, 0), torch.where(x > 0.2, x, 0), x.softmax(-1), x.softmax(0)),
            (randn(4, 6).to(dtype),),
        )


def test_losses() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            loss
            for reduction in ("none", "mean", "sum")
            for loss in (
                F.mse_loss(x, y, reduction=reduction),
                F.l1_loss(x, y, reduction=reduction),
                F.smooth_l1_loss(x, y, reduction=reduction, beta=0.5),
                F.huber_loss(x, y, reduction=reduction, delta=0.3),
                F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=reduction, pos_weight=torch.tensor(2.0)),
                F.kl_div(x, y.softmax(-1), reduction=reduction),
                F.kl_div(x, y, reduction=reduction, log_target=True),
            )
        ]

    agree(function, (randn(4, 6), randn(4, 6)))
    with pytest.raises(ShapeError, match="the target"):
        fg.kernel(F.binary_cross_entropy_with_logits)(torch.zeros(4, 1), torch.zeros(4))
    agree(lambda x, y: F.huber_loss(x, y, "none"), (randn(4, 6), randn(4, 6).double()))  # in the dtype of the first


def test_hyperbolic_functions_of_integers() -> None:
    """In floats from the start: what is negated does not wrap."""
    dtypes = (torch.uint8, torch.int8, torch.int32, torch.bool)
    agree_over(lambda x: (torch.sinh(x), torch.cosh(x)), {str(d): (torch.tensor([0, 1, 4]).to(d),) for d in dtypes})
