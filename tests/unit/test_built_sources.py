"""``fusegen build --format sources``: CUDA files that plain nvcc compiles, with functions that launch them."""

from __future__ import annotations

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
    source = tmp_path / "made" / f"{name}_bf16_sm_90a.cu"
    command = [nvcc(), "-std=c++17", "-fmad=false", "-gencode", "arch=compute_90a,code=sm_90a", "-c", str(source)]
    done = subprocess.run([*command, "-o", str(tmp_path / "made.o")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{name}_bf16_sm_90a.cu" in (tmp_path / "made" / "CMakeLists.txt").read_text()


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
    function.write_text("import fusegen as fg\n\n\n@fg.kernel\ndef mine(x, seed):\n    return fg.dropout(x, 0.5, seed=seed)\n")
    assert build(tmp_path / "seed", f"{function}:mine", "--arch", "sm_90a", "--shape", "x=64x32", "--arg", "seed=7") == 1
    assert "seed as a number" in capsys.readouterr().err


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
    assert "int64_t half_stride1 FUSEGEN_INITIAL(0);  // a stride in elements, a multiple of 2" in header
    text = (tmp_path / "made" / "mixed_f32_sm_90a.cu").read_text()
    assert "if (s_half_stride1 < 0 || s_half_stride1 % 2) return cudaErrorInvalidValue;" in text
    assert "> INT32_MAX) return cudaErrorInvalidValue;" in text
