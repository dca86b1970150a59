"""Elementwise chains: activations, and what stands around them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.specs.spec import Arguments, Spec, meta


@fg.kernel
def gelu(x: Tensor) -> Tensor:
    """½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))

    x: any shape. Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv 1606.08415), the tanh form.
    """
    return F.gelu(x, approximate="tanh")


@fg.kernel
def gelu_new(x: Tensor) -> Tensor:
    """½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), in eight operations as GPT-2 writes it

    x: any shape. The line stands in Hugging Face transformers, ``NewGELUActivation``.
    """
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@fg.kernel
def bias_gelu_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """gelu(x + bias) + residual, with the tanh form of gelu

    x, residual: (…, features); bias: (features).
    """
    return F.gelu(x + bias, approximate="tanh") + residual


@fg.kernel
def gelu_dropout_add(x: Tensor, residual: Tensor, *, p: float = 0.1, training: bool = True, seed: int | None = None) -> Tensor:
    """dropout(gelu(x), p) + residual, with the tanh form of gelu

    x, residual: the same shape; seed: of the mask, by default drawn from torch's generator. Srivastava et al., "Dropout: A Simple
    Way to Prevent Neural Networks from Overfitting" (JMLR 15, 2014).
    """
    return fg.dropout(F.gelu(x, approximate="tanh"), p, training, seed=seed) + residual


@fg.kernel
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up

    gate, up: the same shape. Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202).
    """
    return F.silu(gate) * up


def _activation(dtype: torch.dtype, rows: int = 16384, features: int = 8192) -> Arguments:
    return {"x": meta(rows, features, dtype=dtype)}


def _gpt2(dtype: torch.dtype, batch: int = 8, positions: int = 1024, features: int = 3072) -> Arguments:
    return {"x": meta(batch, positions, features, dtype=dtype)}


def _bias_gelu_add(dtype: torch.dtype, rows: int = 16384, features: int = 8192) -> Arguments:
    return {name: meta(rows, features, dtype=dtype) for name in ("x", "residual")} | {"bias": meta(features, dtype=dtype)}


def _gelu_dropout_add(dtype: torch.dtype, rows: int = 16384, features: int = 8192) -> Arguments:
    return {name: meta(rows, features, dtype=dtype) for name in ("x", "residual")} | {"seed": 0}


def _swiglu(dtype: torch.dtype, rows: int = 4096, features: int = 14336) -> Arguments:
    return {name: meta(rows, features, dtype=dtype) for name in ("gate", "up")}


SPECS = (
    Spec("gelu", gelu, "elementwise", _activation),
    Spec("gelu_new", gelu_new, "elementwise", _gpt2),
    Spec("bias_gelu_add", bias_gelu_add, "elementwise", _bias_gelu_add),
    Spec("gelu_dropout_add", gelu_dropout_add, "elementwise", _gelu_dropout_add),
    Spec("swiglu", swiglu, "elementwise", _swiglu),
)
