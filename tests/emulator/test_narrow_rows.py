"""Rows that share a warp: each plan gives what torch gives, whatever is left over for the last warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler import specialize
from fusegen.families.rows.plan import RowPlan
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch
from tests.unit.eager import agree, ints, randn

BF16, F16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")


def with_statistics(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = F.layer_norm(x, x.shape[-1:], w)
    return y, x.amax(-1), (x * w).logsumexp(-1)


def shifted_by_a_row(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.softmax((x - shift) * scale[:, None], -1) + x.argmax(-1, keepdim=True)


def cut(x: Tensor) -> Tensor:
    return torch.softmax(F.pad(x, (3, 2)), -1)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "one row": (lambda x: x.softmax(-1), (randn(1, 64, dtype=BF16),)),
    "a block and one": (with_statistics, (randn(65, 72, dtype=F16), randn(72, dtype=F16))),
    "groups for half the threads": (with_statistics, (randn(19, 40), randn(40))),
    "rows of two axes": (lambda x: x.softmax(-1), (randn(5, 7, 33),)),
    "numbers of rows": (shifted_by_a_row, (randn(37, 24), randn(37, 1), randn(37))),
    "edges": (cut, (randn(9, 30),)),
    "integers": (lambda x: (x.sum(-1), x.argmin(-1)), (ints(13, 50, dtype=torch.int8),)),
    "one column": (lambda x: x.softmax(-1), (randn(9, 1),)),
}


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("name", CASES)
def test_every_plan(name: str) -> None:
    function, inputs = CASES[name]
    for launch in fg.tune(fg.kernel(function), *inputs).launches:
        assert not [each.error for each in launch.candidates if each.error]
    agree(function, inputs)


def test_rows_are_worked_on_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread without a row goes along with the last one, which others write over."""
    found: list[Plan] = []

    def preferred(launch: Launch, *_: object) -> Plan:
        found.append(next(plan for plan in launch.candidates if isinstance(plan, RowPlan) and plan.threads < 32))
        return found[-1]

    monkeypatch.setattr(specialize, "preferred", preferred)

    def normalize(x: Tensor, w: Tensor) -> None:
        x.copy_(F.layer_norm(x, x.shape[-1:], w))

    x, w = randn(9, 64), randn(64)
    expected = F.layer_norm(x, (64,), w)
    fg.kernel(normalize, mutates=("x",))(x, w)
    torch.testing.assert_close(x, expected)
    assert found
