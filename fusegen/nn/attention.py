"""Self-attention as a module: projections, rotation, attention and the output projection in one graph."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen import ops
from fusegen.nn.checks import require_above, require_both, require_not_negative, require_positions, require_probability
from fusegen.nn.linear import heads_of
from fusegen.nn.norms import RMSNorm


class Attention(nn.Module):
    """Self-attention with GQA and rotary positions, with the parameter names of `transformers`' ``LlamaAttention`` (with `qk_norm`,
    ``Qwen3Attention``). Its linear layers are ordinary submodules, as in `MLP`.

    Args:
        hidden_size: features of the input and the result.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads, by default `num_attention_heads`.
        head_dim: channels of a head, by default hidden_size / num_attention_heads.
        bias: True if the projections to queries, keys and values have a bias.
        out_bias: True if the output projection has a bias.
        qk_norm: True if `q_norm` and `k_norm` normalize the queries and keys of each head.
        eps: epsilon of these norms.
        is_causal: True if a position sees only itself and earlier positions.
        window: number of positions that a position sees at most; None is unlimited.
        softcap: scores become softcap·tanh(scores/softcap).
        scale: factor of the scores, by default 1/√head_dim.
        interleaved: True rotates neighbouring channels as pairs; False pairs the halves of a head.
        p: dropout probability of the attention weights in training.
        device, dtype: device and dtype of the parameters.

    Raises:
        ArgumentError: heads that do not divide hidden_size or each other, counts below 1, p outside [0, 1], a negative eps, or a
            window or softcap that is not positive.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        eps: float = 1e-6,
        is_causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        interleaved: bool = False,
        p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_probability("Attention", p)
        require_not_negative("Attention", "eps", eps)
        require_above("Attention", "window", window, 0)
        require_above("Attention", "softcap", softcap, 0)
        heads, kv_heads, channels = heads_of("Attention", hidden_size, num_attention_heads, num_key_value_heads, head_dim)
        super().__init__()
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, channels
        self.is_causal, self.window, self.softcap, self.scale = is_causal, window, softcap, scale
        self.interleaved, self.p = interleaved, p
        self.q_proj = nn.Linear(hidden_size, heads * channels, bias, device, dtype)
        self.k_proj = nn.Linear(hidden_size, kv_heads * channels, bias, device, dtype)
        self.v_proj = nn.Linear(hidden_size, kv_heads * channels, bias, device, dtype)
        self.o_proj = nn.Linear(heads * channels, hidden_size, out_bias, device, dtype)
        self.q_norm, self.k_norm = (
            RMSNorm(channels, eps, device=device, dtype=dtype, casting_mode="llama") if qk_norm else None for _ in "qk"
        )

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Returns the projected attention: (batch, positions, hidden_size).

        Args:
            x: (batch, positions, hidden_size).
            cos, sin: (positions, r) or (batch, positions, r), as in `fusegen.ops.rotary`; None skips the rotation.
            mask: floats that are added to the scores, or booleans that are True where a key is seen; broadcasts to (batch, heads,
                positions, positions).
        """
        require_positions("Attention", x)
        require_both("Attention", cos, sin)
        return attention(self, x, cos, sin, mask)

    def extra_repr(self) -> str:
        heads = f"heads={self.num_attention_heads}, kv_heads={self.num_key_value_heads}, head_dim={self.head_dim}"
        return f"{heads}, is_causal={self.is_causal}, window={self.window}, softcap={self.softcap}, p={self.p}"


@fg.kernel
def attention(block: Attention, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> Tensor:
    """o_proj(attention(q_proj(x), k_proj(x), v_proj(x)))

    x: (batch, positions, hidden_size); the rest as in `Attention.forward`.
    """
    q, k, v = (split_heads(project(x), block.head_dim) for project in (block.q_proj, block.k_proj, block.v_proj))
    if block.q_norm is not None and block.k_norm is not None:
        q, k = block.q_norm(q), block.k_norm(k)
    return block.o_proj(attended(block, q, k, v, cos, sin, mask))  # type: ignore[no-any-return]


def split_heads(x: Tensor, channels: int) -> Tensor:
    """Reshapes (batch, positions, heads·channels) to (batch, heads, positions, channels)."""
    return torch.unflatten(x, -1, (-1, channels)).transpose(1, 2)


class AttentionSettings(Protocol):
    """The attention settings of a block."""

    is_causal: bool
    window: int | None
    softcap: float | None
    scale: float | None
    interleaved: bool
    p: float
    training: bool


def attended(
    block: AttentionSettings, q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Rotates q and k, and returns their attention: (batch, positions, heads·channels).

    Args:
        q, k, v: (batch, heads, positions, channels); k and v may have fewer heads (GQA).
        cos, sin, mask: as in `Attention.forward`.
    """
    if cos is not None and sin is not None:
        q, k = ops.rotary(q, k, cos, sin, block.interleaved)
    settings = (mask, block.scale, block.is_causal, block.window, block.softcap)
    mixed = ops.flash_attention(q, k, v, *settings, p=block.p, training=block.training)
    assert isinstance(mixed, Tensor)  # no logsumexp was requested
    return mixed.transpose(1, 2).flatten(2)
