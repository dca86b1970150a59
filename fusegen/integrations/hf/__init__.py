"""Extension points of ``transformers``: an attention function by name, and layers for the package ``kernels``.

`fusegen.patch` needs neither.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen import ops
from fusegen.errors import ToolNotFoundError
from fusegen.specs.attention import flash_attention

__all__ = ["attention", "kernel_mapping", "register_attention"]


_LEAST = -1e30  # the score of masked keys


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
    """Returns (batch, queries, heads, channels), contiguous, as models read it."""
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, _LEAST) if mask.dtype == torch.bool else mask + bias
    if softcap is None and sinks is None:
        result = F.scaled_dot_product_attention(query, key, value, mask, p, is_causal, scale=scaling, enable_gqa=True)
    else:
        if mask is not None and mask.dtype == torch.bool:  # finite scores, so that a fully masked query (padding) gives no NaN
            mask = torch.where(mask, 0.0, _LEAST)
        attend = partial(flash_attention.function, softcap=softcap, sinks=sinks, p=p, training=p > 0)
        result = cast(Tensor, attend(query, key, value, mask, scaling, is_causal))
    return result.transpose(1, 2).contiguous()


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
    """An attention function with the signature of ``transformers``. Unlike "sdpa", it supports a soft cap and attention sinks.

    Args:
        module: its ``is_causal`` is the default of the argument.
        query: (batch, heads, queries, channels).
        key, value: (batch, kv_heads, keys, channels).
        attention_mask: added floats, or booleans that are True for visible keys; broadcast to the scores. It includes windows.
        dropout: the probability of a weight to become 0.
        scaling: factor of the scores, 1/√channels by default.
        is_causal: True for a causal mask, if there is no other mask.
        position_bias: a bias that is added to the scores.
        softcap: scores become softcap·tanh(scores/softcap).
        s_aux: (heads), attention sinks: scores that take part in the softmax without a value.

    Returns:
        (batch, queries, heads, channels), and None for the weights.
    """
    count = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and count > 1 and attention_mask is None
    if causal and key.shape[2] > count:  # unused entries of a static cache
        key, value = key[:, :, :count], value[:, :, :count]
        position_bias = None if position_bias is None else position_bias[..., :count]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attention(query, key, value, attention_mask, position_bias, scaling, causal, softcap, s_aux, dropout), None


def register_attention(name: str = "fusegen") -> None:
    """Registers fusegen's attention with ``transformers``: ``from_pretrained(..., attn_implementation="fusegen")``.

    Raises:
        ToolNotFoundError: transformers is not installed.
    """
    models, masks = _installed("transformers.modeling_utils"), _installed("transformers.masking_utils")
    models.AttentionInterface.register(name, attention)
    masks.AttentionMaskInterface.register(name, masks.sdpa_mask)


# Layers for Hugging Face's package ``kernels``. ``transformers`` copies their ``forward`` into modules of a model, so a class has
# no state: ``forward`` reads the attributes of the module.


class _Layer(nn.Module):
    can_torch_compile = True
    has_backward = True


class RMSNorm(_Layer):
    """weight·x/√(mean(x²) + ε), rounded before the multiplication by the weight, as in Llama."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        result = ops.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon, casting_mode="llama")
        return cast(Tensor, result)


class SiLU(_Layer):
    """x·σ(x)."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.silu(input)


class GeLU(_Layer):
    """x·Φ(x)."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input)


class GeluTanh(_Layer):
    """½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input, approximate="tanh")


class NewGELU(GeluTanh):
    """The tanh approximation, as in GPT-2."""


class FastGELU(GeluTanh):
    """The tanh approximation, with √(2/π) written as 0.7978845608."""


class QuickGELU(_Layer):
    """x·σ(1.702·x)."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input, approximate="quick")


LAYERS = (RMSNorm, SiLU, GeLU, GeluTanh, NewGELU, FastGELU, QuickGELU)
"""All layers."""


HUB = Path(__file__).with_name("hub")
"""A folder in the format of `kernels.LocalLayerRepository`."""


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """The layers for ``kernels.register_kernel_mapping``, from files of this package; nothing is downloaded.

    ``transformers`` uses them with ``use_kernels=True``, or after ``model.kernelize()``.

    Raises:
        ToolNotFoundError: kernels is not installed.
    """
    repository = _installed("kernels").LocalLayerRepository
    return {layer.__name__: {kind: repository(HUB, layer_name=layer.__name__) for kind in ("cpu", "cuda")} for layer in LAYERS}


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ToolNotFoundError(f"{package} is not installed", hint=f"pip install {package}") from error
