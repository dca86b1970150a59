"""Trains a GPT to add, with and without fusegen, from the same seed; compares losses, step times and peak memory.

python examples/train_gpt.py                                        # a small model, on any machine
python examples/train_gpt.py --layers 8 --width 512 --context 512   # on a GPU
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import fusegen as fg

CHARACTERS = "0123456789+=\n"


@dataclass(frozen=True)
class Shape:
    """The size of a model: layers, channels per position, attention heads, positions per sequence."""

    layers: int
    width: int
    heads: int
    context: int


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (batch, position, channel)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """A layer of GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(shape.width), Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (batch, position, channel)."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        return result


class Ends(nn.Module):
    """The parameters before and after the layers: embeddings and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), shape.width)
        self.positions = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        self.norm = nn.LayerNorm(shape.width)


class First(nn.Module):
    """The sum of the embeddings of characters and positions."""

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        self.ends = ends

    def forward(self, ids: Tensor) -> Tensor:
        """Takes (batch, position), returns (batch, position, channel)."""
        result: Tensor = self.ends.characters(ids) + self.ends.positions
        return result


class Loss(nn.Module):
    """The last norm, the logits (with the weights of the character embedding), and their cross entropy."""

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        self.ends = ends

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Takes (batch, position, channel) and (batch, position), returns a scalar."""
        logits = F.linear(self.ends.norm(x), self.ends.characters.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def model_of(shape: Shape, seed: int) -> list[nn.Module]:
    """The modules of a model, in order."""
    torch.manual_seed(seed)
    ends = Ends(shape)
    nn.init.normal_(ends.characters.weight, std=0.02)
    return [First(ends), *(Block(shape) for _ in range(shape.layers)), Loss(ends)]


def sums(count: int, seed: int) -> str:
    """A training text of lines such as ``437+85=522``."""
    draw = random.Random(seed)
    pairs = ((draw.randrange(1000), draw.randrange(1000)) for _ in range(count))
    return "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)


def batches(text: str, size: int, context: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches of pieces of the text, and the same pieces shifted by one character as targets."""
    ids = torch.tensor([CHARACTERS.index(c) for c in text])
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(ids) - context - 1, (size, 1), generator=draw)
        piece = ids[starts + torch.arange(context + 1)]
        yield piece[:, :-1].contiguous(), piece[:, 1:].contiguous()


@dataclass(frozen=True)
class Run:
    """The losses of a training, the median seconds of a step, and the peak of allocated bytes (None on a CPU)."""

    losses: list[float]
    step: float
    memory: int | None


def train(name: str, options: argparse.Namespace, fuse: Callable[[nn.Module], nn.Module]) -> Run:
    """Trains a new model, after ``fuse`` was applied to each of its modules."""
    device, shape = torch.device(options.device), Shape(options.layers, options.width, options.heads, options.context)
    modules = [module.to(device) for module in model_of(shape, options.seed)]
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    first, *blocks, loss_of = (fuse(module) for module in modules)
    optimizer = torch.optim.AdamW(parameters, lr=options.rate)
    casts = partial(torch.autocast, device.type, torch.bfloat16) if device.type == "cuda" else nullcontext
    given = batches(sums(20_000, options.seed), options.batch, shape.context, options.steps, options.seed)
    losses, times = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for ids, targets in track(given, f"{name:8}", options.steps, console=Console(stderr=True)):
        start = time.perf_counter()
        with casts():
            x = first(ids.to(device))
            for block in blocks:
                x = block(x)
            loss = loss_of(x, targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Run(losses, sorted(times)[len(times) // 2], memory)


def print_table(runs: dict[str, Run]) -> None:
    """Prints both runs side by side."""
    table = Table("", "first loss", "last loss", "step", "peak memory")
    for name, run in runs.items():
        memory = "only on GPUs" if run.memory is None else f"{run.memory / 2**20:.0f} MiB"
        table.add_row(name, f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}", f"{run.step * 1e3:.2f} ms", memory)
    Console().print(table)


def plot(runs: dict[str, Run], path: Path) -> str:
    """Draws the losses. Returns a line with the file's path."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: pip install matplotlib"
    axes = (figure := Figure(figsize=(7, 4))).subplots()
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        axes.plot(run.losses, style, label=f"{name}, {run.step * 1e3:.2f} ms a step")
    axes.set(xlabel="step", ylabel="cross entropy")
    axes.legend()
    figure.savefig(path, dpi=120)
    return f"losses: {path}"


def main() -> None:
    """Trains with and without fusegen and compares the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (("layers", 4), ("width", 256), ("heads", 8), ("context", 64), ("batch", 8), ("steps", 50), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of AdamW (default: 0.001)")
    plot_file = Path(tempfile.gettempdir()) / "train_gpt.png"
    parser.add_argument("--plot", type=Path, default=plot_file, help="file of the plot (default: %(default)s)")
    options = parser.parse_args()
    runs = {"torch": train("torch", options, lambda module: module), "fusegen": train("fusegen", options, fg.kernel)}
    print_table(runs)
    print(plot(runs, options.plot))
    apart = max(abs(a - b) for a, b in zip(*(run.losses for run in runs.values()), strict=True))
    print(f"largest difference of the losses: {apart:.1e}")
    if apart > (0.1 if options.device.startswith("cuda") else 1e-3):
        raise SystemExit("the losses differ by more than the tolerance")


if __name__ == "__main__":
    main()
