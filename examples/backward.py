"""A norm with its gradients: the backward pass of a kernel, found from its graph, as torch's autograd calls it.

python examples/backward.py
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg


@fg.kernel
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / sqrt(mean(x²) + ε) · weight."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


class FusedNorm(torch.autograd.Function):
    """The kernel's two passes: torch keeps the saved tensors between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, passes: fg.Vjp) -> Tensor:
        """x: (…, features); weight: (features)."""
        result: Tensor
        result, saved = passes.forward(x, weight)
        ctx.passes, ctx.saved = passes, saved.with_tensors(())
        ctx.save_for_backward(*saved.tensors)  # for the tensors alone: one may be the result, which would hold itself
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients by x and weight."""
        saved = ctx.saved.with_tensors(ctx.saved_tensors)
        return (*ctx.passes.backward(saved, *grad_outputs), None)


def main() -> None:
    """Compares the gradients with torch's for several batch sizes, and says what runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(1024, device=device, requires_grad=True)
    passes = fg.vjp(rms_norm, torch.randn(8, 1024, device=device), weight.detach())
    for tokens in (8, 77, 500):  # another batch compiles nothing
        x = torch.randn(tokens, 1024, device=device, requires_grad=True)
        result = FusedNorm.apply(x, weight, passes)  # type: ignore[no-untyped-call]
        got = torch.autograd.grad(result.square().sum(), (x, weight))
        wanted = torch.autograd.grad(rms_norm.function(x, weight).square().sum(), (x, weight))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    print(passes.forward.lower().explain(), passes.backward.lower().explain(), sep="\n")
    print("equal to torch's gradients")


if __name__ == "__main__":
    main()
