"""``fusegen build --model``: a process takes the kernels of a patched model where no compiler works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

import fusegen as fg
from fusegen.bundle import kernels
from fusegen.bundle.manifest import read_manifest
from fusegen.cli.load import module_at
from fusegen.errors import ToolNotFoundError
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

class Loss(Stack):
    def forward(self, ids, labels):
        return nn.functional.cross_entropy(super().forward(ids).flatten(0, 1), labels.flatten())

IDS = torch.arange(6).view(2, 3)

def step():
    return Loss(), {"ids": IDS, "labels": IDS}

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
async def waiting(): return Stack(), (IDS,)
class Waiting(nn.Module):
    async def forward(self, x): return x
def awaited(): return Waiting(), (torch.ones(2, 4),)
def yielding(): yield Stack(), (IDS,)
def tensor(): return Stack(), IDS
def wrong(): return Stack(), (torch.zeros(3, dtype=torch.int32), 1)
def broken(): raise OSError("no weights")
def on_meta(): return Stack().to("meta"), (IDS,)
def meta_inputs(): return Stack(), (IDS.to("meta"),)
def compiled(): return torch.compile(Stack()), (IDS,)
def scripted(): return torch.jit.script(nn.Sequential(nn.Linear(4, 4))), (torch.ones(2, 4),)
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


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later tests do not take kernels of the folders that a test loads."""
    monkeypatch.setattr(kernels, "_LOADED", {})


def site(tmp_path: Path, run: Run, *words: str) -> Path:
    """A folder with the package of a wheel."""
    named = (
        "--format",
        "wheel",
        "--library",
        "fgtest_models",
        "--version",
        "1.0",
        "--arch",
        "cpu",
        "--out",
        str(tmp_path / "dist"),
    )
    done = run("build", *words, *named)
    assert done.code == 0, done.err
    assert "after import fgtest_models, calls of the patched models take these kernels" in done.out
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "site")
    return tmp_path / "site"


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


def step(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """The parameters after two training steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, ids.flip(0)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_training_step_takes_its_kernels(tmp_path: Path, file: Path, run: Run, only: Callable[..., None]) -> None:  # noqa: F811
    done = run("build", "--model", f"{file}:step", "--arch", "cpu", "--out", str(tmp_path / "built"))
    assert done.code == 0, done.err
    (model, _), (patched, _) = module_at(str(file)).step(), module_at(str(file)).step()
    ids = torch.arange(1, 7).repeat(4).view(8, 3)
    expected = step(model, ids)
    only(tmp_path / "built", FUSEGEN_NVCC="/no-compiler")
    report = fg.patch(patched)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(step(patched, ids), expected, strict=True))
    assert all(row.fused for row in report.rows if row.path.startswith("blocks")), str(report)
    assert not [*(tmp_path / "empty").glob("cpu/*")]


def test_an_imported_wheel_serves_its_models(tmp_path: Path, file: Path, run: Run, only: Callable[..., None]) -> None:  # noqa: F811
    found = site(tmp_path, run, "softmax", "--dtype", "f32", "--model", f"{file}:make", "--model", f"{file}:mixed")
    (metadata,) = found.glob("*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    pinned = {name: distribution(name).version.partition("+")[0] for name in ("torch", "sympy", "jinja2")}
    assert all(f"Requires-Dist: {name}=={version}" in lines for name, version in pinned.items())
    assert f"Requires-Python: =={sys.version_info.major}.{sys.version_info.minor}.*" in lines
    model, _ = module_at(str(file)).make()
    ids = torch.arange(1, 7).repeat(4).view(8, 3)
    expected = results(model, ids)
    only(FUSEGEN_NVCC="/no-compiler")
    package = module_at(str(found / "fgtest_models" / "__init__.py"))
    assert package.__all__ == ["softmax"] and "models.py:make" in (package.__doc__ or "")
    report = fg.patch(model)
    assert torch.allclose(results(model, ids)[0], expected[0], atol=1e-5)
    assert all(row.fused and not row.reason for row in report.rows), str(report)
    torch.testing.assert_close(package.softmax(torch.eye(4096)[:3]), torch.eye(4096)[:3].softmax(-1))


def test_a_loaded_folder_serves_its_models_alone(tmp_path: Path, file: Path, run: Run, only: Callable[..., None]) -> None:  # noqa: F811
    done = run("build", "softmax", "--dtype", "f32", "--model", f"{file}:mixed", "--arch", "cpu", "--out", str(tmp_path / "built"))
    assert done.code == 0, done.err
    x, model = torch.randn(4, 16), module_at(str(file)).mixed()[0]
    only()
    fg.load(tmp_path / "built")
    report = fg.patch(model)
    with torch.no_grad():
        model(x, scale=0.5)
    assert all(row.fused and not row.reason for row in report.rows), str(report)
    with pytest.raises(ToolNotFoundError):
        fg.ops.softmax(torch.randn(8, 4096))


def test_a_wheel_of_another_version_is_a_warning(
    tmp_path: Path,
    file: Path,
    run: Run,
    only: Callable[..., None],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = site(tmp_path, run, "--model", f"{file}:mixed")
    monkeypatch.setattr("fusegen.compiler.compile.generator", lambda: "0" * 64)
    only()
    module_at(str(found / "fgtest_models" / "__init__.py"))
    message = "the kernels of models in .*_kernels were built by another version of .*torch.*kernels are compiled"
    report = fg.patch(model := module_at(str(file)).mixed()[0])
    with pytest.warns(RuntimeWarning, match=message), torch.no_grad():
        model(torch.randn(4, 16))
    assert not report.rows[0].fused


def test_a_project_lists_its_models(tmp_path: Path, file: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    models = f'models = ["{file.name}:make", {{name = "{file.name}:mixed", arch = ["sm_90a", "cpu"]}}]'
    table = f'[tool.fusegen.build]\nout = "built"\narch = "cpu"\ndtype = "f32"\n{models}\n'
    (tmp_path / "pyproject.toml").write_text(table + 'kernels = ["softmax"]\n')
    done = run("build")
    assert done.code == 0, done.err
    kernels = read_manifest(tmp_path / "built").kernels
    assert {kernel.model.partition(" ")[0] for kernel in kernels} == {"", "models.py:make", "models.py:mixed"}
    assert "sm_90a: block" in done.out and "== models.py:make ==" in done.out and "== softmax ==" in done.out
    before = (tmp_path / "built" / "manifest.json").read_bytes()
    assert run("build").code == 0 and (tmp_path / "built" / "manifest.json").read_bytes() == before
    (tmp_path / "pyproject.toml").write_text(table)
    done = run("build", "--shape", "x=8x8")
    assert done.code == 2 and "--shape does not apply to --model" in done.err


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
    (model,) = document["models"]
    assert document["kernels"] == [] and (model["name"], model["own_code"]) == ("models.py:mixed", [])
    assert {(kernel["kernel"], kernel["target"]) for kernel in model["kernels"]} == {("block", "sm_90a"), ("block", "cpu")}


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


def test_a_model_that_nothing_awaits(tmp_path: Path, file: Path, run: Run, recwarn: pytest.WarningsRecorder) -> None:
    refused = run("build", "--model", f"{file}:awaited", "--arch", "cpu", "--out", str(tmp_path / "built"))
    assert refused.code == 2 and "the example call of" in refused.err and "by def, not async def" in refused.err
    assert not [each for each in recwarn if "never awaited" in str(each.message)]


def test_mistakes(tmp_path: Path, file: Path, run: Run) -> None:
    mistakes = {
        ("missing",): "has no function 'missing'",
        ("not_a_function",): "not_a_function in .* is a int, not a function",
        ("alone",): "returns .*Stack.*return \\(model, args\\)",
        ("number",): "returns a int, not a torch.nn.Module",
        ("tensor",): r"returns \(Stack, Tensor\), which is no model with example inputs",
        ("broken",): "broken failed: OSError: no weights",
        ("waiting",): "waiting returns a coroutine, whose code did not run.*by def, not async def",
        ("yielding",): "yielding returns a generator, whose code did not run.*with return, not yield",
        ("wrong",): "the example call of .*wrong failed: TypeError",
        ("on_meta",): r"the Stack's blocks.0.norm.weight and \d+ others are on the meta device.*try: model.to_empty",
        ("meta_inputs",): "an example input is on the meta device",
        ("compiled",): "the model of .*compiled: Stack is compiled by torch.compile.*before torch.compile",
        ("scripted",): "the model of .*scripted: Sequential is scripted.*before torch.jit.script",
        ("empty",): "the example inputs of .*empty are empty",
        ("linear",): "no module of .* became a kernel|has no module",
        ("make", "--shape", "x=8x64"): "--shape does not apply to --model",
        ("make", "--format", "extension"): "--format extension does not apply to a model",
        ("make", "--format", "wheel"): "the wheel has no name",
    }
    for (name, *words), message in mistakes.items():
        with case((name, words)):
            done = run("build", *words, "--model", f"{file}:{name}", "--arch", "cpu", "--out", str(tmp_path / "built"))
            assert done.code == 2
            assert re.search(message, " ".join(done.err.split())), done.err
    assert not (tmp_path / "built").exists()
    assert "names no function" in run("build", "--model", "softmax", "--out", str(tmp_path / "built")).err
    assert "add --out DIR" in run("build", "--model", f"{file}:make", "--arch", "cpu").err
