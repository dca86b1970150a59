"""Attention, as softmax of scores times values; nothing below says how to stream it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import fusegen as fg
from fusegen.specs.spec import Arguments, Spec, meta


@fg.kernel
def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d)·v

    q, k, v: (batch, heads, positions, d). Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762).
    """
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5)
    return torch.softmax(scores, -1) @ v


@fg.kernel
def flash_attention_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d where key ≤ query)·v

    q, k, v: (batch, heads, positions, d).
    """
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5)
    query = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
    key = torch.arange(k.shape[-2], device=q.device)
    return torch.softmax(torch.where(key <= query, scores, -math.inf), -1) @ v


@fg.kernel
def flash_attention_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d + slope·(key − query) where key ≤ query)·v

    q, k, v: (batch, heads, positions, d); slopes: (heads). Press et al., "Train Short, Test Long" (arXiv 2108.12409).
    """
    query = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
    key = torch.arange(k.shape[-2], device=q.device)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5) + slopes.view(-1, 1, 1) * (key - query)
    return torch.softmax(torch.where(key <= query, scores, -math.inf), -1).to(v.dtype) @ v


def _heads(
    dtype: torch.dtype, batch: int = 4, heads: int = 16, queries: int = 4096, keys: int = 4096, channels: int = 128
) -> Arguments:
    positions = {"q": queries, "k": keys, "v": keys}
    return {name: meta(batch, heads, count, channels, dtype=dtype) for name, count in positions.items()}


def alibi_slopes(heads: int) -> Tensor:
    """The slopes of the paper, 2^(-8/heads) and its powers: values, not only a shape."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float32))


def _heads_and_slopes(
    dtype: torch.dtype, batch: int = 4, heads: int = 16, queries: int = 4096, keys: int = 4096, channels: int = 128
) -> Arguments:
    return _heads(dtype, batch, heads, queries, keys, channels) | {"slopes": alibi_slopes(heads)}


SPECS = (
    Spec("flash_attention", flash_attention, "attention", _heads),
    Spec("flash_attention_causal", flash_attention_causal, "attention", _heads),
    Spec("flash_attention_alibi", flash_attention_alibi, "attention", _heads_and_slopes),
)
