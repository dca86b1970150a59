"""The ranks that share a module's weights: which part a rank has, and the two ways in which a tensor crosses the border.

The collectives are torch's functional ones, as operators that take the group's name: torch.compile records them as they are, and a
module that holds a name can be copied and saved, which a `ProcessGroup` cannot. The derivative of an all-reduce depends on the
place, which torch's own does not know: one that sums partial results passes gradients on; one that sums gradients is the derivative
of a copy. So each of the two has an `autograd.Function`, whose backward pass is the other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fusegen.errors import ArgumentError

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
            raise ArgumentError("torch.distributed is not initialized", mend="call torch.distributed.init_process_group first")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ArgumentError(f"a mesh of {group.ndim} dims", mend="give one of its dims, as mesh['tp']")
            group = group.get_group()
        found = dist.group.WORLD if group is None else group
        assert found is not None  # as it is initialized
        if not isinstance(found, ProcessGroup):
            what = f"{found!r} is no process group" + (" that this rank is in" if isinstance(found, int) else "")
            raise ArgumentError(what, mend="give a group of torch.distributed.new_group on its ranks alone, or a mesh")
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
            mend = f"give a multiple of {self.size}, or a smaller group"
            raise ArgumentError(f"{what}={count} cannot be split over {self.size} ranks", mend=mend)

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
            raise ArgumentError(what, mend="redistribute it with Replicate()")
        return _parameter(full.to_local(), full)

    def _require_placed(self, what: str, tensor: DTensor, dim: int) -> None:
        if tuple(tensor.placements) != (Shard(dim),) or tensor.device_mesh.get_group().group_name != self.name:
            what = f"{what} is placed as {tensor.placements} over {tensor.device_mesh}"
            raise ArgumentError(what, mend=f"redistribute it with (Shard({dim}),) over a mesh of the module's group")


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
