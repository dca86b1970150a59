"""Built kernels on a GPU: the bits of those that are declared; tensor maps, much shared memory, streams, devices."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.bundle.build import BuildRequest, build
from fusegen.compiler.parameters import Parameters
from fusegen.errors import ArgumentError, BundleError
from fusegen.runtime.devices import target_of
from tests.gpu.test_threads_and_devices import KINDS, Function, attention, bias_silu, inputs, linear_relu, norm
from tests.unit.bundles import CASES, equal
from tests.unit.test_bundle import ALONE, ROOT

FUNCTIONS = (attention, bias_silu, linear_relu, norm)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds of kernels, for this GPU."""
    here = target_of(torch.device("cuda"))
    out = tmp_path_factory.mktemp("bundle") / "kernels"
    wanted = []
    for function in FUNCTIONS:
        shown = [tensor.to("meta") for tensor in inputs(function, 0)]
        wanted.append(
            BuildRequest(function.__name__, function, dict(zip(Parameters.of(function).user_names, shown, strict=True)), here)
        )
    build(out, wanted, fg.__version__)
    return out


@KINDS
def test_bits_of_a_declared_kernel(function: Function, folder: Path) -> None:
    kernel, declared = fg.load(folder)[function.__name__], fg.kernel(function)
    for seed in range(3):
        given = inputs(function, seed)
        assert torch.equal(kernel(*given), declared(*given))


@KINDS
def test_another_stream_and_a_cuda_graph(function: Function, folder: Path) -> None:
    kernel, given = fg.load(folder)[function.__name__], inputs(function, 0)
    expected = kernel(*given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        late = kernel(*[tensor.mul(1.0) for tensor in given])
    side.synchronize()
    assert torch.equal(late, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(*given)
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("name", CASES)
def test_numbers_structures_and_workspaces(name: str, tmp_path: Path) -> None:
    function, made, other = CASES[name]
    here = target_of(torch.device("cuda"))
    given = dict(zip(Parameters.of(function).user_names, made, strict=False))
    build(tmp_path / "kernels", [BuildRequest(name, function, given, here)], fg.__version__)
    kernel = fg.load(tmp_path / "kernels")[name]
    on_gpu = [value.cuda() if isinstance(value, Tensor) else value for value in other]
    assert equal(fg.kernel(function)(*on_gpu), kernel(*on_gpu))


def test_a_process_without_sympy_jinja_and_our_compiler(folder: Path, tmp_path: Path) -> None:
    calls = {function.__name__: inputs(function, 5) for function in FUNCTIONS}
    (tmp_path / "calls").write_bytes(pickle.dumps(calls))
    command = [sys.executable, "-c", ALONE, str(folder), str(tmp_path / "calls"), str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results", weights_only=True)
    assert all(torch.equal(results[f.__name__][0], fg.kernel(f)(*calls[f.__name__])) for f in FUNCTIONS)


def test_machine_code_that_is_not_for_this_gpu(folder: Path) -> None:
    kernel = fg.load(folder).bias_silu
    with pytest.raises(ArgumentError, match="was not built for cpu"):
        kernel(*[tensor.cpu() for tensor in inputs(bias_silu, 0)])


def test_a_binary_that_changes_after_the_folder_was_loaded(folder: Path) -> None:
    kernel = fg.load(folder).bias_silu
    (path,) = (path for path in (folder / "bias_silu").rglob("*.cubin") if "ward" not in path.parent.name)
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1] + b"\xff")
        with pytest.raises(BundleError, match="was modified after the build"):
            kernel(*inputs(bias_silu, 0))
    finally:
        path.write_bytes(content)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@KINDS
def test_two_devices(function: Function, folder: Path) -> None:
    kernel = fg.load(folder)[function.__name__]
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        given = inputs(function, 0, device)
        result = kernel(*given)
        assert result.device == torch.device(device)
        assert torch.equal(result, fg.kernel(function)(*given))
