"""What products are expected to take, beside what they took on an H200: the choice that follows is close to the best that was."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

from fusegen.schedule.choose import Choice
from fusegen.schedule.cost import H200, library_time, product_time
from fusegen.schedule.heuristics.contraction import ProductShape, candidates
from fusegen.target import target

MEASURED = Path(__file__).parents[2] / "docs/costs/h200.json"
HOPPER = target("sm_90a")


def times() -> dict[tuple[int, ...], dict[tuple[int, int] | None, float]]:
    """For rows, columns, depth and products: measured times by plan, and by None for the library."""
    found: dict[tuple[int, ...], dict[tuple[int, int] | None, float]] = defaultdict(dict)
    for case in json.loads(MEASURED.read_text())["cases"]:
        plan = (case["consumers"], case["tile_n"]) if case["consumers"] else None
        found[case["rows"], case["columns"], case["depth"], case["products"]][plan] = case["microseconds"]
    return found


def chosen(rows: int, columns: int, depth: int, products: int) -> tuple[int, int] | None:
    """What is chosen for a product with an epilogue."""
    shape = ProductShape(rows, [columns], depth, products=products)
    expected = {plan: product_time(H200, plan, shape.sizes, HOPPER.processors) for plan in candidates(shape, HOPPER)}
    plan = min(expected, key=lambda plan: expected[plan])
    library = library_time(H200, shape.sizes, 4 * products * rows * columns, HOPPER.processors)
    return None if Choice(plan, expected[plan], library).takes_library else (plan.consumers, plan.tile_n)


def test_the_choice_is_close_to_the_best_that_was_measured() -> None:
    ratios = [by_plan[chosen(*case)] / min(by_plan.values()) for case, by_plan in times().items()]
    assert len(ratios) == 144 and statistics.mean(ratios) < 1.02
    assert statistics.quantiles(ratios, n=10)[-1] < 1.05 and max(ratios) < 1.4
