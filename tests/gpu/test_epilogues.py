"""What epilogues take and give, on tensor cores: the emulator's cases, and the same at the sizes of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.emulator import test_epilogues as small
from tests.emulator import test_weights as stored

WIDTH, ROWS = 1024, 1000


def weight(*shape: int) -> Tensor:
    return small.weight(*shape).cuda()


def tensor(*shape: int) -> Tensor:
    return small.tensor(*shape).cuda()


LARGE: dict[Callable[..., object], Callable[[], tuple[Tensor, ...]]] = {
    small.bias_swiglu: lambda: (tensor(4 * ROWS, WIDTH), weight(2816, WIDTH), weight(2816, WIDTH), tensor(2816)),
    small.packed_swiglu: lambda: (tensor(4, ROWS, WIDTH), weight(5632, WIDTH)),
    small.rotary: lambda: (tensor(4, ROWS, WIDTH), weight(2048, WIDTH), tensor(ROWS, 64), tensor(ROWS, 64)),
    small.qkv: lambda: (
        *(tensor(4, ROWS, WIDTH), weight(2048, WIDTH), weight(256, WIDTH), weight(256, WIDTH)),
        *(tensor(ROWS, 64), tensor(ROWS, 64)),
    ),
    small.kept: lambda: (tensor(4 * ROWS, WIDTH), weight(4096, WIDTH), tensor(4096)),
    small.kept_gated: lambda: (tensor(4 * ROWS, WIDTH), weight(2816, WIDTH), weight(2816, WIDTH)),
}


def check(function: Callable[..., object], arguments: tuple[Tensor, ...]) -> None:
    """Two units in the last place of what float64 gives, or as near as eager is, where the library computes products."""
    runs = fg.kernel(function)(*arguments), function(*arguments), function(*map(small.wide, arguments))
    for got, eager, exact in zip(*map(listed, runs), strict=True):
        ulp = 2**-8 if got.dtype is torch.bfloat16 else 2**-13
        assert distance(got, exact) <= max(2 * ulp, distance(eager, exact))


def listed(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def distance(got: Tensor, exact: Tensor) -> float:
    """The greatest error, over one more than the magnitude."""
    return float(((got.double() - exact.double()).abs() / (1 + exact.double().abs())).max())


@pytest.mark.parametrize("function", small.CASES, ids=lambda f: f.__name__)
def test_small_products(function: Callable[..., object]) -> None:
    check(function, tuple(a.cuda() for a in small.CASES[function]))


@pytest.mark.parametrize("function", LARGE, ids=lambda f: f.__name__)
def test_products_of_models(function: Callable[..., object]) -> None:
    check(function, LARGE[function]())


@pytest.mark.parametrize(("heads", "shared", "width", "length"), [(32, 8, 128, 1000), (32, 1, 64, 513), (12, 4, 64, 77)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_queries_that_share_heads_of_keys(heads: int, shared: int, width: int, length: int, is_causal: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    check_attention(function, *(tensor(2, count, length, width) for count in (heads, shared, shared)))


def test_a_batch_that_shares_keys() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1))

    check_attention(function, tensor(4, 8, 300, 64), tensor(1, 8, 500, 64), tensor(1, 8, 500, 64))


def check_attention(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    """One launch, hardly further from float64 than torch's own."""
    kernel = fg.kernel(function)
    assert len(kernel.lower(q, k, v).program.steps) == 1
    wanted = function(q.double(), k.double(), v.double())
    errors = [(got.double() - wanted).square().mean().sqrt().item() for got in (kernel(q, k, v), function(q, k, v))]
    assert errors[0] <= 1.15 * errors[1]


def groups(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, stored.of_groups(w, s))


def nibbles(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, stored.of_groups(stored.nibbles(w).to(x.dtype) - 8, s))


@pytest.mark.parametrize("rows", [1, 9, 16, 40, 64])
def test_weights_that_are_computed_on_load(rows: int) -> None:
    columns, depth = 2816, 4096 + 64
    cases = {
        stored.channels: (stored.numbers(columns, depth), stored.scales(columns)),
        groups: (stored.numbers(columns, depth), stored.scales(columns, depth // 64)),
        nibbles: (stored.numbers(columns, depth // 2, dtype=torch.uint8), stored.scales(columns, depth // 64)),
    }
    x = stored.randn(rows, depth).cuda()
    for function, others in cases.items():
        arguments = (x, *(other.cuda() for other in others))
        got, wanted = fg.kernel(function)(*arguments), function(*arguments)
        assert (got.double() - wanted.double()).abs().max() <= 2**-7 * wanted.double().abs().max()


@pytest.mark.parametrize("rows", [1, 9, 16])
def test_few_rows_of_weights_with_contiguous_columns(rows: int) -> None:
    def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(x @ gate) * (x @ up)

    for columns, depth in ((2816, WIDTH + 8), (WIDTH, 2816)):
        check(gated, (tensor(rows, depth), weight(depth, columns), weight(depth, columns)))
