"""Tensor-parallel modules, as in Megatron: column split, then row split, with one all-reduce.

import fusegen.nn as fnn
from fusegen.parallel import ParallelGatedMLP

mlp = ParallelGatedMLP.from_module(fnn.GatedMLP(4096, 14336), group)
y = mlp(x)  # x and y are the same on all ranks

Shoeybi et al., "Megatron-LM" (arXiv 1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrize import is_parametrized

import fusegen as fg
from fusegen import ops
from fusegen.errors import ArgumentError
from fusegen.nn import Attention, GatedMLP, RMSNorm
from fusegen.nn.attention import attended, split_heads
from fusegen.nn.checks import require_both, require_instance, require_positions
from fusegen.specs.elementwise import activate

# Collectives.
#
# The collectives are torch's functional operators, because torch.compile can record them. They take the group's name: a module
# can be copied and pickled with a name, but not with a `ProcessGroup`. The backward pass of an all-reduce of partial results is the
# identity, and the backward pass of a copy to all ranks is an all-reduce. Each has its own `autograd.Function`, since torch cannot
# know which of the two a collective is.


GroupLike: TypeAlias = ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class Ranks:
    """The process group that shares the weights of a module, and the rank of this process."""

    name: str
    rank: int
    size: int

    @staticmethod
    def of(group: GroupLike) -> Ranks:
        """Returns the ranks of a group, of a mesh of one dim, or of all processes; raises `ArgumentError` for others."""
        if not dist.is_initialized():
            raise ArgumentError("torch.distributed is not initialized", hint="call torch.distributed.init_process_group first")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ArgumentError(f"the mesh has {group.ndim} dims, not one", hint="pass one of its dims, such as mesh['tp']")
            group = group.get_group()
        chosen = dist.group.WORLD if group is None else group
        assert chosen is not None  # torch.distributed is initialized
        if not isinstance(chosen, ProcessGroup):
            what = f"{chosen!r} is not a process group" + (" that contains this rank" if isinstance(chosen, int) else "")
            raise ArgumentError(what, hint="pass a group of torch.distributed.new_group, on its ranks only, or a mesh")
        return Ranks(chosen.group_name, dist.get_rank(chosen), dist.get_world_size(chosen))

    def part(self, count: int) -> slice:
        """Returns this rank's slice of ``count`` items; the number of ranks must divide the count."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def require_divides(self, what: str, count: int) -> None:
        if count % self.size:
            hint = f"use a multiple of {self.size}, or a smaller group"
            raise ArgumentError(f"{what}={count} cannot be split over {self.size} ranks", hint=hint)

    def shard(self, what: str, full: Tensor, dim: int) -> nn.Parameter:
        """Returns this rank's slice of a parameter along a dim: a copy, or the local tensor of a sharded DTensor."""
        self.require_divides(f"{what}.shape[{dim}]", full.shape[dim])
        if isinstance(full, DTensor):
            self._check_placement(what, full, dim)
            return _parameter(full.to_local(), full)
        part = self.part(full.shape[dim])
        return _parameter(full.narrow(dim, part.start, part.stop - part.start).clone(memory_format=torch.contiguous_format), full)

    def replica(self, what: str, full: Tensor) -> nn.Parameter:
        """Returns a parameter that is the same on all ranks: a copy, or the local tensor of a replicated DTensor."""
        if not isinstance(full, DTensor):
            return _parameter(full.clone(), full)
        if not all(placement.is_replicate() for placement in full.placements):
            what = f"{what} is placed as {full.placements}, but every rank needs the full tensor"
            raise ArgumentError(what, hint="redistribute it with Replicate()")
        return _parameter(full.to_local(), full)

    def _check_placement(self, what: str, tensor: DTensor, dim: int) -> None:
        if tuple(tensor.placements) != (Shard(dim),) or tensor.device_mesh.get_group().group_name != self.name:
            what = f"{what} has the wrong placements {tensor.placements} over {tensor.device_mesh}"
            raise ArgumentError(what, hint=f"redistribute it with (Shard({dim}),) over a mesh of the module's group")


def _parameter(values: Tensor, original: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach(), requires_grad=original.requires_grad)


def copy_to_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Passes a replicated tensor to rank-local computations; the backward pass sums its gradients over the ranks."""
    return _Copied.apply(x, ranks.name) if x.requires_grad else x  # type: ignore[no-untyped-call]


def sum_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """All-reduces partial results; the backward pass passes gradients through, since they are equal on all ranks."""
    total: Tensor = _Summed.apply(x, ranks.name)  # type: ignore[no-untyped-call]
    return total


def _all_reduced(x: Tensor, name: str) -> Tensor:
    ops = torch.ops._c10d_functional
    total: Tensor = ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", name))
    return total


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Summed.apply(gradients[0], ctx.name), None  # type: ignore[no-untyped-call]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return _all_reduced(x, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Copied.apply(gradients[0], ctx.name), None  # type: ignore[no-untyped-call]


class _ShardedLinear(nn.Module):
    """A rank's shard of a linear layer."""

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = weight
        self.register_parameter("bias", bias)

    def extra_repr(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}, bias={self.bias is not None}, rank={self.ranks.rank} of {self.ranks.size}"


class ColumnParallelLinear(_ShardedLinear):
    """A linear layer with its outputs split over ranks. The input is the same on all ranks.

    Args:
        weight, bias: this rank's rows: (outputs / ranks, inputs) and (outputs / ranks).
    """

    @classmethod
    def from_module(cls, module: nn.Linear, group: GroupLike = None) -> ColumnParallelLinear:
        """Creates this rank's shard of a linear layer.

        Args:
            module: an unsharded layer, the same on all ranks, from which this rank copies a slice; or a layer with DTensors placed
                as ``Shard(0)``, whose local tensors are used without a copy.
            group: a process group or a mesh of one dim; by default all ranks.

        Raises:
            ArgumentError: the outputs cannot be split evenly, a DTensor has another placement, or the layer is not a plain
                `torch.nn.Linear`.
        """
        _check_plain(module)
        ranks = Ranks.of(group)
        bias = None if module.bias is None else ranks.shard("bias", module.bias, 0)
        return cls(ranks.shard("weight", module.weight, 0), bias, ranks).train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """Computes this rank's outputs; x: (…, inputs)."""
        return ops.linear(copy_to_ranks(x, self.ranks), self.weight, self.bias)

    def local(self, x: Tensor) -> Tensor:
        """Like `forward`, but without a sum of gradients, for kernels that use x more than once."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(_ShardedLinear):
    """A linear layer with its inputs split over ranks; one all-reduce sums the partial results.

    Args:
        weight: this rank's columns: (outputs, inputs / ranks).
        bias: the full bias, or None.
    """

    @classmethod
    def from_module(cls, module: nn.Linear, group: GroupLike = None) -> RowParallelLinear:
        """Creates this rank's shard of a linear layer; arguments and errors are those of `ColumnParallelLinear.from_module`.

        A weight that is a DTensor must be placed as ``Shard(1)``; the bias must be a plain tensor or a replicated DTensor.
        """
        _check_plain(module)
        ranks = Ranks.of(group)
        bias = None if module.bias is None else ranks.replica("bias", module.bias)
        return cls(ranks.shard("weight", module.weight, 1), bias, ranks).train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the full result on all ranks; x: (…, inputs / ranks), this rank's part."""
        return self.reduce(ops.linear(x, self.weight))

    def partial(self, x: Tensor) -> Tensor:
        """Computes this rank's partial result, without the bias."""
        return F.linear(x, self.weight)

    def reduce(self, partial: Tensor) -> Tensor:
        """All-reduces the partial results, and adds the bias once."""
        y = sum_over_ranks(partial, self.ranks)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # for autocast, like torch


def _check_plain(module: nn.Module) -> None:
    """Raises `ArgumentError` unless a layer computes with its weight and bias alone.

    Hooks are allowed on layers with DTensors, where `torch.distributed.tensor.parallel` places inputs and results by them.
    """
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    has_hooks = is_linear and bool(module._forward_hooks or module._forward_pre_hooks) and not isinstance(module.weight, DTensor)
    if not is_linear or has_hooks or is_parametrized(module):
        what = f"{type(module).__name__} is not a plain torch.nn.Linear: its result depends on more than its weight and bias"
        raise ArgumentError(what, hint="merge adapters and parametrizations into the weight, and remove hooks, before splitting it")


class ParallelGatedMLP(nn.Module):
    """`fusegen.nn.GatedMLP` with its hidden features split over ranks: one all-reduce forward, and one backward."""

    def __init__(
        self, gate_proj: ColumnParallelLinear, up_proj: ColumnParallelLinear, down_proj: RowParallelLinear, activation: str
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.activation = gate_proj, up_proj, down_proj, activation

    @classmethod
    def from_module(cls, module: GatedMLP, group: GroupLike = None) -> ParallelGatedMLP:
        """Creates this rank's shard of a block; arguments and errors are those of `ColumnParallelLinear.from_module`."""
        require_instance("ParallelGatedMLP", module, GatedMLP)
        gate, up = (ColumnParallelLinear.from_module(each, group) for each in (module.gate_proj, module.up_proj))
        down = RowParallelLinear.from_module(module.down_proj, group)
        return cls(gate, up, down, module.activation).train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, hidden_size), the same on all ranks, like the result."""
        return self.down_proj.reduce(gated_mlp_part(self, copy_to_ranks(x, self.down_proj.ranks)))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


@fg.kernel
def gated_mlp_part(block: ParallelGatedMLP, x: Tensor) -> Tensor:
    """This rank's partial result of down_proj(act(gate_proj(x))·up_proj(x))

    x: (…, hidden_size).
    """
    gate, up = block.gate_proj.local(x), block.up_proj.local(x)
    return block.down_proj.partial(activate(gate, block.activation) * up)


class ParallelAttention(nn.Module):
    """`fusegen.nn.Attention` with its heads split over ranks: one all-reduce forward, one backward.

    Each weight of ``q_norm`` and ``k_norm``, shared by all heads, adds a small all-reduce backward.

    Args:
        module: an unsharded block, the same on all ranks, or one with DTensors, as for `ColumnParallelLinear.from_module` and
            `RowParallelLinear.from_module`.
        group: as for `ColumnParallelLinear.from_module`.

    Raises:
        ArgumentError: heads that cannot be split evenly, DTensors with another placement, another module, or dropout of attention
            weights: each rank would draw the same mask for different heads.
    """

    def __init__(self, module: Attention, group: GroupLike = None) -> None:
        require_instance("ParallelAttention", module, Attention)
        super().__init__()
        self.ranks = ranks = Ranks.of(group)
        ranks.require_divides("num_attention_heads", module.num_attention_heads)
        ranks.require_divides("num_key_value_heads", module.num_key_value_heads)
        if module.p:
            what = f"ParallelAttention: p={module.p}, dropout of attention weights, is not supported with several ranks"
            raise ArgumentError(what, hint="use p=0, and apply dropout to its result with one seed on all ranks")
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
        """Creates this rank's shard of a block; the arguments are those of the class."""
        return cls(module, group)

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Computes attention and projects it: (batch, positions, hidden_size), on all ranks.

        Args:
            x, cos, sin, mask: as for `fusegen.nn.Attention.forward`, the same on all ranks; a mask per head covers the heads of all
                ranks.

        Raises:
            ArgumentError: other dims of x, only one of cos and sin, or a mask of integers or of another number of heads.
        """
        require_positions("ParallelAttention", x)
        require_both("ParallelAttention", cos, sin)
        cos, sin, mask = (None if each is None else copy_to_ranks(each, self.ranks) for each in (cos, sin, mask))
        weights = (None if norm is None else copy_to_ranks(norm.weight, self.ranks) for norm in (self.q_norm, self.k_norm))
        return self.o_proj.reduce(attention_part(self, copy_to_ranks(x, self.ranks), cos, sin, self._local_mask(mask), *weights))

    def _local_mask(self, mask: Tensor | None) -> Tensor | None:
        if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
            return mask
        if mask.shape[-3] != self.num_attention_heads * self.ranks.size:
            what = f"ParallelAttention: the mask has shape {tuple(mask.shape)}, but dim -3 must be the number of heads of all ranks"
            raise ArgumentError(what, hint=f"pass a mask of {self.num_attention_heads * self.ranks.size} heads, or of one head")
        return mask[..., self.ranks.part(mask.shape[-3]), :, :]

    def extra_repr(self) -> str:
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
    """This rank's partial result of o_proj(attention(q_proj(x), k_proj(x), v_proj(x)))

    x: (batch, positions, hidden_size); q_weight, k_weight: (channels) of the norms of heads; the rest as for `Attention.forward`.
    """
    q, k, v = (split_heads(project.local(x), block.head_dim) for project in (block.q_proj, block.k_proj, block.v_proj))
    if block.q_norm is not None and block.k_norm is not None:
        q = _normalized(block.q_norm, q, q_weight)
        k = _normalized(block.k_norm, k, k_weight)
    return block.o_proj.partial(attended(block, q, k, v, cos, sin, mask))


def _normalized(norm: RMSNorm, x: Tensor, weight: Tensor | None) -> Tensor:
    normalized = ops.rms_norm(x, norm.normalized_shape, weight, norm.eps, norm.zero_centered_gamma, norm.casting_mode)
    return cast(Tensor, normalized)


def _replica(norm: RMSNorm, ranks: Ranks) -> RMSNorm:
    copy = RMSNorm(
        norm.normalized_shape,
        norm.eps,
        device="meta",
        zero_centered_gamma=norm.zero_centered_gamma,
        casting_mode=norm.casting_mode,
    )
    copy.weight = ranks.replica("weight", norm.weight)
    return copy
