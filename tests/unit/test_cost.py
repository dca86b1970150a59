"""What products are expected to take, beside what they took on an H200: the choice that follows is close to the best that was."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAlias

from fusegen.families.gemm.cost import H200, EpilogueSize, library_time
from fusegen.families.gemm.heuristics import MatmulChoice, MatmulShape, candidates, expected_time
from fusegen.families.gemm.plan import CostedPlan, FewRowsPlan
from fusegen.target import target

COSTS = Path(__file__).parents[2] / "docs/costs"
HOPPER = target("sm_90a")

EPILOGUES = {
    "linear_gelu": EpilogueSize(0, 0, 1),
    "linear_gelu_erf": EpilogueSize(0, 0, 1),
    "linear_relu": EpilogueSize(0, 0),
    "gated": EpilogueSize(0, 0),
    "linear_gelu_saved": EpilogueSize(0, 1, 1),
    "gated_saved": EpilogueSize(0, 2),
    "silu_backward": EpilogueSize(1, 0),
    "gated_backward": EpilogueSize(2, 1),
}
SAVED = {"gated_saved": 2}
"""The number of results of a kernel that are products as they are, which the library writes; a bias is none."""


LIBRARY = (None, None, None)
Key: TypeAlias = tuple[int | None, ...]


def key(plan: CostedPlan) -> Key:
    """Tells measured plans apart."""
    if isinstance(plan, FewRowsPlan):
        return None, plan.tile_n, plan.warps
    return (plan.consumers, plan.tile_n, None) if plan.splits == 1 else (plan.consumers, plan.tile_n, None, plan.splits)


def times(record: str) -> dict[tuple[Any, ...], dict[Key, float]]:
    """Measured times by plan, for a kernel, rows, columns, depth and products."""
    found: dict[tuple[Any, ...], dict[Key, float]] = defaultdict(dict)
    for case in json.loads((COSTS / record).read_text())["cases"]:
        plan: Key = case["consumers"], case["tile_n"], case.get("warps")
        plan = (*plan, case["splits"]) if case.get("splits", 1) > 1 else plan
        found[case["kernel"], case["rows"], case["columns"], case["depth"], case["products"]][plan] = case["microseconds"]
    return found


def chosen(measured: Collection[Key], kernel: str, rows: int, columns: int, depth: int, products: int) -> Key:
    """The choice for a matmul with an epilogue among the plans that were measured."""
    epilogue = EPILOGUES[kernel]
    shape = MatmulShape(rows, [columns], depth, products=products, result_registers=1 + int(epilogue.written), epilogue=epilogue)
    expected = {plan: expected_time(shape, plan, HOPPER) for plan in candidates(shape, HOPPER) if key(plan) in measured}
    plan = min(expected, key=lambda plan: expected[plan])
    moved = 2 * (products + epilogue.read + 1 + epilogue.written - SAVED.get(kernel, 0)) * rows * columns
    library = library_time(H200, shape.sizes, round(moved), HOPPER.sms)
    return LIBRARY if MatmulChoice(plan, expected[plan], library).takes_library else key(plan)


def ratios(record: str) -> list[float]:
    """The time of what is chosen over that of the best, in each case."""
    return [by_plan[chosen(by_plan, *case)] / min(by_plan.values()) for case, by_plan in times(record).items()]


def test_the_choice_is_close_to_the_best_that_was_measured() -> None:
    found = ratios("h200.json")
    assert len(found) == 120 and statistics.mean(found) < 1.02
    assert statistics.quantiles(found, n=10)[-1] < 1.03 and max(found) < 1.25


def test_the_choice_at_sizes_drawn_at_random() -> None:
    found = ratios("sizes-h200.json")
    assert len(found) == 86 and statistics.mean(found) < 1.02
    assert statistics.quantiles(found, n=10)[-1] < 1.04 and max(found) < 1.16


def test_the_choice_for_few_rows_is_close_to_the_best_measured() -> None:
    found = ratios("few-rows-h200.json")
    assert len(found) == 78 and statistics.mean(found) < 1.01 and max(found) < 1.1


def test_the_choice_for_epilogues_that_read_and_write_more() -> None:
    found = ratios("epilogues-h100.json")
    assert len(found) == 48 and statistics.mean(found) < 1.03
    assert statistics.quantiles(found, n=10)[-1] < 1.085 and max(found) < 1.2
