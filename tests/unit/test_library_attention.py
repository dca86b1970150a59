"""Attention that trains without its scores: torch's own kernels are steps of both passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import UnsupportedError
from tests.unit.eager import randn
from tests.unit.test_scatter import trained

attention = F.scaled_dot_product_attention

Q, K, V = randn(2, 4, 9, 8), randn(2, 4, 13, 8), randn(2, 4, 13, 8)
SHOWN = torch.arange(13) < torch.tensor([13, 6])[:, None, None, None]


def packed(x: Tensor, weight: Tensor) -> Tensor:
    """Causal attention of heads that one product gives, as GPT-2 has it."""
    q, k, v = F.linear(x, weight).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same with queries and keys that are rotated by position, as Llama has it."""
    q, k, v = F.linear(x, weight).unflatten(-1, (3, -1, cos.shape[-1])).permute(2, 0, 3, 1, 4)
    q, k = (y * cos + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sin for y in (q, k))
    return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads of keys that two heads of queries read, as transformers repeats them."""
    k, v = (x[:, :, None].expand(2, 2, 2, 13, 8).reshape(2, 4, 13, 8) for x in (k, v))
    return torch.softmax(q @ k.transpose(2, 3) * 8**-0.5, -1, dtype=torch.float32).to(q.dtype) @ v


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "as it is": (lambda q, k, v: attention(q, k, v), (Q, K, V)),
    "of halves": (lambda q, k, v: attention(q, k, v, scale=0.5).sin(), (Q.bfloat16(), K.bfloat16(), V.bfloat16())),
    "causal": (lambda q, k, v: attention(q, k, v, is_causal=True), (Q, K, V)),
    "of few heads of keys": (lambda q, k, v: attention(q, k, v, enable_gqa=True), (Q, K[:, :2], V[:, :2])),
    "of few heads of halves, written": (repeated, (Q.bfloat16(), K[:, :2].bfloat16(), V[:, :2].bfloat16())),
    "padded": (lambda q, k, v, m: attention(q, k, v, m), (Q, K, V, SHOWN)),
    "a row without a key": (lambda q, k, v, m: attention(q, k, v, m & (torch.arange(9)[:, None] != 3)), (Q, K, V, SHOWN)),
    "a constant bias": (lambda q, k, v, b: attention(q, k, v, b.detach()), (Q, K, V, randn(4, 9, 13))),
    "written": (lambda q, k, v: torch.softmax(q @ k.mT / 3, -1) @ v, (Q[0], K[0], V[0])),
    "hidden by hand": (
        lambda q, k, v: (q @ k.mT).masked_fill(torch.arange(13) > torch.arange(9)[:, None], -torch.inf).softmax(-1) @ v,
        (Q, K, V),
    ),
    "of one head": (lambda q, k, v: attention(q, k, v), (Q[0, 0], K[0, 0], V[0, 0])),
    "of packed heads": (packed, (randn(3, 9, 32), randn(96, 32) / 6)),
    "of rotated heads": (rotated, (randn(3, 9, 32), randn(96, 32) / 6, randn(9, 8), randn(9, 8))),
    "of no key": (lambda q, k, v: attention(q, k, v), (Q, K[:, :, :0], V[:, :, :0])),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name: str) -> None:
    function, arguments = CASES[name]
    given = [a.double() if a.dtype is torch.float32 else a for a in arguments]
    found, exact = (
        trained(fg.kernel(function), *given),
        trained(function, *(a.double() if a.is_floating_point() else a for a in given)),
    )
    bounds = {"rtol": 2e-2, "atol": 3e-2} if any(a.dtype is torch.bfloat16 for a in given) else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close([f.double() for f in found], exact, **bounds)


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90a"])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"of no key"}))
def test_neither_pass_keeps_scores(name: str, target: str) -> None:
    function, arguments = CASES[name]
    half = [a.bfloat16() if a.is_floating_point() else a for a in arguments]
    passes = fg.vjp(fg.kernel(function), *half, target=target)
    steps = [repr(step) for pass_ in (passes.forward, passes.backward) for step in pass_.lower().program.steps]
    assert "<attention of the library>" in steps
    assert "<attention_backward of the library>" in steps


KEPT: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "weights that are a result": (lambda q, k, v: ((w := torch.softmax(q @ k.mT, -1)) @ v, w), (Q, K, V)),
    "a soft cap": (lambda q, k, v: torch.softmax(5 * torch.tanh(q @ k.mT / 5), -1) @ v, (Q, K, V)),
    "rows that may be NaN": (lambda q, k, v, m: torch.softmax((q @ k.mT).masked_fill(~m, -torch.inf), -1) @ v, (Q, K, V, SHOWN)),
    "values of another width": (lambda q, k, v: attention(q, k, v), (Q, K, V[..., :4])),
    "a negative scale": (lambda q, k, v: attention(q, k, v, scale=-30.0), (Q, K, V)),
    "dropout of a seed": (lambda q, k, v: fg.dropout(torch.softmax(q @ k.mT, -1), 0.5, seed=3) @ v, (Q, K, V)),
    "a bias with a gradient": (lambda q, k, v, b: attention(q, k, v, b), (Q, K, V, randn(9, 13))),
    "later keys alone": (lambda q, k, v: attention(q, k, v, torch.arange(13) >= torch.arange(9)[:, None]), (Q, K, V)),
}


@pytest.mark.parametrize("name", KEPT)
def test_gradients_of_what_torch_does_not_compute(name: str) -> None:
    function, arguments = KEPT[name]
    given = [a.double().requires_grad_() if a.is_floating_point() else a for a in arguments]
    floats = [a for a in given if a.requires_grad]
    found, exact = (torch.utils._pytree.tree_leaves(f(*given)) for f in (fg.kernel(function), function))
    one, other = (torch.autograd.grad([y.sin().sum() for y in ys], floats) for ys in (found, exact))
    torch.testing.assert_close([*found, *one], [*exact, *other])


def test_queries_and_keys_that_are_no_numbers() -> None:
    """NaN stays NaN, also where a query sees nothing else."""
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    q[0, 0, 1], k[0, 1, 0] = torch.nan, torch.nan
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ v

    torch.testing.assert_close(fg.kernel(attended)(q, k, v), attended(q, k, v), equal_nan=True)


def test_rotated_heads_go_on_without_a_copy() -> None:
    def layer(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, last: Tensor) -> Tensor:
        return F.linear(rotated(x, weight, cos, sin), last)

    shapes = (4, 1024, 1024), (3072, 1024), (1024, 64), (1024, 64), (1024, 1024)
    given = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes]
    steps = [repr(step) for step in fg.kernel(layer).lower(*given, target="sm_90a").program.steps]
    assert steps[1] == "<attention of the library>"
    assert len(steps) == 3


@pytest.mark.usefixtures("emulated")
def test_a_bias_of_all_scores_has_a_gradient_in_the_emulator() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attention(q, k, v, bias)

    given = [x.requires_grad_() for x in (Q.clone(), K.clone(), V.clone(), randn(2, 4, 9, 13))]
    found, exact = (f(*given) for f in (fg.kernel(biased), biased))
    one, other = (torch.autograd.grad(y.sin().sum(), given) for y in (found, exact))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("emulated")
def test_the_emulator_trains_no_dropout_of_attention() -> None:
    q, k, v = (x.bfloat16().requires_grad_() for x in (Q, K, V))
    with pytest.raises(UnsupportedError, match="the emulator does not support attention with dropout"):
        fg.kernel(lambda q, k, v: attention(q, k, v, dropout_p=0.5))(q, k, v)


@pytest.mark.usefixtures("emulated")
def test_dropout_of_attention_without_gradients_keeps_no_scores() -> None:
    q, k, v = (x.bfloat16() for x in (Q, K, V))
    kernel = fg.kernel(lambda q, k, v: attention(q, k, v, dropout_p=0.5))
    for target in ("sm_80", "sm_90a"):
        low = kernel.lower(q, k, v, target=target)
        assert [repr(step) for step in low.program.steps] == ["<attention of the library>"]
    torch.manual_seed(0)
    found = kernel(q, k, torch.ones_like(v))
    assert 0.9 < found.mean().item() < 1.1 and found.std().item() > 0.1


def test_dropped_weights_are_not_computed_again() -> None:
    q, k, v = (x.bfloat16() for x in (Q, K, V))
    kernel = fg.kernel(lambda q, k, v: attention(q, k, v, dropout_p=0.5).sin(), recompute="all")
    steps = [repr(step) for step in kernel.backward.lower(q, k, v, target="sm_80").program.steps]
    assert "<attention_backward of the library>" in steps
    assert "<attention of the library>" not in steps


@pytest.mark.deep
@pytest.mark.parametrize("name", ["padded", "of few heads of keys"])
def test_an_extension_gives_the_same_bits(name: str) -> None:
    function, arguments = CASES[name]
    ours, theirs = (trained(fg.kernel(function, compiler=compiler), *arguments) for compiler in ("extension", "nvrtc"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
