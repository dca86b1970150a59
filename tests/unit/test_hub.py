"""``fusegen build --format hub``: folders for Hugging Face's package ``kernels``.

A test with the package itself is skipped where it is missing; ``.ci/deep hub`` installs it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusegen.bundle import cpp
from fusegen.cli.main import main
from fusegen.jit.nvrtc import nvrtc_version
from tests.naming import case
from tests.unit.commands import Run
from tests.unit.test_reproducible import files
from tests.unit.test_wheel import Refusal

LIBRARY = b"library"
TORCH = "torch" + "".join(torch.__version__.split(".")[:2])
WORDS = ("build", "--format", "hub", "--library", "my_kernels", "--dtype", "f32")
NORM = ("rms_norm", "--shape", "input=4x32", "--shape", "weight=32", "--arg", "normalized_shape=32,")
OWN = """
from torch import Tensor
import fusegen as fg

@fg.kernel
def silu(input: Tensor) -> Tensor:
    '''Not the prebuilt one.'''
    return input + 1
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, where no C++ compiler runs."""
    monkeypatch.setattr(cpp, "library_content", lambda _texts: LIBRARY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def variants(folder: Path) -> dict[str, Path]:
    """The folders of variants, by what they are for."""
    return {path.name.split("-")[2]: path for path in (folder / "build").iterdir()}


linux = pytest.mark.skipif(sys.platform != "linux", reason="names of variants have another form")


@linux
def test_a_variant_for_each_build_of_torch(here: Path, run: Run) -> None:
    done = run(*WORDS, "silu", "--shape", "input=4x32", "--arch", "sm_90a,sm_80,cpu", "--cpu", "x86-64", "--out", "hub")
    assert done.code == 0 and "kernels.get_local_kernel(Path('hub')) loads them" in done.out
    assert "silu(Tensor input) -> Tensor" in done.out and "layers: SiLU" in done.out
    cuda = "cu" + nvrtc_version().replace(".", "")
    found = variants(here / "hub")
    assert {path.name for path in found.values()} == {f"{TORCH}-cxx11-{kind}-x86_64-linux" for kind in ("cpu", cuda)}
    ids = set()
    for kind, backend, calls in (
        ("cpu", {"type": "cpu"}, 1),
        (cuda, {"type": "cuda", "archs": ["9.0a", "8.0"]}, 2),
    ):
        with case(kind):
            metadata = json.loads((found[kind] / "metadata.json").read_text())
            name = metadata.pop("id")
            wanted = {"name": "my-kernels", "version": 1, "license": "unknown", "python-depends": [], "backend": backend}
            assert metadata == wanted
            assert (found[kind] / f"{name}.so").read_bytes() == LIBRARY and name.startswith("my_kernels_")
            assert f"torch.ops.{name}: silu" in (found[kind] / "binding.cpp").read_text()
            built_for = json.loads((found[kind] / "extension.json").read_text())["operators"][0]["built_for"]
            assert len(built_for) == calls
            ids.add(name)
    assert len(ids) == 2, "a process may load both"
    words = "--library my_kernels --arch sm_90a,sm_80,cpu --cpu x86-64 --dtype f32 --shape input=4x32\n"
    assert (here / "hub" / "build.txt").read_text() == f"fusegen build silu --format hub {words}"


def test_layers_have_the_meaning_of_the_built_calls(here: Path, run: Run) -> None:
    (here / "mine.py").write_text(OWN)
    for number, (words, layers) in enumerate(
        (
            ((*NORM, "--arg", "casting_mode=llama"), ["RMSNorm"]),
            (NORM, []),
            ((*NORM, "--arg", "casting_mode=llama", "--arg", "zero_centered_gamma=True"), []),
            ((*NORM[:3], *NORM[5:], "--arg", "weight=None", "--arg", "casting_mode=llama"), []),
            (("gelu", "--arg", "approximate=tanh"), ["GeluTanh", "NewGELU", "FastGELU"]),
            (("gelu", "--arg", "approximate=quick"), ["QuickGELU"]),
            (("gelu", "--arg", "approximate=none"), ["GeLU"]),
            (("swiglu", "--shape", "gate=4x32", "--arg", "up=None"), ["SiluAndMul"]),
            (("swiglu", "--shape", "gate=4x32", "--arg", "up=None", "--arg", "interleaved=True"), []),
            (("swiglu",), []),
            (("mine.py:silu", "--shape", "input=4x32"), []),
        )
    ):
        with case(words):
            done = run(*WORDS, *words, "--arch", "cpu", "--out", str(number), "--json")
            assert done.code == 0, done.err
            assert json.loads(done.out)["layers"] == layers
            (folder,) = variants(here / str(number)).values()
            text = (folder / "layers.py").read_text() if layers else ""
            assert [line.split()[1].partition("(")[0] for line in text.splitlines() if line.startswith("class ")] == layers
            assert ("from . import layers" in (folder / "__init__.py").read_text()) == bool(layers)


def test_a_module_without_fusegen(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine.py").write_text(OWN)
    (here / "pyproject.toml").write_text('[project]\nlicense = "MIT"')
    assert run(*WORDS, "mine.py:silu", "--shape", "input=4x32", "--arch", "cpu", "--version", "7", "--out", "hub").code == 0
    (folder,) = variants(here / "hub").values()
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["version"], metadata["license"]) == (7, "MIT")
    assert " --version 7 " in (here / "hub" / "build.txt").read_text()
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    refusal = {str(folder / f"{metadata['id']}.so"): Refusal("")}
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(fg_refusal=refusal[path]))
    text = (folder / "__init__.py").read_text()
    assert "Not the prebuilt one." in text and "fusegen" not in text.partition("\n")[2]
    with pytest.raises(AttributeError, match="silu"):  # the library has no operators
        exec(text, {"__file__": str(folder / "__init__.py")})
    assert loaded == [*refusal]
    refusal[loaded[0]] = Refusal("built for another processor")
    with pytest.raises(ImportError, match="my_kernels: built for another processor"):
        exec(text, {"__file__": str(folder / "__init__.py")})


def test_equal_kernels_are_equal_bytes(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*WORDS, "silu", "--shape", "input=4x32", "--arch", "sm_90a,cpu")
    assert run(*words, "--out", "one").code == 0
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert run(*words, "--out", "other").code == 0
    assert files(here / "one") == files(here / "elsewhere" / "other")


def test_mistakes(here: Path, run: Run) -> None:
    (here / "taken").mkdir()
    words = (*WORDS, "silu", "--arch", "sm_90a", "--out", "hub")
    for further, text, code in (
        *(
            (("--library", name), f"the name {name!r} is not two or more of a-z", 2)
            for name in ("K", "k", "my-k", "_k", "k_", "é1")
        ),
        *((("--version", version), f"the version {version!r} of a hub folder", 2) for version in ("1.0", "-1", "01", "v1", "1\n")),
        (("--out", "taken"), "taken exists already", 1),
        (("--cpu", "x86-64"), "--cpu applies only to the target cpu", 2),
        (("--format", "sources", "--version", "1"), "--version applies only to wheels and hub folders", 2),
    ):
        with case(further):
            done = run(*words, *further)
            assert done.code == code and text in done.err.replace("\\\\", "\\")
            assert {path.name for path in here.iterdir()} == {"taken"} and not [*(here / "taken").iterdir()]


def test_a_kernel_of_the_name_of_the_layers(here: Path, run: Run) -> None:
    (here / "mine.py").write_text(OWN.replace("silu", "layers"))
    done = run(*WORDS, "mine.py:layers", "--shape", "input=4x32", "--arch", "cpu", "--out", "hub")
    assert done.code == 2 and "'layers' is the module of layers" in done.err and not (here / "hub").exists()


TABLE = """
[tool.fusegen.build]
format = "hub"
library = "my_kernels"
arch = "cpu"
dtype = "f32"
kernels = [
    {name = "rms_norm", shape = ["input=4x32", "weight=32"], arg = ["normalized_shape=32,", "casting_mode=llama"]},
    {name = "swiglu", shape = "gate=4x32", arg = "up=None"},
]
"""
USE = """
import shutil, sys
sys.modules["fusegen"] = None
from pathlib import Path
import kernels, torch, torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

module = kernels.get_local_kernel(Path("hub"))
assert module.__all__ == ["rms_norm", "swiglu", "layers"] and module.swiglu.__doc__.startswith("swiglu(Tensor gate")
assert kernels.get_local_kernel(Path(shutil.copytree("hub", "copy"))).swiglu is module.swiglu

x = torch.randn(7, 32, requires_grad=True)
torch.testing.assert_close(module.swiglu(x), F.silu(x[:, :16]) * x[:, 16:])
torch.testing.assert_close(module.layers.SiluAndMul()(x), F.silu(x[:, :16]) * x[:, 16:])

norm = LlamaRMSNorm(32)
norm.weight.data.uniform_()
expected = norm(x)
(gradient,) = torch.autograd.grad(expected.sum(), x)
kernels.replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
mapping = {"RMSNorm": {"cpu": kernels.LocalLayerRepository(Path("hub"), layer_name="RMSNorm")}}
with kernels.use_kernel_mapping(mapping):
    kernels.kernelize(norm, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
assert norm.forward.__qualname__ == "RMSNorm.forward"
torch.testing.assert_close(norm(x), expected)
torch.testing.assert_close(torch.compile(norm, fullgraph=True)(x), expected)
torch.testing.assert_close(*torch.autograd.grad(norm(x).sum(), x), gradient)
try:
    norm(x.bfloat16())
except Exception as error:
    assert "build it for this call too" in str(error), error
"""


@pytest.mark.deep
def test_the_loader_takes_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kernels", reason="`.ci/deep hub` installs it")
    (tmp_path / "pyproject.toml").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    assert main(["build", "--out", "hub"]) == 0
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
