"""``fusegen find``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.naming import case
from tests.unit.commands import Run

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return F.gelu(self.norm(x)) * 2

def made():
    return Model().bfloat16()

def plain(x, y):
    return torch.exp(x * y) + 1

def failing():
    raise ValueError("no")

model = Model()
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models_to_look_at.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("name", "batch"), [("model", ["8x64"]), ("Model", ["x=8x64"]), ("made", ["8x64"]), ("plain", ["8x64", "64"])]
)
def test_models_classes_factories_and_functions_are_looked_at(run: Run, file: Path, name: str, batch: list[str]) -> None:
    done = run("find", f"{file}:{name}", "--batch", *batch)
    assert done.code == 0, done.err
    assert "→ 1" in done.out and "@fg.kernel" in done.out


def test_json_has_every_finding(run: Run, file: Path) -> None:
    done = run("find", f"{file}:made", "--batch", "8x64", "--json")
    document = json.loads(done.out)
    assert document["command"] == "find" and document["launches_before"] == 3
    (finding,) = document["findings"]
    assert finding["operations"] == ["native_layer_norm", "gelu", "mul"]
    assert finding["arguments"]["input"] == "8×64 bfloat16, input"


def test_a_trace_is_looked_at(run: Run) -> None:
    done = run("find", str(Path(__file__).with_name("h100.json.gz")))
    assert done.code == 0, done.err
    assert "bound by the host" in done.out


def test_the_batch_of_the_file_is_the_default(run: Run, file: Path) -> None:
    file.write_text(f"{FILE}\ndef batch():\n    return torch.zeros(8, 64)\n")
    assert "3 → 1" in run("find", f"{file}:model").out


def test_mistakes_are_one_line(run: Run, file: Path, tmp_path: Path) -> None:
    trace = str(Path(__file__).with_name("h100.json.gz"))
    no_batch = tmp_path / "no_batch.py"
    no_batch.write_text(f"{FILE}\ndef batch():\n    raise ValueError\n")
    wrong = {
        (f"{file}:model",): "the model's arguments are unknown",
        (f"{file}:missing", "--batch", "8x64"): "no model 'missing'",
        (str(file), "--batch", "8x64"): "does not name a model",
        (f"{file}:number", "--batch", "8x64"): "number in",
        (f"{file}:failing", "--batch", "8x64"): "failed: ValueError: no",
        (f"{file}:model", "--batch", "8x65"): "does not run on this batch",
        (f"{file}:plain", "--batch", "x=8x64", "64"): "only some arguments",
        (f"{file}:plain", "--batch", "x=8x64", "x=8x64"): "'x' is given twice",
        (f"{file}:plain", "--batch", "8,64"): "cannot read the shape '8,64' · try: --batch",
        (f"{file}:model", "--batch", "0x64"): "error: 0x64: the tensor is empty",
        (f"{file}:torch.exp", "--batch", "8x64", "8x64", "8x64"): "exp does not run on this batch",
        (f"{no_batch}:model",): "batch of",
        (f"{file}:model", "--batch", "8x64", "--target", "cpu"): "compares launches on GPUs",
        (trace, "--batch", "8x64"): "--batch is for a model",
        ("nothing",): "neither a model nor a trace",
        ("missing.json",): "cannot read missing.json",
    }
    for words, text in wrong.items():
        with case(words):
            done = run("find", *words)
            assert done.code == 2 and not done.out
            assert text in done.err
