"""Gradients where a function ends, or its formula has an infinite factor: on a CPU they are torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusegen as fg

INF, NAN = float("inf"), float("nan")
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, INF, -INF, NAN, 1e-40, -1e-40, 1e38, -1e38, 1e-20])
PAIRS = torch.tensor(list(itertools.product(EDGES.tolist(), repeat=2)))

OF_ONE: dict[str, Callable[[Any], Any]] = {
    "entr": lambda x: torch.special.entr(x),
    "root": lambda x: x**0.5,
    "root-of-cube": lambda x: x**1.5,
    "reciprocal-root": lambda x: x**-0.5,
    "cube": lambda x: x**3,
}
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "hypot": lambda x, y: torch.hypot(x, y),
    "pow": lambda x, y: x**y,
    "xlogy": lambda x, y: torch.xlogy(x, y),
    "xlog1py": lambda x, y: torch.special.xlog1py(x, y),
}


def same(function: Callable[..., Any], *edges: torch.Tensor) -> None:
    """Compares values and gradients with torch's."""
    found = []
    for run in (fg.kernel(function), function):
        leaves = [edge.clone().requires_grad_() for edge in edges]
        y = run(*leaves)
        found.append((y.detach(), *torch.autograd.grad(y, leaves, torch.full_like(y, -2.0))))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OF_ONE)
def test_of_one_number(name: str) -> None:
    same(OF_ONE[name], EDGES)


@pytest.mark.parametrize("value", [0.0, 3.0, torch.ones(len(EDGES))])
def test_of_what_is_overwritten(value: Any) -> None:
    def filled(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:] = value
        return y

    def copied(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).copy_(torch.as_tensor(value))

    finite = EDGES[EDGES.isfinite()]
    same(filled, EDGES)
    same(lambda x: (x * 2).zero_(), finite)
    same(copied, EDGES)


@pytest.mark.parametrize("eps", [None, 1e-6])
def test_logit(eps: float | None) -> None:
    is_told = ~EDGES.isnan() & ~(EDGES.eq(0) & EDGES.signbit())  # torch's own vectors and single numbers differ there
    same(lambda x: torch.logit(x, eps), EDGES[is_told])


@pytest.mark.parametrize("name", OF_TWO)
def test_of_two_numbers(name: str) -> None:
    same(OF_TWO[name], PAIRS[:, 0].contiguous(), PAIRS[:, 1].contiguous())
