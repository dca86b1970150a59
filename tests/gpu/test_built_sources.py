"""Functions that ``fusegen build --format sources`` writes, compiled by nvcc, called through C."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusegen.cli.main import main
from tests.unit.eager import randn

NVCC = shutil.which("nvcc")


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc here")
def test_results_are_those_of_float64(tmp_path: Path) -> None:
    out = tmp_path / "made"
    command = ["build", "softmax", "flash_attention", "--format", "sources", "--library", "mine", "--arch", "sm_90a"]
    assert main([*command, "--dtype", "bf16", "--out", str(out)]) == 0
    library = tmp_path / "mine.so"
    flags = ["-std=c++17", "-fmad=false", "-gencode", "arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run([str(NVCC), *flags, *map(str, out.glob("*.cu")), "-o", str(library)], check=True)
    functions = ctypes.CDLL(str(library))

    x = randn(1000, 4096).cuda().bfloat16()
    y = torch.empty_like(x)
    call(functions.softmax_bf16_sm_90a, out / "softmax_bf16_sm_90a.h", input=x, out=y, input_dim0=1000, temperature=bits(1.0))
    torch.testing.assert_close(y, torch.softmax(x.double(), -1).bfloat16(), rtol=2**-7, atol=0)

    q, k, v = (randn(2, 16, 512, 128).cuda().bfloat16() for _ in range(3))
    y = torch.empty_like(q)
    sizes = {"q_dim0": 2, "q_dim1": 16, "q_dim2": 512, "k_dim2": 512, "offset": 0, "p": bits(0.0)}
    call(functions.flash_attention_bf16_sm_90a, out / "flash_attention_bf16_sm_90a.h", q=q, k=k, v=v, out=y, **sizes)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(y, wanted.bfloat16(), rtol=2**-6, atol=1e-3)


def bits(number: float) -> int:
    """A double as the word that holds it."""
    return int.from_bytes(struct.pack("=d", number), sys.byteorder)


def call(function: ctypes._NamedFuncPointer, header: Path, **given: torch.Tensor | int) -> None:
    """Calls a function with the fields of its header in their order."""
    body = header.read_text().partition("_arguments {\n")[2].partition("};")[0]
    names = [line.partition(" FUSEGEN_INITIAL(")[0].split()[-1] for line in body.splitlines()]
    values = [given[name] for name in names]
    words = (ctypes.c_int64 * len(values))(*(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values))
    assert function(words, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)) == 0
    torch.cuda.synchronize()
