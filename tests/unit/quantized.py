"""Ways to store activations, weights and caches in 8 bits, as they are written in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.eight_bits import E4M3, E5M2

LARGEST = 448.0  # of E4M3


def of_a_norm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The norm of rows, by one scale that is known."""
    return (F.rms_norm(x, x.shape[-1:], weight, 1e-6) / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def of_a_gate(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """A gated activation, with a scale for each token."""
    hidden = F.silu(gate) * up
    scale = hidden.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (hidden / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def of_a_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of a sum, with a scale for each token, and the sum."""
    hidden = x + residual
    normed = F.rms_norm(hidden, hidden.shape[-1:], weight, 1e-6)
    scale = (normed.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-6)
    return (normed / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale, hidden


def of_a_weight(x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale for each block of 128 x 128."""
    blocks = x.view(-1, 128, x.shape[1] // 128, 128)
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-4)
    return (blocks * (LARGEST / largest)).to(E4M3).view(x.shape), (largest / LARGEST).squeeze(3).squeeze(1)


def in_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale for each 128 neighbours of a row."""
    blocks = x.view(x.shape[0], -1, 128)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / LARGEST
    return (blocks / scale).to(E4M3).view(x.shape), scale.squeeze(-1)


def of_a_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale, of the largest magnitude."""
    scale = x.abs().amax() / 57344.0
    return (x / scale).to(E5M2), scale


def dequantized(x: Tensor, scale: Tensor) -> Tensor:
    """8 bits times a scale for each row, in bfloat16."""
    return (x.float() * scale).bfloat16()


def dequantized_blocks(x: Tensor, scale: Tensor) -> Tensor:
    """8 bits times a scale for each 128 neighbours, in bfloat16."""
    blocks = x.float().view(x.shape[0], -1, 128) * scale[..., None]
    return blocks.view(x.shape).to(torch.bfloat16)


def into_a_cache(cache: Tensor, key: Tensor, slots: Tensor, scale: Tensor) -> None:
    """Writes keys of new tokens to their slots."""
    cache[slots] = (key / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def cases(rows: int, width: int) -> Mapping[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Each way with arguments; the last ones hold infinities, NaN and what is too large."""
    x, y = made(rows, width), made(rows, width, seed=1)
    x[0, 0], y[-1, -1] = 1e30, float("nan")
    return {
        "norm": (of_a_norm, (made(rows, width), made(width), torch.tensor(0.01))),
        "gate": (of_a_gate, (made(rows, width), y)),
        "residual": (of_a_residual, (made(rows, width), made(rows, width, seed=1), made(width))),
        "blocks": (in_blocks, (made(rows, width),)),
        "blocks with what is large": (in_blocks, (x,)),
        "tensor": (of_a_tensor, (made(rows, width),)),
        "dequantized": (dequantized, (made(rows, width).to(E4M3), made(rows, 1).abs())),
        "dequantized blocks": (dequantized_blocks, (made(rows, width).to(E5M2), made(rows, width // 128).abs())),
    }
