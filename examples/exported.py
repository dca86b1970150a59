"""A named operator: this process exports and saves a model; another process, which declares the same kernel, loads it.

python examples/exported.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg


@fg.kernel(op="fusegen_example::scaled_norm")
def scaled_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x²) + ε) · weight; the operator is torch.ops.fusegen_example.scaled_norm."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Model(nn.Module):
    """A norm with a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(width)))

    def forward(self, x: Tensor) -> Tensor:
        """Calls the kernel."""
        return scaled_norm(x, self.weight) * 2


def save(path: Path) -> None:
    """Exports the model for any number of rows."""
    program = torch.export.export(Model(32), (torch.ones(4, 32),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)


def load(path: Path) -> None:
    """Runs the saved program and compares it with the model."""
    program = torch.export.load(path)
    x = torch.randn(7, 32)
    torch.testing.assert_close(program.module()(x), Model(32)(x), rtol=1e-5, atol=1e-5)
    print("loaded", [str(node.target) for node in program.graph.nodes if node.op == "call_function"])


def main() -> None:
    """Saves the model in this process and loads it in another one."""
    if len(sys.argv) > 1:
        load(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        save(path)
        subprocess.run([sys.executable, __file__, str(path)], check=True)


if __name__ == "__main__":
    main()
