"""A small model, and a kernel, that other processes can import."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg

WIDTH = 16


@fg.kernel
def scaled(x: Tensor, factor: float) -> Tensor:
    """factor·tanh(x)."""
    return factor * torch.tanh(x)


class Layer(nn.Module):
    """A norm and an MLP beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to (rows, 3)."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
