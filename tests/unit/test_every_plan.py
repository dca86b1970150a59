"""What is run under compute-sanitizer has plans of every form."""

from __future__ import annotations

import pytest

import fusegen as fg
from fusegen.compiler import specialize
from fusegen.families.attention.plan import FewQueriesPlan
from fusegen.families.pointwise.plan import PointwisePlan
from fusegen.families.rows.plan import RowPlan
from tests.gpu.every_plan import BY_WARPS, CASES, Case, arguments

FLAGS = ("unaligned", "tiled", "finishes", "cache_weights", "stage_to_registers", "late_loads")


def form(plan: object) -> str:
    """What of a plan is decided in the text, and not by a number alone."""
    words = [type(plan).__name__]
    if isinstance(plan, RowPlan):
        words += [plan.persistence.value, *(flag for flag in FLAGS if getattr(plan, flag))]
        words += (
            ["persistent"] * (plan.persistent_blocks > 0) + ["shared"] * (plan.cluster > 1) + ["in a warp"] * (plan.threads < 32)
        )
    if isinstance(plan, FewQueriesPlan) and plan.splits > 1:
        words.append("shared")
    if isinstance(plan, PointwisePlan) and plan.wraps:
        words.append("wraps")
    return " ".join(words)


def of_case(case: Case, target: str) -> set[str]:
    """The forms of plans that a case's launches could have, for any number of rows."""
    programs = [each.program for each in fg.kernel(case[0]).lower(*arguments(case, "meta"), target=target).plans]
    launches = [launch for program in programs for launch in program.launches]
    plans = [plan for launch in launches for plan in (launch.candidates or (getattr(launch.kernel.body, "plan", None),))]
    return {form(plan) for plan in plans if plan is not None}


def test_plans_of_every_form_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {words for case in BY_WARPS for words in of_case(case, "sm_80")}
    for apart in (False, True):
        monkeypatch.setattr(specialize, "is_faster_split", lambda *_, apart=apart: apart)
        found |= {words for case in CASES for words in of_case(case, "sm_90a")}
    rows = {
        "registers", "registers in a warp", "registers unaligned", "registers shared", "registers unaligned shared",
        "registers cache_weights", "registers unaligned cache_weights", "registers persistent",
        "registers cache_weights persistent",
        "multi-pass", "multi-pass unaligned", "multi-pass shared", "staged unaligned stage_to_registers persistent",
        "staged unaligned persistent shared",
        "staged unaligned cache_weights persistent shared", "staged unaligned cache_weights stage_to_registers persistent shared",
        "staged unaligned cache_weights late_loads persistent shared",
    }  # fmt: skip
    rows |= {
        f"staged {how}persistent{sharing}"
        for how in (
            "",
            "late_loads ",
            "stage_to_registers ",
            "cache_weights ",
            "cache_weights stage_to_registers ",
            "unaligned late_loads ",
        )
        for sharing in ("", " shared")
    }
    tiles = {
        "registers tiled persistent", "registers tiled persistent in a warp", "registers tiled finishes persistent",
        "registers tiled finishes persistent in a warp", "registers tiled finishes persistent shared",
        "registers tiled finishes persistent shared in a warp", "registers unaligned tiled persistent",
        "registers unaligned tiled finishes persistent", "registers unaligned tiled finishes persistent shared",
    }  # fmt: skip
    others = {
        "PointwisePlan", "PointwisePlan wraps", "TilePlan", "ColumnPlan", "ScanPlan", "ContractionPlan", "FewRowsPlan", "MmaPlan",
        "AttentionPlan", "FewQueriesPlan", "FewQueriesPlan shared",
    }  # fmt: skip
    assert found == {f"RowPlan {words}" for words in rows | tiles} | others
