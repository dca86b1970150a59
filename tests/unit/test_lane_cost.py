"""What kernels of points and of rows are expected to take, beside what they took on an H200: the choice that follows is close to
the best that was."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

import fusegen as fg
from fusegen.bench.lanes import FUNCTIONS, document, inputs, read
from fusegen.bench.record import environment
from fusegen.schedule.plan import Persistence, PointwisePlan, RowPlan
from fusegen.schedule.program import Launch
from fusegen.schedule.ranking import expected_times, preferred
from fusegen.schedule.words import plan_words
from fusegen.target import target

MEASURED = Path(__file__).parents[2] / "docs/costs/lanes-h200.json"
HOPPER = target("sm_90a")


@dataclass(frozen=True)
class Case:
    """What was measured: microseconds by plan, in words."""

    launch: Launch
    rows: int
    times: Mapping[str, float]

    @property
    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(("x_dim0", "y_dim0"), self.rows)

    def chosen(self) -> float:
        """What the plan took that is chosen, over what the best did."""
        plan = preferred(self.launch, self.sizes, HOPPER)
        assert plan is not None
        return self.times[plan_words(plan)] / min(self.times.values())


@cache
def lowered(function: str, columns: int, dtype: torch.dtype, *, one_row: bool) -> Launch:
    rows = 1 if one_row else 300  # one row is known to be one, any other number may be any
    arguments = inputs(function, rows, columns, dtype, "meta")
    (launch,) = fg.kernel(FUNCTIONS[function]).lower(*arguments, target="sm_90a").program.launches
    return launch


def cases() -> Iterator[Case]:
    for case in read(MEASURED):
        launch = lowered(case.function, case.columns, getattr(torch, case.dtype), one_row=case.rows == 1)
        yield Case(launch, case.rows, case.microseconds)


@pytest.mark.parametrize(("kind", "fewest"), [pytest.param(RowPlan, 780, marks=pytest.mark.deep), (PointwisePlan, 350)])
def test_the_choice_is_close_to_the_best_that_was_measured(kind: type, fewest: int) -> None:
    ratios = [case.chosen() for case in cases() if isinstance(case.launch.plan, kind)]
    assert len(ratios) >= fewest and statistics.geometric_mean(ratios) < 1.04
    assert statistics.quantiles(ratios, n=10)[-1] < 1.12 and max(ratios) < 1.6


def test_rows_that_no_cache_holds_are_shared() -> None:
    """Softmax of 512 x 262144 takes 283 µs on an H200 where each block loops over a row: 69 MB are under way."""
    launch, sizes = lowered("softmax", 262144, torch.bfloat16, one_row=False), {"x_dim0": 512}
    plan = preferred(launch, sizes, HOPPER)
    assert isinstance(plan, RowPlan) and plan.cluster > 1
    times = expected_times(launch, sizes, HOPPER)
    looped = [t for p, t in times.items() if isinstance(p, RowPlan) and p.persistence is Persistence.LOOPED and p.cluster == 1]
    assert looped == [pytest.approx(283, rel=0.2)]


def test_a_staged_row_that_leaves_no_room_for_the_next_costs_more() -> None:
    """Layer norm of 2048 x 65536 takes 156 µs on an H200 where a block stages rows and has room for 5 of 8 groups of the next."""
    launch = lowered("layer_norm", 65536, torch.bfloat16, one_row=False)
    times = expected_times(launch, {"x_dim0": 2048}, HOPPER)
    staged = {plan: t for plan, t in times.items() if isinstance(plan, RowPlan) and plan.persistence is Persistence.STAGED}
    (alone,) = (t for plan, t in staged.items() if plan.threads == plan.block == 1024)
    assert alone > 1.02 * min(staged.values()) and alone == pytest.approx(156, rel=0.1)


def test_calls_take_the_plan_of_their_sizes() -> None:
    kernel = fg.kernel(FUNCTIONS["layer_norm"])
    weights = [torch.empty(4096, device="meta", dtype=torch.bfloat16) for _ in range(2)]
    few, many = (
        kernel.lower(torch.empty(rows, 4096, device="meta", dtype=torch.bfloat16), *weights, target="sm_90a") for rows in (2, 16384)
    )
    (one,), (other,) = few.program.launches, many.program.launches
    assert one.plan != other.plan and one.candidates == other.candidates
    assert "128 threads, 4 x 8 elements each;" in many.explain()
    assert "512 threads, 1 x 8 elements each, what rows share at once;" in few.explain()


def test_a_record_says_what_was_measured(tmp_path: Path) -> None:
    found = read(MEASURED)[:30]
    (tmp_path / "lanes.json").write_text(document(found[::-1], environment(torch.device("cpu"), "a clock")))
    assert read(tmp_path / "lanes.json") == found, "in one order, whatever the order of measuring"
