"""Attention, as its math and as torch's function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.unit.fusions.table import add, fusion, shaped

BATCH, HEADS, QUERIES, KEYS, CHANNELS = 2, 4, 6, 9, 8


def heads(
    queries: int = QUERIES, keys: int = KEYS, of_keys: int = HEADS, channels: int = CHANNELS
) -> Callable[[], tuple[Tensor, ...]]:
    shapes = ((HEADS, queries), (of_keys, keys), (of_keys, keys))
    return shaped(*((BATCH, count, length, channels) for count, length in shapes))


SQUARE = heads(7, 7)
GROUPED = heads(7, 7, of_keys=2)


def weighted(scores: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores, -1) @ v


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT) * (q.shape[-1] ** -0.5)


def places(scores: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])


@fusion(heads())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(scores_of(q, k), v)


@fusion(heads(5, 5, channels=33))
def attention_of_odd_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(scores_of(q, k), v)


@fusion(lambda: tuple(x.to(torch.bfloat16) for x in heads()()))
def attention_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(scores_of(q, k), v)


@fusion(SQUARE)
def attention_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    query, key = places(scores)
    return weighted(torch.where(key <= query, scores, -math.inf), v)


@fusion(heads(4, 9))
def attention_causal_of_last_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    query, key = places(scores)
    return weighted(torch.where(key <= query + k.shape[-2] - q.shape[-2], scores, -math.inf), v)


@fusion(heads(9, 9))
def attention_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    query, key = places(scores)
    return weighted(torch.where((key <= query) & (key > query - 4), scores, -math.inf), v)


@fusion(lambda: (*SQUARE(), 2.0 ** -torch.arange(1.0, HEADS + 1)))
def attention_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    scores = scores_of(q, k)
    query, key = places(scores)
    scores = scores + slopes.view(-1, 1, 1) * (key - query)
    return weighted(torch.where(key <= query, scores, -math.inf), v)


@fusion(SQUARE)
def attention_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 20.0 * torch.tanh(scores_of(q, k) / 20.0)
    query, key = places(scores)
    return weighted(torch.where(key <= query, scores, -math.inf), v)


@fusion(lambda: (*heads()(), torch.randn(BATCH, 1, QUERIES, KEYS)))
def attention_additive_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return weighted(scores_of(q, k) + mask, v)


def padded() -> Tensor:
    return (torch.arange(KEYS) < torch.tensor([[KEYS], [5]])).view(BATCH, 1, 1, KEYS)


@fusion(lambda: (*heads()(), padded()))
def attention_bool_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return weighted(scores_of(q, k).masked_fill(~mask, -math.inf), v)


@fusion(lambda: (*heads()(), torch.where(padded(), 0.0, torch.finfo(torch.float32).min)), trained=(0, 1, 2))
def attention_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return weighted(scores_of(q, k) + mask, v)


@fusion(lambda: (*heads(9, 9)(), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])))
def attention_documents(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    scores = scores_of(q, k)
    query, key = places(scores)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]) & (key <= query)
    return weighted(torch.where(seen, scores, -math.inf), v)


@fusion(lambda: (*heads(9, 9)(), torch.tensor([4, 7])))
def attention_prefix(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor) -> Tensor:
    scores = scores_of(q, k)
    query, key = places(scores)
    return weighted(torch.where((key <= query) | (key < prefix.view(-1, 1, 1, 1)), scores, -math.inf), v)


@fusion(lambda: (*SQUARE(), torch.randn(HEADS, 2 * 6 + 1)))
def attention_relative_bias(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A bias that is computed from the distance, without a look-up."""
    scores = scores_of(q, k)
    query, key = places(scores)
    return weighted(scores + table[:, :1, None] * torch.exp(-(key - query).abs() * 0.3), v)


@fusion(lambda: (*SQUARE(), torch.randn(HEADS)))
def attention_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = scores_of(q, k)
    query, key = places(scores)
    scores = torch.where(key <= query, scores, -math.inf)
    joined = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)], -1)
    return torch.softmax(joined, -1)[..., :-1] @ v


@fusion(SQUARE)
def attention_with_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores_of(q, k)
    return weighted(scores, v), torch.logsumexp(scores, -1)


@fusion(GROUPED)
def attention_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (2, 2))
    return weighted(scores_of(q, k.unsqueeze(2)), v.unsqueeze(2)).flatten(1, 2)


@fusion(GROUPED)
def attention_grouped_by_repeat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = scores_of(q, k)
    query, key = places(scores)
    return weighted(torch.where(key <= query, scores, -math.inf), v)


def repeat_kv(x: Tensor, count: int) -> Tensor:
    batch, of_keys, length, channels = x.shape
    return x[:, :, None].expand(batch, of_keys, count, length, channels).reshape(batch, of_keys * count, length, channels)


@fusion(GROUPED)
def attention_grouped_by_expand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(scores_of(q, repeat_kv(k, 2)), repeat_kv(v, 2))


@fusion(heads(7, 7, of_keys=1))
def attention_of_one_head_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(scores_of(q, k), v)


@fusion(lambda: (*heads()(), 17))
def attention_dropout_seed(q: Tensor, k: Tensor, v: Tensor, seed: int) -> Tensor:
    return fg.dropout(torch.softmax(scores_of(q, k), -1), 0.25, seed=seed) @ v


def seen_weights() -> tuple[Tensor, ...]:
    """Values by which the result is the weights themselves."""
    q, k = (torch.randn(BATCH, HEADS, length, CHANNELS) for length in (7, CHANNELS))
    return q, k, torch.eye(CHANNELS).expand(BATCH, HEADS, -1, -1)


def dropped(q: Tensor, k: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(scores_of(q, k), -1)
    return torch.zeros_like(weights), weights / 0.75


@fusion(seen_weights, kept=dropped)
def attention_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.softmax(scores_of(q, k), -1), 0.25) @ v


@fusion(lambda: (torch.randn(BATCH, 7, 3 * 16), torch.randn(16, 16)))
def attention_of_packed_heads(qkv: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in qkv.chunk(3, -1))
    return F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), weight)


@fusion(heads(1, 9), trained=())
def attention_of_one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(scores_of(q, k), v)


def pages() -> tuple[Any, ...]:
    cache = torch.randn(6, 4, 2, CHANNELS)  # pages of 4 positions, 2 heads
    return torch.randn(BATCH, HEADS, CHANNELS), cache, torch.randn_like(cache), torch.tensor([[5, 1], [0, 3]]), torch.tensor([7, 5])


@fusion(pages, trained=())
def attention_of_pages(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (cache[table].flatten(1, 2).transpose(1, 2).unsqueeze(2) for cache in (k_cache, v_cache))
    scores = scores_of(q.unflatten(1, (2, 2)).unsqueeze(-2), k)
    seen = torch.arange(scores.shape[-1]) < lengths.view(-1, 1, 1, 1, 1)
    return weighted(torch.where(seen, scores, -math.inf), v).squeeze(-2).flatten(1, 2)


def _torch(**settings: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **settings)

    return function


add("sdpa", _torch(), heads())
add("sdpa_causal", _torch(is_causal=True), SQUARE)
add("sdpa_scale", _torch(scale=0.3), heads())
add("sdpa_grouped", _torch(enable_gqa=True, is_causal=True), GROUPED)
add("sdpa_bf16", _torch(is_causal=True), lambda: tuple(x.to(torch.bfloat16) for x in SQUARE()))
add("sdpa_dropout", _torch(dropout_p=0.25), seen_weights, kept=dropped)


@fusion(lambda: (*heads()(), torch.randn(QUERIES, KEYS)))
def sdpa_additive_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@fusion(lambda: (*heads()(), padded()))
def sdpa_bool_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
