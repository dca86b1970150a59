"""Values that a function computes under ``torch.no_grad()`` are constants for its gradients, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.unit.eager import randn, same


def centered(switched: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        with switched():
            mean = x.mean(-1, keepdim=True)
        return x - mean

    return function


def scaled_by_itself(x: Tensor) -> Tensor:
    """A copy is a constant, though the graph has the same node for it."""
    with torch.no_grad():
        copy = x.clone()
    return x * copy


def views(x: Tensor) -> Tensor:
    """A view is a constant; the tensor itself, which some functions give back, is none."""
    with torch.no_grad():
        view, itself = x.view(x.shape), x.contiguous()
    return x * view + itself


def written(x: Tensor) -> Tensor:
    """A write to a constant leaves it one."""
    with torch.no_grad():
        size = x.abs()
        size.clamp_(min=0.5)
        peak = x.max(-1, keepdim=True)
    return x * size * peak.values


def gathered(x: Tensor) -> Tensor:
    with torch.no_grad():
        best = x.softmax(-1).argmax(-1, keepdim=True)
        above = F.relu(x * 1, inplace=True)
    return x.gather(-1, best) * above


def switched_on_again(x: Tensor) -> Tensor:
    with torch.no_grad():
        constant = x * 2
        with torch.enable_grad():
            variable = x * 3
    return constant * variable


def nothing_recorded(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


@pytest.mark.parametrize(
    "function",
    [centered(torch.no_grad), centered(torch.inference_mode), scaled_by_itself, views, written, gathered, switched_on_again],
)
def test_what_is_computed_without_gradients_is_constant(function: Callable[[Tensor], Tensor]) -> None:
    kernel, x = fg.kernel(function), randn(4, 6)
    for number in range(3):
        leaf = x.clone().requires_grad_()
        found, wanted = (torch.autograd.grad(run(leaf).square().sum(), leaf) for run in (kernel, function))
        same(found[0], wanted[0], f"gradient of call {number}")
    with torch.no_grad():
        same(kernel(x), function(x), "without gradients")
    passes = fg.vjp(fg.kernel(function), x)
    y, saved = passes.forward(x)
    leaf = x.clone().requires_grad_()
    result = function(leaf)
    (by_x,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
    (gradient,) = passes.backward(saved, torch.ones_like(y))
    assert gradient is not None
    same(gradient, by_x, "gradient of the passes")


def test_a_result_without_a_history() -> None:
    x = randn(4, 6).requires_grad_()
    result = fg.kernel(nothing_recorded)(x)
    assert not result.requires_grad
    same(result, nothing_recorded(x), "result")
