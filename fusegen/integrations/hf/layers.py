"""Forward passes for layers of ``transformers`` that are known to ``kernels`` by these names.

A class here has nothing but ``forward``, which reads the attributes of the module that it is put into.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from fusegen import ops
from fusegen.integrations.hf import layers
from fusegen.integrations.hf.installed import installed


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


# Layers for the package ``kernels`` of Hugging Face, which ``transformers`` puts into models.


HUB = Path(__file__).with_name("hub")
"""A folder that `kernels.LocalLayerRepository` takes for a kernel's."""


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """Layers for ``kernels.register_kernel_mapping``, from files of this package: nothing is downloaded.

    ``transformers`` puts them into models with ``use_kernels=True``, or by ``model.kernelize()``.

    Raises:
        ToolNotFoundError: kernels is not installed.
    """
    repository = installed("kernels").LocalLayerRepository
    return {
        layer.__name__: {kind: repository(HUB, layer_name=layer.__name__) for kind in ("cpu", "cuda")} for layer in layers.LAYERS
    }
