"""Runs of the benchmark: what is stored when, how one goes on with another, and what counts as slower."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegen.bench.case import BenchCase
from fusegen.bench.cases import GROUPS
from fusegen.bench.record import BenchRecord, Latency, ProviderTiming, TimedCase, compare, environment, read, write
from fusegen.bench.run import earlier_record
from fusegen.bench.table import comparison_table
from fusegen.cli import bench
from fusegen.cli.main import main
from fusegen.errors import ArgumentError
from tests.naming import case

HERE = environment(torch.device("cpu"), "wall clock")
WORDS = ["bench", "--device", "cpu", "--quick", "--providers", "fusegen,eager"]


def _row(case: str = "gelu", microseconds: float | None = 100.0, *, spread: float | None = 0.01, shape: str = "4x32") -> TimedCase:
    known = None if spread is None or microseconds is None else spread * microseconds
    low, high = (None, None) if known is None else (microseconds - known, microseconds + known)
    error = None if microseconds is not None else "no compiler"
    ours = ProviderTiming("fusegen", "", microseconds, low, high, None, error)
    return TimedCase("public", case, shape, "float32", 1024, None, "1", (ours, replace(ours, provider="eager")))


def _record(*rows: TimedCase, device: str = "one", **others: Any) -> BenchRecord:
    return BenchRecord(replace(HERE, device=device, **others), rows, ())


# Comparison.


def test_what_is_slower() -> None:
    for old, new, slower in (
        (_row(), _row(microseconds=104.0), False),
        (_row(), _row(microseconds=106.0), True),
        (_row(), _row(microseconds=50.0), False),
        (_row(spread=0.05), _row(microseconds=110.0, spread=0.05), False),
        (_row(spread=0.04), _row(microseconds=110.0, spread=0.04), True),
        (_row(spread=None), _row(microseconds=110.0, spread=0.2), True),
        (_row(spread=0.2), _row(microseconds=110.0, spread=None), True),
        (_row(microseconds=2.0), _row(microseconds=2.4), False),
        (_row(microseconds=2.0), _row(microseconds=2.6), True),
    ):
        with case((old, new, slower)):
            found = compare(_record(old), _record(new))
            assert bool(found.regressions) == slower and len(found.changes) == 1


def test_cases_of_one_record_alone_are_counted() -> None:
    old = _record(_row("gelu"), _row("softmax"), _row("rms_norm", None))
    new = _record(_row("layer_norm"), _row("rms_norm"), _row("gelu", 200.0), _row("gelu", shape="8x32"))
    found = compare(old, new)
    assert [change.case for change in found.changes] == ["gelu"]
    assert (found.only_old, found.only_new) == (1, 3)
    _, rows = comparison_table(found)
    assert rows == [("public", "gelu", "4x32", "float32", "100.0", "200.0", "2.00", "yes")]


def test_other_devices_are_not_compared() -> None:
    with pytest.raises(ArgumentError, match="one and two"):
        compare(_record(), _record(device="two"))


def test_other_timers_and_threads_are_not_compared() -> None:
    for old, new, words in (
        ({"timer": "wall clock, 5 rounds"}, {"timer": "CUDA graphs, 5 rounds"}, "wall clock and CUDA graphs"),
        ({"kind": "cpu", "threads": 64}, {"kind": "cpu", "threads": 2}, "64 and 2"),
    ):
        with case((old, new, words)):
            with pytest.raises(ArgumentError, match=words):
                compare(_record(**old), _record(**new))
            compare(_record(timer="wall clock, tuned"), _record(timer="wall clock"))
            compare(_record(kind="cuda", threads=64), _record(kind="cuda", threads=2))


# Going on.


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    for field in ("device", "commit", "timer"):
        with case(field):
            path = tmp_path / "bench.json"
            write(BenchRecord(replace(HERE, **{field: "other"}), (_row(),), ()), path)
            with pytest.raises(ArgumentError, match=f"another {field}: other, not"):
                earlier_record(path, HERE)


def test_a_record_of_another_day_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    assert earlier_record(path, HERE) == BenchRecord(HERE, (), ())
    stored = BenchRecord(replace(HERE, date="yesterday"), (_row(),), (Latency("fresh", 1.0, 1.0, 1.0),))
    write(stored, path)
    assert earlier_record(path, HERE) == replace(stored, environment=HERE)


# The command.


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the cases that are timed; times are made up."""
    names: list[str] = []

    def run_case(case: BenchCase, *_: object, **__: object) -> TimedCase:
        names.append(case.name)
        return replace(_row(case.name, shape=case.shape), group=case.group, dtype=case.dtype_name)

    found = {case.name: replace(case, cpu_sizes=(4, 32)) for case in GROUPS["public"] if case.name in ("gelu", "rms_norm")}
    monkeypatch.setattr(bench, "run_case", run_case)
    other = replace(found["gelu"], group="rows")
    monkeypatch.setattr(bench, "GROUPS", {"public": tuple(found.values()), "rows": (other, replace(other))})
    return names


def test_groups_and_names(timed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORDS) == 0
    assert timed == ["gelu", "rms_norm"], "of the public group"
    timed.clear()
    assert main([*WORDS, "--group", "rows", "public"]) == 0
    assert timed == ["gelu", "rms_norm", "gelu"], "cases that are alike are timed once"
    out, err = capsys.readouterr()
    assert out.index("== public ==") < out.index("== rows ==") and "2/3 timing rms_norm 4x32 float32 …" in err
    assert main([*WORDS, "rms_norm", "--group", "rows"]) == 2
    assert "rms_norm has no cases in rows · try: --group public" in capsys.readouterr().err
    assert main([*WORDS, "swiglu"]) == 2
    assert "swiglu has no cases in public · try: one of gelu, rms_norm" in capsys.readouterr().err


def test_one_line_says_who_is_missing(timed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gelu", "--device", "cpu"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("not timed: liger (it runs only on a GPU); ")]) == 1
    assert main(["bench", "gelu", "--device", "cpu", "--providers", "fusegen,liger"]) == 2
    assert "liger cannot be timed here" in capsys.readouterr().err and timed == ["gelu"]


def test_what_was_measured_is_stored_when_a_run_is_interrupted(
    timed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run_case = tmp_path / "bench.json", vars(bench)["run_case"]

    def interrupted(case: BenchCase, *rest: Any, **options: Any) -> TimedCase:
        if case.name == "rms_norm":
            raise KeyboardInterrupt
        return run_case(case, *rest, **options)

    monkeypatch.setattr(bench, "run_case", interrupted)
    assert main([*WORDS, "--out", str(path)]) == 1
    assert [row.case for row in read(path).rows] == ["gelu"]
    monkeypatch.setattr(bench, "run_case", run_case)
    timed.clear()
    assert main([*WORDS, "--out", str(path), "--resume"]) == 0
    assert timed == ["rms_norm"] and [row.case for row in read(path).rows] == ["gelu", "rms_norm"]
    assert main([*WORDS, "--out", str(path), "--resume", "--group", "rows"]) == 0
    assert [row.group for row in read(path).rows] == ["public", "public", "rows"], "what is there stays"
    timed.clear()
    assert main([*WORDS, "--out", str(path), "gelu"]) == 0
    assert timed == ["gelu"] and len(read(path).rows) == 1, "without --resume a run starts anew"
    assert main([*WORDS[:3], "--providers", "fusegen,eager", "--out", str(path), "--resume"]) == 2
    assert "another timer" in capsys.readouterr().err


def test_there_is_something_to_go_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--resume"], ["--resume", "--latency", "--out", "x.json"], ["--resume", "--show", "x.json"]):
        with case(words):
            assert main(["bench", *words]) == 2
            assert "--resume continues the record of --out" in capsys.readouterr().err


def _stored(path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    data = json.loads(path.read_text())
    change(data)
    copy = path.with_name("old.json")
    copy.write_text(json.dumps(data))
    return str(copy)


@pytest.mark.usefixtures("timed")
def test_a_regression_is_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    assert main([*WORDS, "--out", str(path)]) == 0

    def faster(data: dict[str, Any]) -> None:
        data["rows"][1]["timings"][0] |= {"microseconds": 50.0, "low": 49.0, "high": 51.0}

    old = _stored(path, faster)
    capsys.readouterr()
    assert main(["bench", "--show", str(path), "--compare", old]) == 1
    assert "slower: rms_norm 4x32 float32: 50.0 to 100.0 µs" in capsys.readouterr().out
    assert main([*WORDS, "--compare", old]) == 1, "a fresh run"
    assert main(["bench", "--show", old, "--compare", str(path)]) == 0
    assert "slower:" not in capsys.readouterr().out.rpartition("rms_norm")[2]


def test_devices_are_compared_before_anything_is_timed(
    timed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    assert main([*WORDS, "--out", str(path)]) == 0
    timed.clear()
    old = _stored(path, lambda data: data["environment"].update(device="abacus"))
    assert main([*WORDS, "--compare", old]) == 2
    assert not timed and "abacus" in capsys.readouterr().err


@pytest.mark.usefixtures("timed")
def test_the_exit_code_is_that_of_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_case(case: BenchCase, *_: object, **__: object) -> TimedCase:
        row = _row(case.name)
        return replace(row, timings=(row.timings[0], replace(row.timings[1], microseconds=None, error="no")))

    monkeypatch.setattr(bench, "run_case", run_case)
    assert main([*WORDS, "gelu"]) == 0
    monkeypatch.setattr(bench, "run_case", lambda case, *_, **__: _row(case.name, None))
    assert main([*WORDS, "gelu"]) == 1
