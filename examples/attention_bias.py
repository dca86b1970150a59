"""Attention with a custom bias on the scores, written in plain torch; fusegen derives the streaming kernel.

python examples/attention_bias.py
"""

import torch
from torch import Tensor

import fusegen as fg


@fg.kernel
def soft_window_attention(q: Tensor, k: Tensor, v: Tensor, width: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d − (distance/width)²)·v: the bias limits each head to keys within about its width of the query.

    q, k, v: (batch, heads, positions, d); width: (heads).
    """
    query = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
    key = torch.arange(k.shape[-2], device=q.device)
    distance = (key - query) / width.view(-1, 1, 1)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5) - distance * distance
    return torch.softmax(scores, -1).to(v.dtype) @ v


def main() -> None:
    """Runs the kernel, compares it with torch in float32, and prints its launches."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    q, k, v = (torch.randn(2, 4, 256, 64, device=device, dtype=dtype) for _ in range(3))
    width = torch.tensor([4.0, 16.0, 64.0, 256.0], device=device)
    fused = soft_window_attention(q, k, v, width)
    wanted = soft_window_attention.function(q.float(), k.float(), v.float(), width)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(fused.float(), wanted, rtol=tolerance, atol=tolerance)
    print(soft_window_attention.lower(q, k, v, width).explain())
    print("equal to torch's result")


if __name__ == "__main__":
    main()
