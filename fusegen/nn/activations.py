"""Activations as modules: those of `torch.nn`, gated units, and fusions with a bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusegen import ops
from fusegen.errors import ArgumentError
from fusegen.nn.checks import require_one_of, require_probability

GELUS = ("none", "tanh", "quick")


class Softmax(nn.Softmax):
    """`torch.nn.Softmax` by `fusegen.ops.softmax`. `dim` is required: `ArgumentError` if it is None."""

    def __init__(self, dim: int | None = None) -> None:
        super().__init__(_dim_of("Softmax", dim))

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape."""
        return ops.softmax(input, _dim_of("Softmax", self.dim))


class LogSoftmax(nn.LogSoftmax):
    """`torch.nn.LogSoftmax` by `fusegen.ops.log_softmax`. `dim` is required: `ArgumentError` if it is None."""

    def __init__(self, dim: int | None = None) -> None:
        super().__init__(_dim_of("LogSoftmax", dim))

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape."""
        return ops.log_softmax(input, _dim_of("LogSoftmax", self.dim))


def _dim_of(module: str, dim: int | None) -> int:
    if dim is None:
        raise ArgumentError(f"{module}: dim is missing; torch's default, chosen by the rank, is deprecated", hint="give dim=-1")
    return dim


class GELU(nn.GELU):
    """`torch.nn.GELU` by `fusegen.ops.gelu`.

    Args:
        approximate: "none" (the error function) or "tanh", as in torch, or "quick" (x·σ(1.702·x)).
    """

    def __init__(self, approximate: str = "none") -> None:
        require_one_of("GELU", "approximate", approximate, GELUS)
        super().__init__(approximate)

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape."""
        return ops.gelu(input, self.approximate)


class SiLU(nn.SiLU):
    """`torch.nn.SiLU` by `fusegen.ops.silu`. `inplace=True` raises `ArgumentError`: in-place kernels have no gradients."""

    def __init__(self, inplace: bool = False) -> None:
        if inplace:
            raise ArgumentError(
                "SiLU: inplace=True is not supported", hint="leave it out; the fused kernel saves the memory traffic"
            )
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape."""
        return ops.silu(input)


class GLU(nn.GLU):
    """`torch.nn.GLU` by `fusegen.ops.glu`: a·σ(b) for the halves a and b of a dim."""

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape; the result has half the size along the dim."""
        return ops.glu(input, self.dim)


class _Gated(nn.Module):
    """A gated unit of two tensors, or of one packed tensor.

    Args:
        interleaved: True if a packed tensor alternates gate and up along its last dim; False if it holds them as halves.
    """

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved

    def extra_repr(self) -> str:
        return f"interleaved={self.interleaved}"


class SwiGLU(_Gated):
    """silu(gate)·up."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """gate, up: the same shape; without up, gate is packed along its last dim."""
        return ops.swiglu(gate, up, self.interleaved)


class GEGLU(_Gated):
    """gelu(gate)·up. `approximate`: as in `GELU`; `interleaved`: as in `SwiGLU`."""

    def __init__(self, approximate: str = "none", interleaved: bool = False) -> None:
        require_one_of("GEGLU", "approximate", approximate, GELUS)
        super().__init__(interleaved)
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """gate, up: as in `SwiGLU`."""
        return ops.geglu(gate, up, self.interleaved, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, {super().extra_repr()}"


class ReGLU(_Gated):
    """max(gate, 0)·up."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """gate, up: as in `SwiGLU`."""
        return ops.reglu(gate, up, self.interleaved)


class BiasGELU(nn.Module):
    """gelu(x + bias), with a bias parameter that is initialized to zeros.

    Args:
        num_features: size of the last dim.
        approximate: as in `GELU`.
        device, dtype: device and dtype of the bias.
    """

    def __init__(
        self,
        num_features: int,
        approximate: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_one_of("BiasGELU", "approximate", approximate, GELUS)
        super().__init__()
        self.num_features, self.approximate = num_features, approximate
        self.bias = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, features)."""
        return ops.bias_gelu(x, self.bias, self.approximate)

    def extra_repr(self) -> str:
        return f"{self.num_features}, approximate={self.approximate!r}"


class BiasDropoutAdd(nn.Module):
    """dropout(x + bias, p) + residual, with a bias parameter that is initialized to zeros.

    Args:
        num_features: size of the last dim.
        p: dropout probability in training.
        bias: False omits the bias.
        device, dtype: device and dtype of the bias.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        p: float = 0.1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_probability("BiasDropoutAdd", p)
        super().__init__()
        self.num_features, self.p = num_features, p
        self.register_parameter("bias", nn.Parameter(torch.empty(num_features, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual: (…, features)."""
        return ops.bias_dropout_add(x, residual, self.bias, self.p, self.training)

    def extra_repr(self) -> str:
        return f"{self.num_features}, p={self.p}, bias={self.bias is not None}"
