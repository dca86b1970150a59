"""Forward passes for layers of ``transformers`` that are known to ``kernels`` by these names.

A class here has nothing but ``forward``, which reads the attributes of the module that it is put into.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from fusegen import ops


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
