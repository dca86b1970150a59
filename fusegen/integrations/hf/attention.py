"""Attention as ``transformers`` calls it, and its registration under a name."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.integrations.hf.installed import installed
from fusegen.specs.attention import flash_attention

_LEAST = -1e30  # added to scores of keys that are not seen


@fg.kernel
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scaling: float,
    is_causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
    p: float,
) -> Tensor:
    """(batch, positions, heads, channels), as models go on with it."""
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, _LEAST) if mask.dtype == torch.bool else mask + bias
    if softcap is None and sinks is None:
        found = F.scaled_dot_product_attention(query, key, value, mask, p, is_causal, scale=scaling, enable_gqa=True)
    else:
        if mask is not None and mask.dtype == torch.bool:  # a query that sees nothing, as a padded one, has no NaN
            mask = torch.where(mask, 0.0, _LEAST)
        attend = partial(flash_attention.function, softcap=softcap, sinks=sinks, p=p, training=p > 0)
        found = cast(Tensor, attend(query, key, value, mask, scaling, is_causal))
    return found.transpose(1, 2).contiguous()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function as ``transformers`` calls it; a soft cap and sinks, which its "sdpa" refuses, are part of the kernel.

    Args:
        module: the attention module; its ``is_causal`` counts where the call says nothing.
        query: (batch, heads, queries, channels).
        key, value: (batch, kv_heads, keys, channels).
        attention_mask: floats that are added, or booleans that are True where a key is seen; broadcast to the scores. A window is
            part of it.
        dropout: the probability with which a weight becomes 0.
        scaling: of the scores; 1/√channels by default.
        is_causal: True if, without a mask, a query sees no later keys.
        position_bias: is added to the scores.
        softcap: scores become softcap·tanh(scores/softcap).
        s_aux: (heads), sinks: scores that take part in the softmax without a value.

    Returns:
        (batch, queries, heads, channels), and None for the weights.
    """
    count = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and count > 1 and attention_mask is None
    if causal and key.shape[2] > count:  # the places of a cache that nothing is in yet
        key, value = key[:, :, :count], value[:, :, :count]
        position_bias = None if position_bias is None else position_bias[..., :count]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attention(query, key, value, attention_mask, position_bias, scaling, causal, softcap, s_aux, dropout), None


def register_attention(name: str = "fusegen") -> None:
    """Makes fusegen's attention known to ``transformers``: ``from_pretrained(..., attn_implementation="fusegen")``.

    Raises:
        ToolNotFoundError: transformers is not installed.
    """
    models, masks = installed("transformers.modeling_utils"), installed("transformers.masking_utils")
    models.AttentionInterface.register(name, attention)
    masks.AttentionMaskInterface.register(name, masks.sdpa_mask)
