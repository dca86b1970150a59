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
