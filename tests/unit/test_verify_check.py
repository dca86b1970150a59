"""A verification run on the CPU: right kernels pass, wrong ones fail, and the command says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.cli.main import main
from fusegen.compiler import tuned
from fusegen.dtypes import DType
from fusegen.specs import Spec
from fusegen.specs.spec import tensor
from fusegen.target import CPU
from fusegen.verify.cases import cases
from fusegen.verify.check import Outcome, case_arguments, check
from fusegen.verify.lowering import LoweredCase, prepare
from fusegen.verify.run import verify
from tests.naming import case

HOST = torch.device("cpu")


@fg.kernel
def shifted(x: Tensor, bias: Tensor) -> Tensor:
    """x + bias"""
    return x + bias


OPERANDS = {"x": tensor("rows features"), "bias": tensor("features")}
SHIFTED = Spec("shifted", shifted, "elementwise", OPERANDS, {"rows": 8, "features": 16}, dtypes=(DType.FLOAT32,))


def outcome(name: str, change: Callable[[Tensor], Any] = lambda result: result) -> Outcome:
    """Of a case of `shifted`, whose result is changed before anybody looks at it."""
    (case,) = (case for case in cases(SHIFTED, DType.FLOAT32) if case.name == name)

    class Changed(LoweredCase):
        def run(self, arguments: Any, device: torch.device) -> tuple[Tensor, ...]:
            (result,) = super().run(arguments, device)
            changed = change(result)
            return changed if isinstance(changed, tuple) else (changed,)

    found = prepare(SHIFTED, case, CPU)
    (result,) = check(SHIFTED, case, [Changed(found.case, found.target, found.dispatcher, found.variant)], HOST)
    return result


@pytest.mark.parametrize("name", ["canonical", "odd", "unaligned", "transposed", "expanded", "empty", "infinite", "nan"])
def test_right_kernels_pass(name: str) -> None:
    found = outcome(name)
    assert found.passed and found.word == "passed", found.failure


def test_what_was_measured_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded is what everybody gets."""
    ignored: list[bool] = []

    def bound(compiled: Any, *_: Any) -> Any:
        ignored.append(bool(tuned._ACTIVE_UNTUNED))
        return compiled

    monkeypatch.setattr("fusegen.compiler.dispatch.with_measured_plans", bound)
    assert outcome("canonical").passed and ignored and all(ignored)


def _last_is_wrong(result: Tensor) -> Tensor:
    result[-1, -1] += 1
    return result


def _raises(_: Tensor) -> Tensor:
    raise RuntimeError("an illegal memory access\nwith details")


def test_wrong_kernels_fail() -> None:
    for change, failure in (
        (_last_is_wrong, "more than twice eager's greatest"),
        (lambda result: result.bfloat16(), "instead of torch.float32"),
        (lambda result: result.bfloat16().float(), "more than twice eager's greatest"),
        (lambda result: result[:-1], "instead of"),
        (lambda result: (result, result), "2 results instead of 1"),
        (lambda result: result / 0, "differ from the exact result in being NaN"),
        (_raises, "RuntimeError: an illegal memory access"),
    ):
        with case((change, failure)):
            found = outcome("odd", change)
            assert not found.passed and failure in found.failure and "\n" not in found.failure


def test_an_empty_result_has_its_shape() -> None:
    assert "instead of" in outcome("empty", lambda result: result[:, 1:]).failure


def test_what_is_too_large_is_skipped_with_a_reason() -> None:
    found = outcome("64-bit")
    assert (found.word, found.passed, found.failure) == ("skipped", False, "") and found.skipped


def test_nothing_is_run_after_a_case_that_the_device_does_not_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    answers = iter([True, True, True, False])  # before and after the first case, before and after the second
    monkeypatch.setattr("fusegen.verify.run.is_alive", lambda _: next(answers, False))
    ((row,),) = verify([SHIFTED], [DType.FLOAT32], [CPU], HOST, said.append)
    words = [outcome.word for _, outcome in row.cases]
    assert words[:2] == ["passed", "passed"] and set(words[2:]) == {"skipped"} and not row.passed
    assert said[-2:] == ["running shifted f32: half as wide", "the device failed in shifted f32: half as wide; nothing more is run"]


def test_a_case_has_the_same_numbers_each_time() -> None:
    (case,) = (case for case in cases(SHIFTED, DType.FLOAT32) if case.name == "transposed")
    first, second = case_arguments(case, HOST), case_arguments(case, HOST)
    assert torch.equal(first["x"], second["x"]) and first["x"].stride() == (1, 72)


# The command.


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "softmax", "--dtype", "bf16", "--json", "--case", "odd", "--case", "64-bit"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert (row["kernel"], row["dtype"], row["target"]) == ("softmax", "bf16", "cpu")
    assert {case["name"]: case["verdict"] for case in row["cases"]} == {"odd": "passed", "64-bit": "skipped"}
    assert document["written"] == []


MISTAKES = (["nothing"], ["--target", "sm_90a"], ["--target", "sm_1"], ["--dtype", "f64"], ["--case", "good"])


def test_mistakes_are_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in MISTAKES:
        with case(words):
            assert main(["verify", *words]) == 2
            assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("full", [1, 9], ids=["until-it-is-emptied", "for-good"])
def test_a_full_memory_is_emptied_and_tried_again(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier cases left behind must not cost a case; one that does not fit at all is skipped, not passed."""
    calls: list[None] = []

    def once_full(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) <= full:
            raise torch.OutOfMemoryError("no memory")
        return case_arguments(*arguments)

    monkeypatch.setattr("fusegen.verify.check.case_arguments", once_full)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=139 << 30))
    spec = Spec("shifted", shifted, "elementwise", OPERANDS, SHIFTED.size_overrides)
    case = cases(spec, DType.FLOAT32)[0]
    (outcome,) = check(spec, case, (prepare(spec, case, CPU),), HOST)
    assert len(calls) == 2
    assert outcome.passed is (full == 1)
    assert ("139 GiB" in outcome.skipped) is (full == 9)
