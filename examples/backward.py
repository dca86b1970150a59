"""A norm and its gradients: fusegen derives the backward pass from the kernel's graph, and autograd calls it.

python examples/backward.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg


@fg.kernel
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / sqrt(mean(x²) + ε) · weight."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def main() -> None:
    """Compares the gradients with torch's for several batch sizes, and prints the launches of both passes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(1024, device=device, requires_grad=True)
    for tokens in (8, 77, 500):  # another batch compiles nothing
        x = torch.randn(tokens, 1024, device=device, requires_grad=True)
        got = torch.autograd.grad(rms_norm(x, weight).square().sum(), (x, weight))
        wanted = torch.autograd.grad(rms_norm.function(x, weight).square().sum(), (x, weight))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    passes = fg.vjp(rms_norm, x, weight)
    print(passes.forward.lower().explain(), passes.backward.lower().explain(), sep="\n")
    print("equal to torch's gradients")


if __name__ == "__main__":
    main()
