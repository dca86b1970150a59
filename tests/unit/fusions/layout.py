"""Heads, rotary positions, look-ups in tables."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.fusions.table import add, fusion, shaped

BATCH, POSITIONS, HEADS, CHANNELS = 2, 5, 3, 8
WIDTH = HEADS * CHANNELS
OF_HEADS = (BATCH, HEADS, POSITIONS, CHANNELS)


def angles() -> Tensor:
    """Positions times frequencies."""
    return torch.arange(POSITIONS)[:, None] * 10000.0 ** (-torch.arange(0, CHANNELS, 2) / CHANNELS)


def cached() -> tuple[Tensor, Tensor]:
    """Cosines and sines of whole heads."""
    both = torch.cat([angles(), angles()], -1)
    return both.cos(), both.sin()


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def by_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


@fusion(shaped((BATCH, POSITIONS, 3 * WIDTH), (3 * WIDTH,)))
def bias_split_heads(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = (x + bias).view(*x.shape[:2], 3, HEADS, CHANNELS).permute(2, 0, 3, 1, 4)
    return y[0], y[1], y[2]


@fusion(shaped((BATCH, POSITIONS, 3 * WIDTH), (3 * WIDTH,)))
def bias_split_heads_by_chunk(x: Tensor, bias: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2).contiguous() for part in (x + bias).chunk(3, -1)]


GROUPED = (4 * CHANNELS, 2 * CHANNELS, 2 * CHANNELS)


def grouped(x: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (-1, CHANNELS)).transpose(1, 2) for part in x.split(GROUPED, dim=-1)]


@fusion(shaped((BATCH, POSITIONS, sum(GROUPED)), (sum(GROUPED),)))
def bias_split_heads_grouped(x: Tensor, bias: Tensor) -> list[Tensor]:
    return grouped(x + bias)


@fusion(lambda: (torch.randn(BATCH, POSITIONS, sum(GROUPED)), *cached()), trained=(0,))
def split_heads_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = grouped(x)
    return by_halves(q, cos, sin), by_halves(k, cos, sin), v


@fusion(
    lambda: (torch.randn(BATCH, POSITIONS, sum(GROUPED)), torch.randn(CHANNELS), torch.randn(CHANNELS), *cached()),
    trained=(0, 1, 2),
)
def split_heads_norm_rotary(x: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = grouped(x)
    q, k = F.rms_norm(q, (CHANNELS,), qw, 1e-6), F.rms_norm(k, (CHANNELS,), kw, 1e-6)
    return by_halves(q, cos, sin), by_halves(k, cos, sin), v


@fusion(shaped(OF_HEADS))
def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


@fusion(shaped(OF_HEADS, (WIDTH,), (BATCH, POSITIONS, WIDTH)))
def merge_heads_bias_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return x.permute(0, 2, 1, 3).contiguous().view(*residual.shape) + bias + residual


@fusion(shaped(OF_HEADS, OF_HEADS, OF_HEADS))
def merge_three_heads(dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    return torch.cat([d.transpose(1, 2).flatten(2) for d in (dq, dk, dv)], -1)


@fusion(shaped(OF_HEADS, OF_HEADS, OF_HEADS))
def merge_three_stacked_heads(dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    return torch.stack((dq, dk, dv), 0).permute(1, 3, 0, 2, 4).flatten(2)


@fusion(lambda: (torch.randn(OF_HEADS), *cached()))
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return by_halves(x, cos, sin)


@fusion(lambda: (torch.randn(OF_HEADS).to(torch.bfloat16), *(c.to(torch.bfloat16) for c in cached())), trained=(0,))
def rotary_bf16(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return by_halves(x, cos, sin)


@fusion(lambda: (torch.randn(OF_HEADS), torch.randn(BATCH, 1, POSITIONS, CHANNELS), *cached()), trained=(0, 1))
def rotary_of_q_and_k(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return by_halves(q, cos, sin), by_halves(k, cos, sin)


@fusion(lambda: (torch.randn(OF_HEADS), angles().cos(), angles().sin()))
def rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return by_pairs(x, cos, sin)


@fusion(lambda: (torch.randn(OF_HEADS), *(c.repeat_interleave(2, -1) for c in (angles().cos(), angles().sin()))), trained=(0,))
def rotary_interleaved_by_stack(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
    return x * cos + turned * sin


@fusion(lambda: (torch.randn(BATCH, HEADS, POSITIONS, 20), *cached()), trained=(0,))
def rotary_partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat((by_halves(turned, cos, sin), rest), -1)


@fusion(lambda: (torch.randn(OF_HEADS), *cached()), trained=(0,))
def rotary_of_two_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b, c, s = x[..., :half], x[..., half:], cos[..., :half], sin[..., :half]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


@fusion(lambda: (torch.randn(OF_HEADS), torch.randint(0, POSITIONS, (BATCH, POSITIONS)), *cached()), trained=(0,))
def rotary_of_looked_up_positions(x: Tensor, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return by_halves(x, cos[ids].unsqueeze(1), sin[ids].unsqueeze(1))


IDS: Callable[[], tuple[Tensor, Tensor]] = lambda: (torch.randn(OF_HEADS), torch.randint(0, 3000, (BATCH, POSITIONS)))  # noqa: E731


def frequencies(base: float = 10000.0) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, CHANNELS, 2, dtype=torch.int64).to(torch.float32) / CHANNELS))


def turned(x: Tensor, ids: Tensor, inverse: Tensor, scale: float = 1.0) -> Tensor:
    """Rotates by angles that are computed from position ids."""
    angle = ids[:, None, :, None].to(torch.float32) * inverse
    both = torch.cat((angle, angle), -1)
    return by_halves(x, both.cos() * scale, both.sin() * scale)


@fusion(IDS)
def rotary_from_position_ids(x: Tensor, ids: Tensor) -> Tensor:
    return turned(x, ids, frequencies())


@fusion(lambda: (*IDS(), frequencies(500000.0)), trained=(0,))
def rotary_from_frequencies(x: Tensor, ids: Tensor, inverse: Tensor) -> Tensor:
    return turned(x, ids, inverse)


@fusion(IDS)
def rotary_linear_scaling(x: Tensor, ids: Tensor) -> Tensor:
    return turned(x, ids, frequencies() / 4.0)


@fusion(IDS)
def rotary_llama3(x: Tensor, ids: Tensor) -> Tensor:
    """Low frequencies by 8, high ones as they are, and between them a mixture."""
    inverse = frequencies(500000.0)
    length = 2 * math.pi / inverse
    smooth = (8192 / length - 1.0) / (4.0 - 1.0)
    mixed = (1 - smooth) * inverse / 8.0 + smooth * inverse
    scaled = torch.where(length > 8192 / 1.0, inverse / 8.0, inverse)
    between = ~(length < 8192 / 4.0) & ~(length > 8192 / 1.0)
    return turned(x, ids, torch.where(between, mixed, scaled))


@fusion(IDS)
def rotary_yarn(x: Tensor, ids: Tensor) -> Tensor:
    def dim_of(turns: float) -> float:
        return CHANNELS * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(dim_of(32.0)), 0), min(math.ceil(dim_of(1.0)), CHANNELS - 1)
    ramp = ((torch.arange(CHANNELS // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = frequencies() / 16.0 * ramp + frequencies() * (1 - ramp)
    return turned(x, ids, inverse, 0.1 * math.log(16.0) + 1.0)


@fusion(lambda: (torch.randn(OF_HEADS), torch.randint(0, 50, (3, BATCH, POSITIONS))))
def rotary_multimodal(x: Tensor, ids: Tensor) -> Tensor:
    """Each part of the channels turns by its own axis of positions."""
    angle = ids[:, :, None, :, None].to(torch.float32) * frequencies()
    mixed = torch.cat([angle[n, ..., a:b] for n, (a, b) in enumerate(((0, 2), (2, 3), (3, 4)))], -1)
    both = torch.cat((mixed, mixed), -1)
    return by_halves(x, both.cos(), both.sin())


TABLE = (19, 16)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randn(TABLE), torch.randint(0, TABLE[0], (BATCH, POSITIONS))


@fusion(tokens)
def embedding(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


@fusion(tokens)
def embedding_by_index(table: Tensor, ids: Tensor) -> Tensor:
    return table[ids]


@fusion(tokens)
def embedding_scaled(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table) * table.shape[-1] ** 0.5


@fusion(lambda: (*tokens(), torch.randn(11, 16)))
def embedding_and_positions(table: Tensor, ids: Tensor, places: Tensor) -> Tensor:
    return F.embedding(ids, table) + places[: ids.shape[-1]]


@fusion(
    lambda: (
        *tokens(),
        torch.randn(11, 16),
        torch.randn(2, 16),
        torch.randint(0, 2, (BATCH, POSITIONS)),
        torch.randn(16),
        torch.randn(16),
    ),
)
def bert_embeddings(
    words: Tensor, ids: Tensor, places: Tensor, kinds: Tensor, kind_ids: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    positions = torch.arange(ids.shape[1], device=ids.device)
    h = F.embedding(ids, words) + F.embedding(positions, places) + F.embedding(kind_ids, kinds)
    return F.layer_norm(h, (h.shape[-1],), weight, bias, 1e-12)


@fusion(lambda: (*tokens(), torch.randn(BATCH, POSITIONS, 16)), trained=(2,))
def frozen_embedding_add(table: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return F.embedding(ids, table) + torch.tanh(x)


@fusion(lambda: (torch.randn(19, CHANNELS), torch.randint(0, 19, (BATCH, POSITIONS)), *cached()), trained=())
def embedding_rotary(table: Tensor, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return by_halves(F.embedding(ids, table), cos, sin)


add("embedding_one_hot", lambda table, ids: (F.one_hot(ids, table.shape[0]).to(table.dtype)) @ table, tokens)
