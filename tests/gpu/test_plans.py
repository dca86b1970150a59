"""`fg.tune` on a GPU: every plan gives one result, and what is kept is as right as what nobody measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.pointwise.plan import TilePlan
from fusegen.families.rows.plan import RowPlan
from fusegen.schedule.kernel import LIBRARY
from tests.gpu.accuracy import check_function

BF16 = torch.bfloat16


pytestmark = pytest.mark.usefixtures("own_cache")


def norm_gelu_add(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], w, b), approximate="tanh") + r


def _moments(x: Tensor) -> tuple[Tensor, ...]:
    var, mean = torch.var_mean(x, -1)
    return var, mean, x.amax(-1), x - x.amin(-1, keepdim=True)


def _norm_inputs(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = (rows, columns), (columns,), (columns,), (rows, columns)
    return tuple(torch.randn(shape, device="cuda").to(dtype) for shape in shapes)


@pytest.mark.parametrize("columns", [768, 5120, 11008, 20480, 50257, 65536])
def test_plans_of_rows(columns: int) -> None:
    kernel, inputs = fg.kernel(norm_gelu_add), _norm_inputs(300, columns, BF16)
    for launch in fg.tune(kernel, *inputs).launches:  # none where there is only one plan
        assert all(each.times is not None for each in launch.candidates), str(launch)
    check_function(kernel, norm_gelu_add, inputs)


@pytest.mark.parametrize(("rows", "columns"), [(64, 65536), (64, 100003), (37, 262144), (8, 1 << 20)])
@pytest.mark.parametrize(
    "function", [lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: F.softmax(x, -1), _moments], ids=["norm", "softmax", "moments"]
)
def test_plans_of_rows_that_blocks_share(function: Callable[..., Any], rows: int, columns: int) -> None:
    kernel, x = fg.kernel(lambda x: function(x)), torch.randn(rows, columns, device="cuda").to(BF16)
    (launch,) = fg.tune(kernel, x).launches
    assert all(each.times is not None for each in launch.candidates), str(launch)
    assert sum(isinstance(each.plan, RowPlan) and each.plan.cluster > 1 for each in launch.candidates) >= 2
    check_function(kernel, function, (x,))


def test_a_row_that_blocks_share_is_the_same_each_time() -> None:
    """Parts arrive in any order, and are combined in one."""

    def everywhere(x: Tensor) -> Tensor:
        return torch.logsumexp(x, -1, keepdim=True) + x * 0

    x = torch.randn(500, 65536, device="cuda")
    (launch,) = fg.tune(fg.kernel(everywhere), x).launches
    plans = [each.plan for each in launch.candidates if isinstance(each.plan, RowPlan) and each.plan.cluster > 1]
    assert plans
    for plan in plans:
        launch.pin(plan)
        kernel = fg.kernel(everywhere)
        first = kernel(x)
        assert (first == first[:, :1]).all()
        assert all(torch.equal(kernel(x), first) for _ in range(50))


@pytest.mark.parametrize("function", [F.gelu, lambda x: F.softmax(x, -1), lambda x: (x * 2).sum(0)], ids=["gelu", "softmax", "sum"])
@pytest.mark.parametrize("shape", [(1, 4096), (4096, 4096), (333, 1001)])
def test_plans_of_other_kinds(function: Callable[..., Any], shape: tuple[int, int]) -> None:
    kernel, x = fg.kernel(lambda x: function(x)), torch.randn(shape, device="cuda")
    for launch in fg.tune(kernel, x).launches:
        assert all(each.times is not None for each in launch.candidates), str(launch)
    check_function(kernel, function, (x,))


def _tuned_in_tiles(kernel: fg.Kernel[..., Any], *inputs: Tensor) -> None:
    (launch,) = fg.tune(kernel, *inputs).launches
    assert any(isinstance(each.plan, TilePlan) for each in launch.candidates)
    assert all(each.times is not None for each in launch.candidates), str(launch)


@pytest.mark.parametrize("dtype", [torch.int8, BF16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4096, 1024), (3001, 64), (5, 333, 77)], ids=str)
def test_plans_of_transposed_copies(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kernel, x = fg.kernel(lambda x: x.mT.contiguous()), torch.randint(-99, 99, shape, device="cuda").to(dtype)
    _tuned_in_tiles(kernel, x)
    assert torch.equal(kernel(x), x.mT)


@pytest.mark.parametrize("shape", [(4096, 1024), (3001, 64), (5, 333, 77)], ids=str)
def test_plans_of_points_that_lie_across(shape: tuple[int, ...]) -> None:
    kernel = fg.kernel(lambda x, y: F.gelu(x.mT) + y)
    inputs = torch.randn(shape, device="cuda").to(BF16), torch.randn(shape, device="cuda").mT.contiguous()
    _tuned_in_tiles(kernel, *inputs)
    check_function(kernel, kernel.function, inputs)


@pytest.mark.parametrize("shape", [(1024, 50257), (333, 1001), (4000, 7)])
def test_plans_of_points_of_odd_rows(shape: tuple[int, int]) -> None:
    kernel = fg.kernel(lambda x, b: F.gelu(x + b))
    inputs = torch.randn(shape, device="cuda").to(BF16), torch.randn(shape[1], device="cuda").to(BF16)
    (launch,) = fg.tune(kernel, *inputs).launches
    assert all(each.times is not None for each in launch.candidates), str(launch)
    check_function(kernel, kernel.function, inputs)


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 4096, 4096), (16, 1024, 8192), (64, 14336, 4096), (333, 1896, 3584), (1800, 1280, 4352)]
)
def test_plans_of_matmuls_and_the_library(rows: int, columns: int, depth: int) -> None:
    kernel = fg.kernel(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    shapes = (rows, depth), (columns, depth), (columns,)
    inputs = tuple((torch.randn(shape, device="cuda") * 0.1).to(BF16) for shape in shapes)
    launches = fg.tune(kernel, *inputs).launches
    for launch in launches:
        assert all(each.times is not None for each in launch.candidates), str(launch)
    assert LIBRARY in {each.plan for launch in launches for each in launch.candidates}
    check_function(kernel, kernel.function, inputs)


@pytest.mark.parametrize(("queries", "keys"), [(1, 4096), (300, 300), (2048, 2048)])
def test_attention_by_kernels_or_torch(queries: int, keys: int) -> None:
    kernel = fg.kernel(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    inputs = tuple(torch.randn(2, 8, count, 64, device="cuda").to(BF16) for count in (queries, keys, keys))
    for launch in fg.tune(kernel, *inputs).launches:
        assert all(each.times is not None for each in launch.candidates), str(launch)
    check_function(kernel, kernel.function, inputs)
