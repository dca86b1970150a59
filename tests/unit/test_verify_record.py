"""Records: what is written, what is kept, what is refused; and that only what passed is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegen
from fusegen.cli import verify as command
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError
from fusegen.specs import SPECS, Spec
from fusegen.target import target
from fusegen.verify import run as verification
from fusegen.verify.accuracy import Errors, Verdict
from fusegen.verify.cases import Case, cases
from fusegen.verify.check import Outcome
from fusegen.verify.lowering import LoweredCase, can_run, prepare
from fusegen.verify.record import (
    LIST,
    DtypeRecord,
    Environment,
    folder_to_write,
    merge,
    own_folder,
    path_of,
    read,
    unverified,
)
from fusegen.verify.run import SpecResult, problems, store, verify
from tests.unit.commands import Run

WHERE = Environment("NVIDIA H200", "sm_90a", "580.1", "13.0", "13.0", "2.11", "0.1.0", "2026-01-01T00:00:00+00:00")
GELU, HOPPER = SPECS["gelu"], target("sm_90a")
RIGHT = Outcome((Verdict(Errors(1.23456e-3, 1e-3, 1e-4, 1e-4, 100)),))
WRONG = Outcome((Verdict(Errors(), "an error"),))


@lru_cache
def _prepared(dtype: DType) -> tuple[LoweredCase, ...]:
    return tuple(prepare(GELU, case, HOPPER) for case in cases(GELU, dtype))


def row(dtype: DType = DType.BFLOAT16, last: Outcome = RIGHT) -> SpecResult:
    prepared = _prepared(dtype)
    outcomes = [*[RIGHT] * (len(prepared) - 1), last]
    return SpecResult(GELU, dtype, HOPPER, tuple(zip(prepared, outcomes, strict=True)))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (path,) = store([row()], tmp_path, WHERE)
    assert path == tmp_path / "sm_90a/gelu/verified.json"
    entry = read(path)["bf16"]
    assert entry.environment == WHERE and list(entry.cases) == [case.name for case in cases(GELU, DType.BFLOAT16)]
    odd = entry.cases["odd"]
    assert odd.arguments == "input: bf16 67x2049" and odd.plan == ["pointwise: threads=128 vec=8 unroll=1 tail"]
    assert odd.results == [{"worst": 1.23e-3, "eager_worst": 1e-3, "rms": 1e-4, "eager_rms": 1e-4, "compared": 100}]
    assert [len(digest) for digest in odd.sources] == [32]


def test_an_entry_leaves_those_of_other_element_types(tmp_path: Path) -> None:
    path = path_of(tmp_path, "sm_90a", "gelu")
    first, second = DtypeRecord(WHERE, {}), DtypeRecord(replace(WHERE, time="later"), {})
    merge(path, "sm_90a", "gelu", {"bf16": first, "f32": first})
    merge(path, "sm_90a", "gelu", {"bf16": second, "f16": second})
    assert {name: entry.environment.time for name, entry in read(path).items()} == {
        "f16": "later",
        "bf16": "later",
        "f32": WHERE.time,
    }
    assert list(json.loads(path.read_text())["dtypes"]) == ["f16", "bf16", "f32"], "in one order"


def test_a_case_that_did_not_pass_leaves_the_old_record(tmp_path: Path) -> None:
    (path,) = store([row(), row(DType.FLOAT32)], tmp_path, WHERE)
    before = path.read_bytes()
    for last in (WRONG, Outcome(error="it broke"), Outcome(skipped="too little memory")):
        assert store([row(DType.FLOAT32), row(last=last)], tmp_path, WHERE) == []
        assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["verified.json"], "nothing half-written"


def test_the_list_of_what_is_not_verified_follows(tmp_path: Path) -> None:
    store([row()], tmp_path, WHERE)
    lines = (tmp_path / LIST).read_text().splitlines()[1:]
    assert lines == [" ".join(each) for each in unverified(tmp_path)]
    assert "sm_90a gelu f32" in lines and "sm_90a gelu bf16" not in lines


def test_an_interrupted_run_keeps_the_records_of_finished_specs(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(spec: Spec, _case: Case, prepared: Sequence[LoweredCase], _device: torch.device) -> tuple[Outcome, ...]:
        if spec is not GELU:
            raise KeyboardInterrupt
        return (RIGHT,) * len(prepared)

    def on_the_cpu(specs: Sequence[Spec], dtypes: Sequence[DType], *rest: Any) -> Iterator[list[SpecResult]]:
        return verify(specs, dtypes, [target("cpu")], torch.device("cpu"), *rest[2:])

    monkeypatch.setattr(verification, "check", check)
    monkeypatch.setattr(command, "_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(command, "target_of", lambda _: HOPPER)
    monkeypatch.setattr(command, "verify", on_the_cpu)
    monkeypatch.setattr(command, "environment_of", lambda _: WHERE)
    path = path_of(tmp_path, "cpu", "gelu")
    merge(path, "cpu", "gelu", {"f32": DtypeRecord(WHERE, {})})
    words = ("verify", "gelu", "swiglu", "rms_norm", "--dtype", "bf16", "--record", str(tmp_path))
    stopped = run(*words)
    assert stopped.code == 1 and "1 record written" in stopped.out
    assert stopped.err.splitlines()[-2:] == ["not verified: swiglu, rms_norm", "error: interrupted"]
    assert set(read(path)) == {"f32", "bf16"} and not path_of(tmp_path, "cpu", "swiglu").exists()
    assert run(*words, "--json").out == ""


def test_a_gpu_that_runs_no_shipped_code_is_told_what_it_can_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(command, "target_of", lambda _: target("sm_80"))
    stopped = run("verify", "gelu", "--dry-run")
    assert stopped.code == 2 and "this GPU cannot run code for sm_90a" in stopped.err and "--target sm_80 --dry-run" in stopped.err


def test_what_is_no_record_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "verified.json"
    for text in ("", "{}", "[]", '{"format": 0}', '{"format": 1, "dtypes": {"f32": {}}}', '{"format": 1, "dtypes": 3}'):
        path.write_text(text)
        with pytest.raises(ArgumentError, match="is not a verification record"):
            read(path)


# Folders.


def test_records_go_into_the_checkout() -> None:
    assert folder_to_write(None) == own_folder() == Path(fusegen.__file__).parents[1] / "generated"


def test_an_installation_is_never_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "lib/site-packages/fusegen/records", Path(fusegen.__file__).parent / "records"):
        with pytest.raises(ArgumentError, match="belongs to the installed package"):
            folder_to_write(folder)
    monkeypatch.setattr("fusegen.verify.record.is_installed", lambda: True)
    assert folder_to_write(None) is None
    assert folder_to_write(tmp_path / "mine") == tmp_path / "mine"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="is not a folder"):
        folder_to_write(tmp_path / "file")


# What a record is worth today.


def _changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_record_of_other_kernels_is_stale(tmp_path: Path) -> None:
    (path,) = store([row()], tmp_path, WHERE)
    cases = read(path)["bf16"].cases
    digest = cases["canonical"].sources[0]
    names = [name for name, case in cases.items() if digest in case.sources]
    _changed(path, digest, "0" * 32)
    assert problems(GELU, HOPPER, tmp_path) == [f"sm_90a gelu bf16: the case {name!r} launches other kernels" for name in names]


def test_a_record_of_kernels_that_were_launched_otherwise_is_stale(tmp_path: Path) -> None:
    (path,) = store([row()], tmp_path, WHERE)
    _changed(path, digest := read(path)["bf16"].cases["canonical"].launches, "0" * len(digest))
    change = "launches its kernels with other parameters"
    otherwise = [f"sm_90a gelu bf16: the case {name!r} {change}" for name in ("canonical", "erf: canonical")]
    assert problems(GELU, HOPPER, tmp_path)[:2] == otherwise
    _changed(path, f', "launches": "{"0" * len(digest)}"', "")
    assert problems(GELU, HOPPER, tmp_path) == [], "of a record that is older nothing is known"


def test_every_case_must_be_there_as_it_is_called(tmp_path: Path) -> None:
    (path,) = store([row()], tmp_path, WHERE)
    good = path.read_text()
    for old, new, problem in (
        ('"odd"', '"old"', "the case 'odd' is missing"),
        ('"odd"', '"old"', "the case 'old' no longer exists"),
        ("67x2049", "67x2051", "the case 'odd' has other arguments"),
        ('"verdict": "passed"', '"verdict": "failed"', "has the verdict 'failed'"),
    ):
        _changed(path, old, new)
        assert any(problem in line for line in problems(GELU, HOPPER, tmp_path)), problem
        path.write_text(good)


def test_the_command_passes_what_is_listed_alone(tmp_path: Path, run: Run) -> None:
    words = ("verify", "gelu", "--target", "sm_90a", "--check", "--record", str(tmp_path))
    (path,) = store([row()], tmp_path, WHERE)
    passed = run(*words)
    assert passed.code == 0 and "2 kernels have no record" in passed.out
    document = json.loads(run(*words, "--json").out)
    assert document["unverified"] == ["sm_90a gelu f32", "sm_90a gelu f16"] and document["problems"] == []
    names = tmp_path / LIST
    listed = names.read_text()
    for text, problem in (
        (listed.replace("sm_90a gelu f16\n", ""), "sm_90a gelu f16: no record"),
        (listed + "sm_90a gelu bf16\n", f"sm_90a gelu bf16: verified, but {LIST} names it"),
    ):
        names.write_text(text)
        failed = run(*words)
        assert failed.code == 1 and failed.out.splitlines() == [problem]
    names.write_text(listed)
    _changed(path, '"odd"', '"old"')
    assert run(*words).code == run(*words, "--dtype", "bf16").code == 1
    assert run(*words, "--dtype", "f16").code == 0  # whose kernels nobody has verified, as is listed
    names.unlink()
    assert run(*words).out.splitlines()[0] == "sm_90a gelu f32: no record"


def test_which_text_a_device_runs() -> None:
    assert can_run(target("sm_80"), target("sm_90a")) and can_run(HOPPER, HOPPER)
    assert not can_run(HOPPER, target("sm_100")), "warpgroup products are Hopper's alone"
    assert not can_run(target("sm_90a"), target("sm_80")), "a device is older than the text"
    assert not can_run(target("sm_80"), target("sm_86")), "less shared memory than the text counts on"
    assert not can_run(target("sm_80"), target("cpu"))
