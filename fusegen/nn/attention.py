"""Self-attention as a module: projections, rotation, attention and the output projection as one graph."""

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
    """Self-attention with grouped heads of keys and rotary positions, with the parameter names of `transformers`'
    ``LlamaAttention`` (and of ``Qwen3Attention`` with ``qk_norm``). Its linear layers are ordinary submodules, as in `MLP`.

    Args:
        hidden_size: features of input and result.
        num_attention_heads: heads of queries.
        num_key_value_heads: heads of keys and of values, by default as many.
        head_dim: channels of a head, by default hidden_size / num_attention_heads.
        bias: True if the projections to queries, keys and values have one.
        out_bias: True if the output projection has one.
        qk_norm: True if queries and keys are normalized head by head, by ``q_norm`` and ``k_norm``.
        eps: of these norms.
        is_causal: True if a position sees only itself and earlier ones.
        window: how many positions it sees at most; None is all.
        softcap: scores become softcap·tanh(scores/softcap).
        scale: the factor of scores, by default 1/√head_dim.
        interleaved: True if neighbours are rotated as pairs; halves of a head otherwise.
        p: the probability of dropout of attention weights in training.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: heads that do not divide what they must, counts below 1, or a p that is no probability; an eps below 0; a
            window or softcap below 0 or 0.
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
        """The result of attention, projected: (batch, positions, hidden_size).

        Args:
            x: (batch, positions, hidden_size).
            cos, sin: (positions, r) or (batch, positions, r), as in `fusegen.ops.rotary`; without them nothing is rotated.
            mask: floats that are added to scores, or booleans that are True where a key is seen, of a shape that broadcasts to
                (batch, heads, positions, positions).

        Raises:
            ArgumentError: other dims of x, a mask of integers, or only one of cos and sin.
        """
        require_positions("Attention", x)
        require_both("Attention", cos, sin)
        return attention(self, x, cos, sin, mask)

    def extra_repr(self) -> str:
        """The arguments that no submodule shows."""
        heads = f"heads={self.num_attention_heads}, kv_heads={self.num_key_value_heads}, head_dim={self.head_dim}"
        return f"{heads}, is_causal={self.is_causal}, window={self.window}, softcap={self.softcap}, p={self.p}"


@fg.kernel
def attention(block: Attention, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> Tensor:
    """o_proj(attention of the heads of q_proj(x), k_proj(x) and v_proj(x))

    x: (batch, positions, hidden_size); the rest as of `Attention.forward`.
    """
    q, k, v = (split_heads(project(x), block.head_dim) for project in (block.q_proj, block.k_proj, block.v_proj))
    if block.q_norm is not None and block.k_norm is not None:
        q, k = block.q_norm(q), block.k_norm(k)
    return block.o_proj(attended(block, q, k, v, cos, sin, mask))  # type: ignore[no-any-return]


def split_heads(x: Tensor, channels: int) -> Tensor:
    """(batch, positions, heads·channels) as (batch, heads, positions, channels)."""
    return torch.unflatten(x, -1, (-1, channels)).transpose(1, 2)


class AttentionSettings(Protocol):
    """The attributes of a block that say how its heads attend."""

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
    """Attention of heads that are rotated first, by the settings of a block: (batch, positions, heads·channels).

    Args:
        block: the settings.
        q, k, v: (batch, heads, positions, channels); fewer heads of k and v are shared.
        cos, sin, mask: as of `Attention.forward`.
    """
    if cos is not None and sin is not None:
        q, k = ops.rotary(q, k, cos, sin, block.interleaved)
    settings = (mask, block.scale, block.is_causal, block.window, block.softcap)
    mixed = ops.flash_attention(q, k, v, *settings, p=block.p, training=block.training)
    assert isinstance(mixed, Tensor)  # no logsumexp is asked for
    return mixed.transpose(1, 2).flatten(2)
