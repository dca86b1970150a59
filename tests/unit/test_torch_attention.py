"""torch's own attention modules and layers, as they stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.errors import ShapeError, TraceError

X = torch.randn(2, 10, 64)
OTHER, THIRD = torch.randn(2, 7, 64), torch.randn(2, 7, 64)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(10)


def attention(**options: int | bool) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(64, 4, **options).eval().requires_grad_(False)


def check(function: Callable[..., object], *arguments: Tensor) -> None:
    found, wanted = fg.kernel(function)(*arguments), function(*arguments)
    for got, exact in zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]:
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)


def test_encoder_layer() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True).eval().requires_grad_(False)
    check(lambda x: layer(x), X)
    check(lambda x: layer(x, src_mask=CAUSAL, is_causal=True), X)


def test_attention_of_a_value_and_of_several() -> None:
    module = attention(batch_first=True)
    check(lambda x: module(x, x, x), X[0])
    check(lambda x, y: module(x, y, y, average_attn_weights=False), X, OTHER)
    check(lambda x, y, z: module(x, y, z, need_weights=False)[0], X, OTHER, THIRD)
    apart = attention(kdim=32, vdim=16)
    check(lambda x, y, z: apart(x, y, z), X, torch.randn(7, 10, 32), torch.randn(7, 10, 16))


def test_masks_that_are_added() -> None:
    module, mask, padding = attention(batch_first=True), torch.randn(10, 10), torch.randn(2, 10)
    check(lambda x, m: module(x, x, x, attn_mask=m), X, torch.randn(8, 10, 10))
    check(lambda x, m, p: module(x, x, x, attn_mask=m, key_padding_mask=p, need_weights=False)[0], X, mask, padding)


Q = torch.randn(2, 4, 10, 16)


def test_a_mask_of_float32_for_other_queries() -> None:
    """The scores are as wide as the mask then, as in torch."""
    dtype = torch.bfloat16
    q, mask = Q.to(dtype), torch.randn(10, 10)
    got, wanted = (f(q, q, q, mask) for f in (fg.kernel(attended), attended))
    exact = attended(q.double(), q.double(), q.double(), mask.double())
    assert got.dtype is dtype
    unit = torch.finfo(dtype).eps * exact.abs().max()
    assert (got - exact).abs().max() <= 2 * (wanted - exact).abs().max() + 2 * unit


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def test_masks_that_torch_refuses() -> None:
    """Of other dtypes, and those that do not broadcast to the scores."""
    for dtype in (torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float64):
        with pytest.raises(RuntimeError, match="Expected attn_mask dtype"):
            attended(Q, Q, Q, torch.zeros(10, 10).to(dtype))
        with pytest.raises(TraceError, match=r"an attention mask of \w+ cannot be added to scores of float32"):
            fg.kernel(attended)(Q, Q, Q, torch.zeros(10, 10).to(dtype))
    for shape in ((1, 2, 4, 10, 10), (3, 2, 4, 10, 10), (9, 10), (4, 1, 10, 10)):
        for mask in (torch.ones(shape), torch.ones(shape, dtype=torch.bool)):
            with pytest.raises(RuntimeError):
                attended(Q, Q, Q, mask)
            with pytest.raises(ShapeError):
                fg.kernel(attended)(Q, Q, Q, mask)


def test_masks_that_torch_s_layer_refuses() -> None:
    module = attention(batch_first=True)
    masked = fg.kernel(lambda x, m: module(x, x, x, attn_mask=m)[0])
    padded = fg.kernel(lambda x, m: module(x, x, x, key_padding_mask=m)[0])
    for mask in (torch.zeros(1, 10), torch.zeros(10), torch.zeros(1, 10, 10), torch.zeros(2, 4, 10, 10)):
        with pytest.raises(ShapeError, match="attn_mask has shape"):
            masked(X, mask)
    with pytest.raises(ShapeError, match="key_padding_mask has shape"):
        padded(X, torch.zeros(1, 10))
    with pytest.raises(TraceError, match="the attention mask is bfloat16, but the queries are float32"):
        masked(X, torch.zeros(10, 10, dtype=torch.bfloat16))


def test_what_is_not_traced_is_refused() -> None:
    module = attention(add_bias_kv=True)
    with pytest.raises(TraceError, match="bias_k"):
        fg.kernel(lambda x: module(x, x, x)[0])(X)
