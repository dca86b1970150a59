"""Plans are legal: what they ask of the machine it has, and what they claim of a row holds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import VerificationError
from fusegen.families.attention.plan import AttentionPlan, attention_plans
from fusegen.families.gemm.choice import MatmulChoice, measured_choice
from fusegen.families.gemm.heuristics import CLASSES, MatmulShape, candidates, contraction_plan
from fusegen.families.gemm.plan import ContractionPlan, FewRowsPlan
from fusegen.families.rows.heuristics import RowFeatures, row_plans
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.fusion.groups import Group
from fusegen.ir.graph import Graph
from fusegen.ir.symbolic import Axes, axis_symbol
from fusegen.specs import SPECS
from fusegen.target import Target, cuda_targets, target
from tests.naming import case
from tests.unit.gate import some
from tests.unit.lowering import meta, pinned
from tests.unit.ptxas import figures

REGISTERS = 65536  # of a multiprocessor; of a block as well
LENGTHS = (1, 3, 8, 24, 32, 33, 256, 1000, 1024, 4096, 5000, 8192, 16384, 16392, 24576, 32768, 40000, 65536, 100_000, 1 << 20)


def features(columns: int, itemsize: int, held: float, sums: int, reductions: int, staged: int) -> RowFeatures:
    return RowFeatures(Axes((axis_symbol("column"),), (columns,)), [itemsize], held, sums, reductions, staged)


def covered(plan: RowPlan) -> int:
    """Columns that a block's threads hold."""
    return plan.columns_per_step * plan.vectors_per_thread


def fits_the_machine(plan: RowPlan, machine: Target, columns: int, itemsize: int, reductions: int, inputs: int, sums: int) -> None:
    assert plan.block <= 1024 and plan.vec * itemsize <= 16 and columns % plan.vec == 0
    assert plan.block % 32 == 0 and (plan.threads in (4, 8, 16) if plan.threads % 32 else plan.rows == 1 or plan.threads == 32)
    assert plan.block * plan.blocks_per_sm <= 2048
    if plan.persistence is not Persistence.MULTI_PASS:
        assert covered(plan) >= columns and plan.exact is (covered(plan) == columns and plan.threads >= 32)
        assert covered(plan) - columns < plan.columns_per_step, "a chunk that holds nothing"
    if plan.persistence is Persistence.STAGED:
        assert plan.vectors_per_thread < plan.stage_vectors <= (4 if sums else 3) * plan.vectors_per_thread and inputs
        scratch = (plan.warps + 1) * 2 * 8 * reductions  # and barriers
        taken = plan.stage_vectors * plan.columns_per_step // plan.cluster * inputs * itemsize + scratch + 1024
        assert taken * plan.blocks_per_sm <= machine.shared_bytes + 1024  # which a multiprocessor has beside that of one block
        assert plan.persistent_blocks == plan.blocks_per_sm * machine.clusters(plan.cluster) and plan.cluster <= machine.cluster
    else:
        assert plan.stage_vectors == 0
    assert bool(plan.persistent_blocks) is (bool(sums) or plan.persistence is Persistence.STAGED)


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
    wanted = MatmulShape(rows, columns, 1024, products=products, head=head, result_registers=words)
    plan = contraction_plan(wanted, machine)
    assert plan.products == products and plan.tile_n % head == 0
    if isinstance(plan, FewRowsPlan):
        assert rows <= plan.tile_m <= 16 and plan.threads <= 1024 and plan.shared_bytes <= 48 << 10
        return
    of_launch(plan)
    assert 2 <= plan.stages <= 8 and plan.shared_bytes <= machine.shared_bytes
    accumulators = plan.tile_n * plan.products // 2
    assert accumulators + 32 <= plan.consumer_registers, "accumulators spill"


def test_loads_cover_all_rows_of_a_class() -> None:
    for rows in CLASSES:
        plans = [plan for plan in candidates(MatmulShape(rows, [512], 512), target("sm_90a")) if isinstance(plan, ContractionPlan)]
        assert any(plan.loaded_rows for plan in plans) == (rows < 128)
        assert all(min(rows, plan.tile_m) <= (plan.loaded_rows or plan.tile_m) <= plan.tile_m for plan in plans)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (8, 8), (72, 80), (192, 128), (64, 160), (256, 256)])
def test_plans_of_attention_fit_the_machine(head_dim: int, value_dim: int) -> None:
    machine = target("sm_90a")
    for group in (1, 4, 16, 64):
        for few in attention_plans(head_dim, value_dim, group, None, machine)[1:]:
            assert few.threads <= 1024 and few.rows <= 64
            assert few.blocks_per_sm * few.shared_bytes <= machine.shared_bytes and few.splits <= machine.cluster
    for older, group in itertools.product([t for t in cuda_targets() if not t.wgmma], (1, 4, 16, 64)):
        for few in attention_plans(head_dim, value_dim, group, 1, older):
            assert few.copies and few.rows == group and few.shared_bytes <= older.shared_bytes
            assert few.joins_in_memory == (older.cluster == 1 and few.splits > 1) == (few.splits > older.cluster)
        assert group > 16 or attention_plans(head_dim, value_dim, group, 1, older)
    plan, *_ = attention_plans(head_dim, value_dim, 1, None, machine)
    of_launch(plan)
    assert (plan.head_dim, plan.value_dim) == (head_dim, value_dim)
    assert plan.stages >= 2 and plan.shared_bytes <= machine.shared_bytes
    assert (plan.tile_k + value_dim + plan.tile_k // 2) // 2 + 32 <= plan.consumer_registers, "accumulators and weights spill"


@pytest.mark.parametrize("columns", some([1024, 4096, 16384], [4096]))
def test_no_thread_that_sums_columns_of_staged_rows_spills(columns: int) -> None:
    """Sums of two columns for each of its elements; weights beside them where there are registers left, else in each phase."""
    tensors = [
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((50000, columns), (50000, columns), (columns,))
    ]
    low = SPECS["layer_norm_backward"].fresh().lower(*tensors, target="sm_90a")
    launch = low.program.launches[0]
    plans = [plan for plan in launch.candidates if isinstance(plan, RowPlan) and plan.persistence is Persistence.STAGED]
    assert plans
    for plan in plans:
        form = low._compiled.specializer.at(low.sizes, pinned(launch, plan))
        assert figures(form.sources[0]).spilled == 0, plan


@pytest.mark.parametrize(("name", "experts"), [("topk", 64), ("moe_router", 64), ("moe_router", 256)])
def test_no_thread_that_selects_elements_spills(name: str, experts: int) -> None:
    """Beside the row, it keeps a key for each chosen element."""
    low = SPECS[name].fresh().lower(torch.empty(8192, experts, dtype=torch.bfloat16, device="meta"), 8, target="sm_90a")
    assert figures(low._compiled.specializer.at(low.sizes).sources[0]).spilled == 0


def test_a_plan_that_no_block_could_have_is_refused() -> None:
    tiny = replace(target("sm_90a"), shared_bytes=16)
    kernel = fg.kernel(lambda x: x.softmax(-1))
    with pytest.raises(VerificationError, match="bytes of shared memory"):
        kernel._dispatcher.variants.variant_of([torch.empty(64, 4096, device="meta")], tiny, torch.device("cuda"))


@pytest.mark.usefixtures("own_cache")
def test_ranges_of_rows_ask_for_each_launch_once_per_class_and_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two row counts have many pairs of classes."""
    asked: list[tuple[int, ...]] = []

    def counted(name: str, graph: Graph, group: Group, *rest: Any) -> MatmulChoice:
        asked.append(group.core_nodes)
        return measured_choice(name, graph, group, *rest)

    def two(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return F.gelu(F.linear(x, weight)), F.silu(F.linear(y, weight))

    low = fg.kernel(plan="tiles of 64 x 128: 2 warpgroups, 8 stages")(two).lower(
        meta(4096, 512), meta(2048, 512), meta(1024, 512), target="sm_90a"
    )
    monkeypatch.setattr("fusegen.compiler.specialize.measured_choice", counted)
    ranges = low.plans
    assert ranges and all(len(each.rows) == 2 for each in ranges)
    assert len(set(asked)) == 2 and len(asked) <= 2 * (len(CLASSES) + 1 + len(ranges))
