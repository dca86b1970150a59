"""Norms, softmax and quantized outputs: what reduces rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.unit.fusions.elementwise import GELUS, gelu_tanh
from tests.unit.fusions.table import add, fusion, shaped

ROWS, WIDTH = 5, 40
NORMED = shaped((ROWS, WIDTH), (WIDTH,), (WIDTH,))
SCALED = shaped((2, 3, WIDTH), (WIDTH,))
RESIDUAL = shaped((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,), (WIDTH,))
HALF = torch.bfloat16


@fusion(NORMED)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


@fusion(lambda: (*NORMED(), 1e-3))
def layer_norm_eps(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@fusion(shaped((ROWS, WIDTH), (WIDTH,)))
def layer_norm_without_bias(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight)


@fusion(shaped((ROWS, WIDTH)))
def layer_norm_plain(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],))


@fusion(NORMED)
def layer_norm_zero_centered(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), 1 + weight, bias)


@fusion(NORMED)
def layer_norm_with_statistics(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


add(
    "layer_norm_with_statistics_bf16",
    lambda x, weight, bias: torch.native_layer_norm(x, (x.shape[-1],), weight, bias, 1e-5),
    lambda: (torch.randn(ROWS, WIDTH).to(HALF), *NORMED()[1:]),
)


@fusion(NORMED)
def layer_norm_in_two_passes(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-5)
    return (x - mean) * rstd * weight + bias, mean, rstd


@fusion(NORMED)
def layer_norm_by_var_mean(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) / torch.sqrt(var + 1e-5) * weight + bias


@fusion(shaped((3, 4, 10), (4, 10), (4, 10)))
def layer_norm_of_two_dims(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:], weight, bias)


@fusion(lambda: (torch.randn(ROWS, WIDTH) + 100, *NORMED()[1:]))
def layer_norm_far_from_zero(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


@fusion(shaped((ROWS, WIDTH), (WIDTH,), (WIDTH,), dtype=HALF))
def layer_norm_bf16(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


@fusion(lambda: (*NORMED()[:2], torch.randn(ROWS, WIDTH), torch.rand(ROWS, 1) + 0.5, torch.randn(WIDTH)), trained=())
def layer_norm_backward_from_the_output(
    y: Tensor, weight: Tensor, dy: Tensor, rstd: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normalized = (y - bias) / weight
    grad = dy * weight
    dx = rstd * (grad - grad.mean(-1, keepdim=True) - normalized * (grad * normalized).mean(-1, keepdim=True))
    return dx, (dy * normalized).sum(0), dy.sum(0), (weight == 0).any()


@fusion(SCALED)
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


@fusion(SCALED)
def rms_norm_default_eps(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight)


@fusion(shaped((ROWS, WIDTH)))
def rms_norm_plain(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


@fusion(SCALED)
def rms_norm_zero_centered(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6) * (1 + weight)


@fusion(SCALED)
def rms_norm_by_pow(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def llama(x: Tensor, weight: Tensor) -> Tensor:
    """The statistics and the product by them in float32; the weight in the input's dtype."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    """All in float32, and one rounding."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + weight.float())).type_as(x)


def uncast(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


for mode in (llama, gemma, uncast):
    add(f"rms_norm_{mode.__name__}_bf16", lambda x, weight, mode=mode: mode(x, weight), shaped((ROWS, WIDTH), (WIDTH,), dtype=HALF))
add("rms_norm_llama_f16", lambda x, weight: llama(x, weight), shaped((ROWS, WIDTH), (WIDTH,), dtype=torch.float16))
add("rms_norm_gemma_f32", lambda x, weight: gemma(x, weight), SCALED)


@fusion(shaped((2, 3, 4, 16), (2, 3, 2, 16), (16,), (16,)))
def qk_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
    return F.rms_norm(q, (16,), q_weight, 1e-6).transpose(1, 2), F.rms_norm(k, (16,), k_weight, 1e-6).transpose(1, 2)


@fusion(shaped((2, 5, WIDTH), (2, WIDTH), (2, WIDTH)))
def modulated_layer_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """The norm of adaLN: one shift and scale a batch."""
    return F.layer_norm(x, (x.shape[-1],), eps=1e-6) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@fusion(shaped((2, 5, WIDTH), (2, 5, WIDTH), (2, 6 * WIDTH)))
def gated_modulated_layer_norm(x: Tensor, y: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor]:
    """The residual sum and the norm between the two halves of a DiT block."""
    _, _, gate, shift, scale, _ = modulation.unsqueeze(1).chunk(6, dim=-1)
    h = x + gate * y
    return F.layer_norm(h, (h.shape[-1],), eps=1e-6) * (1 + scale) + shift, h


@fusion(shaped((ROWS, WIDTH), (WIDTH,), (ROWS, WIDTH), (ROWS, WIDTH)))
def modulated_rms_norm(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """One shift and scale a row."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6) * (1 + scale) + shift


@fusion(RESIDUAL)
def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.layer_norm(h, (h.shape[-1],), weight, bias), h


@fusion(RESIDUAL)
def add_layer_norm_post(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x + residual, (x.shape[-1],), weight, bias)


@fusion(lambda: (*RESIDUAL(), torch.randn(WIDTH), 5))
def bias_dropout_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, before: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    h = fg.dropout(x + before, 0.25, seed=seed) + residual
    return F.layer_norm(h, (h.shape[-1],), weight, bias), h


@fusion(shaped((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, 1e-6), h


@fusion(shaped((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)))
def add_rms_norm_post(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return residual + F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


@fusion(shaped((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,), dtype=HALF))
def add_rms_norm_bf16(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return llama(h, weight), h


@fusion(lambda: (*shaped((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,))(), 9))
def dropout_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    h = fg.dropout(x, 0.25, seed=seed) + residual
    return F.rms_norm(h, (h.shape[-1],), weight, 1e-6), h


def _norm_then(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return act(F.layer_norm(x, (x.shape[-1],), weight, bias))

    return function


for name, gelu in GELUS.items():
    add(f"layer_norm_{name}", _norm_then(gelu), NORMED)


@fusion(lambda: (*NORMED(), torch.randn(ROWS, WIDTH), 13))
def layer_norm_gelu_dropout_add_seed(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, seed: int) -> Tensor:
    return fg.dropout(gelu_tanh(F.layer_norm(x, (x.shape[-1],), weight, bias)), 0.25, seed=seed) + residual


def _chain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gelu_tanh(F.layer_norm(x, (x.shape[-1],), weight, bias))


@fusion(
    lambda: (*NORMED(), torch.randn(ROWS, WIDTH)),
    kept=lambda x, w, b, residual: (residual, _chain(x, w, b) / 0.75 + residual),
)
def layer_norm_gelu_dropout_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.dropout(_chain(x, weight, bias), 0.25) + residual


@fusion(shaped((ROWS, WIDTH)))
def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


@fusion(lambda: (torch.randn(ROWS, WIDTH), 0.7))
def softmax_temperature(x: Tensor, temperature: float) -> Tensor:
    return torch.softmax(x / temperature, -1)


@fusion(lambda: (torch.randn(ROWS, WIDTH), torch.rand(ROWS, 1) + 0.5))
def softmax_temperature_of_rows(x: Tensor, temperature: Tensor) -> Tensor:
    return torch.softmax(x / temperature, -1)


@fusion(shaped((3, 7, 5)))
def softmax_of_a_middle_dim(x: Tensor) -> Tensor:
    return torch.softmax(x, 1)


@fusion(shaped((ROWS, WIDTH), dtype=HALF))
def softmax_in_float32(x: Tensor) -> Tensor:
    return F.softmax(x, -1, dtype=torch.float32).to(x.dtype)


@fusion(shaped((2, 5000)))
def softmax_of_long_rows(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@fusion(shaped((ROWS, WIDTH)))
def softmax_by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@fusion(shaped((ROWS, WIDTH)))
def log_softmax(x: Tensor) -> Tensor:
    return F.log_softmax(x, -1)


@fusion(shaped((ROWS, WIDTH)))
def logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


@fusion(shaped((2, 3, 6, 8), (2, 1, 1, 8)))
def scale_mask_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores * 0.125 + mask, -1)


def _padding() -> Tensor:
    return torch.where(torch.arange(8) < torch.tensor([[8], [5]]), 0.0, torch.finfo(torch.float32).min).view(2, 1, 1, 8)


@fusion(lambda: (torch.randn(2, 3, 6, 8), _padding()))
def scale_padding_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores * 0.125 + mask, -1)


@fusion(lambda: (torch.randn(2, 3, 6, 8), torch.arange(8) >= torch.tensor([8, 5]).view(2, 1, 1, 1)))
def scale_bool_mask_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((scores * 0.125).masked_fill(mask, -math.inf), -1)


@fusion(lambda: (torch.randn(2, 3, 6, 8), torch.rand(2, 3, 6, 8) < 0.6))
def scale_where_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(torch.where(mask, scores * 0.125, -10000.0), -1)


def below(scores: Tensor) -> Tensor:
    """Keys that a query sees."""
    query, key = (torch.arange(scores.shape[dim], device=scores.device) for dim in (-2, -1))
    return key <= query[:, None]


@fusion(shaped((2, 3, 7, 7)))
def causal_softmax(scores: Tensor) -> Tensor:
    return torch.softmax(torch.where(below(scores), scores * 0.25, -math.inf), -1)


@fusion(shaped((2, 3, 7, 7)))
def causal_softmax_by_tril(scores: Tensor) -> Tensor:
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~mask, -math.inf), -1)


@fusion(shaped((2, 3, 7, 7)))
def softcap_softmax(scores: Tensor) -> Tensor:
    return torch.softmax(torch.where(below(scores), 30.0 * torch.tanh(scores / 30.0), -math.inf), -1)


@fusion(lambda: (torch.randn(2, 3, 7, 7), 21))
def causal_softmax_dropout_seed(scores: Tensor, seed: int) -> Tensor:
    return fg.dropout(torch.softmax(torch.where(below(scores), scores * 0.25, -math.inf), -1), 0.25, seed=seed)


@fusion(shaped((ROWS, WIDTH)), kept=lambda x: (torch.zeros_like(x), torch.softmax(x, -1) / 0.5))
def softmax_dropout(x: Tensor) -> Tensor:
    return F.dropout(torch.softmax(x, -1), 0.5)


@fusion(shaped((ROWS, WIDTH), (WIDTH,)), trained=())
def rms_norm_int8_static(x: Tensor, weight: Tensor) -> Tensor:
    y = F.rms_norm(x, (x.shape[-1],), weight, 1e-6)
    return torch.clamp(torch.round(y / 0.02), -128, 127).to(torch.int8)


@fusion(shaped((ROWS, WIDTH), (WIDTH,)), trained=())
def rms_norm_int8_a_token(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x, (x.shape[-1],), weight, 1e-6)
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return torch.round(y / scale).to(torch.int8), scale


@fusion(shaped((ROWS, WIDTH)), trained=())
def gelu_int8_dynamic(x: Tensor) -> tuple[Tensor, Tensor]:
    y = gelu_tanh(x)
    scale = y.abs().max() / 127
    return torch.round(y / scale).to(torch.int8), scale


@fusion(shaped((3, 256), (3, 256)), trained=())
def swiglu_int8_blocks(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    y = (F.silu(gate) * up).unflatten(-1, (-1, 128))
    scale = y.abs().amax(-1, keepdim=True) / 127
    return torch.round(y / scale).to(torch.int8).flatten(-2), scale.squeeze(-1)
