"""`fg.kernel` of a module: a module that shares everything with it and whose forward pass is fused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen.errors import ArgumentError
from tests.unit.eager import randn, same


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(8))
        self.scale = 3.0

    def forward(self, x: Tensor) -> Tensor:
        """A residual block."""
        return self.dropout(self.linear(self.norm(x)).relu()) * self.scale + x + self.shift


def made() -> tuple[Block, Block]:
    torch.manual_seed(0)
    block = Block().eval()
    return block, fg.kernel(block)


def test_it_is_a_module_like_the_one_it_is_made_of() -> None:
    block, fused = made()
    assert isinstance(fused, Block) and list(fused.state_dict()) == list(block.state_dict())
    assert all(one is other for one, other in zip(fused.parameters(), block.parameters(), strict=True))
    x = randn(5, 8)
    same(fused(x), block(x))
    assert "2 kernels" in fused.lower(x).explain()
    for one in (fg.kernel(nn.Linear(8, 4)), fg.kernel(nn.Sequential(nn.LayerNorm(8), nn.GELU()))):
        assert one(x).shape[0] == 5


def test_whatever_changes_is_seen() -> None:
    block, fused = made()

    def agree() -> None:
        x = randn(5, 8)
        same(fused(x), block(x))

    agree()
    block.load_state_dict({name: 2 * value for name, value in block.state_dict().items()})
    agree()
    block.linear.weight = nn.Parameter(torch.ones(8, 8))
    agree()
    block.shift = torch.zeros(8)
    agree()
    hook = block.linear.register_forward_hook(lambda module, args, y: y + 1)
    agree()
    hook.remove()
    agree()
    fused.train()
    dropped = fused(torch.ones(64, 8)) == 1
    assert 0.2 < dropped.double().mean() < 0.95
    fused.eval()
    fused.scale = block.scale = 0.5
    agree()
    fused.double()
    same(fused(x := randn(5, 8).double()), block(x))


def test_it_trains() -> None:
    block, fused = made()
    wanted = torch.autograd.grad(block(x := randn(5, 8)).sum(), list(block.parameters()))
    same(torch.autograd.grad(fused(x).sum(), list(fused.parameters())), wanted)


def test_copies_and_pickles_are_of_the_module() -> None:
    block, fused = made()
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert isinstance(other, Block) and type(other).__name__ == "FusedBlock" and other.linear.weight is not block.linear.weight
        same(other(x := randn(5, 8)), block(x))


def test_what_has_no_forward_of_its_class_is_refused() -> None:
    block, fused = made()
    block.forward = lambda x: x  # type: ignore[method-assign]
    for module, says in (
        (block, "not a Python function of its class"),
        (fused, "already a kernel"),
        (torch.jit.script(nn.ReLU()), "not a Python function"),
    ):
        with pytest.raises(ArgumentError, match=says):
            fg.kernel(module)
