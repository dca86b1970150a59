"""Matmuls with norms before them, or with activations, sums or rotations after them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_shapes
from fusegen.specs.elementwise import ACTIVATIONS, activate, gelu_of, halves, require_one_packing
from fusegen.specs.heads import placed, split
from fusegen.specs.normalization import rms_normalized
from fusegen.specs.rotary import HALVES
from fusegen.specs.spec import SpecFamily, VariantOperands, size, tensor

FAMILY = SpecFamily("linear")

SIZES = {"rows": 8192, "inputs": 4096, "outputs": 16384}
X, WEIGHT, BIAS, OUT = tensor("rows inputs"), tensor("outputs inputs"), tensor("outputs"), tensor("rows outputs")


def projected(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x·weightᵀ + bias. The residual is only checked for its shape, not added.

    Raises:
        ArgumentError: shapes that do not match.
    """
    require_shapes(x=(x, "* inputs"), weight=(weight, "outputs inputs"), bias=(bias, "outputs"), residual=(residual, "* outputs"))
    return F.linear(x, weight, bias)


@FAMILY.spec(
    {"input": X, "weight": WEIGHT, "bias": BIAS, "activation": "gelu_tanh"},
    sizes=SIZES,
    variants={
        "plain": {"bias": None, "activation": "linear"},
        "silu": {"activation": "silu"},
        "relu2": {"activation": "relu2", "bias": None},
        "residual": {"activation": "linear", "residual": OUT},
        "dropout_residual": {"activation": "linear", "residual": OUT, "p": 0.1, "training": True, "seed": 0},
    },
    aliases={"linear_act": "", "linear_gelu": "", "linear_residual": "residual"},
)
@fg.kernel
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "linear",
    residual: Tensor | None = None,
    p: float = 0.0,
    training: bool = False,
    seed: int | None = None,
) -> Tensor:
    """dropout(act(x·weightᵀ + bias), p) + residual

    input: (…, inputs); weight: (outputs, inputs); bias: (outputs); residual: (…, outputs); activation: a name of `transformers`:
    "gelu", "gelu_tanh", "silu", "relu2", …; seed: the mask's seed, by default from torch's generator.
    """
    y = fg.dropout(activate(projected(input, weight, bias, residual), activation), p, training, seed=seed)
    return y if residual is None else y + residual


@FAMILY.spec({"x": X, "weight": WEIGHT, "bias": BIAS}, sizes=SIZES)
@fg.kernel
def linear_bias_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x·weightᵀ + bias), with the tanh form of gelu

    x: (…, inputs); weight: (outputs, inputs); bias: (outputs). The first half of a transformer's feed-forward block.
    """
    return F.gelu(projected(x, weight, bias), approximate="tanh")


@FAMILY.spec(
    {"x": X, "weight": tensor("2*pairs inputs"), "cos": tensor("rows pairs"), "sin": tensor("rows pairs")},
    sizes={"rows": 8192, "pairs": 2048},
)
@fg.kernel
def linear_rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a·cos − b·sin, b·cos + a·sin) of interleaved pairs (a, b) of y = x·weightᵀ

    x: (rows, inputs); weight: (outputs, inputs); cos, sin: (rows, outputs/2). Su et al., "RoFormer" (arXiv 2104.09864).
    """
    if weight.shape[0] % 2:
        raise ArgumentError(f"the weight has {weight.shape[0]} outputs", hint="give an even number: pairs are rotated")
    y = projected(x, weight)
    a, b = y[..., 0::2], y[..., 1::2]
    require_shapes(a=(a, "rows pairs"), cos=(cos, "rows pairs"), sin=(sin, "rows pairs"))
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


PACKED = "heads*2*pairs+2*kv_heads*2*pairs"
SEPARATE = {
    "weight": tensor("heads*2*pairs inputs"),
    "k_weight": tensor("kv_heads*2*pairs inputs"),
    "v_weight": tensor("kv_heads*2*pairs inputs"),
}


@FAMILY.spec(
    {
        "x": tensor("batch positions inputs"),
        "weight": tensor(f"{PACKED} inputs"),
        "heads": size("heads"),
        "kv_heads": size("kv_heads"),
    },
    sizes={"positions": 2048},
    variants={
        "bias": {"bias": tensor(PACKED)},
        "rotary": HALVES,
        "separate": SEPARATE,
        "separate_rotary": {**SEPARATE, **HALVES},
        "qk_norm_rotary": {**HALVES, "q_norm_weight": tensor("2*pairs"), "k_norm_weight": tensor("2*pairs")},
    },
    aliases=["FusedQKVLinear", "fused_qkv_linear"],
)
@fg.kernel
def qkv_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v = split(x·weightᵀ + bias) by heads, with q and k normalized and rotated on request

    x: (batch, positions, inputs); weight: ((heads + 2·kv_heads)·channels, inputs), or only that of q with separate
    k_weight and v_weight; bias: of the packed weight; q: (batch, heads, positions, channels); k, v: (batch, kv_heads, positions,
    channels); cos, sin, interleaved: as in `rotary`; q_norm_weight, k_norm_weight: (channels), as in `qk_norm`.
    """
    require_shapes(x=(x, "batch positions inputs"))
    if (k_weight is None) != (v_weight is None):
        raise ArgumentError("only one of k_weight and v_weight is given", hint="give both, or neither and one packed weight")
    if k_weight is None or v_weight is None:
        q, k, v = split(projected(x, weight, bias), heads, kv_heads)
    else:
        channels = _channels(weight, k_weight, v_weight, bias, heads, kv_heads)
        q, k, v = (torch.unflatten(F.linear(x, each), -1, (-1, channels)).transpose(1, 2) for each in (weight, k_weight, v_weight))
    q, k = placed(q, k, q_norm_weight, k_norm_weight, cos, sin, interleaved, eps)
    return q.contiguous(), k.contiguous(), v.contiguous()


def _channels(weight: Tensor, k_weight: Tensor, v_weight: Tensor, bias: Tensor | None, heads: int, kv_heads: int | None) -> int:
    """Returns the head dim of separate weights; rejects a bias, and rows that do not match the heads."""
    if bias is not None:
        raise ArgumentError("a bias is not supported with k_weight and v_weight", hint="give one packed weight with its bias")
    q_weight = (weight, "outputs inputs")
    require_shapes(weight=q_weight, k_weight=(k_weight, "kv_outputs inputs"), v_weight=(v_weight, "kv_outputs inputs"))
    rows, kv_rows = weight.shape[0], k_weight.shape[0]
    channels = rows // max(heads, 1)
    is_whole = channels > 0 and rows == heads * channels and kv_rows % channels == 0
    if not is_whole or (kv_heads is not None and kv_rows != kv_heads * channels):
        what = f"heads={heads} and kv_heads={kv_heads} do not split {rows} and {kv_rows} rows"
        raise ArgumentError(what, hint="give weights of (heads·channels, inputs) and (kv_heads·channels, inputs)")
    return channels


NORMED = {"x": X, "norm_weight": tensor("inputs"), "norm_bias": tensor("inputs"), "weight": WEIGHT, "bias": BIAS}
NORM_SIZES = {"rows": 8192, "outputs": 12288}
OPTIONS: VariantOperands = {
    "no_bias": {"bias": None},
    "zero_centered_gamma": {"zero_centered_gamma": True},
    "return_norm": {"return_norm": True},
    "gelu": {"activation": "gelu_tanh"},
}


@FAMILY.spec(NORMED, sizes=NORM_SIZES, variants=OPTIONS, aliases=["FusedLinearLayerNorm", "LayerNormLinear"])
@fg.kernel
def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    return_norm: bool = False,
    activation: str = "linear",
) -> Tensor | tuple[Tensor, Tensor]:
    """act(layer_norm(x)·weightᵀ + bias), and layer_norm(x) on request

    x: (…, inputs); norm_weight, norm_bias: (inputs); weight: (outputs, inputs); bias: (outputs); zero_centered_gamma: the
    norm's factor is 1 + norm_weight; activation: as in `linear`. TransformerEngine's ``LayerNormLinear``.
    """
    gamma = 1 + norm_weight if zero_centered_gamma and norm_weight is not None else norm_weight
    normalized = F.layer_norm(x, (x.shape[-1],), gamma, norm_bias, eps)
    y = activate(projected(normalized, weight, bias), activation)
    return (y, normalized) if return_norm else y


@FAMILY.spec(
    {name: operand for name, operand in NORMED.items() if name != "norm_bias"} | {"bias": None},
    sizes=NORM_SIZES,
    variants={"bias": {"bias": BIAS}, **{name: option for name, option in OPTIONS.items() if name != "no_bias"}},
    aliases=["RMSNormLinear"],
)
@fg.kernel
def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
    casting_mode: str = "none",
    return_norm: bool = False,
    activation: str = "linear",
) -> Tensor | tuple[Tensor, Tensor]:
    """act(rms_norm(x)·weightᵀ + bias), and rms_norm(x) on request

    x: (…, inputs); norm_weight: (inputs); weight: (outputs, inputs); bias: (outputs); zero_centered_gamma, casting_mode: as in
    `rms_norm`; activation: as in `linear`.
    """
    normalized = rms_normalized(x, norm_weight, eps, zero_centered_gamma, casting_mode)
    y = activate(projected(normalized, weight, bias), activation)
    return (y, normalized) if return_norm else y


GATES = {"swiglu": "silu", "geglu": "gelu_tanh", "reglu": "relu", "glu": "sigmoid"}
MLP_SIZES = {"rows": 8192, "inputs": 4096, "hidden": 14336}


@FAMILY.spec(
    {
        "x": X,
        "norm_weight": tensor("inputs"),
        "norm_bias": tensor("inputs"),
        "fc1_weight": tensor("hidden inputs"),
        "fc1_bias": tensor("hidden"),
        "fc2_weight": tensor("inputs hidden"),
        "fc2_bias": tensor("inputs"),
        "activation": "gelu_tanh",
    },
    sizes={**MLP_SIZES, "hidden": 16384},
    variants={
        "relu": {"activation": "relu"},
        "silu": {"activation": "silu"},
        "swiglu": {"activation": "swiglu", "fc1_weight": tensor("2*hidden inputs"), "fc1_bias": tensor("2*hidden")},
        "geglu": {"activation": "geglu", "fc1_weight": tensor("2*hidden inputs"), "fc1_bias": tensor("2*hidden")},
        "rms_norm": {"normalization": "RMSNorm", "norm_bias": None, "fc1_bias": None, "fc2_bias": None},
        "residual": {"residual": X},
    },
    aliases=["LayerNormMLP"],
)
@fg.kernel
def layer_norm_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: str = "gelu",
    normalization: str = "LayerNorm",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    return_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """act(norm(x)·fc1ᵀ + b₁)·fc2ᵀ + b₂ + residual, and norm(x) on request

    x: (…, inputs); norm_weight, norm_bias: (inputs); fc1_weight: (hidden, inputs), with twice the rows, gate first, if the
    activation is gated ("swiglu", "geglu", "reglu", "glu"); fc2_weight: (inputs, hidden); normalization: "LayerNorm" or "RMSNorm";
    zero_centered_gamma: the norm's factor is 1 + norm_weight. TransformerEngine's ``LayerNormMLP``.
    """
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise ArgumentError(f"no normalization is called {normalization!r}", hint="give 'LayerNorm' or 'RMSNorm'")
    gamma = 1 + norm_weight if zero_centered_gamma and norm_weight is not None else norm_weight
    is_rms = normalization == "RMSNorm"
    if is_rms and norm_bias is not None:
        raise ArgumentError("RMSNorm has no norm_bias", hint="leave it out, or give normalization='LayerNorm'")
    normalized = rms_normalized(x, gamma, eps) if is_rms else F.layer_norm(x, (x.shape[-1],), gamma, norm_bias, eps)
    h = projected(normalized, fc1_weight, fc1_bias)
    if activation in GATES:
        gate, up = halves(h, None, interleaved=False)
        h = ACTIVATIONS[GATES[activation]](gate) * up
    else:
        h = activate(h, activation)
    y = projected(h, fc2_weight, fc2_bias, residual)
    y = y if residual is None else y + residual
    return (y, normalized) if return_norm else y


GATED = {"x": X, "gate_weight": tensor("hidden inputs"), "up_weight": tensor("hidden inputs")}
PACKINGS: VariantOperands = {
    "packed": {"gate_weight": tensor("2*hidden inputs"), "up_weight": None},
    "interleaved": {"gate_weight": tensor("2*hidden inputs"), "up_weight": None, "interleaved": True},
}


def gated_linear(x: Tensor, gate: Tensor, up: Tensor | None, interleaved: bool, function: Callable[[Tensor], Tensor]) -> Tensor:
    """function(x·gateᵀ)·(x·upᵀ), from two weights, or one that holds both as halves or interleaved rows."""
    require_one_packing(up, interleaved)
    if up is not None:
        require_shapes(gate_weight=(gate, "hidden inputs"), up_weight=(up, "hidden inputs"))
        return function(projected(x, gate)) * projected(x, up)
    first, second = halves(projected(x, gate), None, interleaved)
    return function(first) * second


@FAMILY.spec(GATED, sizes=MLP_SIZES, variants=PACKINGS)
@fg.kernel
def swiglu_linear(x: Tensor, gate_weight: Tensor, up_weight: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """silu(x·gateᵀ)·(x·upᵀ)

    x: (…, inputs); gate_weight, up_weight: (hidden, inputs); without up_weight, gate_weight holds both: as halves of its rows, or
    interleaved. Shazeer (arXiv 2002.05202).
    """
    return gated_linear(x, gate_weight, up_weight, interleaved, F.silu)


@FAMILY.spec({**GATED, "approximate": "tanh"}, sizes=MLP_SIZES, variants={**PACKINGS, "erf": {"approximate": "none"}})
@fg.kernel
def geglu_linear(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None = None, interleaved: bool = False, approximate: str = "none"
) -> Tensor:
    """gelu(x·gateᵀ)·(x·upᵀ)

    x, gate_weight, up_weight, interleaved: as in `swiglu_linear`; approximate: as in `gelu`.
    """
    return gated_linear(x, gate_weight, up_weight, interleaved, lambda gate: gelu_of(gate, approximate))


@FAMILY.spec({**GATED, "down_weight": tensor("inputs hidden")}, sizes=MLP_SIZES, variants=PACKINGS, aliases=["SwiGLU", "LlamaMLP"])
@fg.kernel
def swiglu_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    interleaved: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """(silu(x·gateᵀ)·(x·upᵀ))·downᵀ + residual

    x, residual: (…, inputs); gate_weight, up_weight, interleaved: as in `swiglu_linear`; down_weight: (inputs, hidden).
    """
    y = projected(gated_linear(x, gate_weight, up_weight, interleaved, F.silu), down_weight, residual=residual)
    return y if residual is None else y + residual
