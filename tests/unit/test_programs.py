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

import fusegen as fg
from tests.unit.eager import agree, ints, randn

BF16, F16 = torch.bfloat16, torch.float16

Calls = tuple[tuple[Any, ...], ...]
PROGRAMS: list[tuple[Callable[..., Any], Calls]] = []


def program(*calls: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Puts a function into the corpus, with the arguments of its calls."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append((function, calls))
        return function

    return register


# Positions.


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


@program(
    (randn(2, 4, 6, 16), randn(2, 2, 6, 16), randn(2, 6, 16), randn(2, 6, 16)), (randn(1, 3, 5, 8),) * 2 + (randn(1, 5, 8),) * 2
)
def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


@program((randn(2, 5, 4, 16, dtype=BF16), randn(5, 8), randn(5, 8)), (randn(3, 4, 2, 8, dtype=BF16), randn(4, 4), randn(4, 4)))
def rotary_of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    rope = torch.stack([cos, sin], dim=-1).view(-1, x.size(1), 1, pairs.size(3), 2)
    a, b, c, s = pairs[..., 0], pairs[..., 1], rope[..., 0], rope[..., 1]
    return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(3).type_as(x)


@program((randn(4, 16),), (randn(7, 16),))
def sinusoidal_positions(x: Tensor) -> Tensor:
    n, d = x.shape
    position = torch.arange(n, device=x.device).float().unsqueeze(1)
    angle = position * torch.exp(torch.arange(0, d, 2).float() * (-math.log(10000.0) / d))
    return x + torch.stack([torch.sin(angle), torch.cos(angle)], -1).view(n, d)


@program((randn(2, 4, 5, 5), randn(4)), (randn(1, 4, 7, 9), randn(4)))
def alibi(scores: Tensor, slopes: Tensor) -> Tensor:
    distance = torch.arange(scores.shape[-1])[None, :] - torch.arange(scores.shape[-2])[:, None]
    return (scores + slopes.view(-1, 1, 1) * distance).softmax(-1)


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


# A row that masks every key would compare scores beside -65504, which eager rounds away and a kernel in float32 does not.
@program(
    (randn(2, 4, 5, 5, dtype=F16), torch.tensor([[1, 0, 0, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.int32)),
    (randn(2, 4, 6, 6, dtype=F16), torch.tensor([[0, 0, 0, 0, 0, 1], [1, 1, 0, 1, 1, 1]], dtype=torch.int32)),
)
def bert_mask(scores: Tensor, attention_mask: Tensor) -> Tensor:
    extended = attention_mask[:, None, None, :].to(dtype=scores.dtype)
    extended = (1.0 - extended) * torch.finfo(scores.dtype).min
    return F.softmax(scores / math.sqrt(64) + extended, dim=-1)


@program((randn(2, 4, 4, 4), randn(2, 4) > 0), (randn(2, 4, 9, 9), randn(2, 9) > 0))
def causal_and_padding(scores: Tensor, keep: Tensor) -> Tensor:
    causal = torch.tril(torch.ones_like(scores[0, 0], dtype=torch.bool))
    mask = causal[None, None] & keep[:, None, None, :]
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num()


@program((randn(2, 4, 6, 6),), (randn(2, 4, 9, 9),))
def sliding_window(scores: Tensor, window: int = 3) -> Tensor:
    i = torch.arange(scores.size(-1))
    distance = i[:, None] - i[None, :]
    return torch.where((distance >= 0) & (distance < window), scores, float("-inf")).softmax(-1)


@program((randn(2, 5, 6), ints(2, low=1, high=5)), (randn(2, 9, 6), ints(2, low=1, high=9)))
def mean_of_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(x.shape[1])[None, :] < lengths[:, None]
    return (x * mask[..., None]).sum(1) / lengths[:, None]


@program((randn(2, 2, 5, 8, dtype=BF16), 3), (randn(1, 4, 7, 8, dtype=BF16), 1))
def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    batch, heads, length, width = x.shape
    if n_rep == 1:
        return x
    return x[:, :, None, :, :].expand(batch, heads, n_rep, length, width).reshape(batch, heads * n_rep, length, width)


@program((randn(2, 5, 96, dtype=BF16),), (randn(2, 7, 96, dtype=BF16),))
def split_heads(qkv: Tensor, heads: int = 4) -> tuple[Tensor, ...]:
    b, n, c = qkv.shape
    q, k, v = qkv.reshape(b, n, 3, heads, c // 3 // heads).permute(2, 0, 3, 1, 4).unbind(0)
    return q * (1.0 / math.sqrt(k.size(-1))), k, v.contiguous()


@program((randn(2, 3, 4, 8), randn(2, 3, 5, 8), randn(2, 3, 5, 8)), (randn(1, 2, 6, 8), randn(1, 2, 6, 8), randn(1, 2, 6, 8)))
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    result: Tensor = (scores.softmax(dim=-1) @ v).transpose(1, 2).contiguous().view(q.size(0), q.size(2), -1)
    return result


@program((randn(2, 5, 8),), (randn(2, 8, 8),), (randn(2, 11, 8),))
def attention_in_blocks(x: Tensor, block: int = 4) -> Tensor:
    b, n, c = x.shape
    blocks = -(-n // block)
    y = F.pad(x, (0, 0, 0, blocks * block - n)).view(b, blocks, block, c)
    return (y @ y.transpose(-1, -2)).softmax(-1)


# Images and windows.


@program((randn(2, 8, 8, 6), 4), (randn(1, 12, 4, 6), 4))
def window_partition(x: Tensor, size: int) -> Tensor:
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, c)


@program((randn(2, 8, 8, 6),), (randn(1, 4, 4, 6),))
def shifted_window(x: Tensor) -> Tensor:
    return torch.roll(x, shifts=(-2, -2), dims=(1, 2))


@program((randn(2, 8, 8, 6),), (randn(1, 4, 4, 6),))
def patch_merging(x: Tensor) -> Tensor:
    x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
    return F.layer_norm(x.view(x.shape[0], -1, x.shape[-1]), (x.shape[-1],))


@program((randn(2, 3, 8, 8),), (randn(1, 3, 16, 8),))
def patchify(images: Tensor, p: int = 4) -> Tensor:
    n, c, h, w = images.shape
    x = torch.einsum("nchpwq->nhwpqc", images.reshape(n, c, h // p, p, w // p, p))
    return x.reshape(n, h // p * (w // p), p**2 * c)


MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


@program((ints(2, 4, 4, 3, low=0, high=255, dtype=torch.uint8),), (ints(1, 3, 2, 3, low=0, high=255, dtype=torch.uint8),))
def preprocess_images(x: Tensor) -> Tensor:
    return ((x.permute(0, 3, 1, 2).float() / 255.0) - MEAN[:, None, None]) / STD.view(-1, 1, 1)


@program((randn(2, 8, 4, 4), randn(8), randn(8)), (randn(3, 8, 5, 4), randn(8), randn(8)))
def block_of_a_resnet(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.silu(F.group_norm(x, 4, weight, bias))
    return x + y * torch.sigmoid(y.mean((2, 3), keepdim=True))


@program((randn(8, 4, 3, 3),), (randn(4, 2, 1, 2),))
def weight_standardisation(w: Tensor) -> Tensor:
    variance, mean = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
    return (w - mean) / torch.sqrt(variance + 1e-10)


# Norms and activations.


@program((randn(4, 16, dtype=BF16), randn(16, dtype=BF16)), (randn(3, 8, dtype=F16), randn(8, dtype=F16)))
def llama_rms_norm(hidden_states: Tensor, weight: Tensor, variance_epsilon: float = 1e-6) -> Tensor:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + variance_epsilon)
    return weight * hidden_states.to(input_dtype)


@program((randn(4, 6), randn(6), randn(4, 6)), (randn(4, 6), randn(6), None))
def norm_of_an_optional_sum(x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    if residual is not None:
        x = x + residual
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6), x


@program(
    (randn(4, 8), randn(4, 8), randn(8), randn(4, 1), randn(4, 1)),
    (randn(5, 16), randn(5, 16), randn(16), randn(5, 1), randn(5, 1)),
)
def layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
    normed, wdy = (x - mean) * rstd, dy * weight
    c1, c2 = (normed * wdy).mean(-1, keepdim=True), wdy.mean(-1, keepdim=True)
    return (wdy - (normed * c1 + c2)) * rstd, (dy * normed).sum(0), dy.sum(0)


@program((randn(4, 32, dtype=BF16),), (randn(3, 8, dtype=BF16),))
def clamped_swiglu(gate_up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@program((randn(4, 16), "relu"), (randn(4, 16), "gelu"))
def activation_by_name(x: Tensor, name: str) -> Tensor:
    functions: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    return functions[name](x)


@program((randn(2, 5, 8),), (randn(3, 4, 6),))
def token_shift(x: Tensor) -> Tensor:
    before = F.pad(x, (0, 0, 1, -1))
    return x + 0.5 * (before - x)


# Quantisation.


@program((randn(4, 16),), (randn(3, 8) * 10,))
def quantise_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(dim=-1, keepdim=True) / 127.0
    q = torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)
    return q, q.to(torch.float32) * scale


@program((randn(4, 32),), (randn(2, 64),))
def pack_to_int4(x: Tensor, group: int = 16) -> tuple[Tensor, Tensor]:
    n, k = x.shape
    groups = x.view(n, k // group, group)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 7
    nibbles = ((groups / scale).round().clamp(-8, 7) + 8).to(torch.uint8).view(n, k)
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4), scale.squeeze(-1)


@program(
    (ints(4, 8, low=0, high=255, dtype=torch.uint8), randn(4, 2, dtype=F16), randn(4, 2, dtype=F16)),
    (ints(2, 8, low=0, high=255, dtype=torch.uint8), randn(2, 4, dtype=F16), randn(2, 4, dtype=F16)),
)
def unpack_int4(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    low, high = (packed & 0xF).to(scale.dtype), (packed >> 4).to(scale.dtype)
    w = torch.stack((low, high), -1).view(packed.shape[0], scale.shape[1], -1)
    return ((w - zero[..., None]) * scale[..., None]).view(packed.shape[0], -1)


@program((randn(4, 32, dtype=BF16),), (randn(2, 64, dtype=BF16),))
def shared_exponents(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.float().view(x.shape[0], -1, 16)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 2
    scale = torch.exp2(exponent.clamp(-127, 127))
    return (blocks / scale).round().clamp(-6, 6) * scale, exponent


# Losses, experts and optimisers.


@program((randn(4, 16), torch.tensor([3, -100, 0, 15])), (randn(3, 9), torch.tensor([8, 1, -100])))
def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100, smoothing: float = 0.1) -> Tensor:
    logp = logits.log_softmax(-1)
    chosen = target[:, None] == torch.arange(logits.shape[-1])
    valid = target != ignore_index
    loss = -(1 - smoothing) * torch.where(chosen, logp, 0.0).sum(-1) - smoothing * logp.mean(-1)
    return (loss * valid).sum() / valid.sum()


@program((randn(4, 16), randn(4, 16)), (randn(3, 8, dtype=BF16), randn(3, 8, dtype=BF16)))
def distillation(student: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    p, q = F.log_softmax(teacher / temperature, dim=-1), F.log_softmax(student / temperature, dim=-1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1) * temperature**2


@program((randn(4, 16),), (randn(3, 8),))
def route_to_one_expert(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = logits.softmax(-1)
    weight, expert = p.max(-1)
    load = (expert[:, None] == torch.arange(logits.shape[-1])).to(p.dtype).mean(0)
    return weight, expert, (load * p.mean(0)).sum() * logits.shape[-1]


@program((randn(4, 16), randn(4, 16), randn(4, 16).abs(), 1e-3, 5), (randn(3), randn(3), randn(3).abs(), 1e-2, 7))
def adam(g: Tensor, m: Tensor, v: Tensor, lr: float, step: int, b1: float = 0.9, b2: float = 0.999) -> tuple[Tensor, ...]:
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + 1e-8), m, v


@program((randn(4, 16), randn(3, 5)), (randn(4, 1), randn(2, 2)))
def clip_gradients(a: Tensor, b: Tensor, most: float = 1.0) -> tuple[Tensor, Tensor]:
    norm = torch.stack([g.norm() for g in (a, b)]).norm()
    scale = (most / (norm + 1e-6)).clamp(max=1.0)
    return a * scale, b * scale


MODULE = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Dropout(0.1)).eval()


@program((randn(4, 6),), (randn(2, 3, 6),))
def modules(x: Tensor) -> Tensor:
    y: Tensor = MODULE.requires_grad_(False)(x)
    return y.relu()


@pytest.mark.parametrize(("function", "calls"), PROGRAMS, ids=[f.__name__ for f, _ in PROGRAMS])
def test_program(function: Callable[..., Any], calls: Calls) -> None:
    agree(function, *calls)


@pytest.mark.parametrize(("function", "calls"), PROGRAMS, ids=[f.__name__ for f, _ in PROGRAMS])
def test_program_in_cuda(function: Callable[..., Any], calls: Calls) -> None:
    """Each is lowered for a GPU as well, and the compiler accepts the text."""
    low = fg.kernel(function).lower(*calls[0], target="sm_90a")
    assert all(f".entry {source.entry}" in low.asm["ptx"] for source in low.sources)
