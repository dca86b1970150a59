"""Norms along rows, what is fused around them, and a norm's backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.specs.spec import Arguments, Spec, meta


@fg.kernel
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: fg.Static[float] = 1e-5) -> Tensor:
    """(x − μ)/√(σ² + ε)·weight + bias, with mean μ and variance σ² of each row

    x: (…, features); weight, bias: (features). Ba et al., "Layer Normalization" (arXiv 1607.06450).
    """
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@fg.kernel
def layer_norm_gelu_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, eps: fg.Static[float] = 1e-5) -> Tensor:
    """gelu(layer_norm(x)·weight + bias) + residual, with the tanh form of gelu

    x, residual: (…, features); weight, bias: (features).
    """
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight, bias, eps), approximate="tanh") + residual


@fg.kernel
def layer_norm_backward(x: Tensor, dy: Tensor, weight: Tensor, eps: fg.Static[float] = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    """dx = r·(g − mean(g) − x̂·mean(g·x̂)), dγ = Σ dy·x̂, dβ = Σ dy, with x̂ = (x − μ)·r and g = dy·γ

    x, dy: (rows, features); weight: (features). Written by hand; mean and r are computed again from x, so that the forward
    pass has to keep nothing else.
    """
    centered = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((centered * centered).mean(-1, keepdim=True) + eps)
    normalized = centered * rstd
    grad = dy * weight
    dx = rstd * (grad - grad.mean(-1, keepdim=True) - normalized * (grad * normalized).mean(-1, keepdim=True))
    return dx, (dy * normalized).sum(0), dy.sum(0)


@fg.kernel
def rms_norm(x: Tensor, weight: Tensor, eps: fg.Static[float] = 1e-6) -> Tensor:
    """x/√(mean(x²) + ε)·weight

    x: (…, features); weight: (features). Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@fg.kernel
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: fg.Static[float] = 1e-6) -> tuple[Tensor, Tensor]:
    """h = x + residual; rms_norm(h)·weight and h

    x, residual: (…, features); weight: (features). The pre-norm residual stream of Llama-like models.
    """
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, eps), h


def _layer_norm(dtype: torch.dtype, rows: int = 16384, features: int = 4096) -> Arguments:
    return {"x": meta(rows, features, dtype=dtype), "weight": meta(features, dtype=dtype), "bias": meta(features, dtype=dtype)}


def _layer_norm_gelu_add(dtype: torch.dtype, rows: int = 16384, features: int = 8192) -> Arguments:
    return _layer_norm(dtype, rows, features) | {"residual": meta(rows, features, dtype=dtype)}


def _layer_norm_backward(dtype: torch.dtype, rows: int = 16384, features: int = 4096) -> Arguments:
    return {name: meta(rows, features, dtype=dtype) for name in ("x", "dy")} | {"weight": meta(features, dtype=dtype)}


def _rms_norm(dtype: torch.dtype, rows: int = 16384, features: int = 4096) -> Arguments:
    return {"x": meta(rows, features, dtype=dtype), "weight": meta(features, dtype=dtype)}


def _add_rms_norm(dtype: torch.dtype, rows: int = 16384, features: int = 4096) -> Arguments:
    return _rms_norm(dtype, rows, features) | {"residual": meta(rows, features, dtype=dtype)}


SPECS = (
    Spec("layer_norm", layer_norm, "normalization", _layer_norm),
    Spec("layer_norm_gelu_add", layer_norm_gelu_add, "normalization", _layer_norm_gelu_add),
    Spec("layer_norm_backward", layer_norm_backward, "normalization", _layer_norm_backward),
    Spec("rms_norm", rms_norm, "normalization", _rms_norm),
    Spec("add_rms_norm", add_rms_norm, "normalization", _add_rms_norm),
)
