"""Reductions of whole tensors: large ones go row by row, so that they are more than one block's work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.naming import case
from tests.unit.eager import randn

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 0.5),
    "amax": lambda x: x.abs().amax(),
    "norm": lambda x: x / x.norm(),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_large_tensors_take_more_than_one_block(name: str) -> None:
    for shape in ((8192, 4096), (1 << 22,), (64, 128, 300), (4, 100000, 3)):
        with case(shape):
            low = fg.kernel(REDUCTIONS[name]).lower(torch.empty(shape, device="meta"), target="sm_90a")
            grids = [launch.grid(low.sizes) for launch in low.program.launches]
            assert grids[0] >= 64 and len(grids) <= 3, grids


@pytest.mark.parametrize("name", REDUCTIONS)
def test_small_tensors_take_one_launch(name: str) -> None:
    low = fg.kernel(REDUCTIONS[name]).lower(torch.empty((64, 300), device="meta"), target="sm_90a")
    assert len(low.program.launches) == 1


@pytest.mark.parametrize("name", REDUCTIONS)
def test_results_and_gradients(name: str) -> None:
    x = randn(700, 300)
    function, kernel = REDUCTIONS[name], fg.kernel(REDUCTIONS[name])
    for shape in ((700, 300), (2, 350, 300), (210000,)) if name == "sum" else ((700, 300),):
        with case(shape):
            ours, exact = x.view(shape).clone().requires_grad_(), x.view(shape).double().requires_grad_()
            got, wanted = kernel(ours), function(exact)
            torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-9)
            got.sum().backward()
            wanted.sum().backward()
            assert ours.grad is not None and exact.grad is not None
            torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)
