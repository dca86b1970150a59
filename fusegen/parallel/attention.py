"""Self-attention whose heads are split over ranks."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

import fusegen as fg
from fusegen import ops
from fusegen.errors import ArgumentError
from fusegen.nn import Attention, RMSNorm
from fusegen.nn.attention import attended, split_heads
from fusegen.nn.checks import require_both, require_instance, require_positions
from fusegen.parallel.linear import ColumnParallelLinear, GroupLike, Ranks, RowParallelLinear, copied


class ParallelAttention(nn.Module):
    """`fusegen.nn.Attention` with its heads split over ranks: one all-reduce forward, one backward. Each weight of ``q_norm`` and
    ``k_norm``, which all heads share, costs a small one more backward.

    Args:
        module: a whole block, the same on all ranks, or one with DTensors, as of `ColumnParallelLinear.from_module` and
            `RowParallelLinear.from_module`.
        group: as of `ColumnParallelLinear.from_module`.

    Raises:
        ArgumentError: heads that cannot be split evenly, DTensors that are placed otherwise, or dropout of attention weights: each
            rank would draw the mask of the same heads; another module.
    """

    def __init__(self, module: Attention, group: GroupLike = None) -> None:
        require_instance("ParallelAttention", module, Attention)
        super().__init__()
        self.ranks = ranks = Ranks.of(group)
        ranks.require_divides("num_attention_heads", module.num_attention_heads)
        ranks.require_divides("num_key_value_heads", module.num_key_value_heads)
        if module.p:
            what = f"ParallelAttention: p={module.p}, dropout of attention weights, is not supported over ranks"
            raise ArgumentError(what, mend="make the block with p=0, and drop out of its result, on all ranks by one seed")
        self.num_attention_heads = module.num_attention_heads // ranks.size
        self.num_key_value_heads = module.num_key_value_heads // ranks.size
        self.head_dim, self.p, self.interleaved = module.head_dim, module.p, module.interleaved
        self.is_causal, self.window, self.softcap, self.scale = module.is_causal, module.window, module.softcap, module.scale
        self.q_proj = ColumnParallelLinear.from_module(module.q_proj, group)
        self.k_proj = ColumnParallelLinear.from_module(module.k_proj, group)
        self.v_proj = ColumnParallelLinear.from_module(module.v_proj, group)
        self.o_proj = RowParallelLinear.from_module(module.o_proj, group)
        self.q_norm = None if module.q_norm is None else _replica(module.q_norm, ranks)
        self.k_norm = None if module.k_norm is None else _replica(module.k_norm, ranks)
        self.train(module.training)

    @classmethod
    def from_module(cls, module: Attention, group: GroupLike = None) -> ParallelAttention:
        """This rank's part of a block; the arguments are those of the class."""
        return cls(module, group)

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The result of attention, projected, on all ranks: (batch, positions, hidden_size).

        Args:
            x, cos, sin, mask: as of `fusegen.nn.Attention.forward`, the same on all ranks; a mask by heads has those of all ranks.

        Raises:
            ArgumentError: other dims of x, only one of cos and sin, or a mask of integers or of another number of heads.
        """
        require_positions("ParallelAttention", x)
        require_both("ParallelAttention", cos, sin)
        cos, sin, mask = (None if each is None else copied(each, self.ranks) for each in (cos, sin, mask))
        weights = (None if norm is None else copied(norm.weight, self.ranks) for norm in (self.q_norm, self.k_norm))
        return self.o_proj.whole(attention_part(self, copied(x, self.ranks), cos, sin, self._of_heads(mask), *weights))

    def _of_heads(self, mask: Tensor | None) -> Tensor | None:
        """The part of a mask that is of this rank's heads."""
        if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
            return mask
        if mask.shape[-3] != self.num_attention_heads * self.ranks.size:
            what = f"ParallelAttention: the mask has shape {tuple(mask.shape)}, and is not of the heads of all ranks"
            raise ArgumentError(what, mend=f"give a mask of {self.num_attention_heads * self.ranks.size} heads, or of one")
        return mask[..., self.ranks.part(mask.shape[-3]), :, :]

    def extra_repr(self) -> str:
        """This rank's part, and the settings."""
        heads = f"heads={self.num_attention_heads}, kv_heads={self.num_key_value_heads}, head_dim={self.head_dim}"
        return f"{heads}, is_causal={self.is_causal}, window={self.window}, softcap={self.softcap}"


@fg.kernel
def attention_part(
    block: ParallelAttention,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> Tensor:
    """This rank's term of o_proj(attention of the heads of q_proj(x), k_proj(x) and v_proj(x))

    x: (batch, positions, hidden_size); q_weight, k_weight: (channels) of the norms of heads; the rest as of `Attention.forward`.
    """
    q, k, v = (split_heads(project.local(x), block.head_dim) for project in (block.q_proj, block.k_proj, block.v_proj))
    if block.q_norm is not None and block.k_norm is not None:
        q = _normalized(block.q_norm, q, q_weight)
        k = _normalized(block.k_norm, k, k_weight)
    return block.o_proj.partial(attended(block, q, k, v, cos, sin, mask))


def _normalized(norm: RMSNorm, x: Tensor, weight: Tensor | None) -> Tensor:
    """A norm with another weight than its own."""
    found = ops.rms_norm(x, norm.normalized_shape, weight, norm.eps, norm.zero_centered_gamma, norm.casting_mode)
    return cast(Tensor, found)


def _replica(norm: RMSNorm, ranks: Ranks) -> RMSNorm:
    """The norm, with a weight of its own on each rank."""
    found = RMSNorm(
        norm.normalized_shape,
        norm.eps,
        device="meta",
        zero_centered_gamma=norm.zero_centered_gamma,
        casting_mode=norm.casting_mode,
    )
    found.weight = ranks.replica("weight", norm.weight)
    return found
