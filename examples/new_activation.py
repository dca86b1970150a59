"""A new activation as one kernel: a decorated line of torch.

python examples/new_activation.py
fusegen show examples/new_activation.py:snish --shape x=4096x4096:f32
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg


@fg.kernel
def snish(x: Tensor, frequency: float) -> Tensor:
    """x·tanh(softplus(x)) + sin²(frequency·x)/frequency: the sum of mish and the periodic term of snake."""
    return x * torch.tanh(F.softplus(x)) + torch.sin(frequency * x) ** 2 / frequency


def main() -> None:
    """Runs the kernel, compares it with torch, and prints its launches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(4096, 4096, device=device)
    for frequency in (0.5, 2.0):  # the number is a run-time value, so the second call compiles nothing
        torch.testing.assert_close(snish(x, frequency), snish.function(x, frequency), rtol=1e-5, atol=1e-5)
    print(snish.lower(x, 0.5).explain())
    print("equal to torch's result")


if __name__ == "__main__":
    main()
