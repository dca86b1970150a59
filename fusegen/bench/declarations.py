"""The benchmark's own declarations, written as users write them, and the arguments of all cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.nn.transformer_layer import LayerMath, layer_kernel, parameter_shapes
from fusegen.specs import meta
from fusegen.specs.attention import alibi_slopes
from fusegen.specs.spec import Arguments

CaseSizes: TypeAlias = tuple[int, ...]
Build: TypeAlias = Callable[[torch.dtype, CaseSizes], Arguments]

_DROPPED = 0.1


@fg.kernel
def column_sum(x: Tensor) -> Tensor:
    """Σ x over rows, the gradient of a bias."""
    return x.sum(0)


@fg.kernel
def transposed_copy(x: Tensor) -> Tensor:
    """A contiguous copy of xᵀ."""
    return x.t().contiguous()


@fg.kernel
def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """dropout(x + bias) + residual, the end of a transformer block in training."""
    return F.dropout(x + bias, _DROPPED) + residual


@fg.kernel
def ln_gelu_dropout_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """dropout(gelu(layer_norm(x)·weight + bias)) + residual, with the tanh approximation of gelu."""
    normalized = F.layer_norm(x, (x.shape[-1],), weight, bias)
    return F.dropout(F.gelu(normalized, approximate="tanh"), _DROPPED) + residual


_TANH = {"approximate": "tanh"}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "gelu": _TANH,
    "bias_gelu_add": _TANH,
    "gelu_dropout_add": _TANH,
    "layer_norm_gelu_add": _TANH,
    "flash_attention_causal": {"is_causal": True},
    "flash_attention_alibi": {"is_causal": True},
    "rms_norm": {"eps": 1e-6},
}
_AS_IN_TORCH = ("gelu", "layer_norm", "rms_norm", "softmax")  # their first parameter is named input
_NORMS = ("layer_norm", "rms_norm")


def arguments_by_name(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A case's arguments by the parameter names of its declaration, with the case's settings."""
    if name in OWN:
        return dict(arguments)
    first = "input" if name in _AS_IN_TORCH else "x"
    named = {first if key == "x" else key: value for key, value in arguments.items()}
    shape = {"normalized_shape": tuple(named[first].shape[-1:])} if name in _NORMS else {}
    return named | shape | dict(_SETTINGS.get(name, {}))


_HEADS = 16  # in an encoder layer
_CAP = 50.0


# Trained functions: rows.


@fg.kernel
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q·cos + (−q₂, q₁)·sin for halves (q₁, q₂) of q, and the same for k, as in Llama."""
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@fg.kernel
def scale_mask_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """softmax(x/8 + mask), with a mask that is broadcast over heads and queries."""
    return torch.softmax(x * 0.125 + mask, -1)


@fg.kernel
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of rows of logits."""
    return F.cross_entropy(logits, targets)


@fg.kernel
def embedding_layer_norm(tokens: Tensor, table: Tensor, positions: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """layer_norm(table[tokens] + positions)·weight + bias."""
    return F.layer_norm(F.embedding(tokens, table) + positions, (table.shape[-1],), weight, bias)


# Attention.


@fg.kernel
def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d)·v, as torch's function."""
    return F.scaled_dot_product_attention(q, k, v)


@fg.kernel
def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d where key ≤ query)·v, as torch's function."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@fg.kernel
def soft_cap_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(50·tanh(q·kᵀ/(50·√d)))·v, the soft cap of Gemma 2."""
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5)
    return torch.softmax(_CAP * torch.tanh(scores / _CAP), -1) @ v


@fg.kernel
def bias_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d + bias)·v, with a learned bias per head and key."""
    return torch.softmax((q @ k.mT) * (q.shape[-1] ** -0.5) + bias, -1) @ v


# Matmuls.


@fg.kernel
def swiglu_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """(silu(x·gateᵀ)·(x·upᵀ))·downᵀ, the feed-forward block of Llama."""
    return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)


@fg.kernel
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of the logits x·weightᵀ."""
    return F.cross_entropy(F.linear(x, weight), targets)


# Layers.


@fg.kernel
def encoder_pre_norm(
    x: Tensor,
    attention_norm: Tensor,
    attention_norm_bias: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mlp_norm: Tensor,
    mlp_norm_bias: Tensor,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
) -> Tensor:
    """A transformer encoder layer in training, with pre-norm."""
    x = x + F.dropout(
        _attention(_norm(x, attention_norm, attention_norm_bias), qkv_weight, qkv_bias, out_weight, out_bias), _DROPPED
    )
    return x + F.dropout(_mlp(_norm(x, mlp_norm, mlp_norm_bias), up_weight, up_bias, down_weight, down_bias), _DROPPED)


@fg.kernel
def encoder_post_norm(
    x: Tensor,
    attention_norm: Tensor,
    attention_norm_bias: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mlp_norm: Tensor,
    mlp_norm_bias: Tensor,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
) -> Tensor:
    """A transformer encoder layer in training, with post-norm, as in BERT."""
    x = x + F.dropout(_attention(x, qkv_weight, qkv_bias, out_weight, out_bias), _DROPPED)
    x = _norm(x, attention_norm, attention_norm_bias)
    return _norm(x + F.dropout(_mlp(x, up_weight, up_bias, down_weight, down_bias), _DROPPED), mlp_norm, mlp_norm_bias)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def _attention(x: Tensor, qkv_weight: Tensor, qkv_bias: Tensor, out_weight: Tensor, out_bias: Tensor) -> Tensor:
    projections = F.linear(x, qkv_weight, qkv_bias).chunk(3, -1)
    q, k, v = (projection.view(*projection.shape[:-1], _HEADS, -1).transpose(1, 2) for projection in projections)
    context = F.scaled_dot_product_attention(q, k, v, dropout_p=_DROPPED)
    return F.linear(context.transpose(1, 2).flatten(2), out_weight, out_bias)


def _mlp(x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up_weight, up_bias), approximate="tanh"), down_weight, down_bias)


# FusedTransformerLayer, with the heads and the dropout of BERT-large.

_BERT = LayerMath(_HEADS, attn_dropout=_DROPPED, hidden_dropout=_DROPPED)

OWN: Mapping[str, fg.Kernel[..., Any]] = {
    "column_sum": column_sum,
    "transposed_copy": transposed_copy,
    "bias_dropout_add": bias_dropout_add,
    "ln_gelu_dropout_add": ln_gelu_dropout_add,
    "rotary": rotary,
    "scale_mask_softmax": scale_mask_softmax,
    "cross_entropy": cross_entropy,
    "embedding_layer_norm": embedding_layer_norm,
    "sdpa": sdpa,
    "sdpa_causal": sdpa_causal,
    "soft_cap_attention": soft_cap_attention,
    "bias_attention": bias_attention,
    "swiglu_mlp": swiglu_mlp,
    "linear_cross_entropy": linear_cross_entropy,
    "encoder_pre_norm": encoder_pre_norm,
    "encoder_post_norm": encoder_post_norm,
    "transformer_layer_pre_norm": layer_kernel(_BERT),
    "transformer_layer_post_norm": layer_kernel(replace(_BERT, pre_layer_norm=False)),
}
"""The benchmark's own declarations by case name."""


# Arguments of cases: meta tensors for a dtype and sizes; index tensors have values.


def _over(**ranks: int) -> Build:
    """Returns a builder of arguments. ``bias=1`` means that bias has the last size as its shape; 0 stands for all sizes."""
    return lambda dtype, sizes: {name: meta(*sizes[-rank:], dtype=dtype) for name, rank in ranks.items()}


x_only = _over(x=0)
residual = _over(x=2, residual=2)
bias_residual = _over(x=2, bias=1, residual=2)
gated = _over(gate=2, up=2)
weight = _over(x=2, weight=1)
weight_residual = _over(x=2, residual=2, weight=1)
affine = _over(x=2, weight=1, bias=1)
affine_residual = _over(x=2, weight=1, bias=1, residual=2)
norm_backward = _over(x=2, dy=2, weight=1)


def product(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """Arguments of a matmul with a bias; the sizes are rows, outputs, inputs."""
    m, n, k = sizes
    return {"x": meta(m, k, dtype=dtype), "weight": meta(n, k, dtype=dtype), "bias": meta(n, dtype=dtype)}


def heads(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    return {name: meta(*sizes, dtype=dtype) for name in "qkv"}


def heads_and_slopes(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """Queries, keys, values, and the slopes of ALiBi."""
    return heads(dtype, sizes) | {"slopes": alibi_slopes(sizes[1])}


_SEED = 0


def rotated(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """Queries, keys, and an angle per position and channel."""
    angles = {name: meta(*sizes[-2:], dtype=dtype) for name in ("cos", "sin")}
    return {name: meta(*sizes, dtype=dtype) for name in "qk"} | angles


def masked(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """Scores (batch, heads, queries, keys) and a mask (batch, 1, 1, keys)."""
    return {"x": meta(*sizes, dtype=dtype), "mask": meta(sizes[0], 1, 1, sizes[-1], dtype=dtype)}


def logits(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """Logits (rows, classes) and the class of each row."""
    rows, classes = sizes
    return {"logits": meta(rows, classes, dtype=dtype), "targets": _indices(classes, rows)}


def tokens(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """Tokens (batch, positions); a table of embeddings, position embeddings, and a norm's parameters."""
    batch, positions, classes, channels = sizes
    rows = {"table": meta(classes, channels, dtype=dtype), "positions": meta(positions, channels, dtype=dtype)}
    return {"tokens": _indices(classes, batch, positions)} | rows | {n: meta(channels, dtype=dtype) for n in ("weight", "bias")}


def heads_and_bias(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """Queries, keys, values, and a bias per head and key."""
    return heads(dtype, sizes) | {"bias": meta(sizes[1], 1, sizes[2], dtype=dtype)}


def gated_mlp(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """A gated feed-forward block; the sizes are rows, hidden channels, channels."""
    rows, hidden, channels = sizes
    inward = {name: meta(hidden, channels, dtype=dtype) for name in ("gate_weight", "up_weight")}
    return {"x": meta(rows, channels, dtype=dtype)} | inward | {"down_weight": meta(channels, hidden, dtype=dtype)}


def classified(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """A matmul that computes logits; the sizes are rows, channels, classes."""
    rows, channels, classes = sizes
    tensors = {"x": meta(rows, channels, dtype=dtype), "weight": meta(classes, channels, dtype=dtype)}
    return tensors | {"targets": _indices(classes, rows)}


def encoder(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """An encoder layer of batch, positions and channels; its feed-forward block has four times as many channels."""
    width = sizes[-1]
    shapes = {
        "attention_norm": (width,),
        "attention_norm_bias": (width,),
        "qkv_weight": (3 * width, width),
        "qkv_bias": (3 * width,),
        "out_weight": (width, width),
        "out_bias": (width,),
        "mlp_norm": (width,),
        "mlp_norm_bias": (width,),
        "up_weight": (4 * width, width),
        "up_bias": (4 * width,),
        "down_weight": (width, 4 * width),
        "down_bias": (width,),
    }
    return {"x": meta(*sizes, dtype=dtype)} | {name: meta(*shape, dtype=dtype) for name, shape in shapes.items()}


def transformer_layer(dtype: torch.dtype, sizes: CaseSizes) -> Arguments:
    """A `FusedTransformerLayer` of batch, positions and channels; its feed-forward block has four times as many channels."""
    width = sizes[-1]
    shapes = parameter_shapes(width, 4 * width)
    return {"x": meta(*sizes, dtype=dtype)} | {name: meta(*shape, dtype=dtype) for name, shape in shapes.items()}


def _indices(count: int, *sizes: int) -> Tensor:
    return torch.randint(count, sizes, generator=torch.Generator().manual_seed(_SEED))
