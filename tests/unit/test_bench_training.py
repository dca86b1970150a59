"""The group of training steps: what is computed and compared, what is counted, and what the tables show of memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen import timing as clock
from fusegen.bench.case import Implementation, TrainingCase
from fusegen.bench.cases import GROUPS
from fusegen.bench.providers import PROVIDERS, Provider
from fusegen.bench.record import BenchRecord, TimedCase, write
from fusegen.bench.report import full_table, report
from fusegen.bench.run import peak_bytes, run_case
from fusegen.bench.table import group_tables, group_timers, judge
from fusegen.cli import bench
from fusegen.timing import timer_name
from tests.tools.charts import memory_roof, moving, product_roof, products
from tests.unit import bench_records
from tests.unit.commands import Run

HOST, GPU = torch.device("cpu"), torch.device("cuda")
CASES = [case for case in GROUPS["training"] if isinstance(case, TrainingCase)]
QUICK = tuple(each for each in PROVIDERS if each.name in ("fusegen", "eager", "copy"))


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls a round."""
    monkeypatch.setattr(clock, "_QUICK_BUDGET", 1e-4)


def _case(name: str, *sizes: int, dtype: torch.dtype = torch.float32) -> TrainingCase:
    return replace(next(case for case in CASES if case.name == name), sizes=sizes, dtype=dtype)


# Cases.


def test_all_are_training_cases() -> None:
    assert len(CASES) == len(GROUPS["training"]) and all(case.group == "training" for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.shape}")
def test_both_passes_can_be_lowered(case: TrainingCase) -> None:
    forward, backward = (low.program for low in case.lowered("sm_90a"))
    assert forward.steps and backward.steps
    assert case.leaves and case.bytes > 0


def test_a_step_gives_results_and_gradients() -> None:
    case = _case("rotary", 2, 2, 8, 16)
    arguments = case.arguments(HOST)
    found = case.eager.prepare(arguments)()
    q, k = (arguments[name].clone().requires_grad_() for name in "qk")
    results = case.kernel.function(q, k, arguments["cos"], arguments["sin"])
    assert case.leaves == ("q", "k") and len(found) == 4
    torch.testing.assert_close(found[:2], results)
    torch.autograd.backward(results, case._upstream(arguments))
    torch.testing.assert_close(found[2:], (q.grad, k.grad))
    assert not any(each.requires_grad for each in arguments.values() if isinstance(each, Tensor))


def test_wider_arguments_meet_the_same_upstream_gradients() -> None:
    case = _case("layer_norm", 4, 32, dtype=torch.bfloat16)
    arguments = case.arguments(HOST)
    (narrow,) = case._upstream(arguments)
    (wide,) = case._upstream({name: value.double() if isinstance(value, Tensor) else value for name, value in arguments.items()})
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float64) and torch.equal(narrow.double(), wide)


def test_bytes_of_a_step() -> None:
    case = _case("rms_norm", 8, 32)
    tensor, row = 4 * 8 * 32, 4 * 32
    assert case.bytes == 2 * (tensor + row + tensor) + tensor + row
    case = _case("embedding_layer_norm", 2, 4, 100, 32)
    result, positions, vectors = 4 * 2 * 4 * 32, 4 * 4 * 32, 2 * 4 * 32
    assert case.bytes == 2 * (8 * 2 * 4 + positions + vectors + result) + 4 * 100 * 32 + positions + vectors


def test_indices_are_in_range_and_weights_are_small() -> None:
    arguments = _case("linear_cross_entropy", 64, 256, 50).arguments(HOST)
    assert 40 < arguments["targets"].max() < 50 and arguments["targets"].min() >= 0
    assert arguments["weight"].std().item() == pytest.approx(1 / 16, rel=0.1) and arguments["x"].std().item() == pytest.approx(
        1, rel=0.1
    )


# Running them.


@pytest.mark.parametrize(
    "case",
    [
        _case("add_rms_norm", 8, 32),
        _case("bias_attention", 1, 2, 16, 8),
        _case("embedding_layer_norm", 2, 4, 20, 32),
    ],
    ids=lambda case: case.name,
)
def test_a_step_is_measured_and_is_right(case: TrainingCase) -> None:
    row = run_case(case, HOST, QUICK, quick=True)
    assert [timing.provider for timing in row.timings] == ["fusegen", "eager", *([] if row.flops else ["copy"])]
    assert row.launches and row.timer is None, "a CPU has one timer"
    for timing in row.timings:
        assert timing.error is None and timing.microseconds and timing.peak_bytes is None
        assert timing.provider == "copy" or (timing.difference is not None and timing.difference < 1e-5)


def test_dropout_is_not_compared() -> None:
    row = run_case(_case("gelu_dropout_add", 8, 32), HOST, QUICK, quick=True)
    assert [(timing.difference, timing.error) for timing in row.timings] == [(None, None)] * 3


def _provider(name: str, function: Callable[..., Any]) -> Provider:
    return Provider(name, lambda device: None, lambda case: Implementation(name, lambda arguments: case.call(function, arguments)))


def test_a_wrong_gradient_has_no_time() -> None:
    right = _provider("right", lambda input: F.softmax(input, -1))
    halved = _provider("halved", lambda input: F.softmax((input + input.detach()) / 2, -1))
    none = _provider("none", lambda input: F.softmax(input.detach(), -1))
    row = run_case(_case("softmax", 8, 32), HOST, [right, halved, none], quick=True)
    found = {timing.provider: timing for timing in row.timings}
    assert found["right"].microseconds and found["right"].error is None
    assert found["halved"].microseconds is None and found["halved"].difference == pytest.approx(0.5)
    assert found["halved"].error == "wrong: off by 5.0e-01 of the result"
    assert found["none"].error and found["none"].error.startswith("RuntimeError")


def test_bench_times_the_group(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = (replace(_case("layer_norm", 4, 32), cpu_sizes=(4, 32)), replace(_case("cross_entropy", 4, 32), cpu_sizes=(4, 32)))
    monkeypatch.setattr(bench, "GROUPS", {"training": small})
    path = tmp_path / "bench.json"
    words = ("--group", "training", "--device", "cpu", "--quick", "--providers", "fusegen,eager,copy", "--out", str(path))
    result = run("bench", "cross_entropy", *words)
    assert result.code == 0, result.err
    assert "== training ==" in result.out and "cross_entropy" in result.out
    assert "MiB" not in result.out and "layer_norm" not in result.out
    stored = json.loads(path.read_text())
    assert stored["format"] == 3 and stored["rows"][0]["timings"][0]["peak_bytes"] is None


# Timers and memory of a GPU.


def test_the_record_says_what_steps_are_timed_with() -> None:
    assert timer_name(GPU, with_host=True) == "CUDA events around calls, host gaps included, 5 rounds of 20"
    assert timer_name(GPU, with_host=True) != timer_name(GPU) and timer_name(HOST, with_host=True) == timer_name(HOST)


def test_the_peak_is_above_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(now=100, peak=500)

    def call() -> None:
        memory.peak = max(memory.peak, memory.now + 40)
        memory.now = 130  # a workspace of the first call

    for name, value in {
        "synchronize": lambda device: None,
        "memory_allocated": lambda device: memory.now,
        "max_memory_allocated": lambda device: memory.peak,
        "reset_peak_memory_stats": lambda device: setattr(memory, "peak", memory.now),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert peak_bytes(call, GPU) == 40 and peak_bytes(call, HOST) is None


# Tables.


def _with_peaks(row: TimedCase, peaks: Sequence[int | None]) -> TimedCase:
    timings = tuple(replace(timing, peak_bytes=peak) for timing, peak in zip(row.timings, peaks, strict=True))
    return replace(row, group="training", timer="CUDA events, 5 rounds", timings=timings)


def _record() -> BenchRecord:
    times = {"fusegen": 100.0, "eager": 300.0, "compile": 200.0, "copy": 90.0}
    step = _with_peaks(bench_records.row("layer_norm", **times), [3 << 20, 9 << 20, None, None])
    return bench_records.record(bench_records.row("gelu", **times), step)


def test_memory_is_shown_where_a_group_has_it() -> None:
    tables = group_tables(_record())
    assert not [title for title in tables["public"][0] if title.endswith("MiB")]
    columns, (line,) = tables["training"]
    cells = dict(zip(columns, line, strict=True))
    assert [title for title in columns if title.endswith("MiB")] == ["fusegen MiB", "eager MiB"]
    assert (cells["fusegen MiB"], cells["eager MiB"], cells["speed-up"]) == ("3", "9", "2.00×")
    assert group_timers(_record()) == {"training": "CUDA events, 5 rounds"}
    page = full_table([judge(row) for row in _record().rows if row.group == "training"])
    found = dict(zip(page.columns, (cell.text for cell in page.lines[0].cells), strict=True))
    assert (found["fusegen MiB"], found["eager MiB"]) == ("3", "9") and "copy MiB" not in found


def test_the_command_shows_memory_and_timer(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write(_record(), path)
    _, _, training = run("bench", "--show", str(path)).out.partition("== training ==\n")
    assert training.startswith("CUDA events, 5 rounds\n") and "fusegen MiB" in training


def test_steps_are_in_tables_and_in_no_chart_of_rates() -> None:
    found = _record()
    step = found.rows[1]
    assert moving(found.rows) == [found.rows[0]]
    matmul = replace(step, flops=1 << 30)
    assert product_roof([matmul]) is memory_roof([matmul]) is None and not products([judge(matmul)])
    text = report(found)
    assert "Timed with CUDA events, 5 rounds." in text and text.count("<h3>training</h3>") == 1
