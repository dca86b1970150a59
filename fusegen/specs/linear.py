"""Matrix products with something around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.specs.spec import Arguments, Spec, meta


@fg.kernel
def linear_bias_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x·weightᵀ + bias), with the tanh form of gelu

    x: (…, inputs); weight: (outputs, inputs); bias: (outputs). The first half of a transformer's feed-forward block.
    """
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


@fg.kernel
def linear_rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a·cos − b·sin, b·cos + a·sin) of interleaved pairs (a, b) of y = x·weightᵀ

    x: (rows, inputs); weight: (outputs, inputs); cos, sin: (rows, outputs/2). Su et al., "RoFormer" (arXiv 2104.09864).
    """
    y = F.linear(x, weight)
    a, b = y[..., 0::2], y[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _linear_bias_gelu(dtype: torch.dtype, rows: int = 8192, inputs: int = 4096, outputs: int = 16384) -> Arguments:
    return {"x": meta(rows, inputs, dtype=dtype), "weight": meta(outputs, inputs, dtype=dtype), "bias": meta(outputs, dtype=dtype)}


def _linear_rotary(dtype: torch.dtype, rows: int = 8192, inputs: int = 4096, pairs: int = 2048) -> Arguments:
    angles = {name: meta(rows, pairs, dtype=dtype) for name in ("cos", "sin")}
    return {"x": meta(rows, inputs, dtype=dtype), "weight": meta(2 * pairs, inputs, dtype=dtype)} | angles


SPECS = (
    Spec("linear_bias_gelu", linear_bias_gelu, "linear", _linear_bias_gelu),
    Spec("linear_rotary", linear_rotary, "linear", _linear_rotary),
)
