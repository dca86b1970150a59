"""Row kernels: terms in phases that end in reductions; what is held between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusegen as fg
from fusegen.schedule.bodies import Phase, RowBody
from fusegen.schedule.plan import Persistence


def body(function: Callable[..., Any], *shapes: tuple[int, ...], target: str = "sm_90a") -> RowBody:
    low = fg.kernel(function).lower(*(torch.empty(*s, device="meta") for s in shapes), target=target)
    found = low.program.launches[0].kernel.body
    assert isinstance(found, RowBody)
    return found


def phases(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[Phase, ...]:
    return body(function, *shapes).phases


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: x.sum(-1), 2),
        (lambda x: x.softmax(-1), 3),
        (lambda x: F.layer_norm(x, (1024,)), 3),
        (lambda x: (x.sum(-1), x.amax(-1)), 2),
        (lambda x: x.softmax(-1).softmax(-1), 5),
    ],
)
def test_a_phase_ends_where_the_next_needs_a_statistic(function: Callable[..., Any], count: int) -> None:
    found = phases(function, (4, 1024))
    assert len(found) == count
    assert all(p.reductions for p in found[:-1]) and not found[-1].reductions


def test_independent_reductions_share_a_phase() -> None:
    first, *_ = phases(lambda x: (x.sum(-1), x.amax(-1), (x * x).sum(-1)), (4, 1024))
    assert len(first.reductions) == 3 and len((*first.reads, *first.late)) == 1


def test_costly_values_are_held_and_cheap_ones_computed_again() -> None:
    held = [p.name for phase in phases(lambda x: x.softmax(-1), (4, 1024)) for p in phase.held]
    assert len(held) == 1, "the exponential, which both the sum and the result need"
    assert not [p for phase in phases(lambda x: x / (x + 1).sum(-1, keepdim=True), (4, 1024)) for p in phase.held]


def test_a_row_is_loaded_in_the_first_phase_and_no_other_while_it_is_held() -> None:
    found = phases(lambda x, r: (x + r).softmax(-1), (4, 1024), (4, 1024))
    assert [len((*p.reads, *p.late)) for p in found] == [2, 0, 0]


def test_a_row_that_is_looped_over_is_loaded_where_it_is_used() -> None:
    looped = body(lambda x: x.softmax(-1), (4, 10_000_000))
    assert looped.plan.persistence is Persistence.LOOPED
    assert [len((*p.reads, *p.late)) for p in looped.phases] == [1, 1, 1] and not any(p.held for p in looped.phases)


def test_statistics_are_written_once_a_row() -> None:
    found = phases(lambda x: (x.sum(-1), x * x.sum(-1, keepdim=True)), (4, 1024))
    assert [len(p.row_writes) for p in found] == [0, 1] and [len(p.writes) for p in found] == [0, 1]


def test_math_on_statistics_is_done_once_a_row() -> None:
    found = phases(lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), (4, 1024))
    assert found[1].row_call is not None
    names = {t.op.row.name for t in found[1].row_call.function.terms if hasattr(t.op, "row")}
    assert "rsqrt" in names
    assert found[1].call is not None and all(getattr(t.op, "name", "") != "RSQRT" for t in found[1].call.function.terms)
