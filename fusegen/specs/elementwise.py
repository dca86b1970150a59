"""Elementwise chains: activations, and sums and dropout around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_shapes
from fusegen.specs.spec import SpecFamily, tensor

# Activations, also by their names in `transformers`.


def gelu_of(x: Tensor, approximate: str) -> Tensor:
    """GELU: by the error function ("none"), by tanh ("tanh"), or as x·σ(1.702·x) ("quick").

    Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv 1606.08415).
    """
    if approximate == "quick":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate=approximate)


def capped(x: Tensor, softcap: float | None) -> Tensor:
    """cap·tanh(x/cap), or x if softcap is None."""
    if softcap is None:
        return x
    if softcap == 0:
        raise ArgumentError("softcap=0 would divide by zero", hint="give a positive number, or None for no cap")
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
"""Functions by the names that ``activation=`` takes."""


def activate(x: Tensor, activation: str) -> Tensor:
    """Applies an activation by name."""
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"no activation is called {activation!r}", hint=f"give one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation](x)


def require_one_packing(up: Tensor | None, interleaved: bool) -> None:
    """Rejects `up` with interleaved=True."""
    if interleaved and up is not None:
        raise ArgumentError("interleaved=True takes no up", hint="give gate and up separately, or both interleaved in gate")


def halves(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Returns gate and up; without up, the halves or the interleaved pairs of gate's last dim."""
    require_one_packing(up, interleaved)
    if up is not None:
        require_shapes(gate=(gate, "*"), up=(up, "*"))
        return gate, up
    if gate.shape[-1] % 2:
        raise ArgumentError(f"a packed gate cannot have {gate.shape[-1]} features", hint="give an even number, or pass `up` too")
    if interleaved:
        return gate[..., ::2], gate[..., 1::2]
    first, second = gate.chunk(2, -1)
    return first, second


# The family.

FAMILY = SpecFamily("elementwise")

X, BIAS = tensor("rows features"), tensor("features")
SIZES = {"features": 8192}
ERF, QUICK = {"approximate": "none"}, {"approximate": "quick"}
OFF = {"training": False, "seed": None}


@FAMILY.spec(
    {"input": X, "approximate": "tanh"},
    sizes=SIZES,
    variants={"erf": ERF, "quick": QUICK},
    aliases={"gelu_pytorch_tanh": "", "quick_gelu": "quick"},
)
@fg.kernel
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """x·Φ(x), or ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), or x·σ(1.702·x)

    input: any shape; approximate: "none", "tanh" or "quick". Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv
    1606.08415).
    """
    return gelu_of(input, approximate)


@FAMILY.spec(
    {"x": tensor("batch positions features")}, sizes={"batch": 8, "positions": 1024, "features": 3072}, aliases=["NewGELU"]
)
@fg.kernel
def gelu_new(x: Tensor) -> Tensor:
    """½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), in eight operations as GPT-2 writes it

    x: any shape. The line is from Hugging Face transformers, ``NewGELUActivation``.
    """
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@FAMILY.spec({"input": X}, sizes=SIZES, aliases=["swish"])
@fg.kernel
def silu(input: Tensor) -> Tensor:
    """x·σ(x)

    input: any shape. Ramachandran et al., "Searching for Activation Functions" (arXiv 1710.05941).
    """
    return F.silu(input)


@FAMILY.spec({"input": X}, sizes=SIZES)
@fg.kernel
def relu(input: Tensor) -> Tensor:
    """max(x, 0)

    input: any shape.
    """
    return F.relu(input)


@FAMILY.spec({"input": X, "beta": 1.0}, sizes=SIZES, variants={"beta": {"beta": 2.0, "threshold": 5.0}})
@fg.kernel
def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(β·x))/β, and x where β·x is over the threshold

    input: any shape.
    """
    return F.softplus(input, beta, threshold)


@FAMILY.spec({"input": X}, sizes=SIZES)
@fg.kernel
def mish(input: Tensor) -> Tensor:
    """x·tanh(log(1 + exp(x)))

    input: any shape. Misra, "Mish: A Self Regularized Non-Monotonic Activation Function" (arXiv 1908.08681).
    """
    return F.mish(input)


@FAMILY.spec({"input": X, "alpha": 1.0}, sizes=SIZES)
@fg.kernel
def elu(input: Tensor, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else α·(exp(x) − 1)

    input: any shape. Clevert et al., "Fast and Accurate Deep Network Learning by Exponential Linear Units" (arXiv 1511.07289).
    """
    return F.elu(input, alpha)


@FAMILY.spec({"input": X}, sizes=SIZES)
@fg.kernel
def hardswish(input: Tensor) -> Tensor:
    """x·min(max(x + 3, 0), 6)/6

    input: any shape. Howard et al., "Searching for MobileNetV3" (arXiv 1905.02244).
    """
    return F.hardswish(input)


@FAMILY.spec({"input": X}, sizes=SIZES)
@fg.kernel
def sigmoid(input: Tensor) -> Tensor:
    """1/(1 + exp(−x))

    input: any shape.
    """
    return torch.sigmoid(input)


@FAMILY.spec({"input": X}, sizes=SIZES)
@fg.kernel
def tanh(input: Tensor) -> Tensor:
    """(exp(x) − exp(−x))/(exp(x) + exp(−x))

    input: any shape.
    """
    return torch.tanh(input)


@FAMILY.spec({"input": X, "negative_slope": 0.01}, sizes=SIZES)
@fg.kernel
def leaky_relu(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x where x > 0, else slope·x

    input: any shape.
    """
    return F.leaky_relu(input, negative_slope)


@FAMILY.spec({"x": X}, sizes=SIZES, aliases=["relu2"])
@fg.kernel
def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)²

    x: any shape. So et al., "Primer: Searching for Efficient Transformers" (arXiv 2109.08668).
    """
    return F.relu(x).square()


@FAMILY.spec(
    {"x": X, "bias": BIAS, "approximate": "tanh"}, sizes=SIZES, variants={"erf": ERF, "quick": QUICK}, aliases=["BiasGELU"]
)
@fg.kernel
def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x + bias)

    x: (…, features); bias: (features); approximate: as in `gelu`.
    """
    require_shapes(x=(x, "* features"), bias=(bias, "features"))
    return gelu_of(x + bias, approximate)


@FAMILY.spec({"x": X, "bias": BIAS, "residual": X, "approximate": "tanh"}, sizes=SIZES, variants={"erf": ERF, "quick": QUICK})
@fg.kernel
def bias_gelu_add(x: Tensor, bias: Tensor, residual: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x + bias) + residual

    x, residual: (…, features); bias: (features); approximate: as in `gelu`.
    """
    require_shapes(x=(x, "* features"), bias=(bias, "features"), residual=(residual, "* features"))
    return gelu_of(x + bias, approximate) + residual


@FAMILY.spec(
    {"x": X, "residual": X, "seed": 0, "approximate": "tanh"},
    sizes=SIZES,
    variants={"eval": OFF, "erf": ERF, "quick": QUICK, "p0": {"p": 0.0}},
)
@fg.kernel
def gelu_dropout_add(
    x: Tensor, residual: Tensor, p: float = 0.1, training: bool = True, seed: int | None = None, approximate: str = "none"
) -> Tensor:
    """dropout(gelu(x), p) + residual

    x, residual: the same shape; seed: the mask's seed, by default from torch's generator. Srivastava et al., "Dropout: A Simple
    Way to Prevent Neural Networks from Overfitting" (JMLR 15, 2014).
    """
    require_shapes(x=(x, "*"), residual=(residual, "*"))
    return fg.dropout(gelu_of(x, approximate), p, training, seed=seed) + residual


DROPPED = {"x": X, "residual": X, "bias": BIAS, "seed": 0}


@FAMILY.spec(DROPPED, sizes=SIZES, variants={"no_bias": {"bias": None}, "eval": OFF}, aliases={"dropout_add": "no_bias"})
@fg.kernel
def bias_dropout_add(
    x: Tensor, residual: Tensor, bias: Tensor | None = None, p: float = 0.1, training: bool = True, seed: int | None = None
) -> Tensor:
    """dropout(x + bias, p) + residual

    x, residual: (…, features); bias: (features); seed: the mask's seed, by default from torch's generator.
    """
    require_shapes(x=(x, "* features"), residual=(residual, "* features"), bias=(bias, "features"))
    return fg.dropout(x if bias is None else x + bias, p, training, seed=seed) + residual


@FAMILY.spec(DROPPED, sizes=SIZES, variants={"no_bias": {"bias": None}, "eval": OFF}, gradients=False)
@fg.kernel(mutates=("x",))
def bias_dropout_add_(
    x: Tensor, residual: Tensor, bias: Tensor | None = None, p: float = 0.1, training: bool = True, seed: int | None = None
) -> Tensor:
    """dropout(x + bias, p) + residual, written to x

    x, residual: (…, features); bias: (features); seed: the mask's seed, by default from torch's generator.
    """
    require_shapes(x=(x, "* features"), residual=(residual, "* features"), bias=(bias, "features"))
    return x.copy_(fg.dropout(x if bias is None else x + bias, p, training, seed=seed) + residual)


@FAMILY.spec({"input": X, "p": 0.1, "seed": 0}, sizes=SIZES)
@fg.kernel
def dropout(input: Tensor, p: float = 0.5, training: bool = True, seed: int | None = None) -> Tensor:
    """x/(1 − p) with probability 1 − p, else 0; the backward pass computes the mask again

    input: any shape; seed: the mask's seed, by default from torch's generator.
    """
    return fg.dropout(input, p, training, seed=seed)


@FAMILY.spec({"a": X, "b": X}, sizes=SIZES, variants={"three": {"c": X}, "four": {"c": X, "d": X}})
@fg.kernel
def add(a: Tensor, b: Tensor, c: Tensor | None = None, d: Tensor | None = None) -> Tensor:
    """a + b + c + d: sums of residuals

    a, b, c, d: shapes that broadcast.
    """
    total = a + b
    for more in (c, d):
        total = total if more is None else total + more
    return total
