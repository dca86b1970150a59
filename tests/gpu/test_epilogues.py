"""What epilogues take and give, on tensor cores: the emulator's cases, and the same at the sizes of models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusegen as fg
from tests.emulator import test_epilogues as small

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
    """Two units in the last place of what float64 gives."""
    found, wanted = fg.kernel(function)(*arguments), function(*map(small.wide, arguments))
    for got, exact in zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]:
        ulp = 2**-8 if got.dtype is torch.bfloat16 else 2**-13
        torch.testing.assert_close(got.double(), exact.double(), rtol=2 * ulp, atol=2 * ulp)


@pytest.mark.parametrize("function", small.CASES, ids=lambda f: f.__name__)
def test_small_products(function: Callable[..., object]) -> None:
    check(function, tuple(a.cuda() for a in small.CASES[function]))


@pytest.mark.parametrize("function", LARGE, ids=lambda f: f.__name__)
def test_products_of_models(function: Callable[..., object]) -> None:
    check(function, LARGE[function]())
