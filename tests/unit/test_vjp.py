"""Forward and backward passes as a user meets them: compiled, called, looked at, refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, FusegenError, GradientError, UnsupportedError
from fusegen.passes.fuse import GroupKind
from fusegen.schedule.program import Launch


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
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


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
    "swiglu": (swiglu, ((R, K), (R, K))),
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


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_as_near_to_float64_as_eager_s(case: str, dtype: torch.dtype) -> None:
    kernel, shapes = CASES[case]
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


RULES: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "cumsum": (lambda x: x.cumsum(-1), (R, K), 2),
    "cumsum of columns": (lambda x: x.cumsum(0) * x, (R, K), 3),
    "cumprod": (lambda x: (x / 4 + 1).cumprod(-1), (5, 11), 6),
    "prod": (lambda x: x.prod(-1), (R, 7), 1),
    "max": (lambda x: x.max(-1).values, (R, K), 1),
    "norm": (lambda x: F.normalize(x, dim=-1), (R, K), 1),
    "std": (lambda x: x.std(-1), (R, K), 1),
}


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", RULES)
def test_rules_as_they_run(case: str, dtype: torch.dtype) -> None:
    function, shape, launches = RULES[case]
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


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("count", [1, 3])
def test_negative_log_likelihood(count: int) -> None:
    def likelihood(x: Tensor, target: Tensor) -> Tensor:
        return -F.log_softmax(x, -1).gather(-1, target).mean()

    x, target = torch.randn(R, K), torch.randint(0, K, (R, count))
    passes = fg.vjp(fg.kernel(likelihood), x, target)
    _, saved = passes.forward(x, target)
    leaf = x.double().requires_grad_()
    likelihood(leaf, target).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(passes.backward(saved, torch.tensor(1.0))[0].double(), leaf.grad, rtol=1e-4, atol=1e-7)
    assert len(passes.backward.lower().program.steps) == 1


def meta(*shape: int) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


M = meta(8192, 4096)
LAUNCHES: dict[str, tuple[fg.Kernel[..., Any], tuple[Tensor, ...], int, int, int]] = {
    "rms_norm": (rms_norm, (M, meta(4096)), 1, 2, 0),
    "rms_norm of 3 dims": (rms_norm, (meta(8, 1024, 4096), meta(4096)), 1, 2, 0),
    "layer_norm": (layer_norm, (M, meta(4096), meta(4096)), 1, 2, 0),
    "linear_bias_gelu": (linear_bias_gelu, (M, meta(8192, 4096), meta(8192)), 1, 2, 2),
    "gelu_dropped_add": (gelu_dropped_add, (M, M, M), 1, 1, 0),
    "swiglu": (swiglu, (M, M), 1, 1, 0),
    "softmax": (softmax, (M,), 1, 1, 0),
    "add_rms_norm": (add_rms_norm, (M, M, meta(4096)), 1, 2, 0),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_launches_on_hopper(case: str) -> None:
    """Forward in one launch; backward in kernels, a combination of column sums among them, and products by the library."""
    kernel, arguments, forward, backward, products = LAUNCHES[case]
    passes = fg.vjp(fresh(kernel), *arguments, target="sm_90a")
    steps = passes.backward.lower().program.steps
    assert len(passes.forward.lower().program.steps) == forward
    assert sum(isinstance(step, Launch) for step in steps) == backward
    assert sum(step.group.kind is GroupKind.LIBRARY for step in steps) == products


def test_norms_move_what_they_must() -> None:
    """x and the gradient are read once, one gradient is written; the forward pass writes one number a row besides its result."""
    passes = fg.vjp(fresh(rms_norm), M, meta(4096), target="sm_90a")
    forward, backward = passes.forward.lower(), passes.backward.lower()
    whole, rows = 8192 * 4096 * 2, 8192 * 4
    (launch,) = forward.program.launches
    assert launch.traffic.written(forward.sizes) == whole + rows
    first = backward.program.launches[0]
    assert first.traffic.read(backward.sizes) == 2 * whole + 4096 * 2 + rows


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


def test_inputs_are_passed_again_and_results_as_they_are() -> None:
    x, weight = torch.randn(5, 8), torch.randn(8)
    _, saved = fg.vjp(fresh(rms_norm), x, weight).forward(x, weight)
    assert saved.tensors[0] is x and saved.tensors[1] is weight and saved.tensors[2].shape == (5, 1)
    y, saved = fg.vjp(fresh(softmax), x).forward(x)
    assert len(saved.tensors) == 1 and saved.tensors[0] is y


def test_gradients_by_name_and_of_integers() -> None:
    x, n = torch.randn(5, 8), torch.arange(8)
    passes = fg.vjp(fg.kernel(lambda x, n, s: x * n * s), x, n, 2.5)
    assert passes.wrt == ("x",)
    _, saved = passes.forward(x, n, 0.5)  # a run-time number
    torch.testing.assert_close(passes.backward(saved, torch.ones(5, 8))[0], (0.5 * n).float().expand(5, 8))
    for name in ("n", "s", "z"):
        with pytest.raises(ArgumentError, match=f"'{name}' is no tensor of floats that it is given"):
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


# Sizes, layouts, numbers, state.


def test_another_batch_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(16)
    passes = fg.vjp(fresh(rms_norm), torch.randn(4, 16), weight)
    _call(passes, torch.randn(4, 16), weight)
    monkeypatch.setattr("fusegen.runtime.graph_kernel.compile_graph", lambda *a, **k: pytest.fail("compiled again"))
    for rows in (2, 3, 77):
        _call(passes, torch.randn(rows, 16), weight)
    graph = passes.forward._passes.forward  # a batch of one, of which the kernel itself has another variant
    row = torch.randn(1, 16)
    torch.testing.assert_close(graph([row, weight], {}, {})[0], rms_norm.function(row, weight))


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
    with pytest.raises(ArgumentError, match="of branch give gradients by x, and would here give them by nothing"):
        passes.forward(x.int(), 1.0, False)
    with pytest.raises(ArgumentError, match="no argument is a tensor"):
        passes.forward(2.0, 1.0, False)


@pytest.mark.parametrize("rows", [1, 16])
def test_a_batch_that_is_literal_at_first(rows: int) -> None:
    """Of one row, or as long as another dim."""
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


def test_a_function_that_changes_what_it_reads() -> None:
    calls = [0]

    def counted(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * calls[0]

    passes = fg.vjp(fg.kernel(counted), x := torch.randn(4, 6))
    for number in (2, 3):
        calls[0] = number - 1
        _, saved = passes.forward(x)
        assert torch.equal(passes.backward(saved, torch.ones(4, 6))[0], torch.full((4, 6), float(number)))


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
    with pytest.raises(GradientError, match="requires a gradient"):
        kernel(x)


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
    with pytest.raises(ArgumentError, match="give gradients by x, and would here give them by x, weight"):
        passes.forward(x)


def test_another_tensor_under_a_name_by_which_there_is_a_gradient() -> None:
    """A variant may close over others, which it calls the same."""
    layers = [torch.nn.Linear(6, 6, bias=False) for _ in range(2)]
    passes = fg.vjp(fg.kernel(lambda x: layers[x.shape[0] > 4](x)), torch.randn(8, 6))
    assert passes.wrt == ("x", "linear_weight")
    with pytest.raises(ArgumentError, match="'linear_weight' is another tensor than at first"):
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


# What is refused.


def test_wrong_gradients_and_saved_values() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16)
    passes = fg.vjp(fresh(rms_norm), x, weight)
    y, saved = passes.forward(x, weight)
    good = torch.ones_like(y)
    other = fg.vjp(fresh(rms_norm), x, weight).forward(x, weight)[1]
    for match, arguments in {
        "needs 1 gradient, and is given 0": (saved,),
        "needs 1 gradient, and is given 2": (saved, good, good),
        r"'grad' has shape \(5, 16\), where \(x_dim0, 16\) is needed, with x_dim0=4": (saved, torch.ones(5, 16)),
        r"'grad' has shape \(4, 17\)": (saved, torch.ones(4, 17)),
        r"'grad' has shape \(16,\)": (saved, torch.ones(16)),
        "'grad' is of torch.float64, where torch.float32 is needed": (saved, good.double()),
        "'grad' is on meta, but 'x' is on cpu": (saved, good.to("meta")),
        "'grad' is a float, where a tensor is needed": (saved, 1.0),
        "not what its forward pass left": (other, good),
        "first argument is not what its forward pass": ((x, weight), good),
        "needs 3 saved tensors, and is given 2": (saved.with_tensors(saved.tensors[:2]), good),
        r"'weight' has shape \(4, 16\)": (saved.with_tensors((x, x, saved.tensors[2])), good),
        r"'saved' is of torch.bfloat16": (saved.with_tensors((x, weight, saved.tensors[2].bfloat16())), good),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            passes.backward(*arguments)
    with pytest.raises(GradientError, match="'grad' requires a gradient"):
        passes.backward(saved, good.clone().requires_grad_())
    passes.backward(saved, good)


def test_wrong_arguments() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16)
    passes = fg.vjp(fresh(rms_norm), x, weight)
    for match, arguments in {
        r"rms_norm: weight or bias of shape \(16,\) for an input of shape": (torch.randn(4, 17), weight),
        r"rms_norm: weight or bias of shape \(\) for an input of shape": (x, 2.0),
        "'x' has no elements": (x[:0], weight),
        "missing a required argument: 'weight'": (x,),
        "'x' is a meta tensor": (x.to("meta"), weight.to("meta")),
    }.items():
        with pytest.raises(FusegenError, match=match):
            passes.forward(*arguments)
    with pytest.raises(GradientError, match="'x' requires a gradient"):
        passes.forward(x.clone().requires_grad_(), weight)
    elsewhere = fg.vjp(fresh(rms_norm), meta(4, 16).float(), meta(16).float(), target="sm_90a")
    with pytest.raises(ArgumentError, match=r"compiled for sm_90a, and its tensors are on cpu \(cpu\)"):
        elsewhere.forward(x, weight)


def test_what_changes_between_the_passes_is_refused() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16)
    passes = fg.vjp(fresh(rms_norm), x, weight)
    y, saved = passes.forward(x, weight)
    weight += 1
    with pytest.raises(ArgumentError, match="'weight' was changed in place after the forward pass"):
        passes.backward(saved, torch.ones_like(y))


class StraightThrough(torch.autograd.Function):
    """A step whose gradient is that of the identity."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _centered(switched: Any) -> Callable[[Tensor], Tensor]:
    """A function whose mean counts as constant in torch."""

    def centered(x: Tensor) -> Tensor:
        with switched():
            mean = x.mean(-1, keepdim=True)
        return x - mean

    return centered


@pytest.mark.parametrize("called_under", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(
    "function", [_centered(torch.no_grad), _centered(torch.inference_mode), lambda x: x * StraightThrough.apply(x)]
)
def test_gradients_that_are_switched_off_inside_are_refused(function: Callable[[Tensor], Tensor], called_under: Any) -> None:
    """What torch would not differentiate, or otherwise, though the graph could be: also where no call could tell."""
    kernel, x = fg.kernel(function), torch.randn(4, 6)
    with called_under():
        torch.testing.assert_close(kernel(x), function(x))
        with pytest.raises(UnsupportedError, match=r"computes something under torch.no_grad\(\) or in a torch.autograd.Function"):
            fg.vjp(kernel, x)
        fg.vjp(fg.kernel(lambda x: x - x.mean(-1, keepdim=True)), x)


def test_nothing_to_differentiate() -> None:
    for function in (lambda x: x > 0, lambda x: x.detach()):
        with pytest.raises(GradientError, match="no result has a derivative by x"):
            fg.vjp(fg.kernel(function), torch.randn(4, 6))


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


def test_around_it_torch_s_autograd() -> None:
    """What a module of gradients is made of: torch keeps the saved tensors, and gives them back."""
    weight = torch.randn(6, requires_grad=True)
    x = torch.randn(4, 6, requires_grad=True)
    passes = fg.vjp(fresh(rms_norm), x, weight)

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            y, saved = passes.forward(x, weight)
            ctx.saved = saved.with_tensors(())
            ctx.save_for_backward(*saved.tensors)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            return passes.backward(ctx.saved.with_tensors(ctx.saved_tensors), grad)

    Norm.apply(x, weight).square().sum().backward()
    wanted = torch.autograd.grad(rms_norm.function(x, weight).square().sum(), (x, weight))
    for leaf, other in zip((x, weight), wanted, strict=True):
        torch.testing.assert_close(leaf.grad, other, rtol=1e-5, atol=1e-5)


def test_the_stages_can_be_looked_at() -> None:
    passes = fg.vjp(fresh(rms_norm), M, meta(4096), target="sm_90a")
    low = passes.backward.lower()
    assert low.traced.name == "rms_norm_backward" and "row and column reduction" in low.explain()
    assert "fg_rms_norm_backward" in low.asm["cuda"] and low.target.name == "sm_90a"
    assert [spec.dtype for spec in low.traced.inputs][2] is DType.FLOAT32
    with pytest.raises(FusegenError, match="unknown target"):
        fg.vjp(fresh(rms_norm), M, meta(4096), target="sm_1")
