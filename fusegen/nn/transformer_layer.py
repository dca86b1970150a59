"""A transformer's encoder layer, forward and backward, as one kernel: the interface of DeepSpeed's ``DeepSpeedTransformerLayer``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.settings import Compiler

Approximate = Literal["none", "tanh"]

_BERT = {
    "attn_ow": "attention.output.dense.weight",
    "attn_ob": "attention.output.dense.bias",
    "attn_nw": "attention.output.LayerNorm.weight",
    "attn_nb": "attention.output.LayerNorm.bias",
    "inter_w": "intermediate.dense.weight",
    "inter_b": "intermediate.dense.bias",
    "output_w": "output.dense.weight",
    "output_b": "output.dense.bias",
    "norm_w": "output.LayerNorm.weight",
    "norm_b": "output.LayerNorm.bias",
}
"""DeepSpeed's names of parameters, and those of a ``BertLayer`` of transformers, without queries, keys and values."""

_PACKED = {"attn_qkvw": "weight", "attn_qkvb": "bias"}
"""Parameters that hold those of queries, keys and values, one below the other."""


@dataclass(frozen=True)
class _Math:
    """Constants of a layer's math: layers that share them share a kernel."""

    heads: int
    eps: float
    attn_dropout: float
    hidden_dropout: float
    pre_layer_norm: bool
    causal: bool
    approximate: str


class FusedTransformerLayer(nn.Module):
    """An encoder layer: self-attention and a feed-forward block, each with dropout and a residual sum.

    With ``pre_layer_norm`` the norm ``norm_w, norm_b`` stands before the attention and ``attn_nw, attn_nb`` before the feed-forward
    block; without it, as in BERT, ``attn_nw, attn_nb`` follows the residual sum of the attention and ``norm_w, norm_b`` that of the
    feed-forward block. Parameters have DeepSpeed's names and shapes, so its state dicts load. DeepSpeed's ``fp16`` is ``dtype``, and
    its ``local_rank`` is ``device``.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        intermediate_size: int = -1,
        *,
        attn_dropout_ratio: float = 0.0,
        hidden_dropout_ratio: float = 0.0,
        num_hidden_layers: int = 1,
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-12,
        pre_layer_norm: bool = True,
        adjust_init_range: bool = True,
        return_tuple: bool = False,
        training: bool = True,
        causal: bool = False,
        approximate: Approximate = "none",
        compiler: Compiler | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inner = intermediate_size if intermediate_size > 0 else 4 * hidden_size
        self.hidden_size, self.heads, self.intermediate_size = hidden_size, heads, inner
        self.attn_dropout_ratio, self.hidden_dropout_ratio = attn_dropout_ratio, hidden_dropout_ratio
        self.layer_norm_eps, self.pre_layer_norm, self.causal, self.approximate = layer_norm_eps, pre_layer_norm, causal, approximate
        self.return_tuple, self.compiler = return_tuple, compiler
        shapes = {
            "attn_qkvw": (3 * hidden_size, hidden_size),
            "attn_qkvb": (3 * hidden_size,),
            "attn_ow": (hidden_size, hidden_size),
            "attn_ob": (hidden_size,),
            "attn_nw": (hidden_size,),
            "attn_nb": (hidden_size,),
            "inter_w": (inner, hidden_size),
            "inter_b": (inner,),
            "output_w": (hidden_size, inner),
            "output_b": (hidden_size,),
            "norm_w": (hidden_size,),
            "norm_b": (hidden_size,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.initializer_range = initializer_range
        self.output_range = initializer_range / (math.sqrt(2.0 * num_hidden_layers) if adjust_init_range else 1.0)
        self.reset_parameters()
        self.train(training)

    def reset_parameters(self) -> None:
        """Draws the weights anew."""
        for name, parameter in self.named_parameters():
            if name in ("attn_nw", "norm_w"):
                nn.init.ones_(parameter)
            elif parameter.dim() == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self.output_range if name in ("attn_ow", "output_w") else self.initializer_range)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Any:
        """The layer."""
        kernel = _kernel(self._math(), self.compiler)
        result = kernel(
            hidden_states,
            attention_mask,
            self.attn_qkvw,
            self.attn_qkvb,
            self.attn_ow,
            self.attn_ob,
            self.attn_nw,
            self.attn_nb,
            self.inter_w,
            self.inter_b,
            self.output_w,
            self.output_b,
            self.norm_w,
            self.norm_b,
        )
        return (result,) if self.return_tuple else result

    def _math(self) -> _Math:
        drops = (self.attn_dropout_ratio, self.hidden_dropout_ratio) if self.training else (0.0, 0.0)
        return _Math(self.heads, self.layer_norm_eps, *drops, self.pre_layer_norm, self.causal, self.approximate)


@lru_cache(maxsize=None)
def _kernel(how: _Math, compiler: Compiler | None) -> fg.Kernel[..., Tensor]:
    """The kernel of layers with some constants."""

    def transformer_layer(
        x: Tensor,
        mask: Tensor | None,
        attn_qkvw: Tensor,
        attn_qkvb: Tensor,
        attn_ow: Tensor,
        attn_ob: Tensor,
        attn_nw: Tensor,
        attn_nb: Tensor,
        inter_w: Tensor,
        inter_b: Tensor,
        output_w: Tensor,
        output_b: Tensor,
        norm_w: Tensor,
        norm_b: Tensor,
    ) -> Tensor:
        def normalized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.layer_norm(x, (x.shape[-1],), weight, bias, how.eps)

        def dropped(x: Tensor) -> Tensor:
            return F.dropout(x, how.hidden_dropout) if how.hidden_dropout else x

        def attended(x: Tensor) -> Tensor:
            parts = F.linear(x, attn_qkvw, attn_qkvb).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (how.heads, -1)).transpose(1, 2) for part in parts)
            found = F.scaled_dot_product_attention(q, k, v, _bias(mask, x, how), how.attn_dropout, how.causal and mask is None)
            return F.linear(found.transpose(1, 2).flatten(2), attn_ow, attn_ob)

        def fed_forward(x: Tensor) -> Tensor:
            return F.linear(F.gelu(F.linear(x, inter_w, inter_b), approximate=how.approximate), output_w, output_b)

        if how.pre_layer_norm:
            x = x + dropped(attended(normalized(x, norm_w, norm_b)))
            return x + dropped(fed_forward(normalized(x, attn_nw, attn_nb)))
        x = normalized(x + dropped(attended(x)), attn_nw, attn_nb)
        return normalized(x + dropped(fed_forward(x)), norm_w, norm_b)

    return fg.kernel(transformer_layer, compiler=compiler)


def _bias(mask: Tensor | None, x: Tensor, how: _Math) -> Tensor | None:
    """What is added to the scores."""
    if mask is None:
        return None
    mask = mask.to(x.dtype)
    if not how.causal:
        return mask
    length = x.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    return mask.masked_fill(later, -math.inf)
