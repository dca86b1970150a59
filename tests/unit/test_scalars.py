"""Python's numbers in kernels: 64 bits until they meet a tensor, branches on them, values that select code, ints as sizes."""

from __future__ import annotations

import contextlib
import enum
import math
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler import variants
from fusegen.errors import FusegenError
from tests.naming import case
from tests.unit.eager import agree, agree_each, programs, randn, same

X = randn(6, 8)


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, tracing is a mistake."""

    def refuse(*_: object) -> None:
        raise AssertionError("a function was traced")

    return lambda: monkeypatch.setattr(variants, "trace_function", refuse)


# Precision.


def adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, b1: float, b2: float, eps: float, decay: float, step: int
) -> tuple[Tensor, ...]:
    """As in Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101)."""
    p = p * (1 - lr * decay)
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    correction1, correction2 = 1 - b1**step, 1 - b2**step
    denominator = v.sqrt() / math.sqrt(correction2) + eps
    return p - (lr / correction1) * (m / denominator), m, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fifty_steps_of_adamw(dtype: torch.dtype) -> None:
    kernel = fg.kernel(adamw)
    state: Any = (randn(400, dtype=dtype), torch.zeros(400, dtype=dtype), torch.zeros(400, dtype=dtype))
    last_bits = 4 * torch.finfo(dtype).eps
    for step in range(1, 51):
        g = randn(400, dtype=dtype)
        settings: Any = (1e-3, 0.9, 0.999, 1e-8, 0.01, step)
        ours = kernel(state[0], g, *state[1:], *settings)
        state = adamw(state[0], g, *state[1:], *settings)
        torch.testing.assert_close(ours, state, rtol=last_bits, atol=last_bits)
    assert programs(kernel) == 1


def test_numbers_have_64_bits_until_they_meet_a_tensor() -> None:
    def function(x: Tensor, t: float) -> tuple[Tensor, ...]:
        return x / (1 - t), x.double() * t, x.double() * (1 - t), (x * t).double(), x.double() ** t, x.double() + t / 3

    kernel = fg.kernel(function)
    for t in (0.999, 0.1, 1 / 3, 1 - 1e-7):
        for ours, theirs in zip(kernel(X.abs(), t), function(X.abs(), t), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-15 if theirs.dtype is torch.float64 else 2e-7, atol=0.0)


def test_tensors_that_are_made_of_numbers() -> None:
    agree_each(
        "x, s",
        """
        torch.tensor(s) + 0 * x[0, 0] | x.double() * torch.tensor(s)
        x.double() * torch.tensor(0.1) + torch.tensor(0.1, dtype=torch.bfloat16) | torch.full((3,), s)
        x.double().new_full((2,), s) | torch.full_like(x, s) | torch.where(x > 0, s, 1.0)
        torch.where(x > 0, s, 0) + torch.zeros(8, dtype=torch.float64)
        """,
        *[(X, s) for s in (0.1, 3, True, np.float64(0.1), np.float32(0.1), np.int64(3))],
    )


def test_sizes_in_arithmetic_with_numbers() -> None:
    def function(x: Tensor, s: float) -> Tensor:
        y = x.double()
        return y * (x.shape[0] * s) + math.pow(x.shape[0], 0.5) - s / x.shape[0] + y / math.sqrt(x.shape[0])

    kernel = agree(function, *[(randn(n, 4), s) for n in (3, 5, 70) for s in (0.1, 2)])
    assert programs(kernel) == 2  # of a float and of an int


def test_operators_of_numbers_are_python_s() -> None:
    def function(x: Tensor, s: float) -> tuple[Tensor, ...]:
        whole, rest = divmod(s, 3)
        ints = (x.double() * (s & 6), x.double() * (s << 2) + (s | 1) + (5 ^ s) - (s >> 1)) if isinstance(s, int) else ()
        return (
            x.double() * (s // 2),
            x.double() * (s % 3 + 1),
            x.double() * (2**-s),
            x.double() * (-s) ** 3,
            x.double() * abs(s / 7),
            x.double() + whole - rest,
            x.double() * +s,
            x.double() * 3.5**2 // s,
            *ints,
        )

    kernel = fg.kernel(function)
    for s in (1, 2, 3, 7, -2, -7, 0.5, -2.5, 1e16):
        with case(s):
            for ours, theirs in zip(kernel(X, s), function(X, s), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-14 if theirs.dtype is torch.float64 else 1e-6, atol=1e-300)
    assert not kernel._dispatcher.variants.history.static


def test_numbers_may_be_wider_than_64_bits_on_the_way() -> None:
    kernel = agree(lambda x, n: x * (n**40 / n**39), (X, 2), (X, 7))
    wide = fg.kernel(lambda x, n: x.long() * n**40)
    for n in (7, 1, 7):
        with contextlib.nullcontext() if n == 1 else pytest.raises(FusegenError, match="does not fit 64 bits"):
            wide(X, n)
    assert programs(kernel) == 1


# Errors are Python's.


@pytest.mark.parametrize(
    ("function", "good", "bad", "error"),
    [
        (lambda x, s: x * (1 / s), 2.0, 0.0, ZeroDivisionError),
        (lambda x, s: x * (1 // s), 2, 0, ZeroDivisionError),
        (lambda x, s: x * 10.0**s, 2.0, 400.0, OverflowError),
        (lambda x, s: x * math.sqrt(s), 2.0, -1.0, ValueError),
        (lambda x, s: x * math.log(s), 2.0, 0.0, ValueError),
    ],
)
def test_errors_of_numbers_are_python_s(function: Any, good: float, bad: float, error: type[Exception]) -> None:
    for first in (good, bad):
        kernel = fg.kernel(function)
        for value in (first, bad, good, bad):
            if value == good:
                same(kernel(X, value), function(X, value))
            else:
                with pytest.raises(error):
                    kernel(X, value)


def test_an_error_that_the_function_catches() -> None:
    def function(x: Tensor, s: float) -> Tensor:
        try:
            return x / (1 / s)
        except ZeroDivisionError:
            return x + 7

    for values in ((0.0, 2.0, 4.0, 0.0), (2.0, 0.0, 4.0)):
        agree(function, *[(X, value) for value in values])


def test_what_the_trace_asks_for_cannot_be_caught() -> None:
    def function(x: Tensor, s: float) -> Tensor:
        try:
            return x * round(s)
        except Exception:
            return x

    agree(function, (X, 2.6), (X, 0.4), (X, 3.0))


# Types.


class Mode(enum.IntEnum):
    A = 1
    B = 2


def _is_float(value: object) -> bool:
    return type(value) is float


def _matched(x: Tensor, s: Any) -> Tensor:
    match s:
        case 1:
            return x * 5
        case bool():
            return x * 6
        case int(n):
            return x * n
        case float():
            return x * 8
    return x


QUESTIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "float": lambda x, s: x * 2 if isinstance(s, float) else x * 3,
    "int": lambda x, s: x * 2 if isinstance(s, int) else x * 3,
    "bool": lambda x, s: x * 2 if isinstance(s, bool) else x * 3,
    "numpy": lambda x, s: x * 2 if isinstance(s, np.floating) else x * 3,
    "enumeration": lambda x, s: x * 2 if s is Mode.B else x * 3,
    "type": lambda x, s: x * 2 if type(s) is int else x * 3,
    "type in a helper": lambda x, s: x * 2 if _is_float(s) else x * 3,
    "round": lambda x, s: x * round(s) + math.floor(s) - math.ceil(s) + int(s),
    "text": lambda x, s: x * len(f"{s:.3f}") + len(str(s)) + len(f"{s}"),
    "in": lambda x, s: x * 2 if s in (1, 2) else x * 3,
    "look-up": lambda x, s: x * {1: 2.0, 2: 3.0}.get(s, 9.0),
    "match": _matched,
    "min": lambda x, s: x * min(s, 1.5) + max(0, s),
    "truth": lambda x, s: x * s if s else x,
    "is True": lambda x, s: x * 2 if (s > 1) is True else x,
    "factor": lambda x, s: x * (s > 1) + (s == 2),
    "numpy's functions": lambda x, s: x * float(np.sqrt(abs(s))),
    "imported by name": lambda x, s: x * sqrt(abs(s)),
    "attributes": lambda x, s: x * s.real + s.imag,
    "complex": lambda x, s: x * abs(complex(s)),
    "not a number": lambda x, s: x * 2 if math.isnan(s) or math.isinf(s) or not math.isfinite(s) else x,
}
NUMBERS = [2, 1, 0, -1, 0.5, 2.0, -0.0, True, np.float64(2.5), np.float32(0.5), np.int64(2), Mode.B]


@pytest.mark.parametrize("part", range(4))
def test_a_number_answers_as_in_python(part: int) -> None:
    for question in list(QUESTIONS)[part::4]:
        with case(question):
            agree(QUESTIONS[question], *[(X, value) for value in NUMBERS])


@pytest.mark.parametrize("value", [Decimal("0.1"), Fraction(1, 3), 1 + 2j, 2**70])
def test_numbers_that_torch_does_not_take(value: Any) -> None:
    with pytest.raises(FusegenError):
        fg.kernel(lambda x, s: x * s)(X, value)


def test_numbers_that_are_equal_and_not_the_same() -> None:
    kernel = fg.kernel(lambda x, s: x.long() * s[0] if isinstance(s, tuple) else x / s)
    for numbers_of in ((1,), (1.0,), (True,), (2,), (1,)):
        same(kernel(X, numbers_of), kernel.function(X, numbers_of))
    signs = fg.kernel(lambda x, s: x * round(s, 1))
    for value in (0.0, -0.0, 0.0, math.nan):
        ours, theirs = signs(X, value), signs.function(X, value)
        assert torch.equal(ours.signbit(), theirs.signbit()) or math.isnan(value)
        same(ours, theirs)


# Branches.


def test_a_branch_on_a_number_is_a_condition_of_the_variant(no_trace: Callable[[], None]) -> None:
    kernel = fg.kernel(lambda x, lr: x * lr if lr > 1e-4 else x - lr)
    values = [1e-3 * 0.8**k for k in range(40)]
    for _ in range(2):
        for lr in values:
            same(kernel(X, lr), kernel.function(X, lr))
        no_trace()
    assert programs(kernel) == 2


def test_a_condition_that_makes_sense_where_an_earlier_one_holds() -> None:
    def function(x: Tensor, s: float) -> Tensor:
        if s == 0:
            return x
        return x * 2 if 1 / s > 0.5 else x * 3 + s

    kernel = agree(function, *[(X, s) for s in (1.0, 0.0, 4.0, -1.0, 1.5, 0.0)])
    assert programs(kernel) <= 3


def test_a_number_compared_with_a_size() -> None:
    def function(x: Tensor, s: float) -> Tensor:
        return x * 2 if s > x.shape[0] else x * 3 if x.shape[0] == s else x - s

    agree(function, *[(randn(n, 4), s) for n in (3, 5) for s in (2, 3, 4.0, 3.0, 5, 7.5)])


# Values that select code.


@pytest.mark.parametrize("function", [lambda x, b, k: x / sqrt(1 - b**k), lambda x, b, k: x * round(b**k, 3) + float(np.sqrt(k))])
def test_values_that_select_code_and_change_are_promoted(function: Any, no_trace: Callable[[], None]) -> None:
    kernel = fg.kernel(function)
    for _ in range(2):
        for k in range(1, 41):
            same(kernel(X, 0.99, k), function(X, 0.99, k))
        no_trace()
    assert programs(kernel) <= 3


def test_constants_are_promoted_whatever_they_come_from() -> None:
    state = {"scale": 1.0}
    kernel = fg.kernel(lambda x: x * state["scale"] + 1)
    for k in range(8):
        state["scale"] = 1.0 + k / 4
        same(kernel(X), kernel.function(X))
    assert programs(kernel) <= 3


def test_strong_constants_are_promoted_in_their_dtype() -> None:
    agree(lambda x, s: x + torch.tensor(round(s, 2), dtype=torch.float64), *[(X, s) for s in (0.123, 0.456, 0.789)])
    agree(lambda x, n: x.long() * torch.full((8,), n.__index__(), dtype=torch.int8), *[(X, n) for n in (3, 100, 127)])


# Ints as sizes.


SIZED: dict[str, Callable[[Tensor, int], Any]] = {
    "slice": lambda x, n: x[:, :n] * 2,
    "slice to the end": lambda x, n: x[:, :-n] + 1,
    "window": lambda x, n: x[:, n : n + 2] * 2,
    "zeros": lambda x, n: torch.zeros(n, 4) + x[0, 0],
    "arange": lambda x, n: torch.arange(n) + x[0, 0],
    "expand": lambda x, n: x[:1].expand(n, 12) * 2,
    "view": lambda x, n: x.view(n, -1) * 2,
    "row": lambda x, n: x[n] * n,
    "repeat": lambda x, n: x.repeat(n, 1) + n,
    "range": lambda x, n: sum((x * k for k in range(n)), x),
    "branch": lambda x, n: x[:n] * 2 if n > 3 else x[:, :n] * 3,
    "as long as a dim": lambda x, n: x + torch.ones(n, 1),
    "sum": lambda x, n: x[:, :n].sum(1, keepdim=True) / n + x[:, n:].sum(1, keepdim=True),
    "cat": lambda x, n: torch.cat((x[:, n:], x[:, :n]), 1) * 2,
    "split": lambda x, n: torch.split(x, [n, 12 - n], 1)[0] * 2,
}


@pytest.mark.parametrize("part", range(3))
def test_ints_as_sizes(part: int) -> None:
    for use in list(SIZED)[part::3]:
        with case(use):
            sizes_agree(use)


def sizes_agree(use: str) -> None:
    """Whatever the number is: values where torch gives some, an error where it gives one."""
    function = SIZED[use]
    kernel = fg.kernel(function)
    x = randn(6, 12)
    for n in (2, 3, 0, 6, -1, 2):
        try:
            wanted = function(x, n)
        except (RuntimeError, IndexError):
            with pytest.raises((FusegenError, RuntimeError, IndexError)):
                kernel(x, n)
        else:
            same(kernel(x, n), wanted, f"{use} {n}")


def test_a_growing_cache_compiles_once() -> None:
    kernel = fg.kernel(lambda cache, n: cache[:, :n] * 2)
    cache = randn(4, 64)
    for n in range(1, 41):
        same(kernel(cache, n), kernel.function(cache, n))
    assert programs(kernel) <= 3


def test_slices_beyond_the_end_are_clamped() -> None:
    agree(lambda x, n: x[:, :n] * 2, *[(X, n) for n in (3, 8, 9, 100, 5)])


# What runs around a trace.


@pytest.fixture
def own_math() -> Iterator[dict[str, Any]]:
    before = dict(vars(math))
    yield before
    assert dict(vars(math)) == before


def test_math_is_as_it_was(own_math: dict[str, Any]) -> None:
    started, go, seen = threading.Event(), threading.Event(), []

    def slow(x: Tensor, s: float) -> Tensor:
        started.set()
        go.wait()
        return x * math.sqrt(s)

    thread = threading.Thread(target=lambda: seen.append(fg.kernel(slow)(X, 2.0)))
    thread.start()
    started.wait()
    try:
        assert math.sqrt(4) == 2.0 and math.log(8, 2) == own_math["log"](8, 2) and math.isnan(math.nan)
        with pytest.raises(ValueError, match="math domain error"):
            math.sqrt(-1)
    finally:
        go.set()
        thread.join()
    same(seen[0], X * math.sqrt(2.0))
    with pytest.raises(TypeError):
        fg.kernel(lambda x, s: x * math.sqrt())(X, 2.0)


def test_settings_of_functions_are_values() -> None:
    agree(lambda x, s: (F.leaky_relu(x, s), F.softplus(x, beta=s), x.norm(p=s)), (X, 2.0), (X, 3), (X, np.float32(0.5)))
    ours = fg.kernel(lambda x, s: F.leaky_relu(x, s))
    for s in (0.0, -0.0):
        assert torch.equal(ours(X, s).signbit(), F.leaky_relu(X, s).signbit())
