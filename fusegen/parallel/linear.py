"""Linear layers whose weight is split over ranks: by columns of the result, or by rows of the input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from fusegen import ops
from fusegen.errors import ArgumentError
from fusegen.parallel.group import GroupLike, Ranks, copied, summed


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes some of the outputs. All ranks give the same input.

    Args:
        weight: this rank's rows of the weight: (outputs / ranks, inputs).
        bias: this rank's part of the bias, or None.
        ranks: the group.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = weight
        self.register_parameter("bias", bias)

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

    def extra_repr(self) -> str:
        """The sizes of this rank's part."""
        return _shown(self.weight, self.bias, self.ranks)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank has some of the inputs; the products are summed over the ranks, by one all-reduce.

    Args:
        weight: this rank's columns of the weight: (outputs, inputs / ranks).
        bias: the whole bias, or None.
        ranks: the group.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = weight
        self.register_parameter("bias", bias)

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

    def extra_repr(self) -> str:
        """The sizes of this rank's part."""
        return _shown(self.weight, self.bias, self.ranks)


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
        raise ArgumentError(what, mend="merge adapters and parametrizations into the weight, and remove hooks, before it is split")


def _shown(weight: Tensor, bias: Tensor | None, ranks: Ranks) -> str:
    return f"{weight.shape[1]}, {weight.shape[0]}, bias={bias is not None}, rank={ranks.rank} of {ranks.size}"
