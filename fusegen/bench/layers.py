"""Functions that are trained in the benchmark and are no prebuilt fusions, as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.nn.transformer_layer import LayerMath, layer_kernel

_HEADS = 16  # in an encoder layer
_DROPPED = 0.1
_CAP = 50.0


# Rows.


@fg.kernel
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q·cos + (−q₂, q₁)·sin with the halves (q₁, q₂) of q, and k likewise, as Llama rotates them."""
    return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@fg.kernel
def scale_mask_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """softmax(x/8 + mask), with a mask that broadcasts over heads and queries."""
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
    """softmax(q·kᵀ/√d)·v, by torch's function."""
    return F.scaled_dot_product_attention(q, k, v)


@fg.kernel
def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d where key ≤ query)·v, by torch's function."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@fg.kernel
def soft_cap_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(50·tanh(q·kᵀ/(50·√d)))·v, the soft cap of Gemma 2."""
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5)
    return torch.softmax(_CAP * torch.tanh(scores / _CAP), -1) @ v


@fg.kernel
def bias_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d + bias)·v, with a learned bias of each head and key."""
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
    """A transformer's encoder layer in training, with the norms before its halves."""
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
    """A transformer's encoder layer in training, with the norms behind its residual sums, as BERT has them."""
    x = x + F.dropout(_attention(x, qkv_weight, qkv_bias, out_weight, out_bias), _DROPPED)
    x = _norm(x, attention_norm, attention_norm_bias)
    return _norm(x + F.dropout(_mlp(x, up_weight, up_bias, down_weight, down_bias), _DROPPED), mlp_norm, mlp_norm_bias)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def _attention(x: Tensor, qkv_weight: Tensor, qkv_bias: Tensor, out_weight: Tensor, out_bias: Tensor) -> Tensor:
    parts = F.linear(x, qkv_weight, qkv_bias).chunk(3, -1)
    q, k, v = (part.view(*part.shape[:-1], _HEADS, -1).transpose(1, 2) for part in parts)
    found = F.scaled_dot_product_attention(q, k, v, dropout_p=_DROPPED)
    return F.linear(found.transpose(1, 2).flatten(2), out_weight, out_bias)


def _mlp(x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up_weight, up_bias), approximate="tanh"), down_weight, down_bias)


# FusedTransformerLayer, with the heads and the dropout of BERT-large.

_BERT = LayerMath(_HEADS, attn_dropout=_DROPPED, hidden_dropout=_DROPPED)

LAYERS: Mapping[str, fg.Kernel[..., Any]] = {
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
"""By the name of their cases."""
