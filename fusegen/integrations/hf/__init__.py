"""The official doors of ``transformers``: an attention function by name, and layers through the package ``kernels``.

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
    models, masks = _installed("transformers.modeling_utils"), _installed("transformers.masking_utils")
    models.AttentionInterface.register(name, attention)
    masks.AttentionMaskInterface.register(name, masks.sdpa_mask)


# Layers for the package ``kernels`` of Hugging Face, which ``transformers`` puts into models. A class has nothing but ``forward``:
# this method reads the attributes of the module that it is put into.


class _Layer(nn.Module):
    can_torch_compile = True
    has_backward = True


class RMSNorm(_Layer):
    """weight·x/√(mean(x²) + ε), rounded before the weight, as Llama has it."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        found = ops.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon, casting_mode="llama")
        return cast(Tensor, found)


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
    """The same, as GPT-2 has it."""


class FastGELU(GeluTanh):
    """The same, as written with √(2/π) as 0.7978845608."""


class QuickGELU(_Layer):
    """x·σ(1.702·x)."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input, approximate="quick")


LAYERS = (RMSNorm, SiLU, GeLU, GeluTanh, NewGELU, FastGELU, QuickGELU)
"""All of them."""


HUB = Path(__file__).with_name("hub")
"""A folder that `kernels.LocalLayerRepository` takes for a kernel's."""


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """Layers for ``kernels.register_kernel_mapping``, from files of this package: nothing is downloaded.

    ``transformers`` puts them into models with ``use_kernels=True``, or by ``model.kernelize()``.

    Raises:
        ToolNotFoundError: kernels is not installed.
    """
    repository = _installed("kernels").LocalLayerRepository
    return {layer.__name__: {kind: repository(HUB, layer_name=layer.__name__) for kind in ("cpu", "cuda")} for layer in LAYERS}


def _installed(name: str) -> Any:
    """A module of a package that fusegen works with and does not need.

    Raises:
        ToolNotFoundError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ToolNotFoundError(f"{package} is not installed", hint=f"pip install {package}") from error
