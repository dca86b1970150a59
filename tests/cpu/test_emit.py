"""The CPU target end to end: traced functions through fusion, lowering, emission and the host compiler, against float64."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.compiler.backends import host_kernels
from fusegen.errors import CompileError
from fusegen.source import Source
from tests.unit.gate import some

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
TOLERANCE = {F32: 2e-5, F64: 1e-12, BF16: 2.0**-8, F16: 2.0**-10}


def check(function: Callable[..., Any], *calls: tuple[Tensor, ...]) -> fg.Kernel[..., Any]:
    """Results are those of float64: exactly for integers and bools, to the precision of the type for floats."""
    kernel = fg.kernel(function)
    for inputs in calls:
        found, wanted = listed(kernel(*inputs)), listed(function(*(x.double() if x.is_floating_point() else x for x in inputs)))
        for got, want in zip(found, wanted, strict=True):
            assert got.shape == want.shape
            bound = TOLERANCE.get(got.dtype, 0.0)
            torch.testing.assert_close(got.to(want.dtype), want, rtol=bound, atol=bound, equal_nan=True)
    return kernel


def listed(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def norm_backward(x: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5)
    xh, wdy = d * rstd, dy * w
    dx = rstd * (wdy - xh * (wdy * xh).mean(-1, keepdim=True) - wdy.mean(-1, keepdim=True))
    return dx, (dy * xh).sum(0), dy.sum(0)


# Rows.


def test_softmax_of_infinities_and_nan() -> None:
    x = torch.randn(4, 70) * 8
    x[0, 3], x[1, :], x[2, 68] = -math.inf, -math.inf, math.nan
    check(lambda x: torch.softmax(x, -1), (x,))


@pytest.mark.parametrize("shape", some([(11, 257), (11, 1), (1, 257), (4, 5, 64)], [(11, 257)]))
def test_row_outputs(shape: tuple[int, ...]) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        h = torch.relu(x)
        return h, h.sum(-1), h.amax(-1, keepdim=True), x.amin(-1), torch.logsumexp(x, -1), (x > 0).sum(-1)

    check(function, (torch.randn(shape),))


# Columns.


def test_long_column_sums_stay_accurate() -> None:
    x = torch.rand(1 << 17, 3)
    torch.testing.assert_close(fg.kernel(lambda x: x.sum(0))(x).double(), x.double().sum(0), rtol=1e-6, atol=0)


def test_column_sums_beside_rows_do_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    for columns in (100, 257):
        inputs = torch.randn(300, columns), torch.randn(300, columns), torch.randn(columns)
        kernel = check(norm_backward, inputs)
        found = []
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                found.append(kernel(*inputs))
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Calls.


@pytest.mark.parametrize("dtype", some([F32, F64], [F64]))
def test_a_thread_with_a_small_stack(dtype: torch.dtype) -> None:
    """In a process of its own: an overflow would end it."""
    text = (
        "import threading, torch, fusegen as fg\n"
        "kernel = fg.kernel(lambda x: (g := torch.tanh(x)) / (g * g).sum(-1, keepdim=True))\n"
        f"x = torch.randn(3, 65536, dtype={dtype})\n"
        "kernel(x)\n"
        "threading.stack_size(256 << 10)\n"
        "thread = threading.Thread(target=kernel, args=(x,))\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", text], check=True, env=environment)


def test_refused_text_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="nonsense"):
        host_kernels([Source("broken", "fg_broken", "cpp", "", (), "", "nonsense;")])
