"""Values that are read at several places and are made of such values: refused within seconds, instead of compiled for hours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import UnsupportedError
from tests.unit.eager import agree, randn
from tests.unit.gate import some

WORDS = r"(reads|computes) more than \d+ (elements of its \d+ values|values in its kernels)"


def stencil(steps: int) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for _ in range(steps):
            x = (x.roll(1, -1) + x + x.roll(-1, -1)) / 3
        return x

    return function


def chain(count: int) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x * 1.5 + 1
        return x

    return function


def sinkhorn(steps: int) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for _ in range(steps):
            x = x - x.logsumexp(-1, keepdim=True)
            x = x - x.logsumexp(-2, keepdim=True)
        return x.exp()

    return function


REFUSED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "stencil": (stencil(5), (8, 64)),
    "stencil-of-a-softmax": (lambda x: stencil(6)(x.softmax(-1)), (8, 64)),
    "column-sums": (lambda x: stencil(7)(x).sum(0), (8, 64)),
    "sinkhorn": (sinkhorn(40), (8, 64)),
}


@pytest.mark.parametrize("target", some(["cpu", "sm_90a"], ["sm_90a"]))
@pytest.mark.parametrize("name", some(REFUSED, ["stencil", "stencil-of-a-softmax", "column-sums"]))
def test_what_multiplies_is_refused_soon(name: str, target: str) -> None:
    function, shape = REFUSED[name]
    with pytest.raises(UnsupportedError, match=WORDS) as caught:
        fg.kernel(function).lower(torch.empty(shape, device="meta"), target=target)
    assert "split it into several kernels" in str(caught.value)


@pytest.mark.parametrize("length", some([100, 1500], [100]))
def test_a_chain_may_be_of_any_length(length: int) -> None:
    rows = fg.kernel(lambda x: chain(length)(x).softmax(-1)).lower(torch.empty(8, 64, device="meta"), target="sm_90a")
    product = fg.kernel(lambda x: chain(length)(x @ x)).lower(
        torch.empty(64, 64, dtype=torch.bfloat16, device="meta"), target="sm_90a"
    )
    assert len(rows.program.steps) == 1 and len(product.program.steps) == 1


@pytest.mark.parametrize("number", some([60, 500], [60]))
def test_views_and_masks_may_be_of_any_number(number: int) -> None:
    def views(x: Tensor) -> Tensor:
        x = x.exp()
        for _ in range(number):
            x = x.reshape(2, 2, 8).permute(1, 0, 2).permute(1, 0, 2).reshape(4, 8)
        return x

    def masked(q: Tensor, m: Tensor) -> Tensor:
        scores = q @ q.mT
        for _ in range(number):
            scores = torch.where(m, scores, -torch.inf) * 1.5
        return scores.softmax(-1) @ q

    assert len(fg.kernel(views).lower(torch.empty(4, 8, device="meta"), target="sm_90a").program.steps) == 1
    q, m = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, 64, dtype=torch.bool, device="meta")
    assert len(fg.kernel(masked).lower(q, m, target="sm_90a").program.steps) == 1


def test_less_of_it_compiles() -> None:
    agree(stencil(2), (randn(8, 64),))
