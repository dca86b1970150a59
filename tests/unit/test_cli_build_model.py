"""``fusegen build --model``: a process takes the kernels of a patched model where no compiler works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fusegen as fg
from fusegen.bundle.manifest import read_manifest
from fusegen.cli.load import module_at
from tests.naming import case
from tests.unit.commands import Run
from tests.unit.test_bundle_path import only  # noqa: F401  # a fixture

ROOT = Path(__file__).resolve().parents[2]
FILE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x, scale=1.0):
        return x + scale * self.down(torch.relu(self.up(self.norm(x))))

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.table = nn.Embedding(7, 16)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return x

IDS = torch.arange(6).view(2, 3)

def make():
    return Stack().eval(), (IDS,)

def training():
    return Stack(), {"ids": IDS}

def mixed():
    return Block().eval(), (torch.randn(4, 16),), {"scale": 0.5}

def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=19)
    model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    return model, {"input_ids": torch.arange(10).view(2, 5)}

def gpt2():
    from transformers import GPT2Config, GPT2Model
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=19, bos_token_id=1, eos_token_id=2)).eval()
    return model, {"input_ids": torch.arange(10).view(2, 5)}

def alone(): return Stack()
def number(): return 5, (IDS,)
def tensor(): return Stack(), IDS
def wrong(): return Stack(), (torch.zeros(3, dtype=torch.int32), 1)
def broken(): raise OSError("no weights")
def empty(): return Stack(), (IDS[:, :0],)
def linear(): return nn.Linear(4, 4), (torch.ones(2, 4),)
not_a_function = 3
"""
RUN = """
import sys, torch
import fusegen as fg
sys.path.insert(0, sys.argv[1])
import models
model, inputs = getattr(models, sys.argv[2])()
inputs = inputs if isinstance(inputs, dict) else {"ids": inputs[0]}
inputs = {name: value.repeat(3, 1) for name, value in inputs.items()}
with torch.no_grad():
    expected = model(**inputs)[0]
    report = fg.patch(model)
    found = model(**inputs)[0]
assert all(row.fused for row in report.rows if row.reason != "not called yet"), report
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(FILE)
    return path


def results(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Results of a call, with all gradients if the model is in training mode."""
    with torch.set_grad_enabled(model.training):
        result = model(ids)
    parameters = [*model.parameters()] if model.training else []
    gradients = torch.autograd.grad(result, parameters, torch.ones_like(result)) if parameters else ()
    return [result.detach(), *gradients]


@pytest.mark.parametrize("name", ["make", "training"])
def test_a_patched_model_takes_its_kernels(
    tmp_path: Path,
    file: Path,
    run: Run,
    only: Callable[..., None],  # noqa: F811
    name: str,
) -> None:
    done = run("build", "--model", f"{file}:{name}", "--arch", "cpu", "--out", str(tmp_path / "built"))
    assert done.code == 0, done.err
    assert f"with FUSEGEN_BUNDLE_PATH={tmp_path / 'built'}" in done.out and "cpu: block, " in done.out
    model, _ = getattr(module_at(str(file)), name)()
    ids = torch.arange(1, 7).repeat(4).view(8, 3)
    expected = results(model, ids)
    only(tmp_path / "built", FUSEGEN_NVCC="/no-compiler")
    report = fg.patch(model)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(results(model, ids), expected, strict=True))
    assert all(row.fused and not row.reason for row in report.rows), str(report)
    assert not [*(tmp_path / "empty").glob("cpu/*")]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["make", "llama", "gpt2"])
def test_a_model_in_a_new_process(tmp_path: Path, file: Path, run: Run, name: str) -> None:
    done = run("build", "--model", f"{file}:{name}", "--arch", "cpu", "--out", str(tmp_path / "built"))
    assert done.code == 0, done.err
    environment = {"FUSEGEN_BUNDLE_PATH": str(tmp_path / "built"), "CXX": "/no-compiler", "FUSEGEN_NATIVE": "0"}
    environment |= {"FUSEGEN_CACHE_DIR": str(tmp_path / "empty"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, str(tmp_path), name]
    used = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, timeout=280)
    assert used.returncode == 0, used.stderr
    assert not [*(tmp_path / "empty").glob("cpu/*")]


def test_a_gpu_that_this_machine_lacks(tmp_path: Path, file: Path, run: Run) -> None:
    done = run("build", "--model", f"{file}:mixed", "--arch", "sm_90a,cpu", "--out", str(tmp_path / "built"), "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert {kernel["target"] for kernel in document["kernels"]} == {"sm_90a", "cpu"} and document["own_code"] == []
    assert {kernel["kernel"] for kernel in document["kernels"]} == {"block"} and document["model"] == "models.py:mixed"


def test_a_folder_with_other_kernels(tmp_path: Path, file: Path, run: Run) -> None:
    out = tmp_path / "built"
    softmax = ["softmax", "--arch", "cpu", "--dtype", "f32", "--out", str(out)]
    assert run("build", *softmax).code == 0
    counts = []
    for name in ("make", "mixed", "make"):
        done = run("build", "--model", f"{file}:{name}", "--arch", "cpu", "--out", str(out))
        assert done.code == 0, done.err
        counts.append([kernel.model for kernel in read_manifest(out).kernels])
    named = {model.partition(" ")[0] for model in counts[1]}
    assert sorted(counts[1]) == sorted(counts[2]) and named == {"", "models.py:make", "models.py:mixed"}
    assert list(fg.load(out)) == ["softmax"], "a model's kernels have no function"
    assert run("build", *softmax).code == 0
    assert sorted(kernel.model for kernel in read_manifest(out).kernels) == sorted(counts[2])


def test_files_of_one_name_are_two_models(tmp_path: Path, file: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    out, other = tmp_path / "built", tmp_path / "other" / file.name
    other.parent.mkdir()
    other.write_text(FILE.replace("torch.relu", "torch.tanh"))
    found = []
    for place in (file, other, file):
        monkeypatch.chdir(place.parent)
        assert run("build", "--model", f"{place.name}:mixed", "--arch", "cpu", "--out", str(out)).code == 0
        found.append({kernel.name for kernel in read_manifest(out).kernels})
    assert found[0] < found[1] == found[2]


def test_mistakes(tmp_path: Path, file: Path, run: Run) -> None:
    mistakes = {
        ("missing",): "has no function 'missing'",
        ("not_a_function",): "not_a_function in .* is a int, not a function",
        ("alone",): "returns .*Stack.*return \\(model, args\\)",
        ("number",): "returns a int, not a torch.nn.Module",
        ("tensor",): r"returns \(Stack, Tensor\), which is no model with example inputs",
        ("broken",): "broken failed: OSError: no weights",
        ("wrong",): "the example call of .*wrong failed: TypeError",
        ("empty",): "the example inputs of .*empty are empty",
        ("linear",): "no module of .* became a kernel|has no module",
        ("make", "--shape", "x=8x64"): "--shape does not apply beside --model",
        ("make", "softmax"): "kernels cannot be named beside --model",
        ("make", "--format", "wheel"): "--format wheel does not apply to --model",
    }
    for (name, *words), message in mistakes.items():
        with case((name, words)):
            done = run("build", *words, "--model", f"{file}:{name}", "--arch", "cpu", "--out", str(tmp_path / "built"))
            assert done.code == 2
            assert re.search(message, " ".join(done.err.split())), done.err
    assert not (tmp_path / "built").exists()
    assert "names no function" in run("build", "--model", "softmax", "--out", str(tmp_path / "built")).err
    assert "add --out DIR" in run("build", "--model", f"{file}:make", "--arch", "cpu").err
