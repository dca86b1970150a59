"""``fusegen tune``. Times are made up: speed is no matter of tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegen import tuning
from fusegen.cli import tune
from fusegen.timing import RoundTimes, TimedCall
from tests.naming import case
from tests.unit.commands import Run

FILE = """
import torch.nn.functional as F
import fusegen as fg

@fg.kernel
def soft(x, by: float):
    return F.softmax(x * by, -1)

@fg.kernel
def product(x, w):
    return x @ w
"""

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with kernels of a user's in the current folder."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)


def _made_up(calls: Mapping[str, TimedCall], *_: Any, **__: Any) -> dict[str, RoundTimes | Exception]:
    """Times of which that of the second plan is the least."""
    return {name: RoundTimes(t := 50.0 if name == "1" else 100.0, t, t) for name in calls}


def _failing(calls: Mapping[str, TimedCall], *_: Any, **__: Any) -> dict[str, RoundTimes | Exception]:
    return {name: RuntimeError("no graph") for name in calls}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays the GPU."""
    monkeypatch.setattr(tune, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(tuning, "interleaved", _made_up)


WORDS = ("tune", "mine.py:soft", "--shape", "x=8x500", "--arg", "by=2.0")


@pytest.mark.usefixtures("gpu")
def test_the_fastest_plan_is_kept(run: Run, own_cache: Path) -> None:
    result = run(*WORDS)
    assert result.code == 0, result.err
    assert "== mine.py:soft f32 ==" in result.out and "->       50.0 us" in result.out
    (file,) = (own_cache / "tuned").glob("*/8x500.json")
    assert json.loads(file.read_text())


@pytest.mark.usefixtures("gpu")
def test_a_document_holds_every_plan(run: Run) -> None:
    (kernel,) = json.loads(run(*WORDS, "--json").out)["kernels"]
    assert (kernel["name"], kernel["dtype"]) == ("mine.py:soft", "f32")
    (launch,) = kernel["launches"]
    assert launch["extents"] == [8, 500] and launch["plan"] == launch["candidates"][1]["plan"]
    assert [each["microseconds"] for each in launch["candidates"][:2]] == [100.0, 50.0]


@pytest.mark.usefixtures("gpu")
def test_prebuilt_kernels_take_shapes_too(run: Run) -> None:
    result = run("tune", "softmax", "--shape", "input=8x500:f16")
    assert result.code == 0 and "== softmax f16 ==" in result.out and "8 x 500" in result.out


@pytest.mark.usefixtures("gpu")
def test_a_kernel_of_one_plan_says_so(run: Run) -> None:
    result = run("tune", "mine.py:product", "--shape", "x=8x64", "w=64x64")
    assert result.code == 0 and "no launch has several plans" in result.out


@pytest.mark.usefixtures("gpu")
def test_plans_that_cannot_be_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "interleaved", _failing)
    result = run(*WORDS)
    assert result.code == 1 and "RuntimeError: no graph" in result.out


def test_without_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = run(*WORDS)
    assert refused.code == 2 and refused.out == "" and not (own_cache / "tuned").exists()
    assert refused.err == "error: torch sees no NVIDIA GPU, and plans are measured on a GPU · try: fusegen doctor\n"


@pytest.mark.usefixtures("gpu")
def test_mistakes(run: Run) -> None:
    for words, part in (
        ((), "NAME"),
        (("sotfmax",), "softmax"),
        (("mine.py:soft",), "--shape x="),
        (("mine.py:soft", "softmax", "--shape", "x=8"), "--shape and --arg describe one kernel"),
    ):
        with case(words):
            refused = run("tune", *words)
            assert refused.code == 2 and refused.out == "" and part in refused.err
