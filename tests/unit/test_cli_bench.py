"""``fusegen bench`` as a user meets it, with cases of few elements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegen as fg
from fusegen.bench.case import BenchCase
from fusegen.bench.cases import GROUPS
from fusegen.cli import bench
from fusegen.compiler.tuned import with_measured_plans
from fusegen.errors import ArgumentError
from fusegen.runtime.executable import forget_all
from fusegen.tuning import candidates
from tests.naming import case
from tests.unit.commands import Run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases of few elements."""
    found = [replace(case, cpu_sizes=(4, 32)) for case in GROUPS["public"] if case.name in ("gelu", "rms_norm")]
    monkeypatch.setattr(bench, "GROUPS", {"public": tuple(found)})


QUICK = ("bench", "--quick", "--device", "cpu", "--providers", "fusegen,eager,copy")


@pytest.mark.usefixtures("small_cases")
def test_bench_stores_and_shows_the_same(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = run(*QUICK, "gelu", "--out", str(path))
    assert result.code == 0, result.err
    assert [row["case"] for row in json.loads(path.read_text())["rows"]] == ["gelu"]
    assert run("bench", "--show", str(path)).out == result.out


@pytest.mark.usefixtures("small_cases")
def test_bench_writes_a_page(run: Run, tmp_path: Path) -> None:
    page, record = tmp_path / "page.html", tmp_path / "bench.json"
    assert run(*QUICK, "gelu", "--out", str(record), "--report", str(page)).code == 0
    assert ">gelu<" in (first := page.read_text())
    page.unlink()
    assert run("bench", "--show", str(record), "--report", str(page)).code == 0
    assert page.read_text() == first
    refused = run("bench", "--show", str(record), "--report", str(tmp_path))
    assert refused.code == 2 and "--report" in refused.err


@pytest.mark.parametrize("words", [["--show"], ["--out"], ["--show", "docs", "--compare"]])
def test_bench_refuses_to_lose_a_record(run: Run, tmp_path: Path, words: list[str]) -> None:
    path, stored = tmp_path / "bench.json", ROOT / "docs/bench/h200.json"
    path.write_bytes(stored.read_bytes())
    places = [str(stored) if word == "docs" else word for word in words]
    refused = run("bench", *places, str(path), "--report", str(tmp_path / "." / "x" / ".." / "bench.json"))
    assert refused.code == 2 and "would overwrite the record" in refused.err
    assert path.read_bytes() == stored.read_bytes()


def test_bench_shows_or_times(run: Run) -> None:
    for words in (["gelu"], ["--out", "x"], ["--tune"]):
        with case(words):
            names, others = (words, []) if words == ["gelu"] else ([], words)
            refused = run("bench", *names, "--show", str(ROOT / "docs/bench/h200.json"), *others)
            assert refused.code == 2 and "--show times nothing" in refused.err and words[0] in refused.err


def test_bench_goes_on_after_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    good, other = (replace(case, cpu_sizes=(4, 32)) for case in GROUPS["public"] if case.name in ("gelu", "rms_norm"))
    broken = replace(good, build=lambda dtype, sizes: {"x": good.build(dtype, sizes)["x"].to(torch.complex64)})
    monkeypatch.setattr(bench, "GROUPS", {"public": (broken, other)})
    result = run(*QUICK)
    assert result.code == 1
    assert "failed" in result.out and "gelu 4x32: fusegen: " in result.out
    assert result.out.count("rms_norm") == 1


# Measured plans.


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> BenchCase:
    """The only case of the benchmark."""
    case = next(replace(case, cpu_sizes=(8, 500)) for case in GROUPS["public"] if case.name == "softmax")
    monkeypatch.setattr(bench, "GROUPS", {"public": (case,)})
    return case.on("cpu")


def test_bench_times_what_a_call_runs(run: Run, own_cache: Path, one_case: BenchCase, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def bound(compiled: Any, *rest: Any) -> Any:
        plans.append((found := with_measured_plans(compiled, *rest)).program.launches[0].plan)
        return found

    monkeypatch.setattr("fusegen.compiler.dispatch.with_measured_plans", bound)
    (launch,) = candidates(one_case.kernel, **one_case.meta_arguments()).launches
    pinned = launch.candidates[1].plan
    assert run(*QUICK).code == 0 and not (own_cache / "tuned").exists()
    launch.pin(pinned)
    forget_all()
    before = [*plans]
    assert run(*QUICK).code == 0
    assert pinned not in before and plans[len(before) :] == [pinned]


@pytest.mark.usefixtures("one_case")
def test_bench_measures_plans_where_it_is_asked_to(run: Run, own_cache: Path) -> None:
    path = own_cache / "bench.json"
    result = run(*QUICK, "--tune", "--out", str(path))
    assert result.code == 0, result.err
    assert list((own_cache / "tuned").glob("*/8x500.json"))
    assert json.loads(path.read_text())["environment"]["timer"].endswith(", tuned")
    refused = run(*QUICK, "--resume", "--out", str(path))
    assert refused.code == 2 and "another timer" in refused.err


@pytest.mark.usefixtures("small_cases")
def test_plans_that_cannot_be_measured_are_fusegens_failure_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise ArgumentError("no plan can be timed")

    monkeypatch.setattr(fg, "tune", failing)
    result = run(*QUICK, "gelu", "--tune", "--json")
    (row,) = json.loads(result.out)["rows"]
    times = {timing["provider"]: timing for timing in row["timings"]}
    assert result.code == 1 and times["fusegen"]["error"] == "no plan can be timed"
    assert times["eager"]["microseconds"] and times["copy"]["microseconds"]
