"""What torch has for a case that is better than running the declaration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.bench.case import Way
from fusegen.specs.spec import Arguments
from fusegen.timing import Call


def _native_backward(arguments: Arguments) -> Call:
    """torch's own backward, given the statistics that its forward keeps."""
    x, dy, weight = (arguments[name] for name in ("x", "dy", "weight"))
    features = [x.shape[-1]]
    _, mean, rstd = torch.native_layer_norm(x, features, weight, None, 1e-5)
    backward = torch.ops.aten.native_layer_norm_backward
    bias = torch.zeros_like(weight)
    return lambda: backward(dy, x, features, mean, rstd, weight, bias, [True, True, True])


def _attention(**options: Any) -> Callable[[Arguments], Call]:
    def prepare(arguments: Arguments) -> Call:
        q, k, v = (arguments[name] for name in "qkv")
        return lambda: F.scaled_dot_product_attention(q, k, v, **options)

    return prepare


def _biased_attention(arguments: Arguments) -> Call:
    """With the bias as a mask in memory, which is the only way in which torch's function takes one."""
    mask = _alibi(arguments["q"], arguments["slopes"])
    return _attention(attn_mask=mask)(arguments)


def _alibi(q: Tensor, slopes: Tensor) -> Tensor:
    positions = torch.arange(q.shape[-2], device=q.device)
    distance = positions - positions.unsqueeze(-1)
    bias = slopes.view(-1, 1, 1).to(q.dtype) * distance.to(q.dtype)
    return bias.masked_fill_(distance > 0, -math.inf).unsqueeze(0)


SDPA = Way("F.scaled_dot_product_attention", _attention())
SDPA_CAUSAL = Way("F.scaled_dot_product_attention(is_causal)", _attention(is_causal=True))
SDPA_MASK = Way("F.scaled_dot_product_attention(attn_mask)", _biased_attention)
NATIVE_BACKWARD = Way("native_layer_norm_backward, given mean and rstd", _native_backward)
