"""Rows that are reduced and whose columns are summed: each plan, with whole and ragged rows, many rows a block and few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusegen import target as targets
from fusegen.compiler import backends, specialize
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch
from tests.naming import case
from tests.unit.eager import agree, ints, randn

BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.usefixtures("emulated")
Choose = Callable[[Callable[[RowPlan], bool]], list[RowPlan]]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One multiprocessor, so that each of its few blocks has several rows to work on, and sums their columns as well."""
    monkeypatch.setattr(specialize, "is_faster_split", lambda *_: False)
    monkeypatch.setattr(backends, "_EMULATED", replace(targets.target("sm_90a"), wgmma=False, sms=1))


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Launches of rows have their first plan of some kind; gives a list of those that they have had."""

    def planned(wanted: Callable[[RowPlan], bool]) -> list[RowPlan]:
        found: list[RowPlan] = []

        def preferred(launch: Launch, *_: object) -> Plan | None:
            rows = [plan for plan in launch.candidates if isinstance(plan, RowPlan)]
            found.extend([plan for plan in rows if wanted(plan)][:1])
            return found[-1] if rows else None

        monkeypatch.setattr(specialize, "preferred", preferred)
        return found

    return planned


def gradients(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two reductions in the first phase, one in each of the next; sums of columns in two of them."""
    centered = x - x.mean(-1, keepdim=True)
    normalized = centered * torch.rsqrt((centered * centered).mean(-1, keepdim=True) + 1e-5)
    grad = dy * weight
    dx = grad - grad.mean(-1, keepdim=True) - normalized * (grad * normalized).mean(-1, keepdim=True)
    return dx, (dy * normalized).sum(0), dy.sum(0)


def inputs(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return randn(rows, columns, dtype=dtype), randn(rows, columns, dtype=dtype), randn(columns, dtype=dtype)


FORMS = {"whole": (1024, F32), "ragged": (1100, F32), "ragged, 16 bits": (1992, BF16)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_staged_rows(choose: Choose, blocks: int, form: str) -> None:
    """Blocks that share a multiprocessor; fewer rows than they are or have room for, and many."""
    columns, dtype = FORMS[form]
    plans = choose(lambda plan: plan.persistence is Persistence.STAGED and plan.blocks_per_sm == blocks)
    agree(gradients, *(inputs(rows, columns, dtype) for rows in (2, 3, 11)))
    assert plans and all(plan.persistent_blocks == blocks and plan.exact is (form == "whole") for plan in plans)


def test_room_for_parts_of_rows(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no two rows have room, groups of a row are brought while the groups before are still in use; else rows are whole."""
    for room, stage_vectors in ((1.4, 5), (1.75, 7), (2.5, 8), (3.75, 12)):
        with case(room):
            shared = 2 * (4096 + int(room * 2048 * 2 * 4))
            machine = replace(targets.target("sm_90a"), wgmma=False, sms=1, shared_bytes=shared)
            monkeypatch.setattr(backends, "_EMULATED", machine)
            plans = choose(
                lambda plan: plan.persistence is Persistence.STAGED and plan.vectors_per_thread == 4 and plan.blocks_per_sm == 2
            )
            agree(gradients, inputs(6, 2048, F32))
            assert {plan.stage_vectors for plan in plans} == {stage_vectors}


def test_several_rows_of_a_warp_each(choose: Choose) -> None:
    """The row groups of a block add up what they have summed, and blocks that have rows leave a part."""
    plans = choose(lambda plan: plan.rows > 1)
    agree(gradients, *(inputs(rows, 40, F32) for rows in (3, 70)))
    assert plans and all(plan.threads == 32 and plan.rows * plan.persistent_blocks < 70 for plan in plans)


def test_what_all_rows_share_is_loaded_once(choose: Choose) -> None:
    """But for what an index leads to, or a condition: that is loaded where it is used."""

    def scaled(x: Tensor, weight: Tensor, table: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * weight * table[places] + torch.cat([weight[:512], table[:512]])
        return hidden - hidden.mean(-1, keepdim=True), (x * weight).sum(0)

    plans = choose(lambda plan: plan.persistence is Persistence.STAGED)
    agree(scaled, (randn(9, 1024), randn(1024), randn(1024), ints(1024, low=0, high=1024)))
    assert plans and all(plan.cache_weights for plan in plans)


def test_rows_of_two_tensors_one_behind_the_other_are_not_staged(choose: Choose) -> None:
    """No copy asks in which of them a row lies."""

    def joined(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.cat([x, y], 0)
        return rows - rows.mean(-1, keepdim=True), rows.sum(0)

    plans = choose(lambda plan: True)
    agree(joined, (randn(3, 1024), randn(2, 1024)))
    assert all(plan.persistence is Persistence.REGISTERS for plan in plans)
