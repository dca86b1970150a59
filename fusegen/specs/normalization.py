"""Row norms, the chains around them, and a norm's backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_shapes, widened
from fusegen.specs.elementwise import gelu_of
from fusegen.specs.spec import SpecFamily, VariantOperands, shape, tensor

FAMILY = SpecFamily("normalization")

X, ROW = tensor("rows features"), tensor("features")
AFFINE = {"weight": ROW, "bias": ROW}
CENTERED: VariantOperands = {"zero_centered_gamma": {"zero_centered_gamma": True}}
MODES: VariantOperands = {"llama": {"casting_mode": "llama"}, "gemma": {"casting_mode": "gemma", "zero_centered_gamma": True}}
WIDE = {"features": 8192}
PLAIN = {"weight": None, "bias": None}


def rms_normalized(
    x: Tensor, weight: Tensor | None, eps: float | None, zero_centered_gamma: bool = False, casting_mode: str = "none"
) -> Tensor:
    """x/√(mean(x²) + ε)·weight over the last dim; the casting modes are Liger-Kernel's.

    Raises:
        ArgumentError: an unknown mode.

    Args:
        x: (…, features).
        weight: (features).
        zero_centered_gamma: True if the factor is 1 + weight.
        casting_mode: "llama" multiplies by the weight in the dtype of x, "gemma" in float32, "none" as torch does.
    """
    if casting_mode not in ("none", "llama", "gemma"):
        raise ArgumentError(f"no casting mode is called {casting_mode!r}", hint="give 'none', 'llama' or 'gemma'")
    require_shapes(x=(x, "* features"), weight=(weight, "features"))
    if casting_mode == "none":
        weight = 1 + weight if zero_centered_gamma and weight is not None else weight
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = widened(x)
    normalized = wide * reciprocal_rms(wide, eps)
    if weight is None:
        return normalized.to(x.dtype)
    if casting_mode == "llama":
        return normalized.to(x.dtype) * (1 + weight if zero_centered_gamma else weight)
    weight = widened(weight)
    return (normalized * (1 + weight if zero_centered_gamma else weight)).to(x.dtype)


@FAMILY.spec(
    {"input": X, "normalized_shape": shape("features"), **AFFINE},
    variants={"plain": PLAIN, "no_bias": {"bias": None}, **CENTERED, "statistics": {"return_statistics": True}},
    aliases=["LayerNorm"],
)
@fg.kernel
def layer_norm(
    input: Tensor,
    normalized_shape: fg.Static[tuple[int, ...]],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """(x − μ)/√(σ² + ε)·weight + bias, with mean μ and variance σ² of each row

    input: (…, *normalized_shape); weight, bias: normalized_shape; zero_centered_gamma: the factor is 1 + weight. With
    statistics: the result, μ and 1/√(σ² + ε). Ba et al., "Layer Normalization" (arXiv 1607.06450).
    """
    weight = 1 + weight if zero_centered_gamma and weight is not None else weight
    if return_statistics:
        return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


@FAMILY.spec(
    {"input": X, "normalized_shape": shape("features"), "weight": ROW, "eps": 1e-6},
    variants={"plain": {"weight": None}, **CENTERED, **MODES, "statistics": {"return_statistics": True}},
    aliases=["RMSNorm"],
)
@fg.kernel
def rms_norm(
    input: Tensor,
    normalized_shape: fg.Static[tuple[int, ...]],
    weight: Tensor | None = None,
    eps: float | None = None,
    zero_centered_gamma: bool = False,
    casting_mode: str = "none",
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """x/√(mean(x²) + ε)·weight

    input: (…, features); normalized_shape: (features,); weight: (features); zero_centered_gamma: the factor is 1 + weight;
    casting_mode: "llama" multiplies by the weight in the dtype of x, "gemma" in float32. With statistics: the result, and
    1/√(mean(x²) + ε) in float32. Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
    """
    if tuple(normalized_shape) != (input.shape[-1],) and (return_statistics or zero_centered_gamma or casting_mode != "none"):
        raise ArgumentError(
            f"normalized_shape={tuple(normalized_shape)} is not ({input.shape[-1]},), the last dim", hint="give only the last dim"
        )
    if return_statistics:
        return _with_statistics(input, weight, eps, zero_centered_gamma, casting_mode)
    if casting_mode == "none" and not zero_centered_gamma:
        return F.rms_norm(input, normalized_shape, weight, eps)
    return rms_normalized(input, weight, eps, zero_centered_gamma, casting_mode)


def _with_statistics(
    x: Tensor, weight: Tensor | None, eps: float | None, zero_centered_gamma: bool, casting_mode: str
) -> tuple[Tensor, Tensor]:
    """Returns the norm and 1/√(mean(x²) + ε), both from one float32 sum of squares."""
    if casting_mode == "none":
        eps, casting_mode = torch.finfo(widened(x).dtype).eps if eps is None else eps, "gemma"
    normalized = rms_normalized(x, weight, eps, zero_centered_gamma, casting_mode)
    return normalized, reciprocal_rms(widened(x), eps)


def reciprocal_rms(x: Tensor, eps: float | None) -> Tensor:
    """1/√(mean(x²) + ε) of each row."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + (1e-6 if eps is None else eps))


WEIGHTS = {"weight": tensor("3"), "bias": tensor("1")}


@FAMILY.spec({"x": X, **WEIGHTS}, aliases=["PolyNorm"])
@fg.kernel
def poly_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """w₀·norm(x³) + w₁·norm(x²) + w₂·norm(x) + b, with norm(u) = u/√(mean(u²) + ε)

    x: (…, features); weight: (3,); bias: (1,). In float32. Zhuo et al., "Polynomial Composition Activations" (arXiv 2411.03884).
    """
    require_shapes(weight=(weight, "3"), bias=(bias, "1" if bias.dim() else ""))
    wide = widened(x)
    powers = (wide * wide * wide, wide * wide, wide)
    parts = [factor * power * reciprocal_rms(power, eps) for factor, power in zip(widened(weight).unbind(), powers, strict=True)]
    return (parts[0] + parts[1] + parts[2] + widened(bias)).to(x.dtype)


@FAMILY.spec(
    {
        "q": tensor("batch heads positions channels"),
        "k": tensor("batch kv_heads positions channels"),
        "q_weight": tensor("channels"),
        "k_weight": tensor("channels"),
    },
    variants={**CENTERED, **MODES},
)
@fg.kernel
def qk_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
    casting_mode: str = "none",
) -> tuple[Tensor, Tensor]:
    """rms_norm(q)·q_weight and rms_norm(k)·k_weight, head by head

    q, k: (…, channels); q_weight, k_weight: (channels); the rest: as in `rms_norm`. Henry et al., "Query-Key Normalization for
    Transformers" (arXiv 2010.04245).
    """
    queries = rms_normalized(q, q_weight, eps, zero_centered_gamma, casting_mode)
    keys = rms_normalized(k, k_weight, eps, zero_centered_gamma, casting_mode)
    return queries, keys


MODULATED = {"x": tensor("batch positions features"), "scale": tensor("batch features"), "shift": tensor("batch features")}
BY_ROW = {"scale": tensor("batch positions features"), "shift": tensor("batch positions features")}


@FAMILY.spec(MODULATED, variants={"by_row": BY_ROW, "weight": AFFINE}, aliases=["adaLN"])
@fg.kernel
def modulated_layer_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """layer_norm(x)·(1 + scale) + shift

    x: (batch, positions, features); scale, shift: (batch, features), or of the shape of x; weight, bias: (features). Peebles
    and Xie, "Scalable Diffusion Models with Transformers" (arXiv 2212.09748).
    """
    normalized = F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return modulated(normalized, scale, shift)


WEIGHTED: VariantOperands = {name: {"weight": ROW, **settings} for name, settings in {"weight": {}, **MODES}.items()}


@FAMILY.spec(MODULATED, variants={"by_row": BY_ROW, "no_shift": {"shift": None}, **WEIGHTED})
@fg.kernel
def modulated_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
    casting_mode: str = "none",
) -> Tensor:
    """rms_norm(x)·weight·(1 + scale) + shift

    x: (batch, positions, features); scale, shift: (batch, features), or of the shape of x; weight: (features);
    zero_centered_gamma, casting_mode: as in `rms_norm`. The result has the dtype of x.
    """
    return modulated(rms_normalized(x, weight, eps, zero_centered_gamma, casting_mode), scale, shift).to(x.dtype)


def modulated(x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """x·(1 + scale) + shift; with one dim less than x, scale and shift apply per batch entry."""
    by_row = scale.dim() == x.dim()
    dims = "* positions features" if by_row else "* features"
    require_shapes(x=(x, "* positions features"), scale=(scale, dims), shift=(shift, dims))
    if not by_row:
        scale, shift = scale.unsqueeze(-2), None if shift is None else shift.unsqueeze(-2)
    scaled = x * (1 + scale)
    return scaled if shift is None else scaled + shift


ADDED = {"x": X, "residual": X}
CHAIN = {"seed": 0, "p": 0.1}
SUMS: VariantOperands = {
    "post_norm": {"post_norm": True},
    "dropout": {**CHAIN, "training": True},
    "bias_dropout": {**CHAIN, "x_bias": ROW, "training": True},
}


def summed(x: Tensor, residual: Tensor, x_bias: Tensor | None, p: float, training: bool, seed: int | None) -> Tensor:
    """dropout(x + x_bias, p) + residual."""
    require_shapes(x=(x, "* features"), residual=(residual, "* features"), x_bias=(x_bias, "features"))
    return fg.dropout(x if x_bias is None else x + x_bias, p, training, seed=seed) + residual


@FAMILY.spec({**ADDED, **AFFINE}, variants={**SUMS, **CENTERED, "plain": PLAIN})
@fg.kernel
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    post_norm: bool = False,
    x_bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = False,
    seed: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """h = dropout(x + x_bias, p) + residual; layer_norm(h)·weight + bias, and h

    x, residual: (…, features); weight, bias, x_bias: (features); zero_centered_gamma: the factor is 1 + weight; post_norm: h is not
    returned, for models whose residual stream passes through the norm; seed: the mask's seed, by default from torch's generator.
    """
    h = summed(x, residual, x_bias, p, training, seed)
    weight = 1 + weight if zero_centered_gamma and weight is not None else weight
    normalized = F.layer_norm(h, (h.shape[-1],), weight, bias, eps)
    return normalized if post_norm else (normalized, h)


@FAMILY.spec(
    {**ADDED, "weight": ROW}, variants={**SUMS, **CENTERED, **MODES, "plain": {"weight": None}}, aliases=["fused_add_rms_norm"]
)
@fg.kernel
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    zero_centered_gamma: bool = False,
    casting_mode: str = "none",
    post_norm: bool = False,
    x_bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = False,
    seed: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """h = dropout(x + x_bias, p) + residual; rms_norm(h)·weight, and h

    x, residual: (…, features); weight, x_bias: (features); zero_centered_gamma, casting_mode: as in `rms_norm`; post_norm: h is not
    returned; seed: the mask's seed, by default from torch's generator. The residual stream of Llama-like models.
    """
    h = summed(x, residual, x_bias, p, training, seed)
    normalized = rms_normalized(h, weight, eps, zero_centered_gamma, casting_mode)
    return normalized if post_norm else (normalized, h)


GELUS: VariantOperands = {"erf": {"approximate": "none"}, "quick": {"approximate": "quick"}}


@FAMILY.spec({"x": X, **AFFINE, "approximate": "tanh"}, sizes=WIDE, variants=GELUS)
@fg.kernel
def layer_norm_gelu(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, approximate: str = "none") -> Tensor:
    """gelu(layer_norm(x)·weight + bias)

    x: (…, features); weight, bias: (features); approximate: as in `gelu`.
    """
    return gelu_of(F.layer_norm(x, (x.shape[-1],), weight, bias, eps), approximate)


@FAMILY.spec({"x": X, **AFFINE, "residual": X, "approximate": "tanh"}, sizes=WIDE, variants=GELUS)
@fg.kernel
def layer_norm_gelu_add(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor, eps: float = 1e-5, approximate: str = "none"
) -> Tensor:
    """gelu(layer_norm(x)·weight + bias) + residual

    x, residual: (…, features); weight, bias: (features); approximate: as in `gelu`.
    """
    require_shapes(x=(x, "*"), residual=(residual, "*"))
    return gelu_of(F.layer_norm(x, (x.shape[-1],), weight, bias, eps), approximate) + residual


@FAMILY.spec(
    {"x": X, **AFFINE, "residual": X, "seed": 0, "approximate": "tanh"},
    sizes=WIDE,
    variants={**GELUS, "eval": {"training": False}},
    aliases=["ln_gelu_dropout_add"],
)
@fg.kernel
def layer_norm_gelu_dropout_add(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    eps: float = 1e-5,
    p: float = 0.1,
    training: bool = True,
    seed: int | None = None,
    approximate: str = "none",
) -> Tensor:
    """dropout(gelu(layer_norm(x)·weight + bias), p) + residual

    x, residual: (…, features); weight, bias: (features); approximate: as in `gelu`; seed: the mask's seed, by default from
    torch's generator.
    """
    require_shapes(x=(x, "*"), residual=(residual, "*"))
    activated = gelu_of(F.layer_norm(x, (x.shape[-1],), weight, bias, eps), approximate)
    return fg.dropout(activated, p, training, seed=seed) + residual


@FAMILY.spec({"x": X, "dy": X, "weight": ROW}, gradients=False)
@fg.kernel
def layer_norm_backward(x: Tensor, dy: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    """dx = r·(g − mean(g) − x̂·mean(g·x̂)), dγ = Σ dy·x̂, dβ = Σ dy, with x̂ = (x − μ)·r and g = dy·γ

    x, dy: (rows, features); weight: (features). Written by hand. The mean and r are recomputed from x, so that the forward
    pass saves nothing else.
    """
    require_shapes(x=(x, "rows features"), dy=(dy, "rows features"), weight=(weight, "features"))
    centered = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((centered * centered).mean(-1, keepdim=True) + eps)
    normalized = centered * rstd
    dx = _input_gradient(normalized, rstd, dy * weight)
    dweight, dbias = (dy * normalized).sum(0), dy.sum(0)
    return dx, dweight, dbias


@FAMILY.spec({"y": X, "dy": X, **AFFINE, "rstd": tensor("rows 1", torch.float32)}, gradients=False)
@fg.kernel
def layer_norm_invertible_backward(
    y: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dγ and dβ of layer_norm from its result y, with x̂ = (y − β)/γ; True if an element of γ is 0: x̂ is undefined there

    y, dy: (rows, features); weight, bias: (features); rstd: (rows, 1) of float32. DeepSpeed's ``normalize_invertible``: the
    input is not saved. The flag stays on the device, to be read when the host synchronizes anyway.
    """
    require_shapes(
        y=(y, "rows features"),
        dy=(dy, "rows features"),
        weight=(weight, "features"),
        bias=(bias, "features"),
        rstd=(rstd, "rows 1"),
    )
    normalized = (y - bias) / weight
    dx = _input_gradient(normalized, rstd, dy * weight)
    dweight, dbias = (dy * normalized).sum(0), dy.sum(0)
    has_zero = (weight == 0).any()
    return dx.to(y.dtype), dweight, dbias, has_zero


def _input_gradient(normalized: Tensor, rstd: Tensor, grad: Tensor) -> Tensor:
    """r·(g − mean(g) − x̂·mean(g·x̂)): the gradient of a norm's input."""
    return rstd * (grad - grad.mean(-1, keepdim=True) - normalized * (grad * normalized).mean(-1, keepdim=True))
