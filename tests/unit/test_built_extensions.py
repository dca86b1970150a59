"""``fusegen build --format extension``: operators of torch that run and train where fusegen cannot be imported."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck
from torch.utils.cpp_extension import include_paths, library_paths

from fusegen.cli.load import load
from fusegen.cli.main import main
from fusegen.runtime import devices
from tests.unit.eager import randn

KERNELS = """
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg

@fg.kernel
def block(x: Tensor, w: Tensor, b: Tensor, class_: float = 1.0, approximate: str = "none") -> tuple[Tensor, Tensor]:
    h = F.gelu(F.layer_norm(x, (x.shape[-1],), b, b), approximate=approximate) * (class_ * 2 + 1)
    return h @ w, h.sum(-1)


@fg.kernel(mutates=("cache",))
def store(cache: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    cache[slots] = x * 2
    return x.sum(-1)
"""

DROP = """
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg

scale = torch.linspace(1, 2, 32)


@fg.kernel
def block(x: Tensor) -> Tensor:
    return fg.dropout(F.silu(x * scale), 0.25)
"""

EDGE = """
import torch
from torch import Tensor

import fusegen as fg

@fg.kernel
def block(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.abs() + 1, (x * w * w).t()
"""

LOSS = """
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg

@fg.kernel
def block(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), t)
"""

TEXTS = {"loss": LOSS, "block": KERNELS, "store": KERNELS, "drop": DROP, "edge": EDGE}
SHAPES = {
    "loss": ["--shape", "x=1024x4", "--shape", "w=32768x4", "--shape", "t=1024:i64", "--dtype", "f32"],
    "block": ["--shape", "x=64x32", "--shape", "w=32x16", "--shape", "b=32"],
    "drop": ["--shape", "x=64x32"],
    "edge": ["--shape", "x=64x32", "--shape", "w=32:f32", "--dtype", "i64,f32"],
    "store": ["--shape", "cache=64x32", "--shape", "x=8x32", "--shape", "slots=8:i64"],
}


def build(folder: Path, name: str, *further: str) -> Path:
    """Builds a kernel for the CPU, once; returns the library."""
    (folder / "kernels.py").write_text(TEXTS[name])
    out = folder / f"fgtest_{name}"
    command = [
        "build",
        f"{folder / 'kernels.py'}:{'store' if name == 'store' else 'block'}",
        "--format",
        "extension",
        "--arch",
        "cpu",
        "--out",
        str(out),
    ]
    assert main([*command, *SHAPES[name], *further]) == 0
    return out / f"fgtest_{name}.so"


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of ``block``, loaded."""
    library = build(tmp_path_factory.mktemp("block"), "block")
    torch.ops.load_library(library)
    return library


def given(rows: int = 9) -> tuple[torch.Tensor, ...]:
    return tuple(t.requires_grad_() for t in (randn(rows, 32), randn(32, 16), randn(32)))


def test_values_and_gradients_are_those_of_the_kernel_in_every_bit(block: Path) -> None:
    tensors = given()
    found = []
    for call in (torch.ops.fgtest_block.block, load(f"{block.parents[1] / 'kernels.py'}:block").kernel):
        with torch.no_grad():
            alone = call(*tensors, 0.7)
        results = call(*tensors, 0.7)
        gradients = torch.autograd.grad([results[0].sum(), results[1].square().sum()], tensors)
        found.append([*alone, *results, *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("block")
def test_torch_finds_nothing_to_say_of_the_operator() -> None:
    opcheck(torch.ops.fgtest_block.block.default, (*given(), 0.7))


@pytest.mark.usefixtures("block")
def test_a_compiled_step_with_sizes_that_change() -> None:
    operator = torch.ops.fgtest_block.block
    step = torch.compile(lambda *t: operator(*t, 0.5)[0].relu(), fullgraph=True, backend="aot_eager")
    for rows in (8, 9, 10):
        tensors = given(rows)
        found = torch.autograd.grad(step(*tensors).sum(), tensors)
        wanted = torch.autograd.grad(operator(*tensors, 0.5)[0].relu().sum(), tensors)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("block")
def test_other_layouts_are_taken_and_other_calls_refused() -> None:
    operator, (x, w, b) = torch.ops.fgtest_block.block, given()
    assert torch.equal(operator(x.t().contiguous().t(), w, b, 0.7)[0], operator(x, w, b, 0.7)[0])
    bare = [t.detach().to("meta") for t in (x, w, b)]
    for call in (
        lambda: operator(x.double(), w, b, 0.7),
        lambda: operator(x, w, b, 0.7, "tanh"),
        lambda: operator(bare[0].double(), *bare[1:], 0.7),
    ):
        with pytest.raises(
            TypeError,
            match=r"fgtest_block::block was not built for .*; it was built for x: f.*\n.*the same --format",
        ):
            call()
    (first,) = torch.autograd.grad(operator(x, w, b, 0.7)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated again.*\n.*for second derivatives, call the function"):
        torch.autograd.grad(first.square().sum(), x)


@pytest.mark.usefixtures("block")
def test_a_refused_call_names_the_built_constants() -> None:
    x, w, b = given()
    with pytest.raises(TypeError, match=r"it was built for x: float32.*, approximate: 'none'"):
        torch.ops.fgtest_block.block(x, w, b, 0.7, "tanh")


@pytest.mark.usefixtures("block")
def test_none_in_place_of_a_tensor_is_refused() -> None:
    x, _, b = given()
    with pytest.raises(TypeError, match=r"fgtest_block::block: a tensor argument is None"):
        torch.ops.fgtest_block.block(x, None, b, 0.7)


@pytest.mark.deep
def test_gradients_that_the_forward_pass_saves_have_no_derivative(tmp_path: Path) -> None:
    torch.ops.load_library(build(tmp_path, "loss"))
    x = randn(1024, 4).requires_grad_()
    loss = torch.ops.fgtest_loss.block(x, randn(32768, 4), torch.zeros(1024, dtype=torch.int64))
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        first.square().sum().backward()


@pytest.mark.deep
@pytest.mark.usefixtures("block")
def test_an_operator_with_random_bits_draws_them_at_each_call(tmp_path: Path) -> None:
    torch.ops.fgtest_block.block(*given(), 0.7)[0].sum().backward()  # its name is that of the other operator
    torch.ops.load_library(build(tmp_path, "drop"))
    assert torch.Tag.nondeterministic_seeded in torch.ops.fgtest_drop.block.default.tags
    x, scale = torch.ones(64, 32, requires_grad=True), torch.linspace(1, 2, 32)

    def two(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ops.fgtest_drop.block(x, scale) for _ in range(2)]

    for call in (two, torch.compile(two, fullgraph=True, backend="aot_eager")):
        one, other = call(x)
        assert not torch.equal(one, other)
        (gradient,) = torch.autograd.grad(one.sum(), x)
        assert torch.equal(one == 0, gradient == 0)


@pytest.mark.deep
def test_an_operator_that_writes_in_place(tmp_path: Path) -> None:
    torch.ops.load_library(build(tmp_path, "store"))
    operator = torch.ops.fgtest_store.store
    cache, x, slots = torch.zeros(64, 32), randn(8, 32), torch.arange(8) * 3
    torch.compile(operator, fullgraph=True, backend="aot_eager")(cache, x, slots)
    assert torch.equal(cache[slots], x * 2)
    version = cache._version
    operator(cache, x * 2, slots)
    assert torch.equal(cache[slots], x * 4) and cache._version == version + 1
    with pytest.raises(IndexError, match=r"\[-64, 64\)"):
        operator(cache, x, slots + 60)
    with pytest.raises(TypeError, match="shares memory with 'x'"):
        operator(cache, cache[:8], slots)
    with pytest.raises(TypeError, match=r"with strides \[64, 2\](.|\n)*contiguous tensor for each written argument"):
        operator(torch.zeros(64, 64)[:, ::2], x, slots)
    with pytest.raises(RuntimeError, match="without a backward pass"):
        operator(cache, x.requires_grad_(), slots)


@pytest.mark.deep
def test_kinds_with_other_results_have_gradients_of_their_own(tmp_path: Path) -> None:
    """One kind has a result of ints; gradients of transposed results have strides that are sizes, which need be no multiples."""
    torch.ops.load_library(build(tmp_path, "edge"))
    operator, w = torch.ops.fgtest_edge.block, randn(32).requires_grad_()
    for x in (torch.arange(160).view(5, 32), randn(5, 32).requires_grad_()):
        results, wanted = operator(x, w), (x.abs() + 1, (x * w * w).t())
        torch.testing.assert_close(results, wanted)
        assert [r.requires_grad for r in results] == [x.requires_grad, True]
        by = [t for t in (x, w) if t.requires_grad]
        ours, theirs = (torch.autograd.grad([r.square().sum() for r in t if r.requires_grad], by) for t in (results, wanted))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    with pytest.raises(NotImplementedError, match=r"has a forward-mode tangent(.|\n)*try: use reverse mode"):
        torch.func.jvp(lambda x: operator(x, w.detach()), (x.detach(),), (x.detach(),))


WITHOUT_FUSEGEN = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fusegen", "jinja2", "ninja", "cuda"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuses())
import torch
torch.ops.load_library(sys.argv[1])
weight = torch.nn.Parameter(torch.ones(32, 16))
for _ in range(3):
    x = torch.ones(5, 32).cumsum(1)
    loss = torch.ops.fgtest_block.block(x, weight, torch.ones(32), 1.0)[0].square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    weight.data -= 1e-3 * gradient
    print(loss.item())
"""


def test_a_process_without_fusegen_trains(block: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_FUSEGEN)
    done = subprocess.run([sys.executable, program, block], capture_output=True, text=True, check=True)
    losses = [float(line) for line in done.stdout.split()]
    assert losses[0] > losses[1] > losses[2]


ON_AN_OLD_PROCESSOR = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
operator, x, w = torch.ops.fgtest_edge.block, torch.ones(5, 32, requires_grad=True), torch.ones(32)
refusal = ctypes.CDLL(sys.argv[1]).fg_refusal
refusal.restype = ctypes.c_char_p
for call in (lambda: operator(x, w), lambda: operator(x.detach(), w)):
    try:
        call()
    except RuntimeError as error:
        assert str(error).startswith("fgtest_edge::block: " + refusal().decode()), error
    else:
        raise AssertionError
print(operator(x.to("meta"), w.to("meta"))[0].shape, refusal().decode())
"""


@pytest.mark.deep
@pytest.mark.skipif(platform.machine() not in devices.X86, reason="levels are of x86-64")
def test_a_processor_without_the_instructions_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices._ADDED_FEATURES, "x86-64-v4", ("fgtest_none",))
    library = build(tmp_path, "edge", "--cpu", "x86-64-v4")
    done = subprocess.run([sys.executable, "-c", ON_AN_OLD_PROCESSOR, library], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([5, 32]) the CPU kernels were built for x86-64-v4" in done.stdout and "lacks fgtest_none" in done.stdout


def test_names_that_cannot_be_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernels.py").write_text(EDGE.replace("w", "class_").replace("x", "fg_kind"))
    command = [
        "build",
        f"{tmp_path / 'kernels.py'}:block",
        "--format",
        "extension",
        "--arch",
        "cpu",
        "--out",
        str(tmp_path / "out"),
    ]
    shapes = ["--shape", "fg_kind=64x32", "class_=32"]
    assert main([*command, *shapes, "--library", "größe"]) == 2
    assert main([*command, *shapes]) == 1
    assert "two arguments of block would be called fg_kind" in capsys.readouterr().err


def test_the_manifest_says_what_is_there(block: Path) -> None:
    (entry,) = json.loads((block.parent / "extension.json").read_text())["operators"]
    assert entry["differentiable"] and entry["schema"].startswith("block(Tensor x, Tensor w, Tensor b, float class_, str approx")


PROGRAM = """
#include <dlfcn.h>
#include <iostream>
#include <torch/torch.h>
#include <ATen/core/dispatch/Dispatcher.h>

int main(int, char** arguments) {
  if (!dlopen(arguments[1], RTLD_NOW)) return 1;
  auto block = c10::Dispatcher::singleton().findSchemaOrThrow("fgtest_block::block", "");
  at::Tensor x = torch::ones({4, 32}).cumsum(1).requires_grad_();
  torch::jit::Stack stack{x, torch::ones({32, 16}), torch::ones({32}), 1.0, std::string("none")};
  block.callBoxed(&stack);
  at::Tensor y = stack[0].toTensor();
  y.sum().backward();
  std::cout << y.sum().item<double>() << " " << x.grad().abs().sum().item<double>() << std::endl;
}
"""


@pytest.mark.deep
def test_a_program_without_python(block: Path, tmp_path: Path) -> None:
    source, program = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text(PROGRAM)
    (libraries,) = library_paths()
    paths = [f"-I{path}" for path in include_paths()]
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    subprocess.run(["c++", "-std=c++20", *paths, str(source), "-o", str(program), "-Wl,--no-as-needed", *links], check=True)
    done = subprocess.run([program, block], capture_output=True, text=True, check=True)
    x = torch.ones(4, 32).cumsum(1).requires_grad_()
    y = torch.ops.fgtest_block.block(x, torch.ones(32, 16), torch.ones(32), 1.0)[0]
    y.sum().backward()
    assert x.grad is not None
    found, wanted = map(float, done.stdout.split()), (y.sum().item(), x.grad.abs().sum().item())
    torch.testing.assert_close(list(found), list(wanted), rtol=1e-4, atol=1e-4)
