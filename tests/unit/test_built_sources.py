"""``fusegen build --format sources``: CUDA files that plain nvcc compiles, with functions that launch them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fusegen.cli.main import main
from tests.unit.test_generated import nvcc


def build(out: Path, *words: str) -> int:
    return main(["build", *words, "--format", "sources", "--library", "mine", "--out", str(out)])


@pytest.mark.deep  # the gate compiles the example of the documents
@pytest.mark.skipif(sys.platform != "linux", reason="nvcc of PyPI needs a host compiler that only Linux is sure to have")
@pytest.mark.parametrize("name", ["swiglu", "flash_attention"])
def test_nvcc_compiles_them(name: str, tmp_path: Path) -> None:
    assert build(tmp_path / "made", name, "--arch", "sm_90a", "--dtype", "bf16") == 0
    compile_by_nvcc(tmp_path / "made" / f"{name}_bf16_sm_90a.cu", "sm_90a")
    assert f"{name}_bf16_sm_90a.cu" in (tmp_path / "made" / "CMakeLists.txt").read_text()


def compile_by_nvcc(source: Path, arch: str) -> None:
    code = f"arch={arch.replace('sm', 'compute')},code={arch}"
    command = [nvcc(), "-std=c++17", "-fmad=false", "-gencode", code, "-c", str(source), "-o", str(source.with_suffix(".o"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_header_says_what_a_call_must_be(tmp_path: Path) -> None:
    assert build(tmp_path / "made", "softmax", "--arch", "sm_90a", "--dtype", "bf16") == 0
    header = (tmp_path / "made" / "softmax_bf16_sm_90a.h").read_text()
    assert "temperature == 1.0" in header
    assert "int64_t input_dim0 FUSEGEN_INITIAL(0);  // a size, 1 or more" in header
    assert "void* out FUSEGEN_INITIAL(nullptr);  // bfloat16 of input_dim0 x 4096, aligned to 16 bytes" in header
    assert "double temperature FUSEGEN_INITIAL(1.0);  // a number; 1.0 by default" in header


def test_what_sources_cannot_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(tmp_path / "cpu", "softmax", "--arch", "cpu") == 1
    assert "--format sources supports GPUs only" in capsys.readouterr().err
    function = tmp_path / "mine.py"
    function.write_text("import fusegen as fg\n\n\n@fg.kernel\ndef mine(x, w):\n    return x.float() @ w.float()\n")
    words = [f"{function}:mine", "--shape", "x=64x32", "--shape", "w=32x16"]
    assert build(tmp_path / "product", *words, "--arch", "sm_80") == 1
    assert "1 library matmul, but plain sources contain kernels only" in capsys.readouterr().err
    assert not (tmp_path / "product").exists()
    function.write_text("import fusegen as fg\n\n\n@fg.kernel(plan='library')\ndef mine(x, w):\n    return (x @ w).relu()\n")
    assert build(tmp_path / "declared", *words, "--arch", "sm_90a", "--dtype", "bf16") == 1
    assert "without plan='library'" in capsys.readouterr().err
    assert main(["build", "softmax", "--format", "sources", "--library", "all", "--out", str(tmp_path / "all")]) == 2
    assert "CMake reserves the name 'all'" in capsys.readouterr().err
    function.write_text("import fusegen as fg\n\n\n@fg.kernel\ndef mine(x, seed):\n    return fg.dropout(x, 0.5, seed=seed)\n")
    assert build(tmp_path / "seed", f"{function}:mine", "--arch", "sm_90a", "--shape", "x=64x32", "--arg", "seed=7") == 1
    assert "leave seed= out" in capsys.readouterr().err
    function.write_text("import fusegen as fg\n\n\n@fg.kernel\ndef mine(x):\n    return fg.dropout(x, 0.5)\n")
    assert build(tmp_path / "key", f"{function}:mine", "--arch", "sm_90a", "--dtype", "f32", "--shape", "x=64x32") == 0
    assert "const void* random_key" in (tmp_path / "key" / "mine_f32_sm_90a.h").read_text()


SCALED = """
import fusegen as fg
from torch import Tensor

@fg.kernel
def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w
"""


def test_kinds_have_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(SCALED)
    command = ["build", f"{tmp_path / 'kernels.py'}:scaled", "--format", "sources", "--arch", "sm_90a", "--dtype", "i64,i32"]
    assert main([*command, "--shape", "x=8x16", "w=16", "--out", str(tmp_path / "ints")]) == 0
    assert {path.name for path in (tmp_path / "ints").glob("*.cu")} == {"scaled_i64_sm_90a.cu", "scaled_i32_sm_90a.cu"}
    assert main([*command, "--shape", "x=8x16", "w=16:f32", "--out", str(tmp_path / "mixed")]) == 0
    assert {path.name for path in (tmp_path / "mixed").glob("*.cu")} == {"scaled_f32_sm_90a.cu", "scaled_f32_sm_90a_2.cu"}


def test_no_call_is_added_to_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error has the command that built it, which builds the same again."""
    (tmp_path / "kernels.py").write_text(SCALED)
    command = ["build", f"{tmp_path / 'kernels.py'}:scaled", "--format", "sources", "--arch", "sm_90a,sm_80"]
    command += ["--call", "x=8x16,w=16:f32", "--call", "x=8x16,w=8x16", "--dtype", "f16", "--library", "mine"]
    assert main([*command, "--out", str(tmp_path / "made")]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert main([*command, "--out", str(tmp_path / "made")]) == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()} == before
    error = capsys.readouterr().err
    fusegen, *words = shlex.split(error.partition("these were built by: ")[2])
    assert "calls can be added only to a bundle" in error and fusegen == "fusegen" and str(tmp_path) not in " ".join(words)
    words = [str(tmp_path / word) if word == "kernels.py:scaled" else word for word in words]
    assert main([*words, "--out", str(tmp_path / "again")]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == before


STRIDED = """
import fusegen as fg
import torch
from torch import Tensor

table, half = torch.randn(64, 64).t(), torch.randn(64, 128)[:, ::2]

@fg.kernel
def mixed(x: Tensor, lr: float) -> Tensor:
    return x * table + half * lr
"""


def test_strides_of_captured_tensors_are_fields_with_rules(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(STRIDED)
    words = [f"{tmp_path / 'kernels.py'}:mixed", "--shape", "x=64x64", "--arg", "lr=0.5"]
    assert build(tmp_path / "made", *words, "--arch", "sm_90a", "--dtype", "f32") == 0
    header = (tmp_path / "made" / "mixed_f32_sm_90a.h").read_text()
    assert "float32 of 64 x 64 with strides [1, table_stride1], aligned to 16 bytes" in header
    assert "int64_t half_stride1 FUSEGEN_INITIAL(0);  // a stride in elements, 1 or more, a multiple of 2" in header
    text = (tmp_path / "made" / "mixed_f32_sm_90a.cu").read_text()
    assert "if (s_half_stride1 % 2) return cudaErrorInvalidValue;" in text
    assert "< int64_t(2147483647))) return cudaErrorInvalidValue;" in text
    assert "% 1)" not in text


CLASHING = """
import fusegen as fg
import torch
from torch import Tensor

half = torch.randn(64, 128)[:, ::2]

@fg.kernel
def clash(x: Tensor, workspace: Tensor, unused: Tensor, class_: float, NULL: float, x_dim0: float, half_stride1: float) -> Tensor:
    return x * class_ + workspace * x_dim0 + half.sum(0) * half_stride1 + NULL
"""

STUBS = """
#define INVALID(change) { clash_f32_sm_90a_arguments a = right; change; printf("%d ", clash_f32_sm_90a(&a, nullptr)); }

static char memory[64];
static int launched = 0;
extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return ++launched, cudaSuccess; }
extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

int main() {
  void* const at = memory + (16 - reinterpret_cast<size_t>(memory) % 16) % 16;
  clash_f32_sm_90a_arguments right;
  right.x = right.workspace = right.half = at;
  right.out = at;
  right.x_dim0_2 = 4;
  right.half_stride1_2 = 2;
  right.x_dim0 = right.half_stride1 = right.class_ = right.NULL_ = 0.5;
  size_t bytes = 1;
  const int sized = clash_f32_sm_90a_workspace(&right, &bytes);
  right.workspace_2 = reinterpret_cast<void*>(256);
  const int valid = clash_f32_sm_90a(&right, nullptr);
  printf("%d %d %d %d | ", sized, valid, launched > 0, bytes > 0);
  launched = 0;
  INVALID(a.x_dim0_2 = 0)
  INVALID(a.x_dim0_2 = (int64_t(1) << 58) + 1)
  INVALID(a.x_dim0_2 = int64_t(1) << 25)
  INVALID(a.half_stride1_2 = 0)
  INVALID(a.half_stride1_2 = 3)
  INVALID(a.half_stride1_2 = (int64_t(1) << 58) + 2)
  INVALID(a.workspace_2 = nullptr)
  INVALID(a.workspace = nullptr)
  printf("%d %d %d | %d\\n", clash_f32_sm_90a(nullptr, nullptr), clash_f32_sm_90a_workspace(&right, nullptr),
         clash_f32_sm_90a_workspace(nullptr, &bytes), launched);
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA's headers of PyPI need a host compiler that only Linux is sure to have")
def test_fields_have_names_of_their_own_and_illegal_calls_launch_nothing(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(CLASHING)
    words = [f"{tmp_path / 'kernels.py'}:clash", "--shape", "x=32x64", "workspace=64", "unused=8x8"]
    numbers = [f"{name}=0.5" for name in ("class_", "NULL", "x_dim0", "half_stride1")]
    assert build(tmp_path / "made", *words, "--arch", "sm_90a", "--dtype", "f32", "--arg", *numbers) == 0
    header = (tmp_path / "made" / "clash_f32_sm_90a.h").read_text()
    assert "unused" not in header
    assert printed_by(tmp_path / "made", "clash_f32_sm_90a", STUBS) == f"0 0 1 1 | {'1 ' * 8}1 1 1 | 0\n"


def printed_by(made: Path, name: str, program: str) -> str:
    """Compiles a function for the host, without its kernels, with a program behind it, and returns its output."""
    text = (made / f"{name}.cu").read_text()
    host = re.sub(r"^namespace (kernel_\w+) \{.*?^\}  // namespace \1$", "", text, flags=re.DOTALL | re.MULTILINE)
    host = re.sub(r"reinterpret_cast<const void\*>\(&kernel_\w+::\w+\)", "nullptr", host)
    (made / "host.cpp").write_text(f"#include <stdio.h>\n{host}{program}")
    include = ["-isystem", str(Path(nvcc()).parents[1] / "include")]
    command = ["c++", "-std=c++17", *include, str(made / "host.cpp"), "-o", str(made / "host")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return subprocess.run([made / "host"], capture_output=True, text=True, check=True).stdout


CAPPED = """
import fusegen as fg
from torch import Tensor

@fg.kernel
def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(4, 1) for x in (k, v))
    return ((q @ k.mT * 0.125).tanh() * 5).softmax(-1) @ v
"""

STREAMS = """
static int capture = 0;
extern "C" cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
extern "C" cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* number,
                                                cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (stream == cudaStreamLegacy || !stream) return cudaErrorStreamCaptureImplicit;
  *number = capture;
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void** arguments) {
  printf("%d ", int(*static_cast<int64_t*>(arguments[COUNTER])));
  return cudaSuccess;
}

int main() {
  capped_bf16_sm_80_arguments a;
  a.q = a.k = a.v = a.out = a.workspace = reinterpret_cast<void*>(256);
  a.q_dim0 = a.k_dim2 = 4;
  const auto on = [&](cudaStream_t stream) { if (int status = capped_bf16_sm_80(&a, stream)) printf("failed: %d ", status); };
  const cudaStream_t one = reinterpret_cast<cudaStream_t>(256), two = reinterpret_cast<cudaStream_t>(512);
  for (cudaStream_t stream : {one, two, one, cudaStream_t(nullptr), cudaStreamLegacy}) on(stream);
  for (capture = 7; capture < 9; ++capture) on(one), on(two), on(one);
  capture = 0;
  on(one);
  std::thread([&] { on(cudaStreamPerThread); on(one); on(cudaStreamPerThread); }).join();
  on(cudaStreamPerThread);
  while (true) {
    ++capture;
    int64_t number = 0;
    if (cudaError_t status = fg::counter_of(number, one)) return printf("| %d %d", capture > 65000, status), 0;
  }
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA's headers of PyPI need a host compiler that only Linux is sure to have")
def test_streams_and_captures_have_counters_of_their_own(tmp_path: Path) -> None:
    """In a kernel whose blocks wait for others of their launch."""
    (tmp_path / "kernels.py").write_text(CAPPED)
    shapes = ["--shape", "q=2x16x1x64", "--shape", "k=2x4x600x64", "--shape", "v=2x4x600x64"]
    assert build(tmp_path / "made", f"{tmp_path / 'kernels.py'}:capped", "--arch", "sm_80", "--dtype", "bf16", *shapes) == 0
    text = (tmp_path / "made" / "capped_bf16_sm_80.cu").read_text()
    number = re.search(r"fg::counter_of\(a(\d+), stream\)", text)
    assert number is not None
    program = f"#include <thread>\n{STREAMS.replace('COUNTER', number[1])}"
    printed = printed_by(tmp_path / "made", "capped_bf16_sm_80", program)
    assert printed == "0 1 0 2 2 3 4 3 5 6 5 0 7 0 7 8 | 1 701"


LARGE = """
import fusegen as fg
from torch import Tensor

@fg.kernel
def large(x: Tensor) -> Tensor:
    centered = x - x.mean(1, keepdim=True)
    return centered.sum(0) * x.float().cumsum(1)
"""

SIZES = """
extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  printf("launched ");
  return cudaSuccess;
}
extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

int main() {
  large_f32_sm_90a_arguments a;
  a.x = a.out = a.workspace = reinterpret_cast<void*>(256);
  for (int64_t rows : {int64_t(600'000), int64_t(1) << 31, int64_t(1) << 44, int64_t(1) << 60}) {
    a.x_dim0 = rows;
    size_t bytes = 0;
    const int sized = large_f32_sm_90a_workspace(&a, &bytes);
    printf("%d %d %d | ", sized, bytes > size_t(rows), large_f32_sm_90a(&a, nullptr));
  }
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA's headers of PyPI need a host compiler that only Linux is sure to have")
def test_tensors_of_more_than_2_31_elements(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(LARGE)
    words = [f"{tmp_path / 'kernels.py'}:large", "--arch", "sm_90a", "--dtype", "f32", "--shape", "x=600000x4096"]
    assert build(tmp_path / "made", *words) == 0
    assert "fewer than 2^56 elements" in (tmp_path / "made" / "large_f32_sm_90a.h").read_text()
    printed = printed_by(tmp_path / "made", "large_f32_sm_90a", SIZES)
    assert printed == f"launched launched launched 0 1 0 | {'1 0 1 | ' * 3}"


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="nvcc of PyPI needs a host compiler that only Linux is sure to have")
def test_nvcc_compiles_counters_and_64_bit_indices(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(f"{LARGE}{CAPPED}")
    for name, arch, shapes in (
        ("large", "sm_90a", ["x=600000x4096:f32"]),
        ("capped", "sm_80", ["q=2000x16x1x64", "k=2000x4x6000x64", "v=2000x4x6000x64"]),
    ):
        words = [f"{tmp_path / 'kernels.py'}:{name}", "--arch", arch, *(word for shape in shapes for word in ("--shape", shape))]
        assert build(tmp_path / name, *words) == 0
        (source,) = (tmp_path / name).glob("*.cu")
        compile_by_nvcc(source, arch)
