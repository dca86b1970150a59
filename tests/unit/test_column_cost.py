"""What sums of columns are expected to take, beside what they took on an H200; and when they stand apart from what rows reduce."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import fusegen as fg
from fusegen.families import preferred
from fusegen.families.rows.match import COLUMN, ROW, ROW_COLUMN
from fusegen.fusion import GroupKind
from fusegen.schedule.program import Launch
from fusegen.target import target
from tests.tools.lanes import FUNCTIONS, Measured, inputs, read

MEASURED = Path(__file__).parents[2] / "docs/costs/columns-h200.json"
HOPPER = target("sm_90a")


@cache
def lowered(function: str, columns: int, dtype: str) -> Launch:
    arguments = inputs(function, 300, columns, getattr(torch, dtype), "meta")  # any number of rows but one makes this launch
    return fg.kernel(FUNCTIONS[function]).lower(*arguments, target="sm_90a").program.launches[0]


def launch_of(case: Measured) -> tuple[Launch, dict[str, int]]:
    return lowered(case.function, case.columns, case.dtype), dict.fromkeys(("x_dim0", "y_dim0"), case.rows)


def test_the_choice_is_close_to_the_best_that_was_measured() -> None:
    ratios = []
    for case in read(MEASURED):
        launch, sizes = launch_of(case)
        plan = preferred(launch, sizes, HOPPER)
        assert plan is not None
        ratios.append(case.microseconds[plan.description] / min(case.microseconds.values()))
    assert len(ratios) >= 230 and statistics.geometric_mean(ratios) < 1.03
    assert statistics.quantiles(ratios, n=10)[-1] < 1.12 and max(ratios) < 1.8


def softmax_and_sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = (x * w).softmax(-1)
    return y, y.sum(0), x.sum(0)


def kinds(rows: int, name: str = "sm_90a") -> list[GroupKind]:
    x, w = torch.empty(rows, 4096, device="meta"), torch.empty(4096, device="meta")
    low = fg.kernel(softmax_and_sums).lower(x, w, target=name)
    return [launch.group.kind for launch in low.program.launches]


def test_sums_stand_apart_while_a_cache_holds_what_is_read_twice() -> None:
    assert kinds(1000) == [ROW, COLUMN]
    assert kinds(4000) == [ROW_COLUMN, ROW_COLUMN], "the second combines what the blocks have summed"


def written_over(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    before = x * 2
    y = before - before.amax(-1, keepdim=True)
    x.copy_(y)
    return x, (y * w).sum(0)


def test_nothing_stands_apart_of_a_program_that_writes_over_what_it_reads() -> None:
    x, w = torch.empty(1000, 4096, device="meta"), torch.empty(4096, device="meta")
    low = fg.kernel(written_over, mutates=("x",)).lower(x, w, target="sm_90a")
    assert ROW_COLUMN in {launch.group.kind for launch in low.program.launches}
