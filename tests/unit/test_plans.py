"""Plans are legal: what they ask of the machine it has, and what they claim of a row holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fusegen as fg
from fusegen.errors import VerificationError
from fusegen.ir.symbolic import Axes, axis_symbol
from fusegen.schedule.bodies import RowBody
from fusegen.schedule.heuristics.attention import attention_plan
from fusegen.schedule.heuristics.contraction import ProductShape, contraction_plan
from fusegen.schedule.heuristics.pointwise import pointwise_plans
from fusegen.schedule.heuristics.rows import RowFeatures, row_plans
from fusegen.schedule.plan import AttentionPlan, ContractionPlan, Persistence, RowPlan
from fusegen.schedule.words import plan_words
from fusegen.specs import SPECS
from fusegen.target import Target, cuda_targets, target
from tests.naming import case
from tests.unit.ptxas import figures

REGISTERS = 65536  # of a multiprocessor; of a block as well
LENGTHS = (1, 3, 8, 24, 32, 33, 256, 1000, 1024, 4096, 5000, 8192, 16384, 16392, 24576, 32768, 40000, 65536, 100_000, 1 << 20)


def features(columns: int, itemsize: int, held: float, sums: int, reductions: int, staged: int) -> RowFeatures:
    return RowFeatures(Axes((axis_symbol("column"),), (columns,)), [itemsize], held, sums, reductions, staged)


def covered(plan: RowPlan) -> int:
    """Columns that a block's threads hold."""
    return plan.span * plan.chunks


def fits_the_machine(plan: RowPlan, machine: Target, columns: int, itemsize: int, reductions: int, inputs: int, sums: int) -> None:
    assert plan.block <= 1024 and plan.lanes * itemsize <= 16 and columns % plan.lanes == 0
    assert plan.block % 32 == 0 and (plan.threads in (4, 8, 16) if plan.threads % 32 else plan.rows == 1 or plan.threads == 32)
    assert plan.block * plan.blocks_per_sm <= 2048
    if plan.persistence is not Persistence.LOOPED:
        assert covered(plan) >= columns and plan.exact is (covered(plan) == columns and plan.threads >= 32)
        assert covered(plan) - columns < plan.span, "a chunk that holds nothing"
    if plan.persistence is Persistence.STAGED:
        assert plan.chunks < plan.slots <= (4 if sums else 3) * plan.chunks and inputs
        scratch = (plan.warps + 1) * 2 * 8 * reductions  # and barriers
        taken = plan.slots * plan.span // plan.cluster * inputs * itemsize + scratch + 1024
        assert taken * plan.blocks_per_sm <= machine.shared_bytes + 1024  # which a multiprocessor has beside that of one block
        assert plan.resident == plan.blocks_per_sm * machine.clusters(plan.cluster) and plan.cluster <= machine.cluster
    else:
        assert plan.slots == 0
    assert bool(plan.resident) is (bool(sums) or plan.persistence is Persistence.STAGED)


@pytest.mark.parametrize("machine", cuda_targets(), ids=lambda machine: machine.name)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_row_plans_fit_the_machine(machine: Target, itemsize: int) -> None:
    for columns, held, sums, reductions, inputs in itertools.product(LENGTHS, (0.5, 1, 3), (0, 2), (1, 2, 12), (0, 1, 2)):
        if sums and columns > 16384:
            continue  # fusion keeps these apart
        plans = row_plans(features(columns, itemsize, held, sums, reductions, inputs * itemsize), machine, {}, {})
        assert len(set(plans)) == len(plans) <= 19
        for plan in plans:
            fits_the_machine(plan, machine, columns, itemsize, reductions, inputs, sums)


@pytest.mark.parametrize("itemsizes", [(1,), (2,), (4,), (8,), (2, 4), (1, 8)])
@pytest.mark.parametrize("shape", [(7,), (8,), (1 << 22,), (5, 7), (5, 12), (5, 64), (3, 5, 6)])
def test_pointwise_plans_divide_their_rows(itemsizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    axes = Axes(tuple(axis_symbol(f"i{d}") for d in range(len(shape))), shape)
    plans = pointwise_plans(axes, itemsizes, [], target("sm_90a"), {})
    assert len(set(plans)) == len(plans)
    for plan in plans:
        assert plan.lanes <= 8 and plan.lanes * min(itemsizes) <= 16
        if len(shape) > 1:
            assert shape[-1] % plan.lanes == 0 and not plan.tail
        else:
            assert plan.tail or shape[0] % plan.lanes == 0


def of_launch(plan: ContractionPlan | AttentionPlan) -> None:
    """What any plan of warpgroups that trade registers must keep to."""
    assert plan.threads == 128 * (plan.consumers + 1) <= 1024
    assert all(24 <= n <= 256 and n % 8 == 0 for n in (plan.producer_registers, plan.consumer_registers))
    assert 128 * (plan.producer_registers + plan.consumers * plan.consumer_registers) <= REGISTERS


def test_plans_of_products_fit_the_machine() -> None:
    parts = [(1, 1, 1), (2, 1, 1), (1, 192, 2), (2, 128, 6), (1, 256, 4)]
    for rows, columns, part in itertools.product([1, 64, 65, 500, 8192], [[8], [64], [200], [256, 64, 64], [384], [4096]], parts):
        with case((rows, columns, part)):
            plan_of_products_fits(rows, columns, *part)


def plan_of_products_fits(rows: int, columns: list[int], products: int, head: int, words: int) -> None:
    machine = target("sm_90a")
    wanted = ProductShape(rows, columns, 1024, products=products, head=head, words=words)
    plan = contraction_plan(wanted, machine)
    assert plan.products == products and plan.tile_n % head == 0
    of_launch(plan)
    assert 2 <= plan.stages <= 8 and plan.shared_bytes <= machine.shared_bytes
    tiles = plan.stages * (plan.tile_m + plan.tile_n * plan.products) * 64 * 2
    assert plan.shared_bytes == tiles + plan.consumers * 2 * 64 * 128 + plan.stages * 16
    assert plan.stages == 8 or plan.shared_bytes + tiles // plan.stages + 16 > machine.shared_bytes, "a stage more would fit"
    accumulators = plan.tile_n * plan.products // 2
    assert accumulators + 32 <= plan.consumer_registers, "accumulators spill"


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (8, 8), (72, 80), (192, 128), (64, 160), (256, 256)])
def test_plans_of_attention_fit_the_machine(head_dim: int, value_dim: int) -> None:
    plan, machine = attention_plan(head_dim, value_dim), target("sm_90a")
    of_launch(plan)
    assert (plan.head_dim, plan.value_dim) == (head_dim, value_dim)
    assert plan.stages >= 2 and plan.shared_bytes <= machine.shared_bytes
    lines, value_lines = (math.ceil(width / 64) for width in (head_dim, value_dim))
    tiles = 128 * (lines * (plan.q_stages * plan.tile_q + plan.stages * plan.tile_k) + value_lines * plan.stages * plan.tile_k)
    assert tiles + 8 * (2 * plan.q_stages + 4 * plan.stages) <= plan.shared_bytes <= tiles + 1024 and plan.shared_bytes % 1024 == 0
    assert (plan.tile_k + value_dim + plan.tile_k // 2) // 2 + 32 <= plan.consumer_registers, "accumulators and weights spill"


@pytest.mark.parametrize("columns", [64, 1000, 24576, 24584])
def test_a_launch_reserves_what_its_kernel_uses(columns: int) -> None:
    """Scratch first, staged rows behind it, one behind the other."""
    x = torch.empty(500, columns, dtype=torch.bfloat16, device="meta")
    low = fg.kernel(lambda x: (x.softmax(-1), x.amax(-1))).lower(x, target="sm_90a")
    (launch,) = low.program.launches
    body = launch.kernel.body
    assert isinstance(body, RowBody)
    plan = body.plan
    scratch = sum(len(p.reductions) for p in body.phases) * plan.warps * 2 * 8 if plan.warps > 1 else 0
    staged = plan.slots * plan.span * 2
    assert launch.shared_bytes == scratch + staged and body.shared.staged == ((scratch,) if staged else ())
    assert launch.grid(low.sizes) == (132 if staged else -(-500 // plan.rows))


@pytest.mark.parametrize(
    ("columns", "kept"),
    [(4096, {True, False}), *(pytest.param(*case, marks=pytest.mark.deep) for case in ((1024, {True}), (16384, {True, False})))],
)
def test_no_thread_that_sums_columns_of_staged_rows_spills(columns: int, kept: set[bool]) -> None:
    """Sums of two columns for each of its elements; weights beside them where there are registers left, else in each phase."""
    tensors = [
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((50000, columns), (50000, columns), (columns,))
    ]
    low = SPECS["layer_norm_backward"].fresh().lower(*tensors, target="sm_90a")
    launch = low.program.launches[0]
    plans = [plan for plan in launch.candidates if isinstance(plan, RowPlan) and plan.persistence is Persistence.STAGED]
    assert len(set(map(plan_words, launch.candidates))) == len(launch.candidates)
    assert plans[0].keeps_shared and {plan.keeps_shared for plan in plans} == kept and (plans[0] == launch.plan or columns < 2048)
    for plan in plans:
        form = low._forms.pinned(low.sizes, {launch.group.outputs: plan})
        body = form.program.launches[0].kernel.body
        assert isinstance(body, RowBody) and [access.name for access in body.kept] == (["weight"] if plan.keeps_shared else [])
        assert any(phase.late for phase in body.phases) is not plan.keeps_shared
        assert figures(form.sources[0]).spilled == 0, plan


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def norm_gelu_add(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], weight, bias), approximate="tanh") + y


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


@pytest.mark.parametrize(
    ("function", "columns", "blocks"),
    [
        (norm_gelu_add, 18432, {1}),
        *(pytest.param(*case, marks=pytest.mark.deep) for case in ((norm, 18432, {2}), (norm, 24576, {1}), (softmax, 18432, {2}))),
    ],
)
def test_two_blocks_of_many_threads_have_room_where_nothing_is_spilled(
    function: Callable[..., torch.Tensor], columns: int, blocks: set[int]
) -> None:
    shapes = (300, columns), (columns,), (columns,), (300, columns)
    count = {softmax: 1, norm: 3, norm_gelu_add: 4}[function]
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes[:count]]
    low = fg.kernel(function).lower(*tensors, target="sm_90a")
    (launch,) = low.program.launches
    plans = [plan for plan in launch.candidates if isinstance(plan, RowPlan) and plan.persistence is Persistence.REGISTERS]
    assert plans and {plan.blocks_per_sm for plan in plans if 512 < plan.threads < 1024} == blocks
    for plan in plans:
        (source,) = low._forms.pinned(low.sizes, {launch.group.outputs: plan}).sources
        assert figures(source).spilled == 0, plan


def test_a_plan_that_no_block_could_have_is_refused() -> None:
    tiny = replace(target("sm_90a"), shared_bytes=32)
    kernel = fg.kernel(lambda x: x.softmax(-1))
    with pytest.raises(VerificationError, match="bytes of shared memory"):
        kernel._dispatcher.variant([torch.empty(64, 4096, device="meta")], tiny, torch.device("cuda"))
