"""The bound itself: there is a rule for every operation, and what a broken compiler would give lies outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.ir.ops import Op
from tests.fuzz.check import Prepared, claims, compare, prepare, results_of, written
from tests.fuzz.enclosure import Float
from tests.fuzz.rules import COVERED, OF_WRITES

Function = Callable[..., Any]


def test_every_operation_has_a_rule() -> None:
    assert {op for op in Op if op not in COVERED} == OF_WRITES


def right(function: Function, *args: Any) -> tuple[Prepared, tuple[Tensor, ...]]:
    """A function and its results, which are right."""
    found = prepare(function, args)
    assert isinstance(found, Prepared)
    got = results_of(found.kernel(*args))
    compare(found, got)
    return found, got


def wrong(function: Function, *args: Any, **broken: Tensor) -> None:
    """Each result is seen to be wrong."""
    prepared, _ = right(function, *args)
    for what, value in broken.items():
        with pytest.raises(AssertionError):
            compare(prepared, (value,))
            pytest.fail(f"{what} passes", pytrace=False)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def test_a_wrong_tail_element_is_seen() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = randn(3, 37, dtype=dtype)
        good = F.gelu(x * 0.5)
        stale = good.clone()
        stale[-1, -1] = stale[-1, -2]
        wrong(lambda x: F.gelu(x * 0.5), x, stale=stale, unwritten=torch.zeros_like(good))


def test_a_row_that_misses_its_last_element_is_seen() -> None:
    x = randn(4, 1000).abs() + 0.5
    wrong(lambda x: x.sum(-1), x, without=x[:, :-1].sum(-1), twice=torch.cat([x, x[:, -1:]], 1).sum(-1))
    wrong(lambda x: torch.softmax(x, -1), x, without=torch.cat([torch.softmax(x[:, :-1], -1), x[:, -1:]], 1))
    wrong(lambda x: F.layer_norm(x, (1000,)), x, shifted=F.layer_norm(x.roll(1, 0), (1000,)), plain=x - x.mean(-1, keepdim=True))


def test_a_lost_cast_is_seen() -> None:
    x = randn(5, 33)
    wrong(lambda x: x.to(torch.bfloat16).float() * 3, x, lost=x * 3)
    wrong(lambda x: x.to(torch.float16).float().sum(-1), x, lost=x.sum(-1))
    wrong(lambda x: (x * 100).to(torch.int8), x, lost=(x * 100).round().to(torch.int8))


def test_the_sides_of_a_step_are_both_right() -> None:
    """A sum that lies at a step to within its rounding error may fall to either side; one that does not may not."""
    x = torch.full((2, 10), 0.1)
    x[1] = 0.125
    prepared, _ = right(lambda x: torch.floor(x.sum(-1)), x)
    _, (bound,) = claims(prepared)
    assert isinstance(bound, Float)
    assert (bound.lo.tolist(), bound.hi.tolist()) == ([0.0, 1.0], [1.0, 1.0])


def test_bounds_are_tight() -> None:
    """Some units in the last place for a chain of float32, no more than one for a result of 16 bits."""
    for dtype, most in ((torch.float32, 2.0**-19), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10), (torch.float64, 2.0**-47)):
        x = randn(4, 64, dtype=dtype)
        prepared, (got,) = right(lambda x: torch.tanh(x) * 0.5 + 2, x)
        _, (bound,) = claims(prepared)
        assert isinstance(bound, Float)
        assert ((bound.hi - bound.lo) / got.double().abs()).max().item() < most


def contracted(function: Function, *args: Any, **broken: Tensor) -> None:
    """What torch gives is right, whatever the kernel gives; each of what a broken kernel would give is seen to be wrong."""
    prepared = prepare(function, args)
    assert isinstance(prepared, Prepared)
    wide = [a.float() if isinstance(a, Tensor) and a.dtype is torch.bfloat16 else a for a in args]
    (good,), (like,) = results_of(function(*wide)), results_of(function(*args))
    compare(prepared, (good.to(like.dtype),))
    for what, value in broken.items():
        with pytest.raises(AssertionError):
            compare(prepared, (value,))
            pytest.fail(f"{what} passes", pytrace=False)


def test_a_difference_of_a_product_that_is_not_rounded_is_seen() -> None:
    x, w = randn(9, 64), randn(9, 64).roll(1, 0)
    c = x * w
    contracted(lambda x, w, c: x * w - c, x, w, c, fused=(x.double() * w - c).float())
    scaled = (x.double() * torch.tensor(0.37).double() - (x * 0.37).amax(-1, keepdim=True)).float()
    contracted(lambda x: x * 0.37 - (x * 0.37).amax(-1, keepdim=True), x, fused=scaled)
    contracted(lambda x: (x * 0.37) == (x * 0.37).amax(-1)[:, None], x, never=torch.zeros(9, 64, dtype=torch.bool))


def test_a_second_use_that_is_another_number_is_seen() -> None:
    """Behind functions whose results are not known to the last bit."""
    x = randn(9, 64)
    nan, small = torch.full((9, 64), float("nan")), torch.full((9, 64), 1e-6)
    contracted(lambda x, y: (torch.exp(x) * x - y * torch.exp(y)).sqrt(), x, x.clone(), fused=nan, other=small)
    contracted(lambda x: torch.sqrt(torch.exp(x).amax(-1, keepdim=True) - torch.exp(x)), x, below=nan)
    contracted(lambda x: torch.exp(x) <= torch.exp(x).amax(-1, keepdim=True), x, above=torch.zeros(9, 64, dtype=torch.bool))
    contracted(lambda x: torch.tanh(x) != torch.tanh(x), x, other=torch.ones(9, 64, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_masked_row_whose_weights_have_no_sum_is_seen(dtype: torch.dtype) -> None:
    q, mask = randn(9, 64, dtype=dtype), torch.zeros(9, 9, dtype=dtype)
    mask[3] = -1e30

    def own(q: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ q.mT + mask) * 0.37
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True)

    def ready(q: Tensor, mask: Tensor) -> Tensor:
        return ((q @ q.mT + mask) * 0.37).softmax(-1)

    for function in (own, ready):
        lost = function(q, mask)
        lost[3] = float("nan")
        contracted(function, q, mask, nan=lost)


def test_attention_to_a_key_without_a_number_is_nan() -> None:
    """Also where torch's kernel for CPUs gives 0."""
    q, k = randn(2, 3, 1, 4), randn(2, 3, 1, 4)
    k[0, 1, 0, 2] = float("nan")
    zero = F.scaled_dot_product_attention(q, k, k).nan_to_num(0.0)
    wrong(lambda q, k: F.scaled_dot_product_attention(q, k, k), q, k, zero=zero)


def test_numbers_of_python_are_doubles_until_they_meet_a_tensor() -> None:
    x = randn(5, 33)
    single = float(torch.tensor(0.1))
    contracted(lambda x, s: x.double() * s, x, 0.1, single=x.double() * single)
    contracted(lambda x, s: x / (1 - s), x, 0.999, single=x / (1 - torch.tensor(0.999)))


def test_results_that_share_memory_are_seen() -> None:
    x = randn(4, 8)
    for results in ((x, x), (x[:2], x[1:]), (x.T, x.reshape(-1))):
        with pytest.raises(AssertionError, match="writing to result"):
            written(results, [])
    with pytest.raises(AssertionError, match="writing to result"):
        written([x], [x])
    written([x, x.clone(), x > 0], [x + 1])
