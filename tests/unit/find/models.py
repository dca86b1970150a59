"""Small models in plain torch, in which something is worth fusing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64


class Mlp(nn.Module):
    """A norm, and an MLP whose GELU is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        hidden = 0.5 * hidden * (1 + torch.tanh(0.79788456 * (hidden + 0.044715 * hidden**3)))
        return x + self.down(hidden)


class Layers(nn.Module):
    """Several of them."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    """Attention of matmuls and a softmax, of a packed projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        weights = F.softmax((q @ k.transpose(-1, -2) * 0.125).masked_fill(mask, float("-inf")), dim=-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, width)
