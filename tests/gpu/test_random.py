"""Random numbers on a GPU: the masks of every other machine, torch's generators, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.unit.test_random import FUNCTIONS

COUNT = 1 << 20


def product(x: Tensor, w: Tensor, r: Tensor, seed: int) -> Tensor:
    """In an epilogue, two columns of a thread at a time."""
    return fg.dropout(F.linear(x, w), 0.3, seed=seed) + r


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [(64, 1024), (37, 4001), (5, 30000)], ids=["even", "odd", "long"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=[f.__name__ for f in FUNCTIONS])
def test_a_seed_gives_the_mask_of_the_cpu(function: Callable[..., Any], shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, r, w = (torch.randn(s).to(dtype) for s in (shape, shape, shape[-1:]))
    got = fg.kernel(function)(x.cuda(), w.cuda(), r.cuda(), 2**62 + 3)
    wanted = function(x.double(), w.double(), r.double(), 2**62 + 3)
    unit = torch.finfo(dtype).eps
    for ours, theirs in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, wanted)), strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=8 * unit, atol=40 * unit * float(theirs.abs().max()))


@pytest.mark.parametrize("shape", [(512, 1024, 512), (96, 200, 328)], ids=["tiles", "tails"])
def test_in_the_epilogue_of_a_product(shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    x, w, r = (torch.randn(s).bfloat16() for s in ((rows, depth), (columns, depth), (rows, columns)))
    got = fg.kernel(product)(x.cuda(), w.cuda(), r.cuda(), 9)
    wanted = product(x.double(), w.double(), r.double(), 9)
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=2e-2, atol=0.5)


def test_torch_seeds_the_keys_of_its_device() -> None:
    kernel, x = fg.kernel(lambda x: F.dropout(x, 0.25)), torch.ones(COUNT, device="cuda")
    torch.manual_seed(3)
    first, second = kernel(x), kernel(x)
    torch.manual_seed(3)
    assert torch.equal(kernel(x), first) and torch.equal(kernel(x), second) and not torch.equal(first, second)
    assert abs((first == 0).double().mean().item() - 0.25) < 5 * (0.25 * 0.75 / COUNT) ** 0.5


def test_a_cuda_graph_draws_anew_at_each_replay() -> None:
    kernel, x = fg.kernel(lambda x: F.dropout(x, 0.5)), torch.ones(COUNT, device="cuda")
    kernel(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(x)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(out.clone())
    for one, other in ((0, 1), (0, 2), (1, 2)):
        agreeing = (results[one] == results[other]).double().mean().item()
        assert abs(agreeing - 0.5) < 5 * 0.5 / COUNT**0.5


def test_both_passes_have_one_mask() -> None:
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    passes = fg.vjp(fg.kernel(lambda x, r: F.dropout(F.gelu(x), 0.25) + r), x, torch.zeros_like(x))
    out, saved = passes.forward(x, torch.zeros_like(x))
    by_x, _ = passes.backward(saved, torch.ones_like(x))
    kept = x.double().requires_grad_()
    (exact,) = torch.autograd.grad((F.gelu(kept) / 0.75).sum(), kept)
    assert torch.equal(out != 0, by_x != 0) or ((out != 0) ^ (by_x != 0)).double().mean() < 1e-3  # gelu or its slope may be 0
    torch.testing.assert_close(by_x.double(), torch.where(out != 0, exact, 0.0), rtol=2e-2, atol=2e-2)
