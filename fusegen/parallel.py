"""Modules whose weights are split over ranks of `torch.distributed`, Megatron's way: columns, then rows, one all-reduce.

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

# The ranks that share a module's weights: which part a rank has, and the two ways in which a tensor crosses the border.
#
# The collectives are torch's functional ones, as operators that take the group's name: torch.compile records them as they are, and
# a module that holds a name can be copied and saved, which a `ProcessGroup` cannot. The derivative of an all-reduce depends on the
# place, which torch's own does not know: one that sums partial results passes gradients on; one that sums gradients is the
# derivative of a copy. So each of the two has an `autograd.Function`, whose backward pass is the other one.


GroupLike: TypeAlias = ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group, as one of them sees them.

    Attributes:
        name: of the group, for collectives.
        rank: this one's number in the group.
        size: how many there are.
    """

    name: str
    rank: int
    size: int

    @staticmethod
    def of(group: GroupLike) -> Ranks:
        """Those of a group, of a mesh of one dim, or of all ranks.

        Raises:
            ArgumentError: `torch.distributed` is not initialized, the mesh has several dims, or the group is none of this rank.
        """
        if not dist.is_initialized():
            raise ArgumentError("torch.distributed is not initialized", hint="call torch.distributed.init_process_group first")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ArgumentError(f"a mesh of {group.ndim} dims", hint="give one of its dims, as mesh['tp']")
            group = group.get_group()
        found = dist.group.WORLD if group is None else group
        assert found is not None  # as it is initialized
        if not isinstance(found, ProcessGroup):
            what = f"{found!r} is no process group" + (" that this rank is in" if isinstance(found, int) else "")
            raise ArgumentError(what, hint="give a group of torch.distributed.new_group on its ranks alone, or a mesh")
        return Ranks(found.group_name, dist.get_rank(found), dist.get_world_size(found))

    def part(self, count: int) -> slice:
        """This rank's part of a number of things that the size divides."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def require_divides(self, what: str, count: int) -> None:
        """Checks that each rank has as many.

        Raises:
            ArgumentError: the size does not divide the count.
        """
        if count % self.size:
            hint = f"give a multiple of {self.size}, or a smaller group"
            raise ArgumentError(f"{what}={count} cannot be split over {self.size} ranks", hint=hint)

    def shard(self, what: str, full: Tensor, dim: int) -> nn.Parameter:
        """This rank's part of a parameter: a copy of a part of a whole tensor, or the local tensor of one that is split so.

        Args:
            what: the name, for messages.
            full: the parameter.
            dim: along which it is split.

        Raises:
            ArgumentError: it cannot be split evenly, or is split otherwise.
        """
        self.require_divides(f"{what}.shape[{dim}]", full.shape[dim])
        if isinstance(full, DTensor):
            self._require_placed(what, full, dim)
            return _parameter(full.to_local(), full)
        part = self.part(full.shape[dim])
        return _parameter(full.narrow(dim, part.start, part.stop - part.start).clone(memory_format=torch.contiguous_format), full)

    def replica(self, what: str, full: Tensor) -> nn.Parameter:
        """A parameter that all ranks have: a copy, or the local tensor of one that is replicated.

        Raises:
            ArgumentError: it is split.
        """
        if not isinstance(full, DTensor):
            return _parameter(full.clone(), full)
        if not all(placement.is_replicate() for placement in full.placements):
            what = f"{what} is placed as {full.placements}, and all ranks need all of it"
            raise ArgumentError(what, hint="redistribute it with Replicate()")
        return _parameter(full.to_local(), full)

    def _require_placed(self, what: str, tensor: DTensor, dim: int) -> None:
        if tuple(tensor.placements) != (Shard(dim),) or tensor.device_mesh.get_group().group_name != self.name:
            what = f"{what} is placed as {tensor.placements} over {tensor.device_mesh}"
            raise ArgumentError(what, hint=f"redistribute it with (Shard({dim}),) over a mesh of the module's group")


def _parameter(values: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter of these values, which is trained if the other one is."""
    return nn.Parameter(values.detach(), requires_grad=like.requires_grad)


def copied(x: Tensor, ranks: Ranks) -> Tensor:
    """A tensor that all ranks have, as each of them goes on to use it: gradients are summed over the ranks."""
    return _Copied.apply(x, ranks.name) if x.requires_grad else x  # type: ignore[no-untyped-call]


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over the ranks of a partial result, which all of them get: gradients are the same everywhere already."""
    found: Tensor = _Summed.apply(x, ranks.name)  # type: ignore[no-untyped-call]
    return found


def _all_reduced(x: Tensor, name: str) -> Tensor:
    ops = torch.ops._c10d_functional
    found: Tensor = ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", name))
    return found


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


# Linear layers.


class _PartOfLinear(nn.Module):
    """A rank's part of a linear layer."""

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = weight
        self.register_parameter("bias", bias)

    def extra_repr(self) -> str:
        """The sizes of this rank's part."""
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}, bias={self.bias is not None}, rank={self.ranks.rank} of {self.ranks.size}"


class ColumnParallelLinear(_PartOfLinear):
    """A linear layer of which each rank computes some of the outputs. All ranks give the same input.

    Args:
        weight: this rank's rows of the weight: (outputs / ranks, inputs).
        bias: this rank's part of the bias, or None.
        ranks: the group.
    """

    @classmethod
    def from_module(cls, module: nn.Linear, group: GroupLike = None) -> ColumnParallelLinear:
        """This rank's part of a linear layer.

        Args:
            module: a whole layer, the same on all ranks, of which a part is copied; or one whose parameters are DTensors placed as
                ``Shard(0)``, of which the local tensors are used as they lie.
            group: a process group or a mesh of one dim; by default all ranks.

        Raises:
            ArgumentError: outputs that cannot be split evenly, DTensors that are placed otherwise, or no plain `torch.nn.Linear`.
        """
        _require_plain(module)
        ranks = Ranks.of(group)
        bias = None if module.bias is None else ranks.shard("bias", module.bias, 0)
        return cls(ranks.shard("weight", module.weight, 0), bias, ranks).train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's outputs; x: (…, inputs)."""
        return ops.linear(copied(x, self.ranks), self.weight, self.bias)

    def local(self, x: Tensor) -> Tensor:
        """The same without a sum of gradients, for kernels that use x more than once."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(_PartOfLinear):
    """A linear layer of which each rank has some of the inputs; the products are summed over the ranks, by one all-reduce.

    Args:
        weight: this rank's columns of the weight: (outputs, inputs / ranks).
        bias: the whole bias, or None.
        ranks: the group.
    """

    @classmethod
    def from_module(cls, module: nn.Linear, group: GroupLike = None) -> RowParallelLinear:
        """This rank's part of a linear layer.

        Args:
            module: a whole layer, the same on all ranks; or one whose weight is a DTensor placed as ``Shard(1)``, of which the
                local tensor is used as it lies, and whose bias is a plain tensor or a replicated DTensor.
            group: as of `ColumnParallelLinear.from_module`.

        Raises:
            ArgumentError: inputs that cannot be split evenly, DTensors that are placed otherwise, or no plain `torch.nn.Linear`.
        """
        _require_plain(module)
        ranks = Ranks.of(group)
        bias = None if module.bias is None else ranks.replica("bias", module.bias)
        return cls(ranks.shard("weight", module.weight, 1), bias, ranks).train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """The whole result, on all ranks; x: (…, inputs / ranks), this rank's part."""
        return self.whole(ops.linear(x, self.weight))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's term of the result, without the bias."""
        return F.linear(x, self.weight)

    def whole(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' terms, and the bias, which counts once."""
        y = summed(partial, self.ranks)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # under autocast, as torch has it


def _require_plain(module: nn.Module) -> None:
    """Checks that a weight and a bias are all that a layer computes by. Hooks of a layer with DTensors are those by which
    `torch.distributed.tensor.parallel` places its input and result.

    Raises:
        ArgumentError: it has another forward, hooks or parametrizations.
    """
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    has_hooks = is_linear and bool(module._forward_hooks or module._forward_pre_hooks) and not isinstance(module.weight, DTensor)
    if not is_linear or has_hooks or is_parametrized(module):
        what = f"{type(module).__name__} is no plain torch.nn.Linear, and its weight is not all that it computes by"
        raise ArgumentError(what, hint="merge adapters and parametrizations into the weight, and remove hooks, before it is split")


# A gated feed-forward block whose hidden features are split over ranks.


class ParallelGatedMLP(nn.Module):
    """`fusegen.nn.GatedMLP` with its hidden features split over ranks: one all-reduce forward, and one backward.

    Args:
        gate_proj, up_proj: the projections to hidden features, split by columns.
        down_proj: the projection back, split by rows.
        activation: of the gate.
    """

    def __init__(
        self, gate_proj: ColumnParallelLinear, up_proj: ColumnParallelLinear, down_proj: RowParallelLinear, activation: str
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.activation = gate_proj, up_proj, down_proj, activation

    @classmethod
    def from_module(cls, module: GatedMLP, group: GroupLike = None) -> ParallelGatedMLP:
        """This rank's part of a block.

        Args:
            module: a whole block, the same on all ranks, or one with DTensors, as of `ColumnParallelLinear.from_module` and
                `RowParallelLinear.from_module`.
            group: as of `ColumnParallelLinear.from_module`.

        Raises:
            ArgumentError: hidden features that cannot be split evenly, DTensors that are placed otherwise, or another module.
        """
        require_instance("ParallelGatedMLP", module, GatedMLP)
        gate, up = (ColumnParallelLinear.from_module(each, group) for each in (module.gate_proj, module.up_proj))
        down = RowParallelLinear.from_module(module.down_proj, group)
        return cls(gate, up, down, module.activation).train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, hidden_size), the same on all ranks, as the result is."""
        return self.down_proj.whole(gated_mlp_part(self, copied(x, self.down_proj.ranks)))

    def extra_repr(self) -> str:
        """The arguments that no submodule shows."""
        return f"activation={self.activation!r}"


@fg.kernel
def gated_mlp_part(block: ParallelGatedMLP, x: Tensor) -> Tensor:
    """This rank's term of down_proj(act(gate_proj(x))·up_proj(x))

    x: (…, hidden_size).
    """
    gate, up = block.gate_proj.local(x), block.up_proj.local(x)
    return block.down_proj.partial(activate(gate, block.activation) * up)


# Self-attention whose heads are split over ranks.


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
            raise ArgumentError(what, hint="make the block with p=0, and drop out of its result, on all ranks by one seed")
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
            raise ArgumentError(what, hint=f"give a mask of {self.num_attention_heads * self.ranks.size} heads, or of one")
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
