"""A gated feed-forward block whose hidden features are split over ranks."""

from __future__ import annotations

from torch import Tensor, nn

import fusegen as fg
from fusegen.nn import GatedMLP
from fusegen.nn.checks import require_instance
from fusegen.parallel.group import GroupLike, copied
from fusegen.parallel.linear import ColumnParallelLinear, RowParallelLinear
from fusegen.specs.activations import activate


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
