"""Random tensors in kernels: distributions, dtypes, shapes, and the same bits on every target and in both passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import TraceError, UnsupportedError
from fusegen.ir.reference import evaluate
from tests.unit.gate import some

KEY = 0x123456789ABCDEF
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture
def known_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls draw this key."""
    for room in ("fusegen.runtime.instructions", "fusegen.compiler.differentiate"):
        monkeypatch.setattr(f"{room}.drawn_key", lambda device: torch.tensor([KEY], device=device))


def drawn(function: Callable[..., Any], *arguments: Tensor) -> Any:
    """A kernel's result after a seed."""
    torch.manual_seed(11)
    return fg.kernel(function)(*arguments)


UNIFORM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "rand_like": lambda x: torch.rand_like(x),
    "uniform_": lambda x: torch.empty_like(x).uniform_(2, 6) * 0.25 - 0.5,
}
NORMAL: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: torch.randn(*x.shape, dtype=x.dtype),
    "randn_like": lambda x: torch.randn_like(x),
    "normal_": lambda x: (torch.empty_like(x).normal_(3.0, 2.0) - 3) / 2,
    "normal": lambda x: torch.normal(x * 0 + 1, 2.0) / 2 - 0.5,
}


def _cumulative(values: Tensor, distribution: Callable[[Tensor], Tensor]) -> float:
    """Kolmogorov's distance of a sample from a distribution, in units of 1 / sqrt(n)."""
    ordered = values.double().flatten().sort().values
    count = ordered.numel()
    steps = torch.arange(count, dtype=torch.float64)
    expected = distribution(ordered)
    apart = torch.maximum((steps + 1) / count - expected, expected - steps / count).max().item()
    return apart * math.sqrt(count)


@pytest.mark.parametrize("name", UNIFORM)
def test_uniform_numbers(name: str) -> None:
    for dtype in FLOATS:
        found = drawn(UNIFORM[name], torch.zeros(200, 250, dtype=dtype))
        assert found.dtype is dtype and found.shape == (200, 250)
        coarse = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 0.0)
        assert _cumulative(found, lambda t, c=coarse: t.clamp(0, 1) + c / 2) < 2.2 + coarse * 200


def test_the_grain_of_uniform_numbers_is_torch_s() -> None:
    """Multiples of 2^-8, 2^-11, 2^-24 and 2^-53, from 0 up to, not including, 1."""
    for dtype, digits in zip((torch.bfloat16, torch.float16, torch.float32, torch.float64), (8, 11, 24, 53), strict=True):
        found = drawn(lambda x: torch.rand_like(x), torch.zeros(1 << 12, dtype=dtype)).double()
        whole = found * 2.0**digits
        assert torch.equal(whole, whole.floor()) and not torch.equal(whole / 2, (whole / 2).floor())
        assert 0 <= found.min() < 2**-7 and 1 - 2**-7 <= found.max() < 1


@pytest.mark.parametrize("name", NORMAL)
def test_normal_numbers(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        found = drawn(NORMAL[name], torch.zeros(200, 250, dtype=dtype))
        assert found.dtype is dtype
        assert _cumulative(found, torch.special.ndtr) < 2.2
    half = drawn(NORMAL[name], torch.zeros(200, 250, dtype=torch.bfloat16))
    assert half.dtype is torch.bfloat16 and abs(half.double().mean()) < 0.03 and abs(half.double().std() - 1) < 0.03


def test_exponential_numbers() -> None:
    found = drawn(lambda x: torch.empty_like(x).exponential_(2.0), torch.zeros(200, 250))
    assert _cumulative(found, lambda t: -torch.expm1(-2 * t)) < 2.2
    assert found.min() > 0


def test_integers() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.randint(7, (100, 100)),
            torch.randint(-3, 5, (100, 100), dtype=torch.int32),
            torch.randint(low=0, high=1 << 31, size=x.shape),
            torch.randint_like(x, 10),
            torch.randint_like(x, 3, 5),
        )

    found = drawn(function, torch.zeros(100, 100))
    for values, low, high in zip(found, (0, -3, 0, 0, 3), (7, 5, 1 << 31, 10, 5), strict=True):
        assert values.min() >= low and values.max() < high
        if high - low < 100:
            counts = torch.bincount((values - low).flatten().long(), minlength=high - low).double()
            share = 1e4 / (high - low)
            assert ((counts - share) ** 2 / share).sum() < (high - low) + 5 * math.sqrt(2 * (high - low))
    assert [t.dtype for t in found] == [torch.int64, torch.int32, torch.int64, torch.float32, torch.float32]


def test_coins() -> None:
    def function(p: Tensor) -> tuple[Tensor, ...]:
        whole = torch.zeros(p.shape, dtype=torch.int64)
        return torch.bernoulli(p), p.bernoulli(0.3), torch.empty_like(p).bernoulli_(p), torch.bernoulli(whole, 0.7)

    shares = torch.tensor([0.0, 0.2, 0.5, 1.0]).repeat_interleave(10000).reshape(4, 10000)
    for dtype in FLOATS:
        found = drawn(function, shares.to(dtype))
        wanted = ((0.0, 0.2, 0.5, 1.0), (0.3,) * 4, (0.0, 0.2, 0.5, 1.0), (0.7,) * 4)
        for coins, share in zip(found, wanted, strict=True):
            assert set(coins.unique().tolist()) <= {0, 1}
            torch.testing.assert_close(coins.double().mean(-1), torch.tensor(share, dtype=torch.float64), atol=0.025, rtol=0)
        assert [coins.dtype for coins in found] == [dtype, dtype, dtype, torch.int64]


def test_native_dropout_gives_its_mask() -> None:
    for p, train in ((0.25, True), (0.0, True), (1.0, True), (0.25, False)):
        x = torch.randn(64, 100)
        values, mask = drawn(lambda x, p=p, train=train: torch.native_dropout(x, p, train), x)
        assert mask.dtype is torch.bool
        share = 1 - p if train else 1.0
        assert abs(mask.double().mean() - share) < 0.03
        torch.testing.assert_close(values, torch.where(mask, x / max(share, 0.5), 0.0))


@pytest.mark.parametrize("dim", [-1, 0])
def test_gumbel_softmax(dim: int) -> None:
    """An argmax of logits with Gumbel's noise draws from their softmax."""
    logits = torch.tensor([0.1, 1.0, -1.0, 2.0]).repeat(20000, 1)
    logits = logits if dim == -1 else logits.T.contiguous()
    soft = drawn(lambda x: F.gumbel_softmax(x, 0.5, dim=dim), logits)
    hard = drawn(lambda x: F.gumbel_softmax(x, 0.5, hard=True, dim=dim), logits)
    torch.testing.assert_close(soft.sum(dim), torch.ones(20000))
    torch.testing.assert_close(hard, F.one_hot(soft.argmax(dim), 4).movedim(-1, dim).float())
    shares = hard.mean(1 + dim)
    torch.testing.assert_close(shares, torch.tensor([0.1, 1.0, -1.0, 2.0]).softmax(-1), atol=0.015, rtol=0)


def test_the_hard_sample_has_the_soft_one_s_gradient() -> None:
    def gradient(hard: bool) -> Tensor:
        x = torch.linspace(-1, 1, 40).reshape(5, 8).requires_grad_()
        torch.manual_seed(4)
        weights = torch.arange(8.0)
        (fg.kernel(lambda x, w: F.gumbel_softmax(x, 0.7, hard=hard) * w)(x, weights)).sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(gradient(True), gradient(False))
    assert gradient(True).abs().max() > 1e-3


# Streams.


def noisy(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    first, second = torch.rand_like(x), torch.rand_like(x)
    rows = F.layer_norm(x + torch.randn_like(x), x.shape[-1:], w) * first
    return (
        rows,
        (first + second).sum(0),
        torch.randint(5, x.shape).transpose(0, 1).contiguous(),
        torch.bernoulli(first * 0.5)[:, 3:],
    )


@pytest.mark.usefixtures("known_key", "either")
@pytest.mark.parametrize("dtype", some(FLOATS, [torch.float32, torch.bfloat16]), ids=str)
def test_one_key_gives_one_result_wherever_it_runs(dtype: torch.dtype) -> None:
    """In kernels of several kinds, on both targets, what the oracle has."""
    x, w = torch.randn(7, 33).to(dtype), torch.randn(33).to(dtype)
    kernel = fg.kernel(noisy)
    found = kernel(x, w)
    traced = kernel.lower(x, w, target="cpu").traced
    inputs = dict(zip((spec.name for spec in traced.inputs), (x, w), strict=True))
    for got, wanted in zip(found, evaluate(traced, inputs, key=KEY), strict=True):
        torch.testing.assert_close(got, wanted.to(got.dtype))


def test_torch_seeds_the_numbers() -> None:
    kernel = fg.kernel(lambda x: (torch.rand_like(x), torch.rand_like(x)))
    x = torch.zeros(64, 64)
    torch.manual_seed(3)
    first, second = kernel(x), kernel(x)
    torch.manual_seed(3)
    again = kernel(x)
    assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    for other in (first[1], second[0]):
        assert abs(torch.corrcoef(torch.stack([first[0].flatten(), other.flatten()]))[0, 1]) < 5 / 64


@pytest.mark.usefixtures("known_key")
def test_the_backward_pass_draws_the_numbers_again() -> None:
    def function(x: Tensor) -> Tensor:
        return F.gelu(x) * torch.rand_like(x) + torch.randn_like(x) * x

    x = torch.randn(16, 64)
    passes = fg.vjp(fg.kernel(function), x)
    out, saved = passes.forward(x)
    (by_x,) = passes.backward(saved, torch.ones_like(out))
    traced = fg.kernel(function).lower(x, target="cpu").traced
    at = [evaluate(traced, {"x": x.double() + step}, key=KEY)[0] for step in (-1e-6, 1e-6)]
    torch.testing.assert_close(by_x.double(), (at[1] - at[0]) / 2e-6, rtol=1e-5, atol=1e-5)
    assert [t.shape for t in saved.tensors if t.shape == x.shape] == [x.shape], "more than the input is stored"


def test_a_probability_has_no_gradient() -> None:
    p = torch.rand(4, 5).requires_grad_()
    out = fg.kernel(lambda p: torch.bernoulli(p) * p)(p)
    out.sum().backward()
    assert p.grad is not None and torch.equal(p.grad, (out != 0).float())


# Refused.

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "generator": lambda x: torch.rand_like(x) + torch.rand(3, generator=torch.Generator()),
    "dtype": lambda x: torch.rand(3, dtype=torch.int64) + x,
    "long range": lambda x: torch.randint(1 << 40, (3,)) + x,
    "no range": lambda x: torch.randint(3, 3, (3,)) + x,
    "probability": lambda x: x.bernoulli(1.5),
    "coins of integers": lambda x: torch.bernoulli(x.long()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    with pytest.raises((TraceError, UnsupportedError)):
        fg.kernel(REFUSED[name])(torch.zeros(3))
