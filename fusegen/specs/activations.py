"""Activations by the names that `transformers` gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_shapes


def gelu_of(x: Tensor, approximate: str) -> Tensor:
    """GELU: by the error function ("none"), by tanh ("tanh"), or as x·σ(1.702·x) ("quick").

    Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv 1606.08415).
    """
    if approximate == "quick":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate=approximate)


def capped(x: Tensor, softcap: float | None) -> Tensor:
    """cap·tanh(x/cap), or x as it is without a cap.

    Raises:
        ArgumentError: a cap of 0.
    """
    if softcap is None:
        return x
    if softcap == 0:
        raise ArgumentError("softcap=0", mend="give a positive number, or None for no cap")
    return softcap * torch.tanh(x / softcap)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: gelu_of(x, "tanh"),
    "gelu_new": lambda x: gelu_of(x, "tanh"),
    "gelu_pytorch_tanh": lambda x: gelu_of(x, "tanh"),
    "quick_gelu": lambda x: gelu_of(x, "quick"),
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "elu": F.elu,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""The functions that ``activation=`` names."""


def activate(x: Tensor, activation: str) -> Tensor:
    """Applies the activation of a name.

    Raises:
        ArgumentError: there is none of that name.
    """
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"no activation is called {activation!r}", mend=f"give one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation](x)


def require_one_packing(up: Tensor | None, interleaved: bool) -> None:
    """Checks that what is interleaved with a gate is not given beside it.

    Raises:
        ArgumentError: it is.
    """
    if interleaved and up is not None:
        raise ArgumentError("interleaved=True beside up", mend="give gate and up apart, or both as pairs in gate")


def halves(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The two operands of a gated unit: gate and up, or without up the halves or the interleaved pairs of gate's last dim.

    Raises:
        ArgumentError: gate alone, of an odd length; up of another shape, or beside pairs.
    """
    require_one_packing(up, interleaved)
    if up is not None:
        require_shapes(gate=(gate, "*"), up=(up, "*"))
        return gate, up
    if gate.shape[-1] % 2:
        raise ArgumentError(f"a packed gate of {gate.shape[-1]} features", mend="give an even number, or up beside it")
    if interleaved:
        return gate[..., ::2], gate[..., 1::2]
    first, second = gate.chunk(2, -1)
    return first, second
