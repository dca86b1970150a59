"""From an idea to a shipped kernel: declare it, compare it with torch, inspect it, train with it, build it, load it elsewhere.

python examples/own_fusion.py
fusegen explain examples/own_fusion.py:gated_residual --shape x=8192x4096 residual=8192x4096 weight=4096
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fusegen as fg
from fusegen.eager_cost import eager_cost
from fusegen.timing import interleaved

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE, SHORT = (torch.bfloat16, "bf16") if IS_GPU else (torch.float32, "f32")
ROWS, WIDTH = (8192, 4096) if IS_GPU else (256, 512)

Gradients = tuple[Tensor, ...]


# 1. The idea: a residual sum in which a norm of the branch gates the branch.


@fg.kernel
def gated_residual(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """residual + x·σ(rms_norm(x)·weight)."""
    gate = F.rms_norm(x, (x.shape[-1],), weight, 1e-6)
    return residual + x * torch.sigmoid(gate)


def operands(dtype: torch.dtype = DTYPE) -> tuple[Tensor, Tensor, Tensor]:
    """The operands; they are the same in every process."""
    torch.manual_seed(0)
    x, residual, weight = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(WIDTH)
    return x.to(DEVICE, dtype), residual.to(DEVICE, dtype), weight.to(DEVICE, dtype)


# 2. The comparison with torch, against float64.


def relative_error(found: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the expected values."""
    return float((found.double() - expected).norm() / expected.norm())


def forward_errors() -> tuple[float, float]:
    """The errors of torch and of the kernel against float64."""
    given = operands()
    expected = gated_residual.function(*(each.double() for each in given))
    return relative_error(gated_residual.function(*given), expected), relative_error(gated_residual(*given), expected)


# 3. Gradients: fusegen derives them from the math above.


def gradients(function: Callable[..., Tensor], given: Gradients) -> Gradients:
    """The gradients of the sum of squares of a function's result."""
    leaves = [each.detach().requires_grad_() for each in given]
    return torch.autograd.grad(function(*leaves).square().sum(), leaves)


def gradient_errors() -> tuple[float, float]:
    """The worst gradient errors of torch and of the kernel against float64."""
    given = operands()
    expected = gradients(gated_residual.function, tuple(each.double() for each in given))
    plain, fused = gradients(gated_residual.function, given), gradients(gated_residual, given)

    def worst(found: Gradients) -> float:
        return max(map(relative_error, found, expected))

    return worst(plain), worst(fused)


# 4. Shipping: this process builds the kernel; another process loads and calls it without a compiler.


def build(folder: Path) -> None:
    """Builds the kernel for this machine with the command line."""
    shapes = [f"x={ROWS}x{WIDTH}", f"residual={ROWS}x{WIDTH}", f"weight={WIDTH}"]
    options = [part for shape in shapes for part in ("--shape", shape)]
    options += [] if IS_GPU else ["--arch", "cpu"]  # the default is the GPU's architecture
    command = [sys.executable, "-m", "fusegen", "build", f"{__file__}:gated_residual", "--dtype", SHORT]
    subprocess.run([*command, *options, "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)


def load(folder: Path) -> None:
    """Loads a built kernel and prints whether its result equals the declared kernel's."""
    shipped = fg.load(folder)["gated_residual"]
    print("in every bit" if torch.equal(shipped(*operands()), gated_residual(*operands())) else "no")


def shipped_result(folder: Path) -> str:
    """The output of another process, which loads the kernel and compares its result."""
    build(folder)
    found = subprocess.run([sys.executable, __file__, str(folder)], check=True, stdout=subprocess.PIPE, text=True)
    return found.stdout.strip()


def main() -> None:
    """Runs all steps and prints a table of their results."""
    if len(sys.argv) > 1:
        load(Path(sys.argv[1]))
        return
    given = operands()
    low = gated_residual.lower(*given)
    print(low.explain())  # the launches and their memory traffic
    passes = fg.vjp(gated_residual, *given)
    print(passes.backward.lower().explain())
    eager = eager_cost(gated_residual.function, dict(zip(("x", "residual", "weight"), given, strict=True)))
    assert eager is not None  # the function runs on tensors without values
    moved = sum(step.traffic.moved(low.sizes) for step in low.program.steps)
    calls = {"torch": partial(gated_residual.function, *given), "fused": partial(gated_residual, *given)}
    times = [str(each) if isinstance(each, Exception) else f"{each.median:.0f} µs" for each in interleaved(calls, DEVICE).values()]
    with tempfile.TemporaryDirectory() as folder:
        shipped = shipped_result(Path(folder) / "kernels")
    errors, worst = forward_errors(), gradient_errors()

    where = torch.cuda.get_device_name() if IS_GPU else "a CPU"
    table = Table("", "torch", "fused", title=f"gated_residual, {ROWS}×{WIDTH}, {DTYPE} on {where}")
    table.add_row("error of the result", *(f"{each:.1e}" for each in errors))
    table.add_row("worst error of a gradient", *(f"{each:.1e}" for each in worst))
    table.add_row("launches", str(eager.launches), str(low.step_count))
    table.add_row("bytes moved", f"{eager.moved / 2**20:.1f} MiB", f"{moved / 2**20:.1f} MiB")
    table.add_row("time", *times)
    table.add_row("shipped kernel equals the declared one", "", shipped)
    Console().print(table)
    if errors[1] > 1.5 * errors[0] + 1e-7 or worst[1] > 1.5 * worst[0] + 1e-7 or shipped == "no":
        raise SystemExit("the kernel is less accurate than torch, or the shipped kernel differs from the declared one")


if __name__ == "__main__":
    main()
