"""The CPU target end to end: traced functions through fusion, lowering, emission and the host compiler, against float64."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import CompileError
from fusegen.runtime.host_launch import host_kernels
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


def norm_gelu_add(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, b)) + r


def norm_backward(x: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5)
    xh, wdy = d * rstd, dy * w
    dx = rstd * (wdy - xh * (wdy * xh).mean(-1, keepdim=True) - wdy.mean(-1, keepdim=True))
    return dx, (dy * xh).sum(0), dy.sum(0)


# Pointwise.


@pytest.mark.parametrize("dtype", some((F32, BF16, F16, F64), [BF16]))
@pytest.mark.parametrize("shape", some([(37, 100), (3, 1), (2, 3, 4097)], [(37, 100)]))
def test_pointwise_chain_with_broadcast(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [torch.randn(size).to(dtype) for size in (shape, shape[-1:], shape)]
    check(lambda x, b, r: F.gelu(x + b, approximate="tanh") + r, tuple(inputs))


def test_views_and_strided_inputs() -> None:
    x, y = torch.randn(33, 66), torch.randn(66, 33)
    check(
        lambda x, y: (
            (x.mT * 2 + y).relu(),
            torch.tanh(x[1::3, ::2]),
            x.reshape(11, 3, 66).permute(1, 2, 0).exp(),
            torch.cat((x[:5], x[7:] * 2, x[:1]), 0) + x[:1],
        ),
        (x, y),
        (torch.randn(66, 33).t(), y),
        (torch.randn(33, 1).expand(33, 66), y),
    )


# Rows.


@pytest.mark.parametrize("dtype", some((F32, BF16, F16, F64), [F16]))
def test_layer_norm_gelu_add(dtype: torch.dtype) -> None:
    """The number of columns is literal at first, and a value of each call then."""
    shapes = [((5, columns), (columns,), (columns,), (5, columns)) for columns in (64, 3, 100, 1000)]
    check(norm_gelu_add, *(tuple(torch.randn(shape).to(dtype) for shape in each) for each in shapes))


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


def test_values_of_the_row() -> None:
    x, s, m = torch.randn(7, 40), torch.randn(7, 1), torch.randn(7, 1)
    check(lambda x, s, m: F.layer_norm(x, (40,)) * s.exp() + x.sum(-1, keepdim=True) * (s + m), (x, s, m))


# Columns.


def test_column_sums() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(0), x.amax(0), x.sum(0, keepdim=True) + 1, x.sum((0, 1)), x.exp().sum((0, 1)), x * 2

    check(function, (torch.rand(5, 37, 100),), (torch.rand(2, 200, 100),))
    check(lambda x, s: ((x * s).sum(0), (x > s).to(torch.int64).sum(0)), (torch.randn(33, 70).t(), torch.randn(70, 1)))


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


# Names, text, calls.


def test_any_name_is_a_name() -> None:
    def maximum(count: Tensor, begin: Tensor, row: Tensor, exp_f32: Tensor, LANES: Tensor, last_row: Tensor, PARTS: Tensor) -> Any:
        return torch.maximum(count + row, begin.exp()) + exp_f32 - LANES, (last_row * PARTS).sum(0)

    x = torch.randn(5, 70)
    check(maximum, (x, x + 1, x * 2, x, x[:1], x, x + 1))


def test_text_is_readable() -> None:
    inputs = (torch.randn(shape) for shape in ((5, 100), (100,), (100,), (5, 100)))
    (source,) = fg.kernel(norm_gelu_add).lower(*inputs, target="cpu").sources
    assert source.language == "cpp" and f'extern "C" void {source.entry}(const void* arguments)' in source.pipeline
    assert "    \n" not in source.text and "\n\n\n" not in source.text and "i0 %" not in source.pipeline


def test_a_kernel_can_be_called_from_several_threads() -> None:
    kernel = check(lambda x: x.exp(), (torch.randn(100),), (torch.randn(101),))

    def call(seed: int) -> bool:
        x = torch.randn(1000 + seed)
        return all(torch.allclose(kernel(x), x.exp()) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(16)))


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
        host_kernels([Source("broken", "fg_broken", "cpp", "", "", "", "nonsense;")])
