"""The benchmark: what it counts, what it stores, and that one failure hides nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusegen as fg
from fusegen.bench import latency
from fusegen.bench.case import BenchCase
from fusegen.bench.cases import GROUPS
from fusegen.bench.providers import PROVIDERS
from fusegen.bench.record import BenchRecord, Latency, ProviderTiming, TimedCase, environment, read, write
from fusegen.bench.run import run_case
from fusegen.bench.table import group_tables
from fusegen.cli.demo import errors
from fusegen.eager_cost import eager_cost
from fusegen.errors import ArgumentError
from fusegen.specs import SPECS, meta
from tests.naming import case as named

HOST = torch.device("cpu")
CASES = GROUPS["public"]
QUICK = tuple(each for each in PROVIDERS if each.name in ("fusegen", "eager", "copy"))


# What eager costs.


def test_launches() -> None:
    for function, operations in (
        (lambda x: F.linear(x, x, x[0]), ("addmm",)),
        (lambda x: F.rms_norm(x, (4,)), ("rms_norm",)),
        (lambda x: F.layer_norm(x, (4,)), ("native_layer_norm",)),
        (lambda x: F.dropout(x, 0.1) + fg.dropout(x, 0.1, seed=3), ("dropout", "dropout", "add")),
        (lambda x: F.dropout(x, 0.1, training=False), ()),
        (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), ("scaled_dot_product_attention",)),
        (lambda x: x.mT.reshape(16).unsqueeze(1) + 1, ("clone", "add")),
        (lambda x: x.view(2, 8).expand(2, 8)[:, ::2], ()),
        (lambda x: torch.where(x > 0, x, -torch.inf), ("gt", "where")),
        (lambda x: x + torch.arange(4), ("arange", "add")),
        (lambda x: x + torch.ones(4, device="cpu"), ("ones", "add")),
    ):
        with named((function, operations)):
            cost = eager_cost(function, {"x": meta(4, 4, dtype=torch.float32)})
            assert cost is not None
            assert cost.operations == operations


def test_expanded_operands_are_read_once() -> None:
    x = torch.empty(1, 4, device="meta").expand(1000, 4)
    cost = eager_cost(lambda x: x + 1, {"x": x})
    assert cost is not None
    assert (cost.read, cost.written) == (4 * 4, 4000 * 4)


def test_what_needs_values_cannot_be_counted() -> None:
    assert eager_cost(lambda x: x if x.sum() > 0 else -x, {"x": torch.randn(3)}) is None


# Cases and running them.


def _tiny(name: str, *sizes: int) -> BenchCase:
    case = next(case for cases in GROUPS.values() for case in cases if case.name == name)
    return replace(case, sizes=sizes, dtype=torch.float32)


@pytest.mark.parametrize(
    "case",
    [
        _tiny("gelu_new", 2, 4, 32),
        _tiny("layer_norm_backward", 8, 32),
        _tiny("linear_bias_gelu", 8, 16, 32),
    ],
    ids=lambda case: case.name,
)
def test_a_case_is_measured_and_is_right(case: BenchCase) -> None:
    row = run_case(case, HOST, QUICK, quick=True)
    assert [timing.provider for timing in row.timings] == ["fusegen", "eager", *([] if row.flops else ["copy"])]
    assert row.launches and row.bytes == case.bytes
    for timing in row.timings:
        assert timing.error is None
        assert timing.microseconds and timing.low and timing.high and 0 < timing.low <= timing.microseconds <= timing.high
        assert timing.provider == "copy" or (timing.difference is not None and timing.difference < 1e-5)


def test_what_is_drawn_has_no_difference() -> None:
    row = run_case(_tiny("bias_dropout_add", 8, 32), HOST, QUICK, quick=True)
    assert [(timing.difference, timing.error) for timing in row.timings] == [(None, None)] * 3


def test_a_failing_kernel_leaves_a_row() -> None:
    case = _tiny("gelu", 4, 32)

    def broken(dtype: torch.dtype, sizes: tuple[int, ...]) -> dict[str, Any]:
        return {"x": torch.randn(sizes, dtype=dtype).requires_grad_()}

    row = run_case(replace(case, build=broken), HOST, QUICK, quick=True)
    assert row.microseconds("fusegen") is not None, "no_grad is on while timing"

    @fg.kernel
    def untraceable(input: torch.Tensor, approximate: str) -> torch.Tensor:
        return F.gelu(input[input > 0], approximate=approximate)

    class Other(BenchCase):
        kernel = property(lambda self: untraceable)

    failed = run_case(Other("gelu", (4, 32), (4, 32), case.build, dtype=torch.float32), HOST, QUICK, quick=True)
    ours = failed.timing("fusegen")
    assert ours is not None and ours.error and ours.microseconds is None and failed.launches == ""
    assert failed.microseconds("eager") is not None and failed.timing("liger") is None


def test_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_FRESH", 1)
    monkeypatch.setattr(latency, "_CALLS", 20)
    monkeypatch.setattr(latency, "_ROUND_CALLS", 2)
    chain = latency._chains(HOST)[0]
    monkeypatch.setattr(latency, "_chains", lambda device: [chain])
    first, *later = latency.measure(HOST)
    assert first.warm_ms is not None and first.cold_ms is not None and first.warm_ms > 0 and first.cold_ms > 0
    ways = ["4 kernels in turn", "one kernel, called from C++ (compiler='extension')", "one kernel, 4 shapes in turn"]
    assert [each.case for each in later[:4]] == ["eager, one operation of torch", *ways]
    assert [each.case for each in later[4:]] == ["gelu + add, forward", "gelu + add, forward and backward"]
    assert all(each.eager_us is not None and each.eager_us > 0 for each in later[4:])
    assert all(each.call_us > 0 for each in (first, *later)) and all(each.cold_ms is each.warm_ms is None for each in later)


def test_errors_against_the_oracle_see_every_slice() -> None:
    kernel = SPECS["gelu_new"].kernel
    x = torch.randn(3, 4, 32)
    good = kernel.function(x)
    bad = good.clone()
    bad[2, 3, 31] += 1
    found = errors(kernel.lower(x).traced, {"x": x}, {"good": good, "bad": bad})
    assert found["good"].relative < 1e-6
    assert found["bad"].greatest == pytest.approx(1, abs=1e-5)


# Records.


def _timing(
    provider: str, microseconds: float | None, *, error: str | None = None, difference: float | None = None
) -> ProviderTiming:
    return ProviderTiming(provider, f"{provider}'s", microseconds, microseconds, microseconds, difference, error)


def _record() -> BenchRecord:
    timings = (
        _timing("fusegen", 250.0, difference=1e-7),
        _timing("eager", 1000.0),
        _timing("quack", 500.0),
        _timing("copy", 200.0),
    )
    row = TimedCase("public", "gelu", "4x32", "float32", 1 << 30, None, "1", timings)
    failed = replace(row, shape="5x32", timings=(_timing("fusegen", None, error="no compiler"), *timings[1:2]))
    product = replace(row, shape="6x32", flops=10**12, timings=timings[:2])
    wrong = replace(row, group="rows", timings=(timings[0], _timing("liger", None, error="wrong: off", difference=0.1)))
    later = Latency("several", None, None, 7.0)
    return BenchRecord(environment(HOST, "wall clock"), (row, failed, product, wrong), (Latency("fresh", 80.0, 2.0, 6.0), later))


def test_a_record_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "bench.json"
    write(_record(), path)
    assert read(path).rows == _record().rows and read(path).latency == _record().latency
    stored = json.loads(path.read_text())
    for field in ("device", "driver", "cuda", "torch", "fusegen", "date", "commit"):
        assert field in stored["environment"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    for text in (
        "",
        "null",
        "[" * 100_000,
        '{"format": 2, "rows": [], "latency": [], "environment": {}}',
        '{"format": 3, "rows": 3, "latency": [], "environment": {}}',
        '{"format": 3, "rows": [{"case": "x", "timings": [{}]}], "latency": [], "environment": {}}',
    ):
        with named(text):
            path = tmp_path / "other.json"
            path.write_text(text)
            with pytest.raises(ArgumentError, match="is not a record"):
                read(path)


def test_values_are_checked(tmp_path: Path) -> None:
    for field, value in (
        ("microseconds", "fast"),
        ("microseconds", True),
        ("microseconds", float("nan")),
        ("microseconds", 10**400),
        ("provider", None),
        ("bytes", 1.5),
        ("low", 0),
        ("difference", -0.5),
        ("case", "gelu\x1b[31m"),
        ("timings", {"provider": "eager"}),
    ):
        with named((field, value)):
            path = tmp_path / "bench.json"
            write(_record(), path)
            data = json.loads(path.read_text())
            row = data["rows"][0]
            (row if field in row else row["timings"][1])[field] = value
            path.write_text(json.dumps(data))
            with pytest.raises(ArgumentError, match=f"is not a record|{field} is"):
                read(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot read"):
        read(tmp_path / "none.json")
    with pytest.raises(ArgumentError, match="cannot read"):
        read(tmp_path)
    with pytest.raises(ArgumentError, match="is not a record"):
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        read(tmp_path / "binary")
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot write"):
        write(_record(), tmp_path / "file" / "bench.json")


def test_the_table_says_what_the_record_says() -> None:
    tables = group_tables(_record())
    assert list(tables) == ["public", "rows"]
    columns, rows = tables["public"]
    cells = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [column for column in columns if column.endswith("µs")] == ["fusegen µs", "eager µs", "quack µs"]
    assert cells[0]["speed-up"] == "2.00×" and cells[0]["of copy"] == "80%" and cells[0]["rate"] == "4.29 TB/s"
    assert cells[0]["best peer"] == "quack: quack's" and cells[0]["difference"] == "1.0e-07"
    assert cells[1]["fusegen µs"] == "failed" and cells[1]["speed-up"] == "–" and cells[1]["best peer"] == "eager: eager's"
    assert cells[2]["rate"] == "4000 TFLOP/s" and cells[2]["of copy"] == "–" and cells[2]["quack µs"] == "–"
    (line,) = tables["rows"][1]
    found = dict(zip(tables["rows"][0], line, strict=True))
    assert found["liger µs"] == "wrong" and found["speed-up"] == found["best peer"] == "–"


def test_cases_do_not_share_a_kernel() -> None:
    first, second = (case for case in CASES if case.name == "softmax")
    for case in (first, second):
        low = case.kernel.lower(**case.meta_arguments(), target="sm_90a")
        assert low.graph.inputs[0].shape[-1] == case.sizes[-1], "the length of rows is literal in each"
