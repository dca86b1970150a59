"""Passes in later calls: other sizes, layouts, numbers and state than those that they were made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError, GradientError, UnsupportedError
from tests.naming import case
from tests.unit.test_vjp import autograd, fresh, listed, rms_norm


def test_another_batch_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(16)
    passes = fg.vjp(fresh(rms_norm), torch.randn(4, 16), weight)
    _call(passes, torch.randn(4, 16), weight)
    monkeypatch.setattr("fusegen.compiler.passes.compile_graph", lambda *a, **k: pytest.fail("compiled again"))
    for rows in (2, 3, 77):
        _call(passes, torch.randn(rows, 16), weight)
    graph = passes.forward._passes.forward  # a batch of one, of which the kernel itself has another variant
    row = torch.randn(1, 16)
    torch.testing.assert_close(graph([row, weight])[0], rms_norm.function(row, weight))


HOOKS: list[Callable[[torch.nn.Module], Any]] = [
    lambda m: m.register_full_backward_hook(lambda *_: None),
    lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    lambda _: torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None),
    lambda _: torch.nn.modules.module.register_module_full_backward_pre_hook(lambda *_: None),
]


@pytest.mark.parametrize("register", HOOKS)
def test_backward_hooks_of_modules_are_refused_also_later(register: Callable[[torch.nn.Module], Any]) -> None:
    module, x = torch.nn.Tanh(), torch.randn(4)
    kernel = fg.kernel(lambda x: module(x) * 3)
    passes = fg.vjp(kernel, x)
    handle = register(module)
    try:
        for call in (passes.forward, lambda x: fg.vjp(kernel, x)):
            with pytest.raises(UnsupportedError, match="backward hooks"):
                call(x)
        torch.testing.assert_close(kernel(x), torch.tanh(x) * 3)
    finally:
        handle.remove()
    passes.forward(x)


def _call(passes: fg.Vjp, x: Tensor, weight: Tensor) -> None:
    """Compares with torch."""
    y, saved = passes.forward(x, weight)
    given = torch.randn(y.shape)
    wanted = autograd(rms_norm.function, [x.double(), weight.double()], [given.double()])
    for one, other in zip(passes.backward(saved, given), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_sizes_that_no_saved_value_has() -> None:
    """A sum's gradient is repeated over dims that only the forward pass saw."""
    passes = fg.vjp(fg.kernel(lambda x: x.sum()), torch.randn(4, 16))
    for rows in (4, 9):
        _, saved = passes.forward(torch.randn(rows, 16))
        assert torch.equal(passes.backward(saved, torch.tensor(3.0))[0], torch.full((rows, 16), 3.0))


def test_strided_arguments_and_gradients() -> None:
    x, weight = torch.randn(16, 6), torch.randn(32)[::2]
    passes = fg.vjp(fresh(rms_norm), x.T, weight)
    y, saved = passes.forward(x.T, weight)
    for given in (torch.randn(16, 6).T, torch.ones(()).expand(6, 16), torch.randn(6, 32)[:, 1::2], torch.randn(6, 16)):
        wanted = autograd(rms_norm.function, [x.T, weight], [given])
        for one, other in zip(passes.backward(saved, given), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert y.is_contiguous()


def check(passes: fg.Vjp, function: Callable[..., Any], *arguments: Any) -> None:
    """The gradients of a call are torch's."""
    results, saved = passes.forward(*arguments)
    given = [torch.randn(r.shape, dtype=r.dtype) for r in listed(results)]
    leaves = [a.detach().double().requires_grad_() if isinstance(a, Tensor) else a for a in arguments]
    floats = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    wanted = torch.autograd.grad(listed(function(*leaves)), floats, [g.double() for g in given])
    for one, other in zip(passes.backward(saved, *given), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_other_branches_have_passes_of_their_own() -> None:
    def branch(x: Tensor, s: float, flip: bool) -> Tensor:
        y = x * 2 if x.shape[0] > 4 else x * 3
        y = y * s if s > 0 else y - s
        return -y if flip else y

    x = torch.randn(8, 6)
    passes = fg.vjp(fg.kernel(branch), x, 1.0, False)
    for rows, s, flip in ((5, 2.0, False), (3, 1.0, False), (8, -1.0, False), (8, 1.0, True), (8, 1, False), (8, 1.0, False)):
        check(passes, branch, torch.randn(rows, 6), s, flip)
    check(passes, branch, x[0], 1.0, False)
    check(passes, branch, x.double(), 1.0, False)
    with pytest.raises(ArgumentError, match="of branch differentiate x; this call would differentiate nothing"):
        passes.forward(x.int(), 1.0, False)
    with pytest.raises(ArgumentError, match="no argument is a tensor"):
        passes.forward(2.0, 1.0, False)


def test_a_batch_that_is_literal_at_first() -> None:
    """Of one row, or as long as another dim."""
    for rows in [1, 16]:
        with case(rows):
            weight = torch.randn(16)
            passes = fg.vjp(fresh(rms_norm), torch.randn(rows, 16), weight)
            for others in (5, 1, 16, 77, rows):
                _call(passes, torch.randn(others, 16), weight)


def test_state_is_looked_at_in_each_call() -> None:
    scale = {"factor": 2.0}
    passes = fg.vjp(fg.kernel(lambda x: x * scale["factor"]), x := torch.randn(4, 6))
    for factor in (2.0, 3.0, 2.0):
        scale["factor"] = factor
        y, saved = passes.forward(x)
        scale["factor"] = 7.0  # which the call did not see
        assert torch.equal(y, x * factor) and torch.equal(passes.backward(saved, torch.ones(4, 6))[0], torch.full((4, 6), factor))


def test_parameters_of_a_module() -> None:
    """By default there are gradients by what requires them; what is left out is constant where nothing asks for its gradient."""
    module = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 6), torch.nn.GELU())
    module[0].bias.requires_grad_(False)
    kernel, x = fg.kernel(lambda x: module(x)), torch.randn(5, 8)
    passes = fg.vjp(kernel, x)
    assert passes.wrt == ("x", "layernorm_weight", "linear_weight", "linear_bias")
    for rows in (5, 1, 9):
        x = torch.randn(rows, 8)
        y, saved = passes.forward(x)
        given, leaf = torch.randn(y.shape), x.clone().requires_grad_()
        wanted = torch.autograd.grad(module(leaf), [leaf, module[0].weight, module[1].weight, module[1].bias], given)
        for one, other in zip(passes.backward(saved, given), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    alone = fg.vjp(kernel, x, wrt=["x"])
    with pytest.raises(GradientError, match="requires a gradient"):
        alone.forward(x)
    with torch.no_grad():
        y, saved = alone.forward(x)
    torch.testing.assert_close(alone.backward(saved, given)[0], wanted[0], rtol=1e-4, atol=1e-5)


def test_closed_over_tensors_are_constants_of_their_call() -> None:
    weight = torch.randn(6)
    passes = fg.vjp(fg.kernel(lambda x: x * weight), x := torch.randn(4, 6))
    assert passes.wrt == ("x",)
    _, saved = passes.forward(x)
    assert torch.equal(passes.backward(saved, torch.ones(4, 6))[0], weight.expand(4, 6))
    weight = torch.randn(6)  # another tensor, as the call finds it
    _, saved = passes.forward(x)
    assert torch.equal(passes.backward(saved, torch.ones(4, 6))[0], weight.expand(4, 6))
    weight.requires_grad_()
    with pytest.raises(ArgumentError, match="differentiate x; this call would differentiate x, weight"):
        passes.forward(x)


def test_another_tensor_under_a_name_by_which_there_is_a_gradient() -> None:
    """A variant may close over others, which it calls the same."""
    layers = [torch.nn.Linear(6, 6, bias=False) for _ in range(2)]
    passes = fg.vjp(fg.kernel(lambda x: layers[x.shape[0] > 4](x)), torch.randn(8, 6))
    assert passes.wrt == ("x", "linear_weight")
    with pytest.raises(ArgumentError, match="'linear_weight' is not the tensor of the first call"):
        passes.forward(torch.randn(3, 6))


def test_a_weight_that_is_replaced() -> None:
    """Its place is what there is a gradient by: also in variants that are made later."""
    layer, x = torch.nn.Linear(6, 6, bias=False), torch.randn(1, 6)
    passes = fg.vjp(fg.kernel(lambda x: layer(x)), x)
    layer.weight = torch.nn.Parameter(torch.randn(6, 6))
    for rows in (1, 5):
        x = torch.randn(rows, 6)
        y, saved = passes.forward(x)
        wanted = torch.autograd.grad(layer(x), layer.weight, torch.ones_like(y))
        torch.testing.assert_close(passes.backward(saved, torch.ones_like(y))[1], *wanted)
