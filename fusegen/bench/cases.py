"""What is measured: a spec at a size, with what torch has to say the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.api import Kernel
from fusegen.specs import SPECS, meta
from fusegen.specs.attention import alibi_slopes
from fusegen.specs.spec import Arguments

Sizes: TypeAlias = tuple[int, ...]
Call: TypeAlias = Callable[[], Any]


@dataclass(frozen=True)
class Rival:
    """What eager is in a case.

    Attributes:
        name: what a reader knows it by.
        prepare: from real arguments to the call that is measured; what it does itself is not.
    """

    name: str
    prepare: Callable[[Arguments], Call]


@dataclass(frozen=True)
class Case:
    """A measurement.

    Attributes:
        spec: which kernel.
        sizes: for a GPU; their meaning is the builder's.
        cpu_sizes: for a CPU, which is a thousand times slower at some of this.
        build: arguments of a dtype and sizes: meta tensors.
        rival: None for the declaration itself, run by torch.
        flops: arithmetic of some sizes, where that is what counts instead of bytes.
    """

    spec: str
    sizes: Sizes
    cpu_sizes: Sizes
    build: Callable[[torch.dtype, Sizes], Arguments]
    rival: Rival | None = None
    flops: Callable[[Sizes], int] | None = None

    @cached_property
    def kernel(self) -> Kernel[..., Any]:
        """The spec's kernel, which knows of no other case: a second length of rows would make lengths run-time values."""
        return SPECS[self.spec].fresh()

    def on(self, kind: str) -> Case:
        """The case with the sizes of a kind of device."""
        return self if kind == "cuda" else replace(self, sizes=self.cpu_sizes)

    @property
    def shape(self) -> str:
        """The sizes as text."""
        return "x".join(map(str, self.sizes))

    def eager(self, arguments: Arguments) -> Call:
        """What is measured as eager."""
        if self.rival is not None:
            return self.rival.prepare(arguments)
        return lambda: self.kernel.function(**arguments)

    @property
    def eager_name(self) -> str:
        """What eager is."""
        return "the declaration" if self.rival is None else self.rival.name


# Arguments of some sizes.


def _over(sizes: Sizes, dtype: torch.dtype, **extents: int) -> Arguments:
    """Tensors by parameter, each over the last so many dims."""
    return {name: meta(*sizes[len(sizes) - rank :], dtype=dtype) for name, rank in extents.items()}


def _one(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    return _over(sizes, dtype, x=len(sizes))


def _bias_residual(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    return _over(sizes, dtype, x=2, bias=1, residual=2)


def _residual(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    return _over(sizes, dtype, x=2, residual=2)


def _affine(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    return _over(sizes, dtype, x=2, weight=1, bias=1)


def _affine_residual(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    return _over(sizes, dtype, x=2, weight=1, bias=1, residual=2)


def _weight(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    return _over(sizes, dtype, x=2, weight=1)


def _norm_backward(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    return _over(sizes, dtype, x=2, dy=2, weight=1)


def _product(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    m, n, k = sizes
    return {"x": meta(m, k, dtype=dtype), "weight": meta(n, k, dtype=dtype), "bias": meta(n, dtype=dtype)}


def _heads(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    return {name: meta(*sizes, dtype=dtype) for name in "qkv"}


def _heads_and_slopes(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    return _heads(dtype, sizes) | {"slopes": alibi_slopes(sizes[1])}


# Arithmetic.


def _product_flops(sizes: Sizes) -> int:
    return 2 * math.prod(sizes)


def _attention_flops(sizes: Sizes) -> int:
    batch, heads, positions, channels = sizes
    return 4 * batch * heads * positions**2 * channels


def _causal_flops(sizes: Sizes) -> int:
    return _attention_flops(sizes) // 2


# What torch has.


def _native_backward(arguments: Arguments) -> Call:
    """torch's own backward, given the statistics that its forward keeps."""
    x, dy, weight = (arguments[name] for name in ("x", "dy", "weight"))
    features = [x.shape[-1]]
    _, mean, rstd = torch.native_layer_norm(x, features, weight, None, 1e-5)
    backward = torch.ops.aten.native_layer_norm_backward
    bias = torch.zeros_like(weight)
    return lambda: backward(dy, x, features, mean, rstd, weight, bias, [True, True, True])


def _attention(**options: Any) -> Callable[[Arguments], Call]:
    def prepare(arguments: Arguments) -> Call:
        q, k, v = (arguments[name] for name in "qkv")
        return lambda: F.scaled_dot_product_attention(q, k, v, **options)

    return prepare


def _biased_attention(arguments: Arguments) -> Call:
    """With the bias as a mask in memory, which is the only way in which torch's function takes one."""
    mask = _alibi(arguments["q"], arguments["slopes"])
    return _attention(attn_mask=mask)(arguments)


def _alibi(q: Tensor, slopes: Tensor) -> Tensor:
    positions = torch.arange(q.shape[-2], device=q.device)
    distance = positions - positions.unsqueeze(-1)
    bias = slopes.view(-1, 1, 1).to(q.dtype) * distance.to(q.dtype)
    return bias.masked_fill_(distance > 0, -math.inf).unsqueeze(0)


_SDPA = Rival("F.scaled_dot_product_attention", _attention())
_SDPA_CAUSAL = Rival("F.scaled_dot_product_attention(is_causal)", _attention(is_causal=True))
_SDPA_MASK = Rival("F.scaled_dot_product_attention(attn_mask)", _biased_attention)
_NATIVE_BACKWARD = Rival("native_layer_norm_backward, given mean and rstd", _native_backward)

_CPU = (4096, 4096)
_CPU_HEADS, _CPU_NARROW = (1, 4, 512, 128), (1, 4, 512, 64)

CASES: tuple[Case, ...] = (
    Case("gelu", (16384, 8192), _CPU, _one),
    Case("gelu_new", (8, 1024, 3072), (8, 1024, 3072), _one),
    Case("bias_gelu_add", (16384, 8192), _CPU, _bias_residual),
    Case("gelu_dropout_add", (16384, 8192), _CPU, _residual),
    Case("layer_norm", (32768, 1024), (8192, 1024), _affine),
    Case("layer_norm", (16384, 4096), _CPU, _affine),
    Case("layer_norm", (8192, 8192), (2048, 8192), _affine),
    Case("layer_norm", (4096, 16384), (1024, 16384), _affine),
    Case("layer_norm", (2048, 65536), (256, 65536), _affine),
    Case("layer_norm_gelu_add", (16384, 8192), _CPU, _affine_residual),
    Case("rms_norm", (16384, 4096), _CPU, _weight),
    Case("softmax", (16384, 4096), _CPU, _one),
    Case("softmax", (4096, 16384), (1024, 16384), _one),
    Case("layer_norm_backward", (16384, 4096), _CPU, _norm_backward, _NATIVE_BACKWARD),
    Case("linear_bias_gelu", (8192, 8192, 8192), (512, 1024, 1024), _product, flops=_product_flops),
    Case("linear_bias_gelu", (8192, 16384, 4096), (512, 2048, 512), _product, flops=_product_flops),
    Case("flash_attention", (4, 16, 4096, 128), _CPU_HEADS, _heads, _SDPA, _attention_flops),
    Case("flash_attention_causal", (4, 16, 4096, 128), _CPU_HEADS, _heads, _SDPA_CAUSAL, _causal_flops),
    Case("flash_attention_alibi", (4, 16, 4096, 128), _CPU_HEADS, _heads_and_slopes, _SDPA_MASK, _causal_flops),
    Case("flash_attention", (4, 16, 4096, 64), _CPU_NARROW, _heads, _SDPA, _attention_flops),
    Case("flash_attention_causal", (4, 16, 4096, 64), _CPU_NARROW, _heads, _SDPA_CAUSAL, _causal_flops),
    Case("flash_attention_alibi", (4, 16, 4096, 64), _CPU_NARROW, _heads_and_slopes, _SDPA_MASK, _causal_flops),
)
"""The public measurements of the five slices; sizes of a product are rows, outputs, inputs."""


def minimum_bytes(arguments: Mapping[str, Any], results: Any) -> int:
    """Bytes that any way of computing must move: each argument read once, each result written once."""
    listed = results if isinstance(results, (tuple, list)) else (results,)
    return sum(t.numel() * t.element_size() for t in (*arguments.values(), *listed) if isinstance(t, Tensor))
