"""A user's own kernels, as methods and modules too: every command takes them by FILE.py:NAME."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.naming import case
from tests.unit.commands import Run

FILE = """
import torch
from torch import Tensor, nn
import torch.nn.functional as F
import fusegen as fg

class Scale:
    def __init__(self, by):
        self.by = by

    @fg.kernel
    def scaled(self, x):
        return x * self.by

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return F.gelu(self.norm(x))

scale = Scale(2.0)
bound = scale.scaled
block = fg.kernel(Block())

def plain(x):
    return x
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file with kernels of a user's."""
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_a_method_and_a_module_are_shown(run: Run, file: str) -> None:
    for name, part in (("bound", "scaled(x: bf16["), ("scale.scaled", "scaled(x: bf16["), ("block", "layer_norm(x, ")):
        with case(name):
            result = run("show", f"{file}:{name}", "--shape", "x=8x64", "--stage", "trace")
            assert result.code == 0 and part in result.out, result.err


def test_a_method_is_built_under_its_name(run: Run, file: str, tmp_path: Path) -> None:
    result = run("build", f"{file}:scale.scaled", "--shape", "x=8x64", "--arch", "cpu", "--out", str(tmp_path / "built"))
    assert result.code == 0 and "== scaled ==" in result.out, result.err


def test_a_method_of_a_class_wants_an_object(run: Run, file: str) -> None:
    refused = run("explain", f"{file}:Scale.scaled", "--shape", "x=8x64")
    assert refused.code == 2 and f"{file}:OBJECT.scaled" in refused.err


def test_a_name_that_leads_nowhere(run: Run, file: str) -> None:
    refused = run("show", f"{file}:scale.scald", "--shape", "x=8x64")
    assert refused.code == 2 and "no kernel 'scale.scald'" in refused.err and f"{file}:bound" in refused.err
