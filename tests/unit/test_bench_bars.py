"""Bars: which cases they have, and when a record reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fusegen.bench.cases import GROUPS
from fusegen.bench.record import TimedCase, write
from tests.naming import case
from tests.tools import bars
from tests.tools.bars import BARS, AtLeast, Bar, BarResult, Losses, Standing, judge_bars
from tests.unit.bench_records import ENVIRONMENT, failed, record, row, wrong

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {bar.name: bar for bar in BARS}


def _judged(wants: AtLeast | Losses, rows: Sequence[TimedCase], unmeasured: int = 0) -> BarResult:
    """How a record of the rows stands to a bar of them and of others that it lacks."""
    others = tuple(row(f"other_{number}").key for number in range(unmeasured))
    (result,) = judge_bars(record(*rows), [Bar("a bar", wants, (*(each.key for each in rows), *others))])
    return result


def _named(*speedups: float) -> list[TimedCase]:
    """Cases in which fusegen is so many times as fast as its peer, which takes 100 µs."""
    return [row(f"case_{number}", fusegen=100.0 / speedup, eager=100.0, copy=1.0) for number, speedup in enumerate(speedups)]


# Which cases.


def test_every_bar_has_cases_and_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(BARS)
    known = {case.key for cases in GROUPS.values() for case in cases}
    for bar in BARS:
        assert bar.cases and set(bar.cases) <= known and len(set(bar.cases)) == len(bar.cases)


# What is wanted.


def test_a_share_of_the_copy() -> None:
    for ours, standing in ((104.0, Standing.PASS), (104.2, Standing.FAIL)):
        with case((ours, standing)):
            result = _judged(
                AtLeast("copy", 0.96), [row("fast", fusegen=90.0, copy=100.0), row(fusegen=ours, eager=1.0, copy=100.0)]
            )
            assert result.standing is standing and result.furthest == "gelu 1024x4096 bfloat16"
            assert result.short == ((row().key,) if standing is Standing.FAIL else ())


def test_few_losses_and_no_long_one() -> None:
    for speedups, standing in (
        ([1.0] * 32 + [0.95], Standing.FAIL),
        ([1.0] * 33 + [0.95], Standing.PASS),
        ([1.0] * 33 + [0.99], Standing.PASS),
        ([1.0] * 33 + [0.92], Standing.PASS),
        ([1.0] * 33 + [0.90], Standing.FAIL),
    ):
        with case((speedups, standing)):
            result = _judged(Losses(0.03, longest=0.10), _named(*speedups))
            assert result.standing is standing and result.measured == len(speedups)
            assert bool(result.short) == (standing is Standing.FAIL) and result.least == f"{speedups[-1]:.2f}×"


def test_what_is_wrong_or_failed_falls_short() -> None:
    for broken in (failed(), wrong()):
        for wants in (AtLeast("eager", 0.5), Losses(0.5, longest=1.0)):
            with case((broken, wants)):
                result = _judged(wants, [*_named(2.0, 2.0, 2.0), broken])
                assert result.standing is Standing.FAIL and result.short == (broken.key,)


# What is not measured.


def test_a_bar_without_cases_in_the_record_is_not_reached() -> None:
    for wants in (AtLeast("copy", 0.5), Losses(0.5, longest=1.0)):
        with case(wants):
            result = _judged(wants, [], unmeasured=3)
            assert (result.standing, result.cases, result.measured, result.least) == (Standing.NONE, 3, 0, "")


def test_a_part_of_the_cases_is_no_pass_and_can_be_a_fail() -> None:
    assert _judged(AtLeast("eager", 1.5), _named(2.0), unmeasured=1).standing is Standing.PART
    assert _judged(AtLeast("eager", 1.5), _named(1.0), unmeasured=1).standing is Standing.FAIL
    assert _judged(Losses(0.03, longest=0.1), _named(0.95), unmeasured=39).standing is Standing.PART, "one of forty"


def test_a_cpu_reaches_no_bar() -> None:
    rows = [row(fusegen=1.0, copy=1.0)]
    bars = [Bar("a bar", AtLeast("copy", 0.5), (rows[0].key,))]
    on_cpu = replace(record(*rows), environment=replace(ENVIRONMENT, kind="cpu"))
    assert [judge_bars(each, bars)[0].standing for each in (record(*rows), on_cpu)] == [Standing.PASS, Standing.NONE]


# The tool.


@pytest.mark.parametrize(("microseconds", "code", "standing"), [(100.0, 0, "pass"), (105.0, 1, "fail"), (None, 1, "not measured")])
def test_the_tool_prints_bars_of_a_stored_record(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    microseconds: float | None,
    code: int,
    standing: str,
) -> None:
    path, measured = tmp_path / "bench.json", row(fusegen=microseconds, copy=96.0) if microseconds else row("other")
    monkeypatch.setattr(bars, "judge_bars", partial(judge_bars, bars=[Bar("one", AtLeast("copy", 0.95), (row().key,))]))
    write(record(measured), path)
    assert bars.main(str(path)) == code
    out = capsys.readouterr().out
    assert f" one  at least 95.0% of copy  {standing} " in f" {out}".replace("\n", "\n ") and "NVIDIA H200" in out


def test_the_stored_run_is_judged_though_it_lacks_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert bars.main(str(ROOT / "docs/bench/h200.json")) in (0, 1)
    assert capsys.readouterr().out.count("\n") == 2 + len(BARS)
