"""The CPU target end to end: traced functions through fusion, lowering, emission and the host compiler, against float64."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import struct
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

from fusegen.errors import CompileError
from fusegen.runtime.host_launch import host_flags, host_kernels
from fusegen.source import Source

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

Run = Callable[..., Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check(ran: Any) -> Any:
    """Results equal the oracle's: exactly for integers and bools, to the precision of the type for floats."""
    for got, want in zip(ran.results, ran.wanted, strict=True):
        assert got.shape == want.shape
        bound = TOLERANCE.get(got.dtype, 0.0)
        torch.testing.assert_close(got.to(want.dtype), want, rtol=bound, atol=bound, equal_nan=True)
    return ran


def gelu_add(x: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(x + b, approximate="tanh") + r


def norm_gelu_add(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, b)) + r


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return F.rms_norm(h, (h.shape[-1],), w), h


def norm_backward(x: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5)
    xh, wdy = d * rstd, dy * w
    dx = rstd * (wdy - xh * (wdy * xh).mean(-1, keepdim=True) - wdy.mean(-1, keepdim=True))
    return dx, (dy * xh).sum(0), dy.sum(0)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., h:], x[..., :h]), -1) * sin


def rope_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def masked(x: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.where(m & (x > 0), x, -x * 0.5), m | (x < 1), x > 0


def integers(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return a // b, a % b, a * b - a.abs(), torch.maximum(a, b), torch.sign(a), a**2


def mixed(x: Tensor, i: Tensor, m: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return x * i + m, d + x, i.float() / 3


def row_outputs(x: Tensor) -> tuple[Tensor, ...]:
    h = torch.relu(x)
    return h, h.sum(-1), h.amax(-1, keepdim=True), x.amin(-1), torch.logsumexp(x, -1)


def leading_sums(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(0), x * 2


# Pointwise.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(37, 100), (5, 64), (3, 1), (1, 1), (2, 3, 4097)])
def test_pointwise_chain_with_broadcast(run: Run, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ran = check(run(gelu_add, x=torch.randn(shape).to(dtype), b=torch.randn(shape[-1]).to(dtype), r=torch.randn(shape).to(dtype)))
    assert ran.kinds == ["pointwise"]


def test_pointwise_shared_among_threads(run: Run) -> None:
    check(run(gelu_add, x=torch.randn(600, 500), b=torch.randn(500), r=torch.randn(600, 500)))
    check(run(gelu_add, x=torch.randn(300_001), b=torch.randn(1), r=torch.randn(300_001)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [rope, rope_pairs])
def test_rotary_embedding(run: Run, function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    half = 2 if function is rope_pairs else 1
    x, cos, sin = torch.randn(2, 3, 7, 64).to(dtype), torch.randn(7, 64 // half), torch.randn(7, 64 // half)
    check(run(function, x=x, cos=cos, sin=sin))
    check(run(function, {"x": ("B", None, "S", None), "cos": ("S", None), "sin": ("S", None)}, x=x, cos=cos, sin=sin))


def test_views(run: Run) -> None:
    x = torch.randn(33, 66)
    check(run(lambda x, y: (x.mT * 2 + y).relu(), x=x, y=torch.randn(66, 33)))
    check(run(lambda x: torch.tanh(x[1::3, ::2]), x=x))
    check(run(lambda x: (x.reshape(11, 3, 66).permute(1, 2, 0).exp(), x.flatten() + 1), x=x))
    check(run(lambda x: torch.cat((x[:5], x[7:] * 2, x[:1]), 0) + x[:1], x=x))


@pytest.mark.parametrize("x", [torch.randn(66, 33).t(), torch.randn(33, 132)[:, ::2], torch.randn(33, 1).expand(33, 66)])
def test_strided_inputs(run: Run, x: Tensor) -> None:
    check(run(lambda x, y: torch.exp(x) - y, x=x, y=torch.randn(33, 66)))


@pytest.mark.parametrize(
    "shapes", [((33, 1), (33, 1)), ((), ()), ((33, 1), (1, 65)), ((2, 3, 4, 5, 6), (2, 1, 4, 1, 6)), ((9, 3), (3,))]
)
def test_broadcasts(run: Run, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    check(run(lambda x, y: x + y, x=torch.randn(shapes[0]), y=torch.randn(shapes[1])))


def test_bool_and_where(run: Run) -> None:
    check(run(masked, x=torch.randn(7, 130), m=torch.randn(7, 130) > 0))
    check(run(masked, x=torch.randn(7, 130), m=torch.randn(130) > 0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_integers(run: Run, dtype: torch.dtype) -> None:
    check(run(integers, a=torch.randint(-9, 9, (3, 70), dtype=dtype), b=torch.randint(1, 9, (3, 70), dtype=dtype)))


def test_mixed_types(run: Run) -> None:
    inputs = {"x": torch.randn(9, 50).bfloat16(), "i": torch.randint(0, 9, (9, 50), dtype=torch.uint8)}
    check(run(mixed, **inputs, m=torch.randn(9, 50) > 0, d=torch.randn(9, 1).double()))


def test_scalars(run: Run) -> None:
    check(run(lambda x, alpha: x * alpha + 1, None, {"alpha": 0.3}, x=torch.randn(9, 50)))


# Rows.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 3, 16, 64, 100, 1000])
def test_layer_norm_gelu_add(run: Run, columns: int, dtype: torch.dtype) -> None:
    x, r, w, b = (torch.randn(shape).to(dtype) for shape in ((5, columns), (5, columns), (columns,), (columns,)))
    assert check(run(norm_gelu_add, x=x, w=w, b=b, r=r)).kinds == ["row reduction"]
    names = {"x": ("R", "K"), "w": ("K",), "b": ("K",), "r": ("R", "K")}
    check(run(norm_gelu_add, names, x=x, w=w, b=b, r=r))


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax(run: Run, dtype: torch.dtype) -> None:
    check(run(softmax, x=torch.randn(7, 300).to(dtype) * 8))
    check(run(softmax, x=torch.randn(300, 4, 33).to(dtype)))
    check(run(lambda x: torch.softmax(x, 1), x=torch.randn(4, 6, 50).to(dtype)))


def test_softmax_of_infinities_and_nan(run: Run) -> None:
    x = torch.randn(4, 70)
    x[0, 3], x[1, :], x[2, 68] = -math.inf, -math.inf, math.nan
    check(run(softmax, x=x))


def test_causal_softmax(run: Run) -> None:
    def causal(x: Tensor) -> Tensor:
        i, j = torch.arange(x.shape[-2]), torch.arange(x.shape[-1])
        return torch.softmax(torch.where(j <= i[:, None], x, -math.inf), -1)

    check(run(causal, x=torch.randn(3, 40, 40)))


def test_two_outputs(run: Run) -> None:
    x, r, w = torch.randn(11, 257), torch.randn(11, 257), torch.randn(257)
    assert check(run(add_norm, x=x, r=r, w=w)).kinds == ["row reduction"]
    check(run(add_norm, {"x": ("R", None), "r": ("R", None)}, x=x.bfloat16(), r=r.bfloat16(), w=w.bfloat16()))


@pytest.mark.parametrize("shape", [(11, 257), (11, 1), (1, 257), (1, 1), (4, 5, 64)])
def test_row_outputs(run: Run, shape: tuple[int, ...]) -> None:
    check(run(row_outputs, x=torch.randn(shape)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_integer_reductions(run: Run, dtype: torch.dtype) -> None:
    x = torch.randint(-50, 50, (9, 77), dtype=dtype)
    check(run(lambda x: (x.sum(-1), x.amax(-1), x.amin(-1)), x=x))


def test_values_of_the_row(run: Run) -> None:
    x, s, m = torch.randn(7, 40), torch.randn(7, 1), torch.randn(7, 1)
    check(run(lambda x, s: torch.softmax(x * (s * 2 + 1), -1), x=x, s=s))
    check(run(lambda x, s, m: F.layer_norm(x, (40,)) * s.exp() + x.sum(-1, keepdim=True) * (s + m), x=x, s=s, m=m))
    check(run(lambda x, a, b: x - torch.cat((a, b), 0) - x.amax(-1, keepdim=True), x=x, a=s[:3], b=m[3:]))


@pytest.mark.parametrize("shape", [(4, 1), (4, 33), (33,), (7, 1, 33)])
def test_rows_of_several_dims(run: Run, shape: tuple[int, ...]) -> None:
    check(run(lambda x, w: (x / x.amax((1, 2), keepdim=True)) * w, x=torch.randn(7, 4, 33).abs() + 1, w=torch.randn(shape)))


def test_reduction_of_everything(run: Run) -> None:
    check(run(lambda x: x.sum(), x=torch.rand(11, 257)))


def test_products_of_the_library_between_kernels(run: Run) -> None:
    check(run(lambda x, w: torch.relu(x @ w) + 1, x=torch.randn(5, 6), w=torch.randn(6, 7)))
    q, k, v = torch.randn(3, 2, 3, 50, 16)
    check(run(lambda q, k, v: torch.softmax(q @ k.mT * 0.25, -1) @ v, q=q, k=k, v=v))


# Columns.


@pytest.mark.parametrize("shape", [(5, 37, 100), (1, 1, 1), (2, 200, 2100), (3000, 3)])
def test_column_sums(run: Run, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    check(run(lambda x: x.sum(0), x=x))
    check(run(lambda x: (x.amax(0), x.mean(0)), x=x))
    check(run(leading_sums, x=x))
    if x.dim() == 3:
        check(run(lambda x: ((x * 2).sum((0, 1)), x.exp().sum((0, 1))), x=x))
        check(run(leading_sums, {"x": ("A", "B", "C")}, x=x.bfloat16()))


def test_column_sums_of_strided_inputs(run: Run) -> None:
    check(run(lambda x, s: ((x * s).sum(0), (x > s).to(torch.int64).sum(0)), x=torch.randn(33, 70).t(), s=torch.randn(70, 1)))
    check(run(lambda x: x.mT.sum((0, 1)), x=torch.rand(5, 6, 77)))


def test_column_sums_stored_twice_and_of_two_shapes(run: Run) -> None:
    check(run(lambda x: (x.sum(0), x.sum(0, keepdim=True), x.sum(0) + 1), x=torch.rand(70, 33)))
    check(run(lambda x, y: (x.sum(0), y.sum(0)), x=torch.rand(70, 2, 33), y=torch.rand(70, 33)))
    check(run(lambda x: (x.sum(0).mT, x.sum(0)), x=torch.rand(70, 3, 33)))


def test_long_column_sums_stay_accurate(run: Run) -> None:
    ran = run(lambda x: x.sum(0), x=torch.rand(1 << 17, 3))
    torch.testing.assert_close(ran.results[0].double(), ran.wanted[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("columns", [1, 100, 257])
def test_layer_norm_backward(run: Run, columns: int) -> None:
    x, dy, w = torch.randn(300, columns), torch.randn(300, columns), torch.randn(columns)
    ran = check(run(norm_backward, x=x, dy=dy, w=w))
    apart = ["row reduction", "column reduction", "column reduction"]  # as on a GPU, where such rows start at places of their own
    assert ran.kinds == (["row and column reduction"] * 2 if columns % 4 == 0 else apart)
    check(run(norm_backward, {"x": ("R", None), "dy": ("R", None)}, x=x.bfloat16(), dy=dy.bfloat16(), w=w.bfloat16()))


def test_column_sums_do_not_depend_on_the_number_of_threads(run: Run) -> None:
    inputs = {"x": torch.randn(500, 257), "dy": torch.randn(500, 257), "w": torch.randn(257)}
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(run(norm_backward, **inputs).results)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Names, text, calls.


def test_any_name_is_a_name(run: Run) -> None:
    def maximum(count: Tensor, begin: Tensor, row: Tensor, exp_f32: Tensor, LANES: Tensor) -> Tensor:
        return torch.maximum(count + row, begin.exp()) + exp_f32 - LANES

    x = torch.randn(5, 70)
    check(run(maximum, count=x, begin=x + 1, row=x * 2, exp_f32=x, LANES=x[:1]))

    def each_chunk(last_row: Tensor, PARTS: Tensor) -> Tensor:
        return (last_row * PARTS).sum(0)

    check(run(each_chunk, last_row=x, PARTS=x + 1))


def test_text_is_deterministic_and_readable(run: Run) -> None:
    first, second = (
        run(norm_gelu_add, x=torch.randn(5, 100), w=torch.randn(100), b=torch.randn(100), r=torch.randn(5, 100)) for _ in "ab"
    )
    assert [s.text for s in first.sources] == [s.text for s in second.sources]
    source = first.sources[0]
    assert source.language == "cpp" and f'extern "C" void {source.entry}(const void* arguments)' in source.pipeline
    assert "    \n" not in source.text and "\n\n\n" not in source.text
    assert "i0 %" not in source.pipeline


def test_kernel_can_be_called_from_several_threads(run: Run) -> None:
    ran = run(lambda x: x.exp(), {"x": ("n",)}, x=torch.randn(100))
    kernel = host_kernels(ran.sources)[0]

    def call(seed: int) -> bool:
        x = torch.randn(1000 + seed)
        y = torch.empty_like(x)
        for _ in range(50):
            kernel(struct.pack("qqq", x.data_ptr(), y.data_ptr(), x.numel()))
        return torch.allclose(y, x.exp())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_thread_with_a_small_stack(dtype: torch.dtype) -> None:
    """In a process of its own: an overflow would end it."""
    text = (
        "import threading, torch, fusegen as fg\n"
        "calls = []\n"
        "for n in (16384, 32768, 65536):\n"
        "    kernel = fg.kernel(lambda x: (g := torch.tanh(x)) / (g * g).sum(-1, keepdim=True))\n"
        f"    calls.append((kernel, torch.randn(3, n, dtype={dtype})))\n"
        "    kernel(calls[-1][1])\n"
        "threading.stack_size(256 << 10)\n"
        "threads = [threading.Thread(target=kernel, args=(x,)) for kernel, x in calls]\n"
        "for thread in threads:\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", text], check=True, env=environment, timeout=120)


def test_flags_name_the_machine() -> None:
    assert any(flag.startswith("-DFG_MACHINE=m") for flag in host_flags())


def test_refused_text_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="nonsense"):
        host_kernels([Source("broken", "fg_broken", "cpp", "", "", "", "nonsense;")])


def test_entry_takes_packed_values() -> None:
    text = 'extern "C" void fg_sum(const void* a) { **(double**)a = ((long long*)a)[1] + ((double*)a)[2]; }'
    (kernel,) = host_kernels([Source("sum", "fg_sum", "cpp", "", "", "", text)])
    out = ctypes.c_double()
    kernel(struct.pack("qqd", ctypes.addressof(out), 2**40, 0.25))
    assert out.value == 2**40 + 0.25
