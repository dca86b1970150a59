"""Quantization to 8 bits with scales: of tensors, norms, activations and matmuls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_shapes
from fusegen.specs.elementwise import activate, halves
from fusegen.specs.normalization import rms_normalized
from fusegen.specs.spec import SpecFamily, SpecOperand, VariantOperands, scales, size, tensor

FAMILY = SpecFamily("quantization")

GRANULARITIES = ("per_tensor", "per_token", "per_group")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}
"""The largest finite value of each 8-bit dtype."""

EPS = 1e-10
"""The least max|x| of a computed scale: zeros have the scale EPS / LARGEST and remain zeros."""


def quantized(
    x: Tensor,
    granularity: str,
    dtype: torch.dtype = E4M3,
    scale: Tensor | None = None,
    group_size: int = 128,
    scale_ue8m0: bool = False,
) -> tuple[Tensor, ...]:
    """x / scale in 8 bits, clamped to the dtype's range, and the scale unless it was given.

    Args:
        x: (…, features) of floats.
        granularity: one scale "per_tensor", "per_token" (a row) or "per_group" (group_size neighbours in a row).
        dtype: float8_e4m3fn, float8_e5m2 or int8, which rounds half to even.
        scale: float32 of shape () or (1) per tensor, (…, 1) per token, (…, features / group_size) per group. By default
            max(max|x|, EPS) over the dtype's largest value.
        group_size: elements per group.
        scale_ue8m0: True rounds scales up to powers of two.

    Returns:
        The values, of the shape of x; and the scale unless it was given.

    Raises:
        ArgumentError: an unknown granularity, another dtype, groups that do not divide a row, a scale of another shape.
    """
    largest = largest_of(dtype)
    if not x.dim():
        raise ArgumentError("a tensor without dims cannot be quantized", hint="give a tensor with dims")
    wide = by_group(x.float(), granularity, group_size)
    if scale is not None:
        return (narrowed(*_raised(wide, dtype, aligned(scale, x, granularity, group_size))).reshape(x.shape),)
    dims = tuple(range(wide.dim())) if granularity == "per_tensor" else (-1,)
    scale = wide.abs().amax(dims, keepdim=granularity != "per_tensor").clamp(min=EPS) * (1.0 / largest)
    scale = torch.exp2(torch.ceil(torch.log2(scale))) if scale_ue8m0 else scale
    return narrowed(wide, dtype, scale).reshape(x.shape), scale.squeeze(-1) if granularity == "per_group" else scale


def narrowed(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """x / scale in 8 bits, computed with the reciprocal of the scale, and clamped against overflow.

    Raises:
        ArgumentError: another dtype.
    """
    largest = largest_of(dtype)
    inverse_scale = 1.0 / scale.float()
    values = (x.float() * inverse_scale).clamp(-largest, largest)
    return (values.round() if dtype == torch.int8 else values).to(dtype)


def _raised(x: Tensor, dtype: torch.dtype, scale: Tensor) -> tuple[Tensor, torch.dtype, Tensor]:
    """Returns arguments of `narrowed`, with x and scale times a power of two if 1 / scale would overflow."""
    factor = torch.where(scale.abs() < 2.0**-100, 2.0**64, 1.0)
    return x * factor, dtype, scale * factor


def largest_of(dtype: torch.dtype) -> float:
    """Returns the largest finite value of an 8-bit dtype."""
    if dtype not in LARGEST:
        raise ArgumentError(f"cannot quantize to {dtype}", hint="give torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8")
    return LARGEST[dtype]


def by_group(x: Tensor, granularity: str, group_size: int) -> Tensor:
    """Returns x, or (…, groups, group_size) for scales per group."""
    if granularity not in GRANULARITIES:
        raise ArgumentError(f"no granularity is called {granularity!r}", hint="give 'per_tensor', 'per_token' or 'per_group'")
    if granularity != "per_group":
        return x
    if group_size < 1 or x.shape[-1] % group_size:
        raise ArgumentError(f"groups of {group_size} do not divide a row of {x.shape[-1]}", hint="give a divisor as group_size")
    return torch.unflatten(x, -1, (-1, group_size))


def aligned(scale: Tensor, x: Tensor, granularity: str, group_size: int) -> Tensor:
    """Checks a scale's shape, and returns it broadcastable to the result of `by_group`."""
    if not isinstance(scale, Tensor):
        raise ArgumentError(f"scale is a {type(scale).__name__}, not a tensor", hint="give a tensor: torch.tensor(0.5)")
    groups = x.shape[-1] // group_size if granularity == "per_group" else 1
    expected = () if granularity == "per_tensor" else (*x.shape[:-1], groups)
    if tuple(scale.shape) != expected and not (granularity == "per_tensor" and tuple(scale.shape) == (1,)):
        raise ArgumentError(f"scale has shape {tuple(scale.shape)}, wrong for {granularity}", hint=f"give shape {expected}")
    return scale.unsqueeze(-1) if granularity == "per_group" else scale.float()


def of_one(results: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Unpacks a single result."""
    return results if len(results) > 1 else results[0]


def in_cache(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Converts keys or values to a cache's dtype; 8-bit ones are divided by their scale.

    Args:
        x: (…, kv_heads, channels).
        scale: float32 of shape () or (kv_heads), only for 8 bits; 1 by default for 8-bit floats, required for int8.
    """
    if dtype not in LARGEST:
        if scale is not None:
            raise ArgumentError(f"a cache of {dtype} takes no scale", hint="give a cache of 8 bits, or no scale")
        return x.to(dtype)
    return narrowed(*_raised(x.float(), dtype, of_heads(scale, dtype, x.shape[-2], x.device)[..., None]))


def from_cache(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Converts cached keys or values, (batch, kv_heads, keys, channels), exactly; also returns their factor: (kv_heads, 1, 1)."""
    if x.dtype not in LARGEST and scale is None:
        return x, None
    return x.to(dtype), of_heads(scale, x.dtype, x.shape[1], x.device).expand(x.shape[1])[:, None, None]


def of_heads(scale: Tensor | None, dtype: torch.dtype, kv_heads: int, device: torch.device) -> Tensor:
    """Checks the scale of an 8-bit cache, and returns it as (1) or (kv_heads)."""
    largest_of(dtype)
    if scale is None and dtype == torch.int8:
        raise ArgumentError("a cache of int8 needs a scale", hint="give k_scale and v_scale")
    if scale is None:
        return torch.ones(1, device=device)
    if tuple(scale.shape) not in ((), (1,), (kv_heads,)):
        raise ArgumentError(f"scale has shape {tuple(scale.shape)}", hint=f"give one number, or one for each of {kv_heads} heads")
    return scale.float().reshape(-1)


X, ROW = "rows features", "features"
LAYER_NORM, RMS_NORM = {"input": X, "weight": ROW, "bias": ROW}, {"input": X, "weight": ROW}
ADDED, TWO = {"x": X, "residual": X}, {"gate": X, "up": X}
PACKED = {"gate": tensor("rows 2*features"), "up": None}
PER_TOKEN, PER_GROUP = {"granularity": "per_token"}, {"granularity": "per_group", "group_size": size("group")}
STATIC = {"granularity": "per_tensor", "scale": scales("")}


def tensors(**shapes: str) -> dict[str, SpecOperand]:
    return {name: tensor(shape) for name, shape in shapes.items()}


def grouped(**shapes: str) -> dict[str, SpecOperand]:
    """Operands with features as groups·group."""
    return {name: tensor(shape.replace("features", "groups*group")) for name, shape in shapes.items()}


def variants(**shapes: str) -> VariantOperands:
    """Returns the quantization variants for operands of these shapes."""
    per_group = {**grouped(**shapes), **PER_GROUP}
    return {
        "static": STATIC,
        "per_tensor": {"granularity": "per_tensor"},
        "per_group": per_group,
        "ue8m0": {**per_group, "scale_ue8m0": True},
        "int8": {"quant_dtype": torch.int8},
        "static_int8": {**STATIC, "quant_dtype": torch.int8},
        "e5m2": {"quant_dtype": E5M2},
    }


@FAMILY.spec(
    {"input": tensor(X), **PER_TOKEN},
    variants={
        **variants(input=X),
        "static_per_token": {"scale": scales("rows 1")},
        "static_per_group": {**grouped(input=X), **PER_GROUP, "scale": scales("rows groups")},
    },
    aliases={
        "per_token_group_quant_fp8": "per_group",
        "per_token_group_quant_int8": "per_group",
        "scaled_fp8_quant": "per_tensor",
        "scaled_int8_quant": "int8",
    },
    gradients=False,
)
@fg.kernel
def quantize(
    input: Tensor,
    scale: Tensor | None = None,
    granularity: str = "per_tensor",
    quant_dtype: torch.dtype = E4M3,
    group_size: fg.Static[int] = 128,
    scale_ue8m0: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """clamp(x / scale) in 8 bits, and scale = max|x| / the greatest number of the dtype, unless it is given

    input: (…, features); granularity: one scale "per_tensor", "per_token" (a row) or "per_group" (group_size neighbours
    in a row); quant_dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8; scale: float32, of the shape (), (…, 1) or (…,
    features/group_size); scale_ue8m0: scales are rounded up to powers of two. Zeros have the scale of max|x| = 1e-10. Micikevicius
    et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433); groups: DeepSeek-V3 (arXiv 2412.19437).
    """
    return of_one(quantized(input, granularity, quant_dtype, scale, group_size, scale_ue8m0))


@FAMILY.spec(
    {"input": tensor(X, E4M3), "scale": scales("rows 1"), **PER_TOKEN},
    variants={
        "per_tensor": STATIC,
        "per_group": {"input": tensor("rows groups*group", E4M3), **PER_GROUP, "scale": scales("rows groups")},
        "int8": {"input": tensor(X, torch.int8)},
        "e5m2": {"input": tensor(X, E5M2)},
    },
    gradients=False,
)
@fg.kernel
def dequantize(
    input: Tensor,
    scale: Tensor,
    granularity: str = "per_tensor",
    group_size: fg.Static[int] = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x·scale, in a wider dtype

    input: (…, features) of 8 bits; scale, granularity, group_size: as in `quantize`; dtype: of the result.
    """
    wide = by_group(input.float(), granularity, group_size)
    return (wide * aligned(scale, input, granularity, group_size)).to(dtype).reshape(input.shape)


@FAMILY.spec(
    {**tensors(**LAYER_NORM), **PER_TOKEN},
    variants=variants(**LAYER_NORM),
    gradients=False,
)
@fg.kernel
def layer_norm_quant(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-5,
    granularity: str = "per_tensor",
    quant_dtype: torch.dtype = E4M3,
    group_size: fg.Static[int] = 128,
    scale_ue8m0: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """quantize(layer_norm(x)·weight + bias)

    input: (…, features); weight, bias: (features); scale and the arguments after eps: as in `quantize`.
    TransformerEngine's ``layernorm_fwd`` with a quantizer.
    """
    normalized = F.layer_norm(input, (input.shape[-1],), weight, bias, eps)
    return of_one(quantized(normalized, granularity, quant_dtype, scale, group_size, scale_ue8m0))


@FAMILY.spec(
    {**tensors(**RMS_NORM), "eps": 1e-6, **PER_TOKEN},
    variants=variants(**RMS_NORM),
    aliases={
        "rmsnorm_quant": "static",
        "rms_norm_static_fp8_quant": "static",
        "rms_norm_dynamic_per_token_quant": "",
        "rms_norm_per_block_quant": "per_group",
    },
    gradients=False,
)
@fg.kernel
def rms_norm_quant(
    input: Tensor,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float | None = None,
    granularity: str = "per_tensor",
    quant_dtype: torch.dtype = E4M3,
    group_size: fg.Static[int] = 128,
    scale_ue8m0: bool = False,
    zero_centered_gamma: bool = False,
    casting_mode: str = "none",
) -> Tensor | tuple[Tensor, ...]:
    """quantize(rms_norm(x)·weight)

    input: (…, features); weight: (features); scale and the arguments after eps: as in `quantize`;
    zero_centered_gamma, casting_mode: as in `rms_norm`. vLLM's ``rms_norm_static_fp8_quant`` and
    ``rms_norm_dynamic_per_token_quant``.
    """
    normalized = rms_normalized(input, weight, eps, zero_centered_gamma, casting_mode)
    return of_one(quantized(normalized, granularity, quant_dtype, scale, group_size, scale_ue8m0))


@FAMILY.spec(
    {**tensors(**ADDED, weight=ROW, bias=ROW), **PER_TOKEN},
    variants=variants(**ADDED, weight=ROW, bias=ROW),
    gradients=False,
)
@fg.kernel
def add_layer_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-5,
    granularity: str = "per_tensor",
    quant_dtype: torch.dtype = E4M3,
    group_size: fg.Static[int] = 128,
    scale_ue8m0: bool = False,
) -> tuple[Tensor, ...]:
    """h = x + residual; quantize(layer_norm(h)·weight + bias), and h

    x, residual: (…, features); weight, bias: (features); scale and the arguments after eps: as in `quantize`. The results are the
    values, the scale unless it is given, and h.
    """
    require_shapes(x=(x, "*"), residual=(residual, "*"))
    h = x + residual
    normalized = F.layer_norm(h, (h.shape[-1],), weight, bias, eps)
    return (*quantized(normalized, granularity, quant_dtype, scale, group_size, scale_ue8m0), h)


@FAMILY.spec(
    {**tensors(**ADDED, weight=ROW), **PER_TOKEN},
    variants=variants(**ADDED, weight=ROW),
    aliases={"fused_add_rmsnorm_quant": "static", "fused_add_rms_norm_static_fp8_quant": "static"},
    gradients=False,
)
@fg.kernel
def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    granularity: str = "per_tensor",
    quant_dtype: torch.dtype = E4M3,
    group_size: fg.Static[int] = 128,
    scale_ue8m0: bool = False,
    zero_centered_gamma: bool = False,
    casting_mode: str = "none",
) -> tuple[Tensor, ...]:
    """h = x + residual; quantize(rms_norm(h)·weight), and h

    x, residual: (…, features); weight: (features); scale and the arguments after eps: as in `quantize`; zero_centered_gamma,
    casting_mode: as in `rms_norm`. The results are the values, the scale unless it is given, and h. FlashInfer's
    ``fused_add_rmsnorm_quant``.
    """
    require_shapes(x=(x, "*"), residual=(residual, "*"))
    h = x + residual
    normalized = rms_normalized(h, weight, eps, zero_centered_gamma, casting_mode)
    return (*quantized(normalized, granularity, quant_dtype, scale, group_size, scale_ue8m0), h)


@FAMILY.spec(
    {"input": tensor(X), "activation": "gelu_tanh", **PER_TOKEN},
    sizes={"features": 8192},
    variants=variants(input=X),
    gradients=False,
)
@fg.kernel
def activation_quant(
    input: Tensor,
    scale: Tensor | None = None,
    activation: str = "gelu",
    granularity: str = "per_tensor",
    quant_dtype: torch.dtype = E4M3,
    group_size: fg.Static[int] = 128,
    scale_ue8m0: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """quantize(act(x))

    input: (…, features); activation: as in `linear`; the rest: as in `quantize`.
    """
    return of_one(quantized(activate(input, activation), granularity, quant_dtype, scale, group_size, scale_ue8m0))


@FAMILY.spec(
    {**tensors(**TWO), "activation": "silu", **PER_TOKEN},
    sizes={"rows": 4096, "features": 14336, "groups": 112},
    variants={
        **variants(**TWO),
        "packed": PACKED,
        "packed_per_group": {**PACKED, **PER_GROUP, "gate": tensor("rows 2*groups*group")},
        "interleaved": {**PACKED, "interleaved": True},
    },
    aliases={"silu_and_mul_quant": "static", "silu_and_mul_per_block_quant": "packed_per_group"},
    gradients=False,
)
@fg.kernel
def gated_activation_quant(
    gate: Tensor,
    up: Tensor | None = None,
    scale: Tensor | None = None,
    activation: str = "silu",
    granularity: str = "per_tensor",
    quant_dtype: torch.dtype = E4M3,
    group_size: fg.Static[int] = 128,
    scale_ue8m0: bool = False,
    interleaved: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """quantize(act(gate)·up)

    gate, up, interleaved: as in `swiglu`; activation: as in `linear`, "silu" for SwiGLU; the rest: as in `quantize`. vLLM's
    ``silu_and_mul_quant`` and ``silu_and_mul_per_block_quant``.
    """
    gate, up = halves(gate, up, interleaved)
    return of_one(quantized(activate(gate, activation) * up, granularity, quant_dtype, scale, group_size, scale_ue8m0))


@FAMILY.spec(
    {
        "input": tensor("rows inputs"),
        "weight": tensor("outputs inputs"),
        "scale": scales(""),
        "bias": tensor("outputs"),
        "activation": "gelu_tanh",
    },
    sizes={"rows": 8192, "inputs": 4096, "outputs": 16384},
    variants={"plain": {"bias": None, "activation": "linear"}, "int8": {"quant_dtype": torch.int8}, "e5m2": {"quant_dtype": E5M2}},
    gradients=False,
)
@fg.kernel
def linear_quant(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str = "linear",
    quant_dtype: torch.dtype = E4M3,
) -> Tensor:
    """quantize(act(x·weightᵀ + bias)) by a scale that is given

    input: (…, inputs); weight: (outputs, inputs); bias: (outputs); scale: () or (1) of float32; activation: as in `linear`;
    quant_dtype: as in `quantize`.
    """
    if scale is None:
        raise ArgumentError("linear_quant needs a scale", hint="give one, or call quantize(linear(x)) in two launches")
    require_shapes(weight=(weight, "outputs inputs"), bias=(bias, "outputs"))
    y = activate(F.linear(input, weight, bias), activation)
    return quantized(y, "per_tensor", quant_dtype, scale)[0]
