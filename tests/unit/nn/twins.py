"""Modules of `fusegen.nn`, each with a module of torch's, or one written in torch, that computes the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen.nn as fnn
from tests.unit.eager import ints, randn


class Gated(nn.Module):
    """act(gate)·up of the halves of one tensor."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return self.act(gate) * up


class AddNorm(nn.Module):
    """A norm of a sum, and the sum, under the norm's own parameter names."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x + residual), x + residual

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.norm.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.norm.load_state_dict(*args, **kwargs)


class BiasGELU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x + self.bias)


class BiasAdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(randn(16))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + self.bias + residual


class ViTMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class LlamaMLP(nn.Module):
    """As ``LlamaMLP`` of `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down_proj = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class NormedLinear(nn.Module):
    """As TransformerEngine's ``LayerNormLinear``, with the norm's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_weight, self.layer_norm_bias = nn.Parameter(randn(16)), nn.Parameter(randn(16))
        self.weight, self.bias = nn.Parameter(randn(24, 16)), nn.Parameter(randn(24))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.layer_norm(x, (16,), 1 + self.layer_norm_weight, self.layer_norm_bias)
        return F.linear(y, self.weight, self.bias), y


class NormedMLP(nn.Module):
    """As TransformerEngine's ``LayerNormMLP``, with an RMS norm and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(randn(16))
        self.fc1_weight, self.fc2_weight = nn.Parameter(randn(48, 16)), nn.Parameter(randn(16, 24))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(F.rms_norm(x, (16,), self.layer_norm_weight, 1e-5), self.fc1_weight).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.fc2_weight)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class QKV(nn.Linear):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        heads = super().forward(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        q, k, v = heads.split((4, 2, 2), 1)
        return rotated(q, cos, sin), rotated(k, cos, sin), v


class LlamaAttention(nn.Module):
    """As ``LlamaAttention`` of `transformers`: 4 heads of queries, 2 of keys, 4 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.k_proj, self.v_proj = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class LinearLoss(nn.Module):
    """As `torch.nn.LinearCrossEntropyLoss`, which came with torch 2.13."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 10, bias=True)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), target, ignore_index=3)


def wanted(*shape: int) -> Tensor:
    """A tensor by which a gradient is wanted."""
    return randn(*shape).requires_grad_()


@dataclass(frozen=True)
class Twin:
    """A module of ours, torch's, and the arguments of a call, of which those that are no coordinates require a gradient."""

    ours: Callable[[], nn.Module]
    theirs: Callable[[], nn.Module]
    arguments: Callable[[], tuple[Tensor, ...]] = lambda: (wanted(2, 5, 16),)


def two() -> tuple[Tensor, ...]:
    return wanted(2, 5, 16), wanted(2, 5, 16)


def turned() -> tuple[Tensor, ...]:
    angles = torch.arange(5.0)[:, None] / 10 ** (torch.arange(4) % 2)
    return wanted(2, 5, 16), angles.cos(), angles.sin()


CLASS_WEIGHTS = torch.linspace(0.5, 1.5, 16)
TWINS = {
    "LayerNorm": Twin(lambda: fnn.LayerNorm(16), lambda: nn.LayerNorm(16)),
    "LayerNorm of two dims": Twin(lambda: fnn.LayerNorm((5, 16), 1e-3), lambda: nn.LayerNorm((5, 16), 1e-3)),
    "LayerNorm without bias": Twin(lambda: fnn.LayerNorm(16, bias=False), lambda: nn.LayerNorm(16, bias=False)),
    "RMSNorm": Twin(lambda: fnn.RMSNorm(16, 1e-6), lambda: nn.RMSNorm(16, 1e-6)),
    "RMSNorm without weight": Twin(
        lambda: fnn.RMSNorm(16, elementwise_affine=False), lambda: nn.RMSNorm(16, elementwise_affine=False)
    ),
    "AddLayerNorm": Twin(lambda: fnn.AddLayerNorm(16), lambda: AddNorm(nn.LayerNorm(16)), two),
    "AddRMSNorm": Twin(lambda: fnn.AddRMSNorm(16), lambda: AddNorm(nn.RMSNorm(16)), two),
    "Softmax": Twin(lambda: fnn.Softmax(1), lambda: nn.Softmax(1)),
    "LogSoftmax": Twin(lambda: fnn.LogSoftmax(-1), lambda: nn.LogSoftmax(-1)),
    "GELU": Twin(fnn.GELU, nn.GELU),
    "GELU by tanh": Twin(lambda: fnn.GELU("tanh"), lambda: nn.GELU("tanh")),
    "SiLU": Twin(fnn.SiLU, nn.SiLU),
    "GLU": Twin(fnn.GLU, nn.GLU),
    "SwiGLU": Twin(fnn.SwiGLU, lambda: Gated(F.silu)),
    "GEGLU": Twin(fnn.GEGLU, lambda: Gated(F.gelu)),
    "ReGLU": Twin(fnn.ReGLU, lambda: Gated(F.relu)),
    "BiasGELU": Twin(lambda: fnn.BiasGELU(16), BiasGELU),
    "BiasDropoutAdd": Twin(lambda: fnn.BiasDropoutAdd(16).eval(), BiasAdd, two),
    "MLP": Twin(lambda: fnn.MLP(16, 24), ViTMLP),
    "GatedMLP": Twin(lambda: fnn.GatedMLP(16, 24), LlamaMLP),
    "Embedding": Twin(
        lambda: fnn.Embedding(7, 16, padding_idx=-1),
        lambda: nn.Embedding(7, 16, padding_idx=-1),
        lambda: (ints(2, 5, low=0, high=7, dtype=torch.int64),),
    ),
    "CrossEntropyLoss": Twin(
        lambda: fnn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=3, label_smoothing=0.1),
        lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=3, label_smoothing=0.1),
        lambda: (wanted(6, 16), torch.tensor([0, 3, 5, 15, 2, 3])),
    ),
    "LinearCrossEntropyLoss": Twin(
        lambda: fnn.LinearCrossEntropyLoss(16, 10, bias=True, ignore_index=3),
        LinearLoss,
        lambda: (wanted(6, 16), torch.tensor([0, 3, 5, 9, 2, 3])),
    ),
    "LayerNormLinear": Twin(
        lambda: fnn.LayerNormLinear(16, 24, zero_centered_gamma=True, return_layernorm_output=True), NormedLinear
    ),
    "LayerNormMLP": Twin(
        lambda: fnn.LayerNormMLP(16, 24, bias=False, normalization="RMSNorm", activation="swiglu"), NormedMLP
    ),
    "FusedQKVLinear": Twin(lambda: fnn.FusedQKVLinear(16, 4, 2), lambda: QKV(16, 32), turned),
    "Attention": Twin(lambda: fnn.Attention(16, 4, 2), LlamaAttention, turned),
}  # fmt: skip


def pair(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    """Both modules of a name, with the same random parameters, and arguments."""
    torch.manual_seed(0)
    twin = TWINS[name]
    ours, theirs = twin.ours(), twin.theirs()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter))
    ours.load_state_dict(theirs.state_dict())
    arguments = (
        a.detach().to(device, dtype if a.is_floating_point() else None).requires_grad_(a.requires_grad) for a in twin.arguments()
    )
    return ours.to(device, dtype), theirs.to(device, dtype), tuple(arguments)


def results(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def gradients(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """By all parameters, in the order of their names, and by arguments that require one, of a weighted sum of all results."""
    total = sum((r * torch.linspace(0.5, 2, r.numel(), device=r.device).view(r.shape)).sum() for r in results(module(*arguments)))
    parameters = [parameter for _, parameter in sorted(module.named_parameters())]
    return torch.autograd.grad(total, [*parameters, *(a for a in arguments if a.requires_grad)])
