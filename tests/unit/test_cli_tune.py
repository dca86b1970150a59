"""``fusegen tune``. Times are made up: speed is no matter of tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import tuning
from fusegen.cli import tune
from fusegen.settings import settings
from fusegen.timing import RoundTimes, TimedCall
from tests.naming import case
from tests.unit.commands import Run
from tests.unit.lowering import meta

FILE = """
import torch.nn.functional as F
import fusegen as fg

@fg.kernel
def soft(x, by: float):
    return F.softmax(x * by, -1)

@fg.kernel
def product(x, w):
    return x @ w

@fg.kernel
def biased(x, w, b):
    return F.relu(F.linear(x, w, b))

@fg.kernel(plan="library")
def declared(x, w, b):
    return F.relu(F.linear(x, w, b))
"""


def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


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
def test_several_sizes(run: Run, own_cache: Path) -> None:
    result = run("tune", "mine.py:soft", "--shape", "x=8x500,40x500,8x3000", "--arg", "by=2.0")
    assert result.code == 0 and all(f"soft, {size}:" in result.out for size in ("8 x 500", "40 x 500", "8 x 3000"))
    assert {file.name for file in (own_cache / "tuned").glob("*/*")} == {"8x500.json", "40x500.json", "8x3000.json"}


LISTED = ("tune", "mine.py:biased", "--shape", "x=512x256", "w=256x256", "b=256", "--target", "sm_90a")


def test_candidates_are_listed_and_pinned_without_a_gpu(run: Run) -> None:
    listed = run(*LISTED, "--list")
    assert listed.code == 0 and "biased, 512 x 256 x 256:" in listed.out and "not measured  library" in listed.out
    pinned = run(*LISTED, "--pin", "library")
    assert pinned.code == 0 and "->  not measured  library" in pinned.out
    assert run(*LISTED, "--list").out == pinned.out
    low = fg.kernel(biased).lower(meta(512, 256), meta(256, 256), meta(256), target="sm_90a")
    assert "->  not measured  library\n   pinned" in low.explain()


def test_a_parameter_may_be_called_like_an_option(run: Run) -> None:
    assert "not measured" in run("tune", "binary_cross_entropy_with_logits", "--list", "--target", "sm_90a").out


@pytest.mark.usefixtures("gpu")
def test_records_move_in_one_file(run: Run, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(*WORDS)
    (file,) = (own_cache / "tuned").glob("*/8x500.json")
    text = file.read_text()
    assert "exported 1 record" in run("tune", "--export", "records.json").out
    file.unlink()
    assert "->       50.0 us" not in run(*WORDS, "--list", "--target", "cpu").out
    with monkeypatch.context() as patch:
        patch.setenv("FUSEGEN_TUNING_PATH", str(tmp_path / "records.json"))
        settings.cache_clear()
        assert "->       50.0 us" in run(*WORDS, "--list", "--target", "cpu").out
    settings.cache_clear()
    assert "imported 1 record" in run("tune", "--import", "records.json").out
    assert file.read_text() == text
    assert "exported 1 record" in run("tune", "--export", "records.json").out


def test_an_export_replaces_nothing_but_an_export(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("precious")
    assert "--export would replace model.py, a file of another kind" in run("tune", "--export", "model.py").err
    assert (tmp_path / "model.py").read_text() == "precious"


@pytest.mark.usefixtures("gpu")
def test_mistakes(run: Run) -> None:
    for words, part in (
        ((), "no kernel is named"),
        (("sotfmax",), "softmax"),
        (("mine.py:soft",), "--shape x="),
        (("mine.py:soft", "softmax", "--shape", "x=8"), "--shape describes one kernel"),
        ((*WORDS[1:], "--shape", "y=1,2,3", "z=1,2"), "different lengths"),
        ((*WORDS[1:], "--target", "sm_90a"), "--list and --pin"),
        ((*LISTED[1:], "--pin", "a plan"), "no candidate 'a plan'"),
        (("mine.py:declared", *LISTED[2:], "--pin", "library"), "the plan= of the declaration decides"),
        (("--import", "mine.py"), "not a file of tuning records"),
    ):
        with case(words):
            refused = run("tune", *words)
            assert refused.code == 2 and refused.out == "" and part in refused.err
