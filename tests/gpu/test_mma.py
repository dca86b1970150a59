"""Products and attention by warps on a GPU of any age: what is lowered for sm_80, compiled for the device that is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen import target as targets
from fusegen.compiler.backends import machine_of
from fusegen.target import Target
from tests.emulator import test_epilogues as small
from tests.emulator.tensor_cores import Call, bound
from tests.emulator.test_copied_queries import capped
from tests.emulator.test_tensor_cores import bias_relu
from tests.emulator.test_weights import channels
from tests.gpu import test_epilogues as gpu
from tests.gpu.accuracy import check

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WARPS = ("mma.sync",)
"""The pipelines that these tests want of any machine."""


def by_warps(function: Callable[..., Any], arguments: Sequence[Any], machine: Target | None = None) -> Call:
    """A call by the pipeline of warps, lowered for the device that is there or for another machine."""
    device = torch.device("cuda", torch.cuda.current_device())
    own = machine_of(device)
    return bound(function, arguments, replace(machine or own.target, products=WARPS), device, own)


def judge(function: Callable[..., Any], *arguments: Tensor, machine: Target | None = None) -> None:
    """The accuracy rule, and the same bits again."""
    call = by_warps(function, arguments, machine)
    found, eager, wanted = call(), function(*arguments), function(*(a.double() for a in arguments))
    for got, theirs, exact in zip(*(t if isinstance(t, tuple) else (t,) for t in (found, eager, wanted)), strict=True):
        check(got, theirs, exact)
    again = call()
    for got, same in zip(*(t if isinstance(t, tuple) else (t,) for t in (found, again)), strict=True):
        assert torch.equal(got, same)


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, device="cuda") / shape[-1] ** 0.5).to(dtype)


OLDER = pytest.mark.parametrize("machine", [t for t in targets.cuda_targets() if not t.wgmma], ids=lambda t: t.name)


@OLDER
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("rows", [1, 16, 4096])
def test_plans_of_every_machine(machine: Target, rows: int, dtype: torch.dtype) -> None:
    shapes = ((rows, 4096), (4096, 4096), (4096,))
    judge(bias_relu, *(randn(*shape, dtype=dtype) for shape in shapes), machine=machine)


@OLDER
@pytest.mark.parametrize("rows", [1, 64])
def test_weights_computed_on_load(machine: Target, rows: int) -> None:
    weights = torch.randint(-128, 128, (4096, 4096), dtype=torch.int8, device="cuda")
    scales = (torch.rand(4096, device="cuda") / 64 + 1 / 64).to(BF16)
    x = randn(rows, 4096)
    got, wanted = by_warps(channels, (x, weights, scales), machine)(), channels(x, weights, scales)
    torch.testing.assert_close(got, wanted, rtol=2.0**-6, atol=2.0**-6 * wanted.abs().max().item())


@OLDER
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(32, 8, 128), (16, 4, 256), (4, 4, 72)])
def test_few_queries_of_every_machine(machine: Target, heads: int, kv_heads: int, width: int) -> None:
    q, k, v = (torch.randn(3, n, m, width, device="cuda").to(BF16) for n, m in ((heads, 1), (kv_heads, 1000), (kv_heads, 1000)))
    judge(capped, q, k, v, machine=machine)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 2, 3), (3, 8, 8), (129, 129, 33), (1000, 1001, 999), (5000, 4104, 72)])
def test_odd_sizes(rows: int, columns: int, depth: int) -> None:
    judge(bias_relu, randn(rows, depth), randn(columns, depth), randn(columns))


@pytest.mark.parametrize("a_major", ["k", "m"])
@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1024, 1536, 2048), (1023, 1535, 2047)])
def test_operands_contiguous_along_either_dim(a_major: str, b_major: str, rows: int, columns: int, depth: int) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu((x if a_major == "k" else x.mT) @ (w.mT if b_major == "k" else w))

    judge(
        function,
        randn(*((rows, depth) if a_major == "k" else (depth, rows))),
        randn(*((columns, depth) if b_major == "k" else (depth, columns))),
    )


@pytest.mark.parametrize("function", gpu.LARGE, ids=lambda f: f.__name__)
def test_epilogues_of_models(function: Callable[..., Any]) -> None:
    arguments = gpu.LARGE[function]()
    small.compare(by_warps(function, arguments)(), function(*(a.double() for a in arguments)))
