"""Gradients at special values, as torch has them: zeros of both signs, bounds, ties, infinities, NaN, and what overflows midway."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.naming import case
from tests.unit.eager import expressions, function_of
from tests.unit.test_autodiff import derived, gradients, traced

INF, NAN = math.inf, math.nan
POINTS = (
    -INF, -1e300, -1e14, -1e4, -100.0, -88.0, -20.0, -7.0, -6.0, -3.0, -2.5, -2.0, -1.0, -0.5, -1e-8, -1e-30, -0.0,
    0.0, 1e-30, 1e-8, 0.5, 1.0, 2.0, 2.5, 3.0, 4.0, 6.0, 7.0, 20.0, 20.5, 88.0, 100.0, 1e4, 1e14, 1e300, INF, NAN,
)  # fmt: skip
FEW = (-INF, -100.0, -2.5, -1.0, -0.5, -0.0, 0.0, 1e-310, 0.5, 1.0, 2.0, 3.0, 100.0, INF, NAN)
ROWS = (
    (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0), (3.0, 3.0, 3.0, -3.0), (100.0, -100.0, 100.0, 2.0), (INF, 1.0, 2.0, 3.0),
    (-INF, -INF, -INF, -INF), (NAN, 1.0, 2.0, 3.0), (-0.0, 0.0, -0.0, 0.0), (INF, INF, 1.0, 2.0), (0.0, 2.0, 0.0, 3.0),
    (0.0, 2.0, 3.0, 4.0), (-INF, INF, 0.0, 1.0), (0.0, -1.0, -2.0, -2.0), (2.0, -1.0, 0.0, 5.0), (1.0, 2.0, 3.0, 4.0),
)  # fmt: skip

UNARY = """
    -x | x.abs() | x.exp() | x.exp2() | x.sin() | x.cos() | x.tanh() | torch.erf(x) | x.sigmoid() | x.square() | x.sign()
    x.reciprocal() | torch.relu(x) | F.silu(x) | F.gelu(x) | F.softplus(x) | F.softplus(x, 2.0, 3.0) | F.leaky_relu(x)
    F.elu(x) | F.elu(x, 0.5) | F.mish(x) | F.hardswish(x) | F.logsigmoid(x) | F.hardtanh(x) | F.hardtanh(x, -3, 7) | F.relu6(x)
    F.celu(x) | F.celu(x, 0.5) | F.selu(x) | x ** 3 | x ** 0 | x ** 2 | x ** -1 | x ** 1.7 | 1.5 ** x | 0.0 ** x | (-2.0) ** x
    x.clamp(-0.5, 0.5) | x.clamp(min=0) | x.clamp(max=1) | x.clamp(2, 1) | x % 0.7 | x % 2.0 | x.fmod(2.0) | x.fmod(0.0)
    torch.where(x > 0.5, x, 2 * x) | x.masked_fill(x < 0, 1.0) | x / 3 | x / 0 | 3 / x | x.trunc() * x | x.frac() | x.log()
    x.log1p() | x.log2() | x.sqrt() | x.rsqrt() | F.tanhshrink(x) | F.hardshrink(x) | F.softshrink(x) | F.threshold(x, 1.0, 2.0)
    x.sinh() | x.cosh() | x.tan() | x.nan_to_num() | x.nan_to_num(1.0, 2.0, 3.0) | torch.xlogy(x, 0.0) | torch.xlogy(x, 2.0)
    torch.xlogy(0.0, x) | torch.xlogy(2.0, x) | x * 0 | x.expm1() | F.gelu(x, approximate="tanh") | torch.logaddexp(x, -x)
    x.atan() | x.asin() | x.acos() | x.asinh() | x.clamp(min=0).acosh() | x.atanh()
    x.masked_fill(x.abs() < 1e-3, 0.0).sinc() | x.erfc() | torch.special.ndtr(x) | x.erfinv()
"""
BINARY = """
    x + y | x - 2 * y | x * y | x / y | x % y | x.fmod(y) | x ** y | torch.maximum(x, y) | torch.minimum(x, y) | torch.max(x, y)
    torch.where(x > y, x * y, y) | torch.lerp(x, y, 0.3) | torch.addcmul(x, x, y, value=0.5) | torch.clamp(x, y)
    torch.clamp(x, max=y) | torch.xlogy(x, y) | torch.logaddexp(x, y) | F.mse_loss(x, y) | F.l1_loss(x, y, reduction="none")
    F.smooth_l1_loss(x, y, reduction="none") | F.huber_loss(x, y, "none") | F.kl_div(x, y, reduction="none")
    torch.atan2(x, y) | torch.fmax(x, y) | torch.fmin(x, y)
    F.binary_cross_entropy(x.clamp(0, 1).nan_to_num(0.5), y.clamp(0, 1).nan_to_num(0.5), reduction="none")
    F.gaussian_nll_loss(x, x.detach() + 1, y.clamp(-1, 2).abs(), reduction="none")
    F.prelu(x[:, None], y[3:4]) | F.prelu(x[:, None], y[13:14])
"""
OVER_DIMS = """
    x.sum(-1) | x.mean(-1) | x.amax(-1) | x.amin(-1) | x.amax(0) | x.max(-1)[0] | x.min(-1).values | x.var(-1)
    x.var(-1, correction=0) | x.std(-1) | x.std(-1, correction=0) | torch.std_mean(x, -1)[0] | x.logsumexp(-1) | F.softmax(x, -1)
    F.log_softmax(x, -1) | F.normalize(x, dim=-1) | F.normalize(x, p=1, dim=-1) | F.normalize(x, p=3.0, dim=-1) | x.norm(dim=-1)
    x.norm(p=1, dim=-1) | x.norm(p=3, dim=-1) | x.norm(p=0.5, dim=-1) | x.norm(p=-1, dim=-1) | x.norm(p=-2, dim=-1)
    x.norm(p=1.5, dim=-1) | x.norm(p=4, dim=-1) | x.norm() | F.cosine_similarity(x, x.detach().exp(), dim=-1) | x.cumsum(-1)
    x.cumsum(0) | torch.var_mean(x, 0)[0] | x[:1].var(0) | x[:1].std(0)
"""
LESS_ACCURATE = ("binary_cross_entropy", "expm1", "tanh", "celu(x, 0.5)", "xlogy(x, 2.0)")
"""Of these torch's gradients cancel, or are of rounded numbers."""


def compared(text: str, parameters: str, *arguments: Tensor) -> None:
    """The gradients are torch's, at each point where these are numbers, and NaN where they are NaN."""
    function = function_of(text, parameters)
    leaves = [a.clone().requires_grad_() for a in arguments]
    result = function(*leaves)
    given = torch.full_like(result, 1.5)
    wanted = torch.autograd.grad(result, leaves, given, allow_unused=True, materialize_grads=True)
    derivative = derived(traced(function, arguments))
    got = gradients(derivative, dict(zip(parameters.split(", "), arguments, strict=True)), [given])
    tolerance = 1e-6 if any(name in text for name in LESS_ACCURATE) else 1e-9
    for name, one, other in zip(derivative.wrt, got, wanted, strict=True):
        close = torch.isclose(one, other, rtol=tolerance, atol=1e-12, equal_nan=True)
        at = [tuple(a[tuple(i)].item() for a in arguments) for i in (~close).nonzero().tolist()[:5]]
        assert close.all(), f"by {name} at {at}: {one[~close][:5].tolist()}, and torch has {other[~close][:5].tolist()}"


def compare_each(table: str, parameters: str, *arguments: Tensor) -> None:
    for text in expressions(table):
        with case(text):
            compared(text, parameters, *arguments)


def test_of_one_operand() -> None:
    compare_each(UNARY, "x", torch.tensor(POINTS, dtype=torch.float64))


def test_of_two_operands() -> None:
    x, y = (part.reshape(-1) for part in torch.meshgrid(*[torch.tensor(FEW, dtype=torch.float64)] * 2, indexing="ij"))
    compare_each(BINARY, "x, y", x.contiguous(), y.contiguous())


def test_over_dims() -> None:
    compare_each(OVER_DIMS, "x", torch.tensor(ROWS, dtype=torch.float64))


def together(texts: list[str]) -> Callable[..., tuple[Tensor, ...]]:
    """A function of as many tensors as there are expressions, each the operand of one."""
    names = [f"x{number}" for number in range(len(texts))]
    results = ", ".join(f"(lambda x: {text})({name})" for name, text in zip(names, texts, strict=True))
    function: Callable[..., tuple[Tensor, ...]] = function_of(f"({results},)", ", ".join(names))
    return function


@pytest.mark.parametrize("table", [UNARY, OVER_DIMS], ids=["unary", "over-dims"])
@pytest.mark.parametrize("number", range(7))
def test_compiled_in_float32(table: str, number: int) -> None:
    """Numbers where torch's are, in the precision in which exponentials and cubes overflow soon."""
    texts = expressions(table)[number::7]
    points = torch.tensor([p for p in POINTS if abs(p) != 1e300] if table is UNARY else ROWS)
    function = together(texts)
    leaves = [points.clone().requires_grad_() for _ in texts]
    results = function(*leaves)
    given = [torch.full_like(r, 1.5) for r in results]
    wanted = torch.autograd.grad(results, leaves, given, allow_unused=True, materialize_grads=True)
    passes = fg.vjp(fg.kernel(function), *([points] * len(texts)))
    _, saved = passes.forward(*([points] * len(texts)))
    for text, one, other in zip(texts, passes.backward(saved, *given), wanted, strict=True):
        wrong = ~(torch.isclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True) | other.isnan())
        found = list(zip(points[wrong].tolist(), one[wrong].tolist(), other[wrong].tolist(), strict=True))
        assert not found, f"{text}: {found[:5]}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_queries_that_see_no_key(dtype: torch.dtype) -> None:
    """A mask of floats that hides a whole row: no weights, and no gradients, neither NaN for what other rows share."""
    mask = torch.zeros(6, 6, dtype=dtype)
    mask[2], mask[4, 1:] = -INF, -INF
    leaves = [torch.randn(1, 2, 6, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    result = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    arguments = [leaf.detach() for leaf in leaves]
    passes = fg.vjp(fg.kernel(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), *arguments, mask)
    y, saved = passes.forward(*arguments, mask)
    torch.testing.assert_close(y, result.detach())
    wanted = torch.autograd.grad(result, leaves, torch.ones_like(y))
    torch.testing.assert_close(passes.backward(saved, torch.ones_like(y))[:3], wanted)


def test_the_deviation_of_equal_elements() -> None:
    """Nothing, though the mean of what has no short binary fraction is rounded."""
    for count, value in itertools.product((7, 96, 1000), (0.1, 3.3, 1e4)):
        x = torch.full((3, count), value)
        passes = fg.vjp(fg.kernel(lambda x: x.std(-1)), x)
        y, saved = passes.forward(x)
        assert passes.backward(saved, torch.ones_like(y))[0].abs().max() < 1e-6
