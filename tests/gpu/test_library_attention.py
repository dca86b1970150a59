"""Attention that trains by torch's own kernels, on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusegen as fg
from tests.unit.test_library_attention import CASES
from tests.unit.test_scatter import trained

attention = F.scaled_dot_product_attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_exact_operations(name: str, dtype: torch.dtype) -> None:
    function, arguments = CASES[name]
    given = [a.cuda().to(dtype) if a.is_floating_point() else a.cuda() for a in arguments]
    with torch.device("cuda"), sdpa_kernel(SDPBackend.MATH):
        exact = trained(function, *(a.double() if a.is_floating_point() else a for a in given))
    found = trained(fg.kernel(function), *given)
    bound = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=bound, atol=bound * max(1.0, other.abs().max().item() if other.numel() else 0)
        )


@pytest.mark.parametrize("heads", [4, 2])
def test_a_bias_of_all_scores_has_a_gradient(heads: int) -> None:
    q = torch.randn(2, 4, 50, 32, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, heads, 70, 32, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(2, 4, 50, 70, device="cuda", dtype=torch.bfloat16)

    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attention(q, k, v, bias, enable_gqa=True)

    found, exact = trained(fg.kernel(biased), q, k, v, bias), trained(biased, *(x.double() for x in (q, k, v, bias)))
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operands_may_lie_anywhere(dtype: torch.dtype) -> None:
    def moved(count: int) -> Tensor:
        return torch.randn(2 * 4 * count * 32 + 1, device="cuda", dtype=dtype)[1:].view(2, 4, count, 32)

    q, k, v, bias = moved(50), moved(70), moved(70).mT.contiguous().mT, torch.randn(50, 71, device="cuda", dtype=dtype)[:, 1:]

    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attention(q, k, v, bias.detach())

    given = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in given]
    found, exact = fg.kernel(biased)(*given, bias), biased(*wide, bias.double())
    pairs = zip(torch.autograd.grad(found.sin().sum(), given), torch.autograd.grad(exact.sin().sum(), wide), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=5e-2 if dtype is torch.bfloat16 else 1e-4)


@pytest.fixture
def dropped() -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v: the result of attention with the unit matrix as values is its weights."""
    q, k = torch.randn(2, 1, 1, 64, 64, device="cuda", dtype=torch.float16)
    return q, k, torch.eye(64, device="cuda", dtype=torch.float16)[None, None].clone()


def test_dropped_weights_are_dropped_in_both_passes(dropped: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = (x.requires_grad_() for x in dropped)
    weights = fg.kernel(lambda q, k, v: attention(q, k, v, dropout_p=0.25))(q, k, v)
    gradient = torch.randn_like(weights)
    by_q, by_k, by_v = torch.autograd.grad(weights, (q, k, v), gradient)
    exact, kept, wide = torch.softmax(q.double() @ k.double().mT / 8, -1), weights != 0, gradient.double()
    by_weights = wide * kept / 0.75
    by_scores = exact * (by_weights - (by_weights * exact).sum(-1, True)) / 8
    assert 0.2 < (~kept).double().mean().item() < 0.3
    pairs = ((weights, exact * kept / 0.75), (by_v, weights.double().mT @ wide))
    for one, other in (*pairs, (by_q, by_scores @ k.double()), (by_k, by_scores.mT @ q.double())):
        torch.testing.assert_close(one.double(), other, rtol=5e-3, atol=5e-3)


def test_dropped_weights_follow_the_seed_of_torch_and_differ_in_each_replay(dropped: tuple[Tensor, Tensor, Tensor]) -> None:
    kernel = fg.kernel(lambda q, k, v: attention(q, k, v, dropout_p=0.5))
    q, k, v = (x.requires_grad_() for x in dropped)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(kernel(q, k, v).detach())
    assert torch.equal(*results)
    assert not torch.equal(results[0], kernel(q, k, v))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernel(q, k, v)
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(result.detach().clone())
    assert not torch.equal(*replays)


def test_memory_is_far_below_that_of_the_scores() -> None:
    q, k, v = (torch.randn(1, 8, 8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    kernel = fg.kernel(lambda q, k, v: attention(q, k, v, is_causal=True))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = kernel(q, k, v)
    torch.autograd.grad(result, (q, k, v), torch.randn_like(result))
    assert torch.cuda.max_memory_allocated() - before < 8 * 8192 * 8192 // 4


def test_dropout_without_gradients_keeps_no_scores() -> None:
    q, k = torch.randn(2, 1, 8, 4096, 64, device="cuda", dtype=torch.bfloat16)
    kernel = fg.kernel(lambda q, k, v: attention(q, k, v, dropout_p=0.25))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sums = kernel(q, k, torch.ones_like(q))
    assert torch.cuda.max_memory_allocated() - before < 8 * 4096 * 4096 // 4
    assert 0.98 < sums.mean().item() < 1.02 and sums.std().item() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_draws_the_same_bits_with_gradients_and_without(dtype: torch.dtype) -> None:
    given = torch.randn(3, 1, 4, 4096, 64, device="cuda", dtype=dtype).unbind()
    kernel, found = fg.kernel(lambda q, k, v: attention(q, k, v, dropout_p=0.25)), []
    for is_recorded in (False, True):
        torch.manual_seed(0)
        found.append(kernel(*(x.clone().requires_grad_(is_recorded) for x in given)).detach())
    torch.testing.assert_close(*found)


def test_an_extension_gives_the_same_values_and_gradients(dropped: tuple[Tensor, Tensor, Tensor]) -> None:
    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, dropout_p=0.5)

    found = []
    for compiler in ("extension", "nvrtc"):
        torch.manual_seed(5)
        found.append(trained(fg.kernel(attended, compiler=compiler), *dropped))
    torch.testing.assert_close(*found)
