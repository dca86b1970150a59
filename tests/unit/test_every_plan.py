"""What is run under compute-sanitizer has plans of every form."""

from __future__ import annotations

import pytest

import fusegen as fg
from fusegen.compiler import specialize
from fusegen.families.pointwise.plan import PointwisePlan
from fusegen.families.rows.plan import RowPlan
from tests.gpu.every_plan import BY_WARPS, CASES, Case, arguments

FLAGS = ("shifted", "tiled", "finishes", "keeps_shared", "drains", "defers")


def form(plan: object) -> str:
    """What of a plan is decided in the text, and not by a number alone."""
    words = [type(plan).__name__]
    if isinstance(plan, RowPlan):
        words += [plan.persistence.value, *(flag for flag in FLAGS if getattr(plan, flag))]
        words += ["resident"] * (plan.persistent_blocks > 0) + ["shared"] * (plan.cluster > 1) + ["in a warp"] * (plan.threads < 32)
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
        "registers", "registers in a warp", "registers shifted", "registers shared", "registers shifted shared",
        "registers keeps_shared", "registers shifted keeps_shared", "registers resident", "registers keeps_shared resident",
        "looped", "looped shifted", "looped shared", "staged shifted drains resident", "staged shifted resident shared",
        "staged shifted keeps_shared resident shared", "staged shifted keeps_shared drains resident shared",
        "staged shifted keeps_shared defers resident shared",
    }  # fmt: skip
    rows |= {
        f"staged {how}resident{sharing}"
        for how in ("", "defers ", "drains ", "keeps_shared ", "keeps_shared drains ", "shifted defers ")
        for sharing in ("", " shared")
    }
    tiles = {
        "registers tiled resident", "registers tiled resident in a warp", "registers tiled finishes resident",
        "registers tiled finishes resident in a warp", "registers tiled finishes resident shared",
        "registers tiled finishes resident shared in a warp", "registers shifted tiled resident",
        "registers shifted tiled finishes resident", "registers shifted tiled finishes resident shared",
    }  # fmt: skip
    others = {
        "PointwisePlan", "PointwisePlan wraps", "TilePlan", "ColumnPlan", "ScanPlan", "ContractionPlan", "MmaPlan", "AttentionPlan",
    }  # fmt: skip
    assert found == {f"RowPlan {words}" for words in rows | tiles} | others
