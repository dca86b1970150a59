"""Gradients through calls: a kernel is a function that autograd records, as those of torch are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusegen as fg
from fusegen.errors import GradientError
from tests.unit.eager import randn, same


def norm_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, b), approximate="tanh")


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]


def listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def gradients(function: Callable[..., Any], tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results, and gradients of their sum, each result weighted by other numbers."""
    results = listed(function(*tensors))
    recorded = [r for r in results if r.requires_grad]
    given = [torch.linspace(-1, 2, r.numel(), dtype=torch.float64).to(r.dtype).reshape(r.shape) for r in recorded]
    by = [t for t in tensors if t.requires_grad]
    return results, list(torch.autograd.grad(recorded, by, given, allow_unused=True))


def trains(function: Callable[..., Any], *calls: tuple[Tensor, ...]) -> None:
    """For each call: results, which of them are recorded, and gradients are torch's."""
    kernel = fg.kernel(function)
    for number, arguments in enumerate(calls):
        ours, theirs = gradients(kernel, leaves(*arguments)), gradients(function, leaves(*arguments))
        same(ours[0], theirs[0], f"call {number}")
        assert [r.requires_grad for r in ours[0]] == [r.requires_grad for r in theirs[0]]
        for one, other in zip(ours[1], theirs[1], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                same(one, other, f"gradient of call {number}")


def test_gradients_by_arguments_at_several_shapes() -> None:
    trains(norm_gelu, *((randn(rows, width), randn(width), randn(width)) for rows, width in ((5, 64), (1, 64), (9, 64), (3, 48))))
    trains(lambda x, y: (x @ y).softmax(-1) * x.sum(), (randn(4, 4), randn(4, 4)), (randn(6, 6), randn(6, 6)))
    trains(lambda x, n: x[n] * 2, (randn(6, 8), torch.tensor([3, 3, 0])))


def test_results_without_a_derivative() -> None:
    """Some of several, an input that none depends on, and all of them."""
    trains(lambda x, y: (x * 2, x.argmax(-1), x > 0, y.detach() * x.detach(), (x - 1, 3 * x)[1]), (randn(4, 8), randn(4, 8)))
    x = randn(4, 8).requires_grad_()
    index, shape = fg.kernel(lambda x: (x.argmax(-1), torch.ones_like(x)))(x)
    assert not index.requires_grad and not shape.requires_grad


@pytest.mark.parametrize("of", [lambda x: x.argmax(-1), Tensor.detach, lambda x: x > 0, Tensor.long])
def test_products_of_which_no_result_has_a_gradient(of: Callable[[Tensor], Tensor]) -> None:
    """Torch's own functions, which write to memory of the call, are not recorded."""
    weight, kernel = randn(4, 4).requires_grad_(), fg.kernel(lambda x: of(x @ weight))
    for _ in range(2):
        y = kernel(x := randn(3, 4))
        assert not y.requires_grad
        same(y, of(x @ weight))


def test_what_requires_a_gradient_may_change() -> None:
    kernel, x, w, b = fg.kernel(norm_gelu), randn(5, 64), randn(64), randn(64)
    for which in ((True, False, False), (False, True, True), (False, False, False), (True, True, True), (True, False, False)):
        given = [t.clone().requires_grad_(wanted) for t, wanted in zip((x, w, b), which, strict=True)]
        y = kernel(*given)
        assert y.requires_grad == any(which)
        if any(which):
            wanted = torch.autograd.grad(norm_gelu(*given).sum(), [t for t in given if t.requires_grad])
            same(torch.autograd.grad(y.sum(), [t for t in given if t.requires_grad]), wanted)
    with torch.no_grad():
        assert not kernel(*leaves(x, w, b)).requires_grad


def test_gradients_that_are_missing_or_lie_otherwise_in_memory() -> None:
    x = randn(6, 8).requires_grad_()
    kernel = fg.kernel(lambda x: (x.exp(), x.sin()))
    for use in (
        lambda a, b: a.sum(),
        lambda a, b: b.mT.contiguous().mT.mean(),
        lambda a, b: (a * b.flip(0)).sum(),
        lambda a, b: b[0, 0],
    ):
        same(torch.autograd.grad(use(*kernel(x)), x), torch.autograd.grad(use(x.exp(), x.sin()), x))


def test_a_graph_that_is_kept_and_hooks() -> None:
    x = randn(6, 8).requires_grad_()
    y = fg.kernel(lambda x: x.exp() * 2)(x)
    seen: list[Tensor] = []
    y.register_hook(seen.append)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), x)[0]) and len(seen) == 2
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_an_input_that_is_changed_before_the_backward_pass() -> None:
    x, w = randn(6, 8), randn(6, 8).requires_grad_()
    y = fg.kernel(lambda x, w: x.exp() * w)(x, w)
    y.sum().backward()
    same(w.grad, x.exp())
    x = randn(6, 8)
    y = fg.kernel(lambda x, w: x * w)(x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_dropout_has_one_mask_in_both_passes() -> None:
    kernel, x = fg.kernel(lambda x, scale: F.dropout(x, 0.5) * scale), torch.ones(4, 1024, requires_grad=True)
    for scale in (2.0, 3.0):
        y = kernel(x, scale)
        assert 0.4 < (y == 0).double().mean() < 0.6
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())
    masks = []
    for one in (kernel, kernel, fg.kernel(kernel.function)):  # of a seed, whether it is the first call or not
        torch.manual_seed(3)
        masks.append(one(x, 2.0))
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
    y = checkpoint(kernel, x, 2.0, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())


def test_empty_tensors() -> None:
    trains(norm_gelu, (randn(0, 64), randn(64), randn(64)))


def test_a_module_trains() -> None:
    """Captured parameters get gradients, and are seen as the optimizer, and whoever else, leaves them."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    theirs = copy.deepcopy(ours)
    kernel = fg.kernel(lambda x: ours(x))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ours, theirs)]
    for step in range(5):
        if step == 2:  # as load_state_dict does, and as one freezes a layer
            for m in (ours, theirs):
                m[3].weight = nn.Parameter(torch.full((4, 16), 0.1))
                m[0].bias.requires_grad_(False)
        x = randn(5, 8)
        losses = [call(x).square().mean() for call in (kernel, theirs)]
        same(losses[0].detach(), losses[1].detach(), f"step {step}")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_gradients_in_half_precision_and_double() -> None:
    x = randn(4, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(fg.kernel(lambda x: (x.sin() * x).exp()), (x,))
    for dtype in (torch.float16, torch.bfloat16):
        trains(lambda x, w: x.float() * w, (randn(4, 8, dtype=dtype), randn(8)))


def test_what_has_no_gradient_is_refused() -> None:
    x = randn(4, 8).requires_grad_()

    def scale(x: Tensor, y: Tensor) -> None:
        y.mul_(x)

    with pytest.raises(GradientError, match="writes in place"):
        fg.kernel(scale, mutates=("y",))(x, randn(4, 8))
    once = torch.autograd.grad(fg.kernel(lambda x: x.exp())(x).sum(), x, create_graph=True)[0]
    with pytest.raises(GradientError, match="differentiated again"):
        once.sum().backward()
    loss = fg.kernel(lambda x, w, t: F.cross_entropy(F.linear(x, w), t))  # its forward pass saves nothing but gradients
    many = randn(1024, 4).requires_grad_()
    loss_of_many = loss(many, randn(32768, 4), torch.zeros(1024, dtype=torch.int64))
    once = torch.autograd.grad(loss_of_many, many, create_graph=True)[0]
    with pytest.raises(GradientError, match="differentiated again"):
        once.sum().backward()
    weight = randn(8, 3).requires_grad_()  # with respect to an input that is not saved, beside a value that depends on it otherwise
    product = fg.kernel(lambda x, w: (x @ w).sin())(randn(4, 8), weight)
    once = torch.autograd.grad(product.sum(), weight, create_graph=True)[0]
    with pytest.raises(GradientError, match="differentiated again"):
        torch.autograd.grad(once.square().sum() + weight.sum(), weight)
    weight = randn(3, 8).requires_grad_()  # its gradient, x.exp(), is saved, but does not depend on it
    product = fg.kernel(lambda x, w: F.linear(x.exp(), w))(randn(4, 8), weight)
    assert not torch.autograd.grad(product.sum(), weight, create_graph=True)[0].requires_grad
    with pytest.raises(GradientError, match="gradients are batched"):
        torch.autograd.grad(fg.kernel(lambda x: x.exp())(x), x, torch.ones(2, 4, 8), is_grads_batched=True)


def test_the_backward_pass_is_looked_at() -> None:
    x, layer = randn(6, 8), nn.LayerNorm(8)
    kernel, module = fg.kernel(norm_gelu), fg.kernel(layer)
    for low in (
        kernel.backward.lower(x, layer.weight, layer.bias, target="sm_90a"),
        module.backward.lower(x, target="sm_90a"),
    ):
        assert "_backward for sm_90a" in low.explain() and "__global__" in low.asm["cuda"]
    assert len(kernel.backward.lower(x, layer.weight, layer.bias, wrt="w").traced.outputs) == 1


def test_an_empty_result_beside_another() -> None:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[:0] * 3

    x = torch.randn(4, requires_grad=True)
    full, empty = fg.kernel(halves)(x)
    assert empty.shape == (0,) and empty.requires_grad
    (full.sum() + empty.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((4,), 2.0))
