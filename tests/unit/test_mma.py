"""What pipelines of products refuse, and plans of products by warps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import ops
from fusegen.compiler.compile import Variant
from fusegen.describe import explain
from fusegen.families.gemm.heuristics import MatmulShape, candidates, mma_plans
from fusegen.families.gemm.pipelines import MMA_SYNC, StoredWeight
from fusegen.families.gemm.plan import ContractionPlan, FewRowsPlan, MmaPlan
from fusegen.schedule.program import Launch, LibraryMatmul, Program
from fusegen.target import cuda_targets, target
from tests.unit.gate import some
from tests.unit.lowering import meta
from tests.unit.ptxas import figures

BF16 = torch.bfloat16
OLDER = [t.name for t in cuda_targets() if not t.wgmma]


def variant(function: Callable[..., object], *arguments: object, machine: fg.target.Target) -> Variant:
    dispatcher = fg.kernel(function)._dispatcher
    values = dispatcher.arguments(arguments, {})
    found, captured = dispatcher.variants.variant_of(values, machine, torch.device("cuda"))
    sizes = dispatcher.variants.sizes(found, values, captured)
    return found.with_specialization(found.specializer.at(sizes))


def program(function: Callable[..., object], *arguments: object, machine: fg.target.Target) -> Program:
    return variant(function, *arguments, machine=machine).program


def plans(found: Program) -> list[type]:
    return [type(step.kernel.body.plan) for step in found.steps if isinstance(step, Launch)]


def bias_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


# What is refused.


def test_a_head_that_no_warp_holds_is_rotated_by_another_kernel() -> None:
    def function(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = F.linear(x, w).unflatten(-1, (-1, 192)).transpose(1, 2)
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat((-second, first), -1) * sin

    arguments = meta(8, 1024, 64), meta(384, 64), meta(1024, 192), meta(1024, 192)
    assert plans(program(function, *arguments, machine=target("sm_90a"))) == [ContractionPlan]
    found = program(function, *arguments, machine=target("sm_80"))
    assert MmaPlan not in plans(found)
    assert "no mma.sync: heads of 192 columns are combined" in explain(found, {"x_dim0": 8, "x_dim1": 1024}, {})


@pytest.mark.parametrize("name", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    "function",
    [lambda x, w: F.linear(x, w).mT * 2, lambda x, w: F.linear(x, w).unflatten(-1, (10, 4)).transpose(0, 1) * 2],
    ids=["transposed", "heads of four"],
)
def test_what_no_eight_columns_lie_side_by_side_of_is_written_by_another_kernel(name: str, function: Callable[..., object]) -> None:
    found = program(function, meta(72, 64), meta(40, 64), machine=target(name))
    assert [type(step) for step in found.steps] == [LibraryMatmul, Launch]


# Plans.


@pytest.mark.parametrize("name", OLDER)
def test_plans_fit_the_machine(name: str) -> None:
    machine, parts = target(name), [(1, 1), (2, 1), (1, 96), (1, 128), (2, 64)]
    columns = [[2], [8], [200], [256, 64, 64], [4096]]
    for rows, each, (products, head) in itertools.product([1, 64, 500, 8192], columns, parts):
        plan, *_ = mma_plans(MatmulShape(rows, each, 512, b_major="n", products=products, head=head), 8, 8, machine)
        assert plan.warp_n % head == 0 and plan.warp_n in MMA_SYNC.tile_widths(head, products)
        assert 2 <= plan.stages <= 4 and plan.blocks_per_sm * (plan.shared_bytes + 1024) <= machine.shared_bytes + 1024
        assert plan.warp_m * plan.warp_n * products // 32 <= 128, "accumulators spill"
        assert plan.copies_evenly


@pytest.mark.parametrize("name", OLDER)
def test_plans_of_few_rows_fit_the_machine(name: str) -> None:
    machine, stored = target(name), StoredWeight((32, 16, 8), 1, 1.0, 2)
    for rows, columns, products, weight in itertools.product([1, 16, 48, 64], [8, 4096], (1, 2), (None, stored)):
        shape = MatmulShape(rows, [columns], 4096, products=products, stored=weight, pipeline=MMA_SYNC.name)
        found = candidates(shape, machine)
        assert bool(found) is (rows <= 16 or weight is not None)
        assert all(plan.tile_m >= rows and plan.shared_bytes <= machine.shared_bytes for plan in found)


@pytest.mark.parametrize("name", OLDER)
def test_few_rows_have_a_kernel_of_their_own(name: str) -> None:
    kernel, weights = fg.kernel(bias_gelu), (meta(4096, 4096), meta(4096))
    found = {rows: kernel.lower(meta(rows, 4096), *weights, target=name).program for rows in (1, 2, 16, 17, 4096)}
    assert [*map(plans, found.values())] == [[FewRowsPlan]] * 3 + [[MmaPlan]] * 2
    assert found[17].launches[0].plan == found[4096].launches[0].plan


# What ptxas makes of it.


def channels(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype) * scale[:, None])


@pytest.mark.parametrize("rows", [1, 16, 64, 4096])
@pytest.mark.parametrize("name", some([*OLDER, "sm_90a"], ["sm_80"]))
def test_no_registers_are_spilled(name: str, rows: int) -> None:
    machine, stored = replace(target(name), products=("mma.sync",)), torch.empty(4096, 4096, dtype=torch.int8, device="meta")
    most_stored = 32 if name == "sm_100" else 64  # where ptxas spills 40 bytes for 64 rows
    cases = [(bias_gelu, meta(4096, 4096))] * (rows != 64) + [(channels, stored)] * (rows <= most_stored)
    for function, weight in cases:
        (source,) = variant(function, meta(rows, 4096), weight, meta(4096), machine=machine).sources
        found = figures(source, name)
        assert found.spilled == 0 and not found.warnings


@pytest.mark.parametrize("name", some(OLDER, ["sm_86"]))
@pytest.mark.parametrize(("heads", "channels"), [(32, 128), (16, 256), (256, 64)])
def test_few_queries_spill_no_registers(name: str, heads: int, channels: int) -> None:
    q, k = meta(4, heads, 1, channels), meta(64, 16, 8, channels)
    numbers = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((4, 8), (4,)))
    (source,) = variant(ops.paged_attention.function, q, k, k, *numbers, machine=target(name)).sources
    found = figures(source, name)
    assert found.spilled == 0 and not found.warnings
