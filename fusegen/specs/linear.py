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


def _linear_bias_gelu(dtype: torch.dtype) -> Arguments:
    return {"x": meta(8192, 4096, dtype=dtype), "weight": meta(16384, 4096, dtype=dtype), "bias": meta(16384, dtype=dtype)}


def _linear_rotary(dtype: torch.dtype) -> Arguments:
    angles = {name: meta(8192, 2048, dtype=dtype) for name in ("cos", "sin")}
    return {"x": meta(8192, 4096, dtype=dtype), "weight": meta(4096, 4096, dtype=dtype)} | angles


SPECS = (
    Spec("linear_bias_gelu", linear_bias_gelu, "linear", _linear_bias_gelu),
    Spec("linear_rotary", linear_rotary, "linear", _linear_rotary),
)
