"""Feed-forward blocks. One kernel declares a whole block, so that the fuser sees all of it; its linear layers are ordinary
submodules, which may be replaced (by an adapter, say), hooked or parametrized: what their forward does is what is fused."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen.nn.checks import require_one_of, require_probability
from fusegen.specs.elementwise import ACTIVATIONS, activate


class MLP(nn.Module):
    """dropout(fc2(act(fc1(x))), p), with the parameter names of CLIP and ViT.

    Args:
        hidden_size: features of input and result.
        intermediate_size: features between.
        activation: a name of `transformers`, as "gelu" (the exact one), "gelu_pytorch_tanh", "quick_gelu", "silu", "relu2".
        bias: True if both linear layers have one.
        p: the probability of dropout in training.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: an unknown activation, or a p that is no probability.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "gelu",
        bias: bool = True,
        p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_one_of("MLP", "activation", activation, ACTIVATIONS)
        require_probability("MLP", p)
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.fc2 = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)
        self.activation, self.p = activation, p

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, hidden_size)."""
        return mlp(self, x)

    def extra_repr(self) -> str:
        """The arguments that no submodule shows."""
        return f"activation={self.activation!r}, p={self.p}"


class GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x))·up_proj(x)), with the parameter names of `transformers`' ``LlamaMLP``.

    Args:
        hidden_size: features of input and result.
        intermediate_size: features between.
        activation: of the gate, as in `MLP`; "silu" is SwiGLU, "gelu_pytorch_tanh" that of Gemma.
        bias: True if the linear layers have one.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_one_of("GatedMLP", "activation", activation, ACTIVATIONS)
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, hidden_size)."""
        return gated_mlp(self, x)

    def extra_repr(self) -> str:
        """The arguments that no submodule shows."""
        return f"activation={self.activation!r}"


@fg.kernel
def mlp(block: MLP, x: Tensor) -> Tensor:
    """dropout(fc2(act(fc1(x))), p)

    x: (…, hidden_size).
    """
    return fg.dropout(block.fc2(activate(block.fc1(x), block.activation)), block.p, block.training)


@fg.kernel
def gated_mlp(block: GatedMLP, x: Tensor) -> Tensor:
    """down_proj(act(gate_proj(x))·up_proj(x))

    x: (…, hidden_size). Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202).
    """
    return block.down_proj(activate(block.gate_proj(x), block.activation) * block.up_proj(x))  # type: ignore[no-any-return]
