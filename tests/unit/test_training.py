"""Kernels in models that are trained in the ways in which models are: each step is that of the plain model."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusegen as fg
from tests.unit.eager import randn

FEATURES = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def models() -> tuple[nn.Sequential, nn.Sequential]:
    """A model of kernels, and a plain one like it."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    return nn.Sequential(*map(fg.kernel, copy.deepcopy(plain))), plain


def losses(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor], steps: int = 4) -> list[float]:
    """The losses of a few steps."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = loss_of(model, torch.randn(8, FEATURES, generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def plainly(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def with_checkpoints(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.children():
        x = checkpoint(block, x, use_reentrant=False)
    return x.square().mean()


def with_old_checkpoints(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    for block in model.children():
        x = checkpoint(block, x, use_reentrant=True)
    return x.square().mean()


def in_parts(model: nn.Module, x: Tensor) -> Tensor:
    (model(x[:3]).square().sum() / x.numel()).backward()
    return model(x[3:]).square().sum() / x.numel()


def of_parameters_elsewhere(model: nn.Module, x: Tensor) -> Tensor:
    given = {name: parameter * 2 for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, given, (x,)).square().mean()


@pytest.mark.parametrize("loss_of", [plainly, with_checkpoints, with_old_checkpoints, in_parts, of_parameters_elsewhere])
def test_a_few_steps(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> None:
    ours, theirs = (losses(model, loss_of) for model in models())
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_checkpoints_are_compiled() -> None:
    ours, theirs = models()
    torch._dynamo.reset()
    step = torch.compile(with_checkpoints, fullgraph=True, backend="aot_eager")
    assert losses(ours, step) == pytest.approx(losses(theirs, with_checkpoints), rel=1e-4)


def test_parameters_of_a_penalty_norm_and_clipping() -> None:
    """Gradients are those of leaf tensors like any: they are clipped, and added to."""
    ours, theirs = models()
    for model in (ours, theirs):
        plainly(model, randn(8, FEATURES)).backward()
        plainly(model, torch.ones(8, FEATURES)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert norm.item() == pytest.approx(0.1, rel=1e-3)


DISTRIBUTED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tests.unit.test_training import losses, models

def loss_of(model, x):
    return model(x[dist.get_rank() * 4:][:4]).square().mean()

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
for shard in (DistributedDataParallel, lambda model: [*map(fully_shard, model), fully_shard(model)][-1]):
    ours, theirs = (losses(shard(model), loss_of) for model in models())
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-5, (ours, theirs)
dist.destroy_process_group()
"""


@pytest.mark.deep  # two processes
def test_parameters_that_two_processes_share_and_shard(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DISTRIBUTED]
    both = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    for process in both:
        _, errors = process.communicate(timeout=100)
        assert not process.returncode, errors
