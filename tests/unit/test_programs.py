"""Programs as people write them, most of them pasted from transformers: each gives what torch gives, for two calls of one kernel.

They show what can be declared. What a function cannot do stands in `test_lang_errors.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.eager import agree, ints, randn

BF16, F16 = torch.bfloat16, torch.float16

Calls = tuple[tuple[Any, ...], ...]
PROGRAMS: dict[str, tuple[Callable[..., Any], Calls]] = {}


def program(*calls: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Puts a function into the corpus, with the arguments of its calls."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = function, calls
        return function

    return register


# Positions.


@program((randn(2, 5, 4, 16, dtype=BF16), randn(5, 8), randn(5, 8)), (randn(3, 4, 2, 8, dtype=BF16), randn(4, 4), randn(4, 4)))
def rotary_of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    rope = torch.stack([cos, sin], dim=-1).view(-1, x.size(1), 1, pairs.size(3), 2)
    a, b, c, s = pairs[..., 0], pairs[..., 1], rope[..., 0], rope[..., 1]
    return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(3).type_as(x)


@program((randn(2, 4, 16),), (randn(2, 7, 16),))
def t5_buckets(x: Tensor, num_buckets: int = 8, max_distance: int = 16) -> Tensor:
    n = x.shape[1]
    relative = torch.arange(n)[None] - torch.arange(n)[:, None]
    half = num_buckets // 2
    side, distance, exact = (relative > 0).to(torch.long) * half, torch.abs(relative), half // 2
    ratio = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    large = exact + (ratio * (half - exact)).to(torch.long)
    return side + torch.where(distance < exact, distance, torch.min(large, torch.full_like(large, half - 1)))


@program((randn(2, 3, 4, 4),), (randn(2, 3, 7, 7),))
def transformer_xl_shift(x: Tensor) -> Tensor:
    b, h, q, k = x.shape
    padded = torch.cat([torch.zeros((b, h, q, 1), dtype=x.dtype), x], dim=-1).view(b, h, k + 1, q)
    return padded[:, :, 1:].view_as(x)


# Masks and attention.


@program((randn(2, 5, 8),), (randn(2, 8, 8),), (randn(2, 11, 8),))
def attention_in_blocks(x: Tensor, block: int = 4) -> Tensor:
    b, n, c = x.shape
    blocks = -(-n // block)
    y = F.pad(x, (0, 0, 0, blocks * block - n)).view(b, blocks, block, c)
    return (y @ y.transpose(-1, -2)).softmax(-1)


# Images and windows.


@program((randn(2, 8, 8, 6),), (randn(1, 4, 4, 6),))
def patch_merging(x: Tensor) -> Tensor:
    x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
    return F.layer_norm(x.view(x.shape[0], -1, x.shape[-1]), (x.shape[-1],))


# Quantisation.


@program(
    (ints(4, 8, low=0, high=255, dtype=torch.uint8), randn(4, 2, dtype=F16), randn(4, 2, dtype=F16)),
    (ints(2, 8, low=0, high=255, dtype=torch.uint8), randn(2, 4, dtype=F16), randn(2, 4, dtype=F16)),
)
def unpack_int4(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    low, high = (packed & 0xF).to(scale.dtype), (packed >> 4).to(scale.dtype)
    w = torch.stack((low, high), -1).view(packed.shape[0], scale.shape[1], -1)
    return ((w - zero[..., None]) * scale[..., None]).view(packed.shape[0], -1)


# Losses, experts and optimisers.


@program((randn(4, 16),), (randn(3, 8),))
def route_to_one_expert(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = logits.softmax(-1)
    weight, expert = p.max(-1)
    load = (expert[:, None] == torch.arange(logits.shape[-1])).to(p.dtype).mean(0)
    return weight, expert, (load * p.mean(0)).sum() * logits.shape[-1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    """On the CPU; and it is lowered for a GPU as well."""
    function, calls = PROGRAMS[name]
    kernel = agree(function, *calls)
    assert kernel.lower(*calls[0], target="sm_90a").sources
