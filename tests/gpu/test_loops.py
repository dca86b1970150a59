"""Scores and logits in blocks of rows, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.unit.test_loops import CASES, few_rows

__all__ = ["few_rows"]


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"halves"}))
def test_gradients_are_those_of_the_exact_operations(name: str, dtype: torch.dtype) -> None:
    function, arguments = CASES[name]
    given = [a.cuda().to(dtype) if a.is_floating_point() else a.cuda() for a in arguments]
    with torch.device("cuda"):
        exact = differentiated(function, *(a.double() if a.is_floating_point() else a for a in given))
    found = differentiated(fg.kernel(function), *given)
    bound = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound * max(1.0, other.abs().max().item()))


def differentiated(function: Callable[..., Tensor], *arguments: Tensor) -> list[Tensor]:
    """The result and the gradients by floats, for gradients by the result that do not depend on its dtype."""
    given = [a.clone().requires_grad_(a.is_floating_point()) for a in arguments]
    result = function(*given)
    upstream = torch.linspace(0.5, 1.5, result.numel(), device="cuda").view(result.shape).to(result.dtype)
    found = torch.autograd.grad(result, [a for a in given if a.requires_grad], upstream, allow_unused=True)
    return [result.detach(), *(gradient for gradient in found if gradient is not None)]


def test_memory_is_far_below_that_of_the_logits() -> None:
    h = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(64000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    t = torch.randint(0, 64000, (8192,), device="cuda")

    def loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), t)

    kernel = fg.kernel(loss)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(kernel(h, w, t), (h, w))
    assert torch.cuda.max_memory_allocated() - before < 2 * 8192 * 64000 // 2


def test_a_training_step_in_blocks_is_replayed() -> None:
    function, _ = CASES["a soft cap"]
    q, k, v = (torch.randn(2, 2, 4096, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    kernel = fg.kernel(function)
    expected = torch.autograd.grad(kernel(q, k, v).sum(), (q, k, v))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(kernel(q, k, v).sum(), (q, k, v))
    graph.replay()
    torch.testing.assert_close(found, expected)
