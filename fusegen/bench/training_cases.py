"""The group ``training``: steps of rows, attention, matmuls, layers and losses, as models have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fusegen.bench import builders, layer_builders
from fusegen.bench.case import Sizes
from fusegen.bench.record import TRAINING
from fusegen.bench.training import TrainingCase
from fusegen.specs.spec import Arguments

_CPU_ROWS = (256, 512)
_HEADS, _CPU_HEADS = (4, 16, 4096, 128), (1, 2, 64, 32)
_CPU_LAYER = (2, 16, 128)
_CPU_LOGITS = (64, 1000)
_BERT_LARGE = ((8, 128, 1024), (8, 512, 1024), (64, 128, 1024))

Build = Callable[[torch.dtype, Sizes], Arguments]


# Arithmetic. The backward pass of a matmul is two, and that of attention computes the scores again: 2.5 times the forward pass.


def _matmul(sizes: Sizes) -> int:
    return 3 * 2 * math.prod(sizes)


def _gated_mlp(sizes: Sizes) -> int:
    return 3 * _matmul(sizes)


def _attention(sizes: Sizes) -> int:
    batch, heads, positions, channels = sizes
    return 7 * 2 * batch * heads * positions**2 * channels


def _causal(sizes: Sizes) -> int:
    return _attention(sizes) // 2


def _encoder(sizes: Sizes) -> int:
    batch, positions, width = sizes
    return 12 * _matmul((batch * positions, width, width)) + _attention((batch, 1, positions, width))


# Cases.


def _case(name: str, sizes: Sizes, cpu_sizes: Sizes, build: Build, **options: Any) -> TrainingCase:
    return TrainingCase(name, sizes, cpu_sizes, build, group=TRAINING, **options)


_layer = partial(_case, cpu_sizes=_CPU_LAYER, build=layer_builders.encoder, flops=_encoder, draws=True)
_fused_layer = partial(_layer, build=layer_builders.transformer_layer)

TRAINING_CASES: tuple[TrainingCase, ...] = (
    _case("layer_norm", (16384, 4096), _CPU_ROWS, builders.affine),
    _case("rms_norm", (16384, 4096), _CPU_ROWS, builders.weight),
    _case("add_rms_norm", (16384, 4096), _CPU_ROWS, builders.weight_residual),
    _case("ln_gelu_dropout_add", (16384, 8192), _CPU_ROWS, builders.affine_residual, draws=True),
    _case("gelu_dropout_add", (16384, 8192), _CPU_ROWS, builders.residual, draws=True),
    _case("swiglu", (16384, 8192), _CPU_ROWS, builders.gated),
    _case("softmax", (16384, 4096), _CPU_ROWS, builders.one),
    _case("rotary", _HEADS, _CPU_HEADS, layer_builders.rotated, fixed=("cos", "sin")),
    _case("scale_mask_softmax", (8, 16, 1024, 1024), (2, 2, 64, 64), layer_builders.masked),
    _case("sdpa", _HEADS, _CPU_HEADS, builders.heads, flops=_attention),
    _case("sdpa_causal", _HEADS, _CPU_HEADS, builders.heads, flops=_causal),
    _case("soft_cap_attention", _HEADS, _CPU_HEADS, builders.heads, flops=_attention),
    _case("bias_attention", _HEADS, _CPU_HEADS, layer_builders.heads_and_bias, flops=_attention),
    _layer("encoder_pre_norm", (16, 512, 1024)),
    _layer("encoder_pre_norm", (8, 128, 1024)),
    _layer("encoder_post_norm", (16, 512, 1024)),
    _layer("encoder_post_norm", (8, 128, 1024)),
    *(_fused_layer(f"transformer_layer_{place}_norm", sizes) for place in ("pre", "post") for sizes in _BERT_LARGE),
    _case("linear_bias_gelu", (8192, 16384, 4096), (64, 128, 64), builders.product, flops=_matmul),
    _case("swiglu_mlp", (8192, 14336, 4096), (64, 128, 64), layer_builders.gated_mlp, flops=_gated_mlp),
    _case("cross_entropy", (8192, 32000), _CPU_LOGITS, layer_builders.logits),
    _case("cross_entropy", (4096, 128256), _CPU_LOGITS, layer_builders.logits),
    _case("linear_cross_entropy", (4096, 4096, 32000), (64, 32, 1000), layer_builders.classified, flops=_matmul),
    _case("embedding_layer_norm", (16, 1024, 32000, 1024), (2, 16, 1000, 128), layer_builders.tokens, tables=("table",)),
)
"""Sizes are those of the builders; of linear_bias_gelu and swiglu_mlp rows, outputs or hidden channels, inputs."""
