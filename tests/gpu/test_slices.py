"""The five slices on a GPU, against torch eager and float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.emulator.test_tensor_cores import WIDTHS

from .accuracy import check_function

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


# Slice 1: pointwise.


def gelu_bias_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh") + residual


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", [(256, 1024), (33, 77), (1, 8), (5, 1)])
def test_pointwise_chain(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    inputs = (randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype), randn(*shape, dtype=dtype))
    check_function(fg.kernel(gelu_bias_residual), gelu_bias_residual, inputs)


def test_pointwise_chain_in_float64() -> None:
    """Against eager in float64 itself, whose own errors are of the same size: a few units in the last place of 1."""
    inputs = (randn(64, 100, dtype=torch.float64), randn(100, dtype=torch.float64), randn(64, 100, dtype=torch.float64))
    torch.testing.assert_close(fg.kernel(gelu_bias_residual)(*inputs), gelu_bias_residual(*inputs), rtol=1e-14, atol=1e-14)


def test_pointwise_strides_offsets_and_broadcasts() -> None:
    kernel = fg.kernel(gelu_bias_residual)
    wide = randn(64, 2048)
    cases = [
        (randn(512, 64).T, randn(512), randn(64, 512)),
        (wide[:, ::4], randn(512), wide[:, :512]),
        (wide.flatten()[1 : 1 + 64 * 512].view(64, 512), randn(512), randn(64, 512)),
        (randn(64, 1).expand(64, 512), randn(512), randn(1, 512)),
        (randn(64, 512), randn(1, dtype=F32), randn(64, 1, dtype=F16)),
    ]
    for inputs in cases:
        check_function(kernel, gelu_bias_residual, inputs)


def test_empty_tensors_give_empty_results() -> None:
    kernel = fg.kernel(gelu_bias_residual)
    result = kernel(randn(0, 64), randn(64), randn(0, 64))
    assert result.shape == (0, 64) and result.is_cuda


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("function", [
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: F.gelu(x),
    F.silu,
    torch.sigmoid,
    torch.tanh,
    torch.exp,
    F.softplus,
    F.mish,
    lambda x: 1.0 / x,
    torch.rsqrt,
    lambda x: 1 + torch.erf(x),
    lambda x: 1 - torch.erf(x),
], ids=[
    "gelu_tanh", "gelu_erf", "silu", "sigmoid", "tanh", "exp", "softplus", "mish", "reciprocal", "rsqrt", "one_plus_erf", "erfc",
])  # fmt: skip
def test_every_16_bit_input(dtype: torch.dtype, function: object) -> None:
    """Approximations are allowed only where no 16-bit input shows them."""
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(dtype)
    check_function(fg.kernel(_named(function)), function, (every[every.isfinite()],))


def _named(function: object) -> object:
    def applied(x: Tensor) -> Tensor:
        return function(x)

    return applied


# Slice 2: rows.


def layer_norm_gelu_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight, bias)) + residual


@pytest.mark.parametrize("columns", [1, 7, 64, 100, 256, 1000, 1024, 4096, 5000, 8192, 16384, 20000, 32768, 65536, 100001])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_layer_norm_in_every_row_layout(columns: int, dtype: torch.dtype) -> None:
    rows = 37 if columns < 20000 else 5
    x, residual = (randn(rows, columns, dtype=dtype) for _ in range(2))
    inputs = (x, randn(columns, dtype=dtype), randn(columns, dtype=dtype), residual)
    check_function(fg.kernel(layer_norm_gelu_add), layer_norm_gelu_add, inputs)


def test_layer_norm_of_a_large_mean_and_of_a_tiny_variance() -> None:
    kernel = fg.kernel(layer_norm_gelu_add)
    for x in (randn(64, 4096, dtype=F32) + 100.0, randn(64, 4096, dtype=F32) * 1e-6, torch.full((64, 4096), 3.0, device="cuda")):
        check_function(kernel, layer_norm_gelu_add, (x, randn(4096, dtype=F32), randn(4096, dtype=F32), x))


def test_softmax_of_masked_and_infinite_rows() -> None:
    x = randn(64, 1000, dtype=F32)
    x[1], x[2, ::2], x[3, 5] = -math.inf, -math.inf, math.inf
    check_function(fg.kernel(_softmax), _softmax, (x,))
    check_function(fg.kernel(_softmax), _softmax, (x.to(BF16) * 1000,))


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


# Slice 3: LayerNorm's backward.


def layer_norm_backward(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(-1, keepdim=True)
    centered = x - mean
    rstd = torch.rsqrt((centered * centered).mean(-1, keepdim=True) + 1e-5)
    normalized = centered * rstd
    scaled = dy * weight
    projection = (scaled * normalized).mean(-1, keepdim=True)
    dx = rstd * (scaled - normalized * projection - scaled.mean(-1, keepdim=True))
    return dx, (dy * normalized).sum(0), dy.sum(0)


@pytest.mark.parametrize("shape", [(64, 256), (1000, 1024), (129, 4096), (33, 16384), (50, 1000)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_layer_norm_backward(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = (randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype))
    kernel = fg.kernel(layer_norm_backward)
    check_function(kernel, layer_norm_backward, inputs)
    first, second = kernel(*inputs), kernel(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "two runs differ"
    assert len(kernel.lower(*inputs).program.launches) == 2


# Slice 4: products.


def linear_bias_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def linear_rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.linear(x, weight)
    even, odd = y[..., 0::2], y[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("shape", [(1, 64, 64), (77, 264, 72), (129, 512, 256), (1000, 3072, 1024), (256, 256, 8192)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_product_with_bias_and_gelu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, depth = shape
    x, weight, bias = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype) / depth**0.5, randn(columns, dtype=dtype)
    kernel = fg.kernel(linear_bias_gelu)
    expected = linear_bias_gelu(x.double(), weight.double(), bias.double())
    assert relative(kernel(x, weight, bias), expected) < 2 * torch.finfo(dtype).eps
    low = kernel.lower(x, weight, bias)
    (choice,) = low.choices.values()
    assert len(low.program.steps) == (2 if choice.takes_library else 1)


def test_product_with_rotary_pairs() -> None:
    x, weight, cos, sin = randn(200, 512), randn(1024, 512) / 512**0.5, randn(200, 512), randn(200, 512)
    kernel = fg.kernel(linear_rotary)
    expected = linear_rotary(*(t.double() for t in (x, weight, cos, sin)))
    assert relative(kernel(x, weight, cos, sin), expected) < 2 * torch.finfo(BF16).eps
    assert len(kernel.lower(x, weight, cos, sin).program.steps) == 1


def test_ten_random_epilogues() -> None:
    """Adding an epilogue touches no template."""
    x, weight = randn(130, 256), randn(264, 256) / 16
    operands = {"bias": randn(264), "residual": randn(130, 264), "row": randn(130, 1)}
    for seed in range(10):
        function = _epilogue(random.Random(seed))
        kernel = fg.kernel(function)
        arguments = (x, weight, *operands.values())
        low = kernel.lower(*arguments)
        (matmul,) = low.choices.values()
        assert len(low.program.steps) == (2 if matmul.takes_library else 1)
        assert relative(kernel(*arguments), function(*(t.double() for t in arguments))) < 1e-2


def _epilogue(choice: random.Random) -> object:
    unary = [F.silu, torch.tanh, F.relu, torch.sigmoid, lambda v: F.gelu(v), lambda v: v * 0.5 + 1.0, torch.abs]
    functions = choice.choices(unary, k=3)
    order = choice.sample(["bias", "residual", "row"], k=3)

    def epilogue(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, row: Tensor) -> Tensor:
        named = {"bias": bias, "residual": residual, "row": row}
        y = F.linear(x, weight)
        for function, name in zip(functions, order, strict=True):
            y = function(y) + named[name]
        return y

    return epilogue


def test_a_product_that_the_kernel_does_not_serve_is_a_library_step() -> None:
    x, weight, bias = randn(64, 63), randn(65, 63), randn(65)
    kernel = fg.kernel(linear_bias_gelu)
    assert "library" in kernel.lower(x, weight, bias).explain()
    assert relative(kernel(x, weight, bias), linear_bias_gelu(x.double(), weight.double(), bias.double())) < 2e-2


# Slice 5: attention.


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.softmax(q @ k.mT * scale, -1) @ v


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    query, key = torch.arange(scores.shape[-2]), torch.arange(scores.shape[-1])
    query, key = query.to(q.device), key.to(q.device)
    return torch.softmax(torch.where(key <= query[:, None], scores, -math.inf), -1) @ v


def alibi_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    query, key = torch.arange(scores.shape[-2]).to(q.device), torch.arange(scores.shape[-1]).to(q.device)
    return torch.softmax(scores + slopes[:, None, None] * (key - query[:, None]), -1).to(v.dtype) @ v


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sizes", [(1, 1), (63, 64), (128, 128), (129, 127), (200, 1000), (1024, 1024)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_attention(head_dim: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    queries, keys = sizes
    q = randn(2, 3, queries, head_dim, dtype=dtype)
    k, v = (randn(2, 3, keys, head_dim, dtype=dtype) for _ in range(2))
    slopes, scale = torch.rand(3, device="cuda"), head_dim**-0.5
    wide = [t.double() for t in (q, k, v)]
    cases = [(attention, ()), (alibi_attention, (slopes,))] + ([(causal_attention, ())] if keys <= queries else [])
    for function, extra in cases:
        kernel = fg.kernel(function)
        expected = function(*wide, *(t.double() for t in extra), scale)
        assert relative(kernel(q, k, v, *extra, scale), expected) < 4 * torch.finfo(dtype).eps
        steps = kernel.lower(q, k, v, *extra, scale).program.steps
        assert len(steps) == 1, "attention became several steps"


@pytest.mark.parametrize(("width", "channels"), WIDTHS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_attention_of_any_width(width: int, channels: int, dtype: torch.dtype) -> None:
    """Heads lie beside each other in longer rows: what lies beyond a head is another one's."""
    sizes = ((200, width), (333, width), (333, channels))
    q, k, v = (randn(2, n, 3 * c, dtype=dtype).unflatten(-1, (3, c)).transpose(1, 2) for n, c in sizes)
    scale = width**-0.5
    for function in (attention, causal_attention):
        kernel = fg.kernel(function)
        expected = function(*(t.double() for t in (q, k, v)), scale)
        assert relative(kernel(q, k, v, scale), expected) < 4 * torch.finfo(dtype).eps
        assert len(kernel.lower(q, k, v, scale).program.steps) == 1


def test_attention_of_packed_views() -> None:
    packed = randn(2, 300, 3, 4, 64)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    kernel = fg.kernel(attention)
    expected = attention(*(t.double() for t in (q, k, v)), 0.125)
    assert relative(kernel(q, k, v, 0.125), expected) < 4 * torch.finfo(BF16).eps


def packed_attention(qkv: Tensor, gate: Tensor, residual: Tensor, scale: float) -> Tensor:
    q, k, v = qkv.unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4).unbind(0)
    return torch.tanh(torch.softmax(q @ k.mT * scale, -1) @ v * torch.sigmoid(gate)) + residual


def test_attention_of_a_packed_tensor_with_an_epilogue() -> None:
    """The three parts are views at an offset; what follows the product is done before it is stored."""
    inputs = (randn(2, 300, 768), randn(2, 4, 300, 64), randn(2, 4, 300, 64))
    kernel = fg.kernel(packed_attention)
    expected = packed_attention(*(t.double() for t in inputs), 0.125)
    assert relative(kernel(*inputs, 0.125), expected) < 2 * torch.finfo(BF16).eps
    assert len(kernel.lower(*inputs, 0.125).program.steps) == 1


def test_product_of_sliced_operands() -> None:
    def sliced(x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu(x[:, 64:] @ weight[8:, 64:].T)

    x, weight = randn(100, 192), randn(264, 192)
    kernel = fg.kernel(sliced)
    assert relative(kernel(x, weight), sliced(x.double(), weight.double())) < 2 * torch.finfo(BF16).eps
    assert len(kernel.lower(x, weight).program.steps) == 1
