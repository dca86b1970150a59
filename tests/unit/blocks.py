"""Blocks of well-known models, written as models write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5, requires_grad=False)


class Conv1D(nn.Module):
    """GPT-2's linear layer: the rows as one dim around the product."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias, self.outputs = _weight(inputs, outputs), _weight(outputs), outputs

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.outputs)


class GPT2Block(nn.Module):
    """Radford et al., Language Models are Unsupervised Multitask Learners (2019)."""

    steps, products = 7, 4

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width).requires_grad_(False) for _ in range(2))
        self.qkv, self.out = Conv1D(width, 3 * width), Conv1D(width, width)
        self.up, self.down = Conv1D(width, 4 * width), Conv1D(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(*x.shape[:2], -1).contiguous()
        x = self.out(attended) + x
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class BertLayer(nn.Module):
    """Devlin et al., BERT (arXiv 1810.04805)."""

    steps, products = 7, 4

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width).requires_grad_(False) for _ in range(4))
        self.up, self.down = (nn.Linear(*s).requires_grad_(False) for s in ((width, 4 * width), (4 * width, width)))
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, eps=1e-12).requires_grad_(False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for proj in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = self.norm_1(self.out(attended) + x)
        return self.norm_2(self.down(F.gelu(self.up(x))) + x)


class LlamaLayer(nn.Module):
    """Touvron et al., LLaMA (arXiv 2302.13971)."""

    steps, products = 7, 4

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inner = heads, 2 * width
        self.norm_1, self.norm_2, self.norm_q, self.norm_k = (_weight(width) for _ in range(4))
        self.q, self.k, self.v, self.out = (_weight(width, width) for _ in range(4))
        self.gate, self.up, self.down = _weight(self.inner, width), _weight(self.inner, width), _weight(width, self.inner)
        angles = torch.outer(torch.arange(4096.0), 10000 ** -torch.arange(0, 1, 2 * heads / width)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        count = x.shape[-2]
        return x * self.cos[:count] + torch.cat((-second, first), -1) * self.sin[:count]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attended(self.normed(x, self.norm_1))
        return x + self.gated(self.normed(x, self.norm_2))

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        attended = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        return F.linear(attended.transpose(1, 2).flatten(2), self.out)

    def projected(self, x: Tensor) -> list[Tensor]:
        return [self.in_heads(F.linear(x, w)).transpose(1, 2) for w in (self.q, self.k, self.v)]

    def gated(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)

    def in_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


class Qwen3Layer(LlamaLayer):
    """Yang et al., Qwen3 (arXiv 2505.09388): queries and keys are normalized, each head for itself."""

    def projected(self, x: Tensor) -> list[Tensor]:
        q, k, v = (self.in_heads(F.linear(x, w)) for w in (self.q, self.k, self.v))
        width = q.shape[-1]
        return [y.transpose(1, 2) for y in (self.normed(q, self.norm_q[:width]), self.normed(k, self.norm_k[:width]), v)]


class Olmo2Layer(LlamaLayer):
    """OLMo Team, 2 OLMo 2 Furious (arXiv 2501.00656): queries and keys are normalized, all heads together; norms end branches."""

    steps, products = 8, 2

    def projected(self, x: Tensor) -> list[Tensor]:
        q, k, v = (F.linear(x, w) for w in (self.q, self.k, self.v))
        return [self.in_heads(y).transpose(1, 2) for y in (self.normed(q, self.norm_q), self.normed(k, self.norm_k), v)]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.normed(self.attended(x), self.norm_1)
        return x + self.normed(self.gated(x), self.norm_2)


class NeoXLayer(nn.Module):
    """Black et al., GPT-NeoX-20B (arXiv 2204.06745): q, k and v of each head together, a quarter of it rotated; branches side by
    side."""

    steps, products = 6, 3

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.rotary = heads, width // heads // 4
        self.norm_1, self.norm_2 = (nn.LayerNorm(width).requires_grad_(False) for _ in range(2))
        sizes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
        self.qkv, self.out, self.up, self.down = (nn.Linear(*s).requires_grad_(False) for s in sizes)
        angles = torch.outer(torch.arange(4096.0), 10000 ** -torch.arange(0, 1, 2 / self.rotary)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x: Tensor) -> Tensor:
        turned, kept = x[..., : self.rotary], x[..., self.rotary :]
        first, second = turned.chunk(2, -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, kept), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).view(*x.shape[:2], self.heads, -1).transpose(1, 2).chunk(3, -1)
        attended = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        attended = self.out(attended.transpose(1, 2).reshape(x.shape))
        return self.down(F.gelu(self.up(self.norm_2(x)))) + attended + x


class FalconLayer(nn.Module):
    """Almazrouei et al., The Falcon Series of Open Language Models (arXiv 2311.16867): one head of keys and values, side by side
    with those of queries."""

    steps, products = 4, 2

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.qkv, self.out = _weight((heads + 2) * (width // heads), width), _weight(width, width)
        self.up, self.down = _weight(4 * width, width), _weight(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        qkv = F.linear(normed, self.qkv).view(*x.shape[:2], self.heads + 2, -1)
        q, k, v = (part.transpose(1, 2) for part in (qkv[..., :-2, :], qkv[..., [-2], :], qkv[..., [-1], :]))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return F.linear(F.gelu(F.linear(normed, self.up)), self.down) + F.linear(attended, self.out) + x


class BloomLayer(nn.Module):
    """BigScience Workshop, BLOOM (arXiv 2211.05100): heads merged with the batch for `baddbmm`, which adds ALiBi (arXiv
    2108.12409)."""

    steps, products = 7, 4

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width).requires_grad_(False) for _ in range(2))
        sizes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
        self.qkv, self.out, self.up, self.down = (nn.Linear(*s).requires_grad_(False) for s in sizes)
        self.register_buffer("slopes", 2 ** (-8 * torch.arange(1, heads + 1) / heads))

    def forward(self, x: Tensor) -> Tensor:
        batch, count = x.shape[:2]
        q, k, v = self.qkv(self.norm_1(x)).view(batch, count, self.heads, 3, -1).unbind(-2)
        q, v = (part.transpose(1, 2).reshape(batch * self.heads, count, -1) for part in (q, v))
        k = k.permute(0, 2, 3, 1).reshape(batch * self.heads, -1, count)
        positions = torch.arange(count, device=x.device)
        alibi = (self.slopes[:, None] * positions).to(x.dtype).repeat(batch, 1).unsqueeze(1)
        scores = alibi.baddbmm(q, k, beta=1.0, alpha=q.shape[-1] ** -0.5).view(batch, self.heads, count, count)
        scores = scores.masked_fill(positions > positions[:, None], torch.finfo(x.dtype).min)
        weights = F.softmax(scores, -1, dtype=torch.float32).to(x.dtype).view(batch * self.heads, count, count)
        attended = torch.bmm(weights, v).view(batch, self.heads, count, -1).transpose(1, 2).reshape(x.shape)
        x = self.out(attended) + x
        return self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")) + x


BLOCKS = (GPT2Block, BertLayer, LlamaLayer, Qwen3Layer, Olmo2Layer, NeoXLayer, FalconLayer, BloomLayer)


def stacked(make: Callable[[int, int], nn.Module], count: int, width: int, heads: int) -> nn.Sequential:
    """Several blocks, one after the other."""
    return nn.Sequential(*(make(width, heads) for _ in range(count)))
