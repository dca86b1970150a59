"""Reductions to one result or to few: large ones go row by row, so that they are more blocks' work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.ir.reference import evaluate
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


def scaled_heads(x: Tensor, t: Tensor) -> Tensor:
    return x * torch.sigmoid(x * t[:, None, None])


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_the_gradient_of_a_parameter_a_head_keeps_all_blocks_busy() -> None:
    low = fg.kernel(scaled_heads).backward.lower(meta(8, 16, 2048, 128), meta(16), target="sm_90a")
    first, *others = low.program.launches
    moved = 2 * 3 * 8 * 16 * 2048 * 128
    assert first.grid(low.sizes) >= low.target.sms
    assert sum(launch.traffic.moved(low.sizes) for launch in low.program.launches) < 1.05 * moved
    assert len(others) == 1 and others[0].traffic.moved(low.sizes) < 0.01 * moved


def test_a_kernel_writes_the_partial_column_sums_that_the_next_one_reads() -> None:
    low = fg.kernel(lambda x: (x.softmax(-1), x.sum(0))).lower(meta(16384, 4096), target="sm_90a")
    rows, combination = low.program.launches
    partials = combination.traffic.read(low.sizes)
    assert partials % (4 * 4096) == 0
    assert rows.traffic.written(low.sizes) == 2 * 16384 * 4096 + partials
    assert combination.traffic.written(low.sizes) == 2 * 4096


def test_groups_of_one_image_are_many_blocks_work_at_every_size() -> None:
    kernel = fg.kernel(lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)))
    for shape in ((1, 320, 64, 64), (1, 512, 256, 256), (1, 640, 33, 47)):
        with case(shape):
            low = kernel.lower(meta(*shape), meta(shape[1]), meta(shape[1]), target="sm_90a")
            assert low.program.launches[0].grid(low.sizes) >= 4 * 32


REFERENCES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "sum of heads": (lambda x: x.sum((0, 2, 3)), (2, 4, 900, 40)),
    "variance of groups": (lambda x: F.group_norm(x + 5 * x[:, :1], 3), (1, 12, 128, 128)),
    "variance": (lambda x: (x - x.mean()) / x.std(), (60, 3000)),
    "greatest of few rows": (lambda x: x.abs().amax((1, 2)), (3, 70, 1100)),
    "softmax of few rows": (lambda x: torch.softmax(x, -1), (3, 90000)),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_few_groups_in_float64(name: str) -> None:
    function, shape = REFERENCES[name]
    x = randn(*shape).double()
    low = fg.kernel(function).lower(x, target="sm_80")  # where no cluster shares a row
    (found,) = evaluate(low.graph, {"x": x})
    torch.testing.assert_close(found, function(x), rtol=1e-12, atol=1e-12)
    assert low.program.launches[0].grid(low.sizes) > 3
