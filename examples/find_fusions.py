"""Finds the chains worth fusing in a GPT-2-like model of plain torch, with the expected saving of each on an H200.

python examples/find_fusions.py
fusegen find examples/find_fusions.py:Gpt
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg

WIDTH, HEADS, LAYERS, WORDS, POSITIONS = 256, 4, 4, 1000, 128


class Block(nn.Module):
    """A layer of GPT-2, with attention and GELU as in the first implementations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.out(self.attention(self.norm_1(x), mask))
        hidden: Tensor = self.up(self.norm_2(x))
        hidden = 0.5 * hidden * (1 + torch.tanh(0.7978845608 * (hidden + 0.044715 * hidden**3)))
        result: Tensor = x + self.down(hidden)
        return result

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) * (width // HEADS) ** -0.5
        weights = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
        result: Tensor = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return result


class Gpt(nn.Module):
    """Embeddings, layers, a norm, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        mask = positions[:, None] < positions
        x = self.words(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batch() -> Tensor:
    """Eight sequences of the model's greatest length."""
    return torch.zeros(8, POSITIONS, dtype=torch.int64)


def main() -> None:
    """Prints the finding that saves most, the summary and the table."""
    found = fg.find(Gpt().bfloat16(), batch(), target="sm_90a")
    best = found[0]
    print(best)
    print()
    print("\n".join(found.summary()))
    print()
    print(found.table())


if __name__ == "__main__":
    main()
