"""What is measured and is no prebuilt fusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bench.layers import LAYERS

_DROPPED = 0.1


@fg.kernel
def column_sum(x: Tensor) -> Tensor:
    """Σ x over rows: a bias's gradient."""
    return x.sum(0)


@fg.kernel
def transposed_copy(x: Tensor) -> Tensor:
    """xᵀ in memory of its own: what is read along rows is written along columns."""
    return x.t().contiguous()


@fg.kernel
def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """dropout(x + bias) + residual, as behind the products of a transformer in training."""
    return F.dropout(x + bias, _DROPPED) + residual


@fg.kernel
def ln_gelu_dropout_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """dropout(gelu(layer_norm(x)·weight + bias)) + residual, with the tanh form of gelu."""
    normalized = F.layer_norm(x, (x.shape[-1],), weight, bias)
    return F.dropout(F.gelu(normalized, approximate="tanh"), _DROPPED) + residual


OWN: Mapping[str, fg.Kernel[..., Any]] = {
    "column_sum": column_sum,
    "transposed_copy": transposed_copy,
    "bias_dropout_add": bias_dropout_add,
    "ln_gelu_dropout_add": ln_gelu_dropout_add,
    **LAYERS,
}
"""By the name of their cases."""

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
_AS_IN_TORCH = ("gelu", "layer_norm", "rms_norm", "softmax")  # their first parameter is called input
_NORMS = ("layer_norm", "rms_norm")


def completed(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a case by the names of its declaration's parameters, with the settings that the case has."""
    if name in OWN:
        return dict(arguments)
    first = "input" if name in _AS_IN_TORCH else "x"
    named = {first if key == "x" else key: value for key, value in arguments.items()}
    shape = {"normalized_shape": tuple(named[first].shape[-1:])} if name in _NORMS else {}
    return named | shape | dict(_SETTINGS.get(name, {}))
