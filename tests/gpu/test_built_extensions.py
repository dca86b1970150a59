"""Operators that ``fusegen build --format extension`` makes, on a GPU: in Python, and in a program without it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from fusegen.cli.load import load
from fusegen.cli.main import main
from tests.unit.eager import randn

KERNELS = """
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg


@fg.kernel
def block(x: Tensor, w: Tensor, b: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    h = F.gelu(F.layer_norm(x, (x.shape[-1],), b, b)) * factor
    return h @ w, h.sum(-1)
"""

PROGRAM = """
#include <dlfcn.h>
#include <iostream>
#include <torch/torch.h>
#include <ATen/core/dispatch/Dispatcher.h>

int main(int, char** arguments) {
  if (!dlopen("libtorch_cuda.so", RTLD_NOW) || !dlopen(arguments[1], RTLD_NOW)) return 1;
  auto block = c10::Dispatcher::singleton().findSchemaOrThrow("fgcuda::block", "");
  auto options = torch::dtype(torch::kBFloat16).device(torch::kCUDA);
  at::Tensor x = (torch::ones({384, 512}, options).cumsum(1) / 512).requires_grad_();
  torch::jit::Stack stack{x, torch::ones({512, 256}, options), torch::ones({512}, options), 1.0};
  block.callBoxed(&stack);
  stack[1].toTensor().sum().backward();
  std::cout << stack[1].toTensor().sum().item<double>() << " " << x.grad().abs().sum().item<double>() << std::endl;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, for both machines, loaded."""
    folder = tmp_path_factory.mktemp("block")
    (folder / "kernels.py").write_text(KERNELS)
    shapes = ["--shape", "x=384x512", "--shape", "w=512x256", "--shape", "b=512", "--arg", "factor=1.0"]
    command = ["build", f"{folder / 'kernels.py'}:block", "--format", "extension", "--library", "fgcuda", "--arch", "cpu,sm_90a"]
    assert main([*command, "--dtype", "bf16", *shapes, "--out", str(folder / "built")]) == 0
    torch.ops.load_library(folder / "built" / "fgcuda.so")
    return folder / "built" / "fgcuda.so"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_values_and_gradients_are_those_of_the_kernel(library: Path, device: str) -> None:
    tensors = [t.to(device, torch.bfloat16).requires_grad_() for t in (randn(200, 512), randn(512, 256), randn(512))]
    found = []
    for call in (torch.ops.fgcuda.block, load(f"{library.parents[1] / 'kernels.py'}:block").kernel):
        with torch.no_grad():
            alone = call(*tensors, 0.7)
        results = call(*tensors, 0.7)
        gradients = torch.autograd.grad([results[0].float().sum(), results[1].float().square().sum()], tensors)
        found.append([*alone, *results, *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("library")
def test_a_training_step_in_a_cuda_graph_and_compiled() -> None:
    tensors = [t.cuda().bfloat16().requires_grad_() for t in (randn(384, 512), randn(512, 256), randn(512))]

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(torch.ops.fgcuda.block(*tensors, 0.5)[0].float().square().sum(), tensors)

    wanted = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    compiled = torch.compile(lambda *t: torch.ops.fgcuda.block(*t, 0.5)[0].float().square().sum(), fullgraph=True)
    for found in (captured, torch.autograd.grad(compiled(*tensors), tensors)):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_a_program_without_python(library: Path, tmp_path: Path) -> None:
    source, program = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text(PROGRAM)
    (libraries,) = library_paths()
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    standard = "-std=c++20" if torch.__version__ >= "2.12" else "-std=c++17"
    includes = [f"-I{path}" for path in include_paths()]
    subprocess.run(["c++", standard, *includes, str(source), "-o", str(program), "-Wl,--no-as-needed", *links], check=True)
    done = subprocess.run([program, library], capture_output=True, text=True, check=True)
    x = (torch.ones(384, 512, dtype=torch.bfloat16, device="cuda").cumsum(1) / 512).requires_grad_()
    ones = [torch.ones(shape, dtype=torch.bfloat16, device="cuda") for shape in ((512, 256), (512,))]
    y = torch.ops.fgcuda.block(x, *ones, 1.0)[1]
    y.sum().backward()
    assert x.grad is not None
    found, wanted = map(float, done.stdout.split()), (y.sum().item(), x.grad.abs().sum().item())
    torch.testing.assert_close(list(found), list(wanted), rtol=1e-2, atol=1e-2)
