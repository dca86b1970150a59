"""What products are expected to take, beside what they took on an H200: the choice that follows is close to the best that was."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen import tuning
from fusegen.compiler import tuned
from fusegen.compiler.compile import specializations_of
from fusegen.families.attention.cost import _READ as READS
from fusegen.families.gemm.choice import MatmulChoice
from fusegen.families.gemm.cost import COSTS as MODELS
from fusegen.families.gemm.cost import EpilogueSize, library_time
from fusegen.families.gemm.heuristics import MatmulShape, candidates, expected_time, shape_of
from fusegen.families.gemm.plan import CostedPlan, FewRowsPlan
from fusegen.families.rows.cost import LANE_COSTS
from fusegen.target import _CARDS, Target, on_card, target
from tests.tools import products as matmuls

COSTS = Path(__file__).parents[2] / "docs/costs"
HOPPER = target("sm_90a")
H100 = on_card(HOPPER, "NVIDIA H100 80GB HBM3")

SAVED = {"gated_saved": 2}
"""The number of results of a kernel that are products as they are, which the library writes; a bias is none."""


LIBRARY = (None, None, None)
Key: TypeAlias = tuple[int | None, ...]


def key(plan: CostedPlan) -> Key:
    """Tells measured plans apart."""
    if isinstance(plan, FewRowsPlan):
        return None, plan.tile_n, plan.warps
    return _key((plan.consumers, plan.tile_n, None), plan.splits, plan.ping_pong)


def _key(plan: Key, splits: int = 1, ping_pong: bool = False) -> Key:
    """A plan's numbers, and those of its form if it is not the plain one."""
    form = (splits, int(ping_pong))
    return plan if form == (1, 0) else (*plan, *form)


def times(record: str) -> dict[tuple[Any, ...], dict[Key, float]]:
    """Measured times by plan, for a kernel, rows, columns, depth and products."""
    found: dict[tuple[Any, ...], dict[Key, float]] = defaultdict(dict)
    for case in json.loads((COSTS / record).read_text())["cases"]:
        plan: Key = case["consumers"], case["tile_n"], case.get("warps")
        plan = _key(plan, case.get("splits", 1), case.get("ping_pong", False))
        found[case["kernel"], case["rows"], case["columns"], case["depth"], case["products"]][plan] = case["microseconds"]
    return found


@cache
def epilogue_of(kernel: str) -> EpilogueSize:
    """The work of a kernel's epilogue, which no size changes."""
    rows, columns, depth = 4096, 2048, 1024
    a, c = (
        torch.empty(rows, depth, device="meta", dtype=torch.bfloat16),
        torch.empty(rows, columns, device="meta", dtype=torch.bfloat16),
    )
    is_backward = kernel.endswith("_backward")
    weight = torch.empty(depth, columns, device="meta", dtype=torch.bfloat16)
    weight = weight if is_backward else weight.mT.contiguous()
    others = {"gated": (weight,), "gated_saved": (weight,), "silu_backward": (c,), "gated_backward": (c, c)}.get(kernel, (c[0],))
    low = getattr(matmuls, kernel).lower(a, weight, *others, target="sm_90a")
    planner = low._compiled.specializer.base
    (group,) = planner.matmul_launches
    return shape_of(planner.graph, group, planner.expected(low.sizes)).epilogue


def chosen(measured: Collection[Key], kernel: str, rows: int, columns: int, depth: int, products: int, machine: Target) -> Key:
    """The choice for a matmul with an epilogue among the plans that were measured."""
    epilogue = epilogue_of(kernel)
    shape = MatmulShape(rows, [columns], depth, products=products, result_registers=1 + int(epilogue.written), epilogue=epilogue)
    expected = {plan: expected_time(shape, plan, machine) for plan in candidates(shape, machine) if key(plan) in measured}
    plan = min(expected, key=lambda plan: expected[plan])
    moved = 2 * (products + epilogue.read + 1 + epilogue.written - SAVED.get(kernel, 0)) * rows * columns
    library = library_time(MODELS[machine.card], shape.sizes, round(moved), machine.sms)
    return LIBRARY if MatmulChoice(plan, expected[plan], library).takes_library else key(plan)


def ratios(record: str, machine: Target = HOPPER) -> list[float]:
    """The time of what is chosen over that of the best, in each case."""
    return [by_plan[chosen(by_plan, *case, machine)] / min(by_plan.values()) for case, by_plan in times(record).items()]


def test_the_choice_is_close_to_the_best_that_was_measured() -> None:
    found = ratios("h200.json")
    assert len(found) == 120 and statistics.mean(found) < 1.02
    assert statistics.quantiles(found, n=10)[-1] < 1.03 and max(found) < 1.25


def test_the_choice_at_sizes_drawn_at_random() -> None:
    found = ratios("sizes-h200.json")
    assert len(found) == 87 and statistics.mean(found) < 1.01
    assert statistics.quantiles(found, n=10)[-1] < 1.05 and max(found) < 1.16


def test_the_choice_for_few_rows_is_close_to_the_best_measured() -> None:
    found = ratios("few-rows-h200.json")
    assert len(found) == 78 and statistics.mean(found) < 1.01 and max(found) < 1.1


@pytest.mark.parametrize(
    ("record", "machine", "worst"), [("epilogues-h200.json", HOPPER, 1.1), ("epilogues-h100.json", H100, 1.17)]
)
def test_the_choice_for_epilogues_that_read_and_write_more(record: str, machine: Target, worst: float) -> None:
    found = ratios(record, machine)
    assert len(found) == 48 and statistics.mean(found) < 1.01
    assert statistics.quantiles(found, n=10)[-1] < 1.04 and max(found) < worst


@pytest.mark.parametrize(("rows", "columns", "depth"), [(8192, 8192, 8192), (8192, 16384, 4096)])
def test_a_generated_kernel_is_chosen_where_an_h100_found_it_faster(rows: int, columns: int, depth: int) -> None:
    bench = json.loads((COSTS.parent / "bench/h100.json").read_text())["rows"]
    case = next(row for row in bench if (row["case"], row["shape"]) == ("linear_bias_gelu", f"{rows}x{columns}x{depth}"))
    measured = {timing["provider"]: timing["microseconds"] for timing in case["timings"]}
    assert measured["fusegen"] < measured["eager"]
    plans: list[Key] = [(2, 256, None), (2, 192, None), (2, 128, None)]
    assert chosen(plans, "linear_gelu", rows, columns, depth, 1, H100) != LIBRARY


def test_a_card_has_its_own_costs() -> None:
    assert HOPPER.card == "NVIDIA H200"
    assert on_card(HOPPER, "NVIDIA H200") == HOPPER == on_card(HOPPER, "NVIDIA H100 PCIe")
    assert [*MODELS] == [*LANE_COSTS] == [*READS] == [*_CARDS["sm_90a"]]
    assert on_card(target("sm_80"), "NVIDIA H200").card == ""


def test_stored_programs_belong_to_a_card() -> None:
    @fg.kernel
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    low = doubled.lower(torch.empty(8, 64, device="meta"), target="sm_90a")
    assert low.target == HOPPER
    first, second = (specializations_of(low.traced, low.traced.locations, machine, False) for machine in (HOPPER, H100))
    assert first._name(low.sizes) != second._name(low.sizes)


def test_all_records_of_the_package_apply() -> None:
    """A record whose computation or plan the planner no longer knows would be ignored without a word."""
    records = json.loads(tuned.table_of("sm_90a, NVIDIA H200").read_text())["records"]
    shipped, applied = {(each["launch"], *each["entry"]["extents"]) for each in records}, set()
    sizes = {tuple(each["entry"]["extents"]) for each in records}
    for kernel, arguments in matmuls.calls_of_layers(torch.device("meta")):
        if (arguments[0].shape[0], *arguments[1].shape) in sizes:
            launches = tuning.candidates(kernel, *arguments, target="sm_90a", device="NVIDIA H200").launches
            applied |= {(each.key.launch, *each.key.extents) for each in launches if each.plan != each.candidates[0].plan}
    assert shipped and shipped == applied
