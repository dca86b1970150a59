"""The residual stream of a Llama-like model: one kernel computes the sum and its norm in one pass over memory.

python examples/fused_norm.py
fusegen explain examples/fused_norm.py:add_rms_norm --shape x=4096x4096 residual=4096x4096 weight=4096
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg


@fg.kernel
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """rms_norm(h)·weight and h, for h = x + residual."""
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, 1e-6), h


def main() -> None:
    """Runs the kernel at several batch sizes, compares it with torch, and prints its launches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(4096, device=device)
    for tokens in (1, 77, 2048):  # the same kernel runs for any number of tokens
        x, residual = (torch.randn(tokens, 4096, device=device) for _ in range(2))
        wanted = add_rms_norm.function(x, residual, weight)
        torch.testing.assert_close(add_rms_norm(x, residual, weight), wanted, rtol=1e-5, atol=1e-5)
    print(add_rms_norm.lower(x, residual, weight).explain())
    print("equal to torch's results")


if __name__ == "__main__":
    main()
