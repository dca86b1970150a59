"""Forward and backward passes as a user meets them: compiled, called, looked at, refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from tests.naming import case


@fg.kernel
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


@fg.kernel
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


@fg.kernel
def linear_bias_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


@fg.kernel
def gelu_dropped_add(x: Tensor, mask: Tensor, residual: Tensor) -> Tensor:
    """The mask is drawn outside: 0, or the reciprocal of the share that is kept."""
    return F.gelu(x, approximate="tanh") * mask + residual


@fg.kernel
def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


@fg.kernel
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, 1e-6), h


@fg.kernel
def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return (torch.logsumexp(x, -1, keepdim=True) - (x * target).sum(-1, keepdim=True)).mean(0)


R, K, N = 37, 96, 64
CASES: dict[str, tuple[fg.Kernel[..., Any], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (rms_norm, ((R, K), (K,))),
    "rms_norm of 3 dims": (rms_norm, ((3, 5, K), (K,))),
    "layer_norm": (layer_norm, ((R, K), (K,), (K,))),
    "linear_bias_gelu": (linear_bias_gelu, ((R, K), (N, K), (N,))),
    "linear_bias_gelu of 3 dims": (linear_bias_gelu, ((2, 5, K), (N, K), (N,))),
    "gelu_dropped_add": (gelu_dropped_add, ((R, K), (R, K), (R, K))),
    "softmax": (softmax, ((R, K),)),
    "add_rms_norm": (add_rms_norm, ((R, K), (R, K), (K,))),
    "cross_entropy": (cross_entropy, ((R, K), (R, K))),
}


def fresh(kernel: fg.Kernel[..., Any]) -> fg.Kernel[..., Any]:
    """The kernel without memory of other tests' calls."""
    return fg.kernel(kernel.function)


def listed(results: Any) -> list[Tensor]:
    """One result or several as a list."""
    return list(results) if isinstance(results, tuple) else [results]


def autograd(function: Callable[..., Any], arguments: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    """Gradients by torch."""
    leaves = [a.detach().clone().requires_grad_() for a in arguments]
    return list(torch.autograd.grad(listed(function(*leaves)), leaves, given))


def error(got: Tensor, exact: Tensor) -> float:
    """The root of the mean square difference."""
    return float((got.double() - exact).square().mean().sqrt())


def near_to_float64(name: str, dtype: torch.dtype) -> None:
    """Gradients are as near to float64's as eager's are."""
    kernel, shapes = CASES[name]
    arguments = [torch.randn(shape).to(dtype) for shape in shapes]
    passes = fg.vjp(fresh(kernel), *arguments)
    results, saved = passes.forward(*arguments)
    given = [torch.randn(r.shape).to(dtype) for r in listed(results)]
    got = passes.backward(saved, *given)
    exact = autograd(kernel.function, [a.double() for a in arguments], [g.double() for g in given])
    eager = autograd(kernel.function, arguments, given)
    unit = torch.finfo(dtype).eps
    for one, other, wanted in zip(got, eager, exact, strict=True):
        assert one.dtype is dtype and one.shape == wanted.shape
        slack = unit * float(wanted.square().mean().sqrt())  # of few elements, by chance
        assert error(one, wanted) <= 1.25 * error(other, wanted) + (slack if dtype is torch.float32 else 0.1 * slack)


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_gradients_are_as_near_to_float64_as_eager_s(dtype: torch.dtype, part: int) -> None:
    for name in list(CASES)[part::2]:
        with case(name):
            near_to_float64(name, dtype)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["layer_norm", "linear_bias_gelu", "add_rms_norm", "cross_entropy"])
def test_gradients_on_a_gpu_are_as_near(name: str) -> None:
    near_to_float64(name, torch.float16)


RULES: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "cumsum": (lambda x: x.cumsum(-1), (R, K), 2),
    "cummax": (lambda x: x.cummax(-1).values, (R, K), 2),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), (R, K), 4),
    "cumsum of columns": (lambda x: x.cumsum(0) * x, (R, K), 3),
    "cumprod": (lambda x: (x / 4 + 1).cumprod(-1), (5, 11), 6),
    "prod": (lambda x: x.prod(-1), (R, 7), 1),
    "max": (lambda x: x.max(-1).values, (R, K), 1),
    "norm": (lambda x: F.normalize(x, dim=-1), (R, K), 1),
    "std": (lambda x: x.std(-1), (R, K), 1),
}


def rules_hold(name: str, dtype: torch.dtype) -> None:
    """A gradient by a rule is as near to float64's as eager's is, and takes so many launches."""
    function, shape, launches = RULES[name]
    x = torch.randn(shape).to(dtype)
    passes = fg.vjp(fg.kernel(function), x)
    y, saved = passes.forward(x)
    given = torch.randn(y.shape).to(dtype)
    (exact,) = autograd(function, [x.double()], [given.double()])
    (eager,) = autograd(function, [x], [given])
    (got,) = passes.backward(saved, given)
    slack = torch.finfo(dtype).eps * float(exact.square().mean().sqrt())
    assert error(got, exact) <= 1.25 * error(eager, exact) + slack
    assert len(passes.backward.lower().program.steps) == launches


def test_rules_as_they_run() -> None:
    for name in RULES:
        with case(name):
            rules_hold(name, torch.bfloat16)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("names", [["cumsum", "cumsum of columns"], ["cumprod"], ["max", "std"]], ids=lambda names: names[0])
def test_rules_as_they_run_on_a_gpu(names: list[str]) -> None:
    for name in names:
        with case(name):
            rules_hold(name, torch.float32)


def meta(*shape: int) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_a_gradient_that_passes_through_is_not_copied() -> None:
    x, mask, residual = (torch.randn(5, 8) for _ in range(3))
    passes = fg.vjp(fresh(gelu_dropped_add), x, mask, residual, wrt=["x", "residual"])
    y, saved = passes.forward(x, mask, residual)
    given = torch.randn_like(y)
    assert passes.backward(saved, given)[1] is given
    sums = fg.vjp(fg.kernel(lambda x, y: x + y), x, mask)
    _, saved = sums.forward(x, mask)
    assert all(gradient is given for gradient in sums.backward(saved, given))
    assert not sums.backward.lower().program.steps


def test_gradients_by_name_and_of_integers() -> None:
    x, n = torch.randn(5, 8), torch.arange(8)
    passes = fg.vjp(fg.kernel(lambda x, n, s: x * n * s), x, n, 2.5)
    assert passes.wrt == ("x",)
    _, saved = passes.forward(x, n, 0.5)  # a run-time number
    torch.testing.assert_close(passes.backward(saved, torch.ones(5, 8))[0], (0.5 * n).float().expand(5, 8))
    for name in ("n", "s", "z"):
        with pytest.raises(ArgumentError, match=f"'{name}' is not a float tensor among its inputs"):
            fg.vjp(fg.kernel(lambda x, n, s: x * n * s), x, n, 2.5, wrt=[name])
    assert fg.vjp(fg.kernel(lambda x, y: x * y), x, x + 1, wrt=["y", "x", "y"]).wrt == ("y", "x")
    assert fg.vjp(fg.kernel(lambda x, weight: x * weight), x, x + 1, wrt="weight").wrt == ("weight",)


def test_zeros_by_what_no_result_depends_on() -> None:
    x, y = torch.randn(5, 8), torch.randn(3, 8)
    passes = fg.vjp(fg.kernel(lambda x, y: x * 2), x, y)
    _, saved = passes.forward(x, y)
    dx, dy = passes.backward(saved, torch.ones(5, 8))
    assert torch.equal(dx, torch.full((5, 8), 2.0)) and torch.equal(dy, torch.zeros(3, 8))


def test_results_keep_their_structure_and_some_have_no_gradient() -> None:
    passes = fg.vjp(fg.kernel(lambda x: {"a": [x * x], "b": x > 0, "c": x}), x := torch.randn(5, 8))
    results, saved = passes.forward(x)
    assert torch.equal(results["a"][0], x * x) and torch.equal(results["b"], x > 0) and results["c"] is not x
    given = torch.randn(5, 8)
    torch.testing.assert_close(passes.backward(saved, given, torch.ones(5, 8))[0], 2 * x * given + 1)


def test_a_method_and_other_names() -> None:
    class Layer:
        def __init__(self) -> None:
            self.scale = 3.0

        @fg.kernel
        def forward(self, grad: Tensor, saved: Tensor, forward_0: Tensor) -> Tensor:
            return F.softmax(grad * self.scale, -1) * saved.exp() * forward_0

    arguments = [torch.randn(4, 6) for _ in range(3)]
    passes = fg.vjp(Layer().forward, *arguments)
    assert passes.wrt == ("grad", "saved", "forward_0") and repr(passes) == "<fusegen vjp of forward by grad, saved, forward_0>"
    y, saved = passes.forward(*arguments)
    wanted = autograd(lambda a, b, c: F.softmax(a * 3.0, -1) * b.exp() * c, arguments, [torch.ones_like(y)])
    for one, other in zip(passes.backward(saved, torch.ones_like(y)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
