"""``fusegen bench FILE.py:NAME``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusegen.bench.providers import PROVIDERS
from tests.naming import case
from tests.unit.commands import Run

FILE = """
import torch
import torch.nn.functional as F
import fusegen as fg

WEIGHT = torch.ones(64)

@fg.kernel
def placed(x, by=2.0, y=None, /, backward: bool = False):
    return x - y if backward else x * by - y

@fg.kernel
def flagged(x, *, backward: bool = False):
    return x + 1

@fg.kernel
def shift(x, by: float, twice: bool = False):
    return x * WEIGHT + (2 * by if twice else by)

@fg.kernel(mutates=("x",))
def add(x, y):
    x.add_(y)
    return x * 2

@fg.kernel(mutates=("cache",))
def stored(x, cache=None):
    if cache is not None:
        cache.copy_(x)
    return x + 1

@fg.kernel
def drop(x):
    return F.dropout(x, 0.5)

@fg.kernel
def gather(x, i):
    return x[i].argmax(-1), {"rows": x[i]}

@fg.kernel
def traced(x):
    if type(x) is torch.Tensor:
        raise RuntimeError("torch runs the kernel inside")
    return x + 1

@fg.kernel
def outer(x):
    return traced(x) + 1

@fg.kernel
def untraceable(x):
    return x.nonzero()

@fg.kernel
def number(n: int):
    return n

@fg.kernel
def scaled(x, w, by: float = 2.0):
    return F.layer_norm(x, x.shape[-1:], w) * by

@fg.kernel
def total(a, b, c, d, e, f, g, h, i, j, k):
    return a + b + c + d + e + f + g + h + i + j + k
"""

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("bench", "--quick", "--device", "cpu", "--providers", "fusegen,eager,copy")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with kernels of a user's in the current folder."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)


def row_of(run: Run, *words: str) -> dict[str, Any]:
    """The one row of a run that succeeds."""
    result = run(*QUICK, *words, "--json")
    assert result.code == 0, result.out + result.err
    (row,) = json.loads(result.out)["rows"]
    assert all(timing["microseconds"] for timing in row["timings"])
    return dict(row)


def difference(row: dict[str, Any]) -> float | None:
    """By how much fusegen's result is off."""
    found: float | None = row["timings"][0]["difference"]
    return found


def test_a_row_says_what_was_timed(run: Run) -> None:
    row = row_of(run, "mine.py:shift", "--shape", "x=8x64:f16", "--arg", "by=2.0", "twice=true")
    assert (row["case"], row["group"], row["dtype"]) == ("mine.py:shift", "own", "float16")
    assert row["shape"] == "by=2.0 twice=True x=8x64"
    assert row["bytes"] == 8 * 64 * 2 + 64 * 4 + 8 * 64 * 4, "the captured weight is read, and widens the result"
    assert [timing["provider"] for timing in row["timings"]] == ["fusegen", "eager", "copy"]


def test_positional_only_parameters(run: Run) -> None:
    for backward in ((), ("--backward",)):
        timings = row_of(run, "mine.py:placed", "--shape", "y=8x64", "x=8x64", *backward)["timings"]
        assert timings[0]["max_error"] < 1e-6 and timings[1]["launches"] >= 2


def test_tensors_have_the_dtype_that_is_given(run: Run) -> None:
    assert row_of(run, "mine.py:drop", "--shape", "x=8x64", "--dtype", "bf16")["dtype"] == "bfloat16"
    assert row_of(run, "mine.py:gather", "--shape", "x=8x64", "i=4:i64")["shape"] == "x=8x64 i=4:i64"


def test_results_that_are_drawn_are_not_compared(run: Run) -> None:
    assert difference(row_of(run, "mine.py:drop", "--shape", "x=8x64")) is None


def test_everybody_writes_to_a_copy(run: Run) -> None:
    assert difference(row_of(run, "mine.py:add", "--shape", "x=8x64", "y=8x64")) == 0


def test_a_tensor_to_write_to_may_be_left_out(run: Run) -> None:
    for more in ([], ["cache=8x64"]):
        with case(more):
            assert difference(row_of(run, "mine.py:stored", "--shape", "x=8x64", *more)) == 0


def test_nested_results_and_integers_are_compared(run: Run) -> None:
    assert difference(row_of(run, "mine.py:gather", "--shape", "x=8x64", "i=4:i64")) == 0


def test_eager_runs_the_kernels_inside(run: Run) -> None:
    result = run(*QUICK, "mine.py:outer", "--shape", "x=8x64", "--json")
    assert result.code == 1 and "torch runs the kernel inside" in json.loads(result.out)["rows"][0]["timings"][0]["error"]


def test_a_wrong_result_has_no_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.api.Kernel.__call__", lambda self, x, i: self.function(x, 1 - i))
    result = run(*QUICK, "mine.py:gather", "--shape", "x=8x64", "i=4:i64", "--json")
    assert result.code == 1 and json.loads(result.out)["rows"][0]["timings"][0]["error"].startswith("wrong: off by")


def test_a_record_is_stored_where_it_is_asked_for(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    words = (*QUICK, "mine.py:drop", "--shape", "x=8x64", "--out", str(path))
    assert run(*words).code == 0
    stored = path.read_text()
    assert run(*words, "--resume").code == 0 and path.read_text() == stored
    assert run("bench", "--show", str(path)).out.partition("== to repeat")[0].count("mine.py:drop") == 1


def test_torch_compile_takes_part_by_default(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compile", lambda function, dynamic: function)
    result = run("bench", "--quick", "--device", "cpu", "mine.py:drop", "--shape", "x=8x64", "--json")
    (row,) = json.loads(result.out)["rows"]
    assert [timing["provider"] for timing in row["timings"]] == ["fusegen", "eager", "compile", "copy"]
    assert "liger" not in result.err


MISTAKES = [
    (("mine.py:drop",), ("x of drop", "--shape x=")),
    (("mine.py:dorp", "--shape", "x=8"), ("no kernel 'dorp'", "mine.py:drop")),
    ((":drop", "--shape", "x=8"), ("names no file or module before the colon", "path/to/file.py:kernel")),
    (("mine.py:", "--shape", "x=8"), ("names no kernel after the colon", "path/to/file.py:kernel")),
    (("mine.py:shift", "--shape", "x=8x64", "--arg", "twice=maybe"), ("'maybe' is neither", "twice=true or --arg twice=false")),
    (("mine.py:number", "--arg", "n=3"), ("mine.py:number takes no tensor",)),
    (("mine.py:drop", "mine.py:add", "--shape", "x=8"), ("--shape describes one kernel", "one kernel per command")),
    (("mine.py:drop", "gelu", "--shape", "x=8"), ("mine.py:drop is your own kernel, and gelu is a prebuilt one", "for each")),
    (("gelu", "--shape", "x=8"), ("--shape applies to your own kernels", "path/to/file.py:kernel")),
    (("--arg", "x=8"), ("--arg applies to your own kernels",)),
    (("gelu", "--call", "x=8"), ("--call applies to your own kernels",)),
    (("gelu", "--backward"), ("--backward applies to your own kernels",)),
    (("mine.py:drop", "mine.py:add", "--call", "x=8"), ("--call describes one kernel", "one kernel per command")),
    (("mine.py:add", "--shape", "x=8x64", "y=8x64", "--backward"), ("mine.py:add writes to x", "forward pass alone")),
    (("gelu", "--dtype", "f32"), ("--dtype applies to your own kernels",)),
    (("mine.py:drop", "--shape", "x=8", "--dtype", "f31"), ("f31", "bf16")),
    (("mine.py:drop", "--shape", "x=8", "--group", "public"), ("--group", "leave it out")),
    (("mine.py:drop", "--shape", "x=8", "--latency"), ("--latency", "leave it out")),
]


def test_mistakes(run: Run) -> None:
    for words, parts in MISTAKES:
        with case(words):
            refused = run("bench", "--device", "cpu", *words)
            assert refused.code == 2 and refused.out == "" and refused.err.count("\n") == 1, refused.err
            for part in parts:
                assert part in refused.err


def test_shapes_are_of_no_stored_record(run: Run) -> None:
    refused = run("bench", "--show", "run.json", "--shape", "x=8")
    assert refused.code == 2 and "--show times nothing, but --shape selects what to time" in refused.err


def test_a_provider_of_other_kernels_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.bench.providers.PROVIDERS", [replace(each, missing=lambda _: None) for each in PROVIDERS])
    refused = run("bench", "--device", "cpu", "mine.py:drop", "--shape", "x=8", "--providers", "fusegen,liger")
    assert refused.code == 2 and "liger cannot compute your own kernels" in refused.err and "fusegen,eager" in refused.err


def test_what_cannot_be_traced_is_said_as_by_show(run: Run) -> None:
    refused = run(*QUICK, "mine.py:untraceable", "--shape", "x=8x64")
    assert refused.code == 1 and refused.err == run("show", "mine.py:untraceable", "--shape", "x=8x64", "--target", "cpu").err


def test_each_call_is_a_row(run: Run) -> None:
    words = ("mine.py:scaled", "--shape", "w=64", "--call", "x=8x64", "--call", "x=16x64:f16", "--json")
    rows = json.loads(run(*QUICK, *words).out)["rows"]
    assert [row["shape"] for row in rows] == ["x=8x64 w=64", "x=16x64 w=64:f32"]


def test_a_provider_has_launches_bytes_and_an_error(run: Run) -> None:
    row = row_of(run, "mine.py:scaled", "--shape", "x=512x64", "w=64")
    ours, eager, _ = row["timings"]
    assert (ours["launches"], eager["launches"]) == (1, 2), "a norm and a product"
    assert ours["moved_bytes"] == row["bytes"] < eager["moved_bytes"]
    assert 0 < ours["max_error"] < 1e-5 and 0 < eager["max_error"] < 1e-5
    assert ours["peak_bytes"] is None and "no peak memory: torch does not count it on a CPU" in row["note"]


def test_gradients_are_timed_and_compared(run: Run) -> None:
    row = row_of(run, "mine.py:scaled", "--shape", "x=512x64", "w=64", "--backward")
    ours, eager, _ = row["timings"]
    assert row["group"] == "own backward" and row["bytes"] == 2 * (2 * 512 * 64 + 64) * 4 + (512 * 64 + 64) * 4
    assert 1 < ours["launches"] < eager["launches"] and ours["difference"] < 1e-5 and ours["max_error"] < 1e-5


def test_captured_tensors_have_gradients(run: Run) -> None:
    (Path("layer.py")).write_text("import torch, fusegen as fg\nnorm = fg.kernel(torch.nn.LayerNorm(64))\n")
    assert row_of(run, "layer.py", "--shape", "input=8x64", "--backward")["timings"][0]["max_error"] < 1e-5


def test_integers_alone_have_no_gradients(run: Run) -> None:
    refused = run(*QUICK, "mine.py:scaled", "--shape", "x=8x64:i32", "w=64:i32", "--backward")
    assert refused.code and refused.err.count("\n") == 1 and "·" in refused.err


def test_random_results_have_no_error(run: Run) -> None:
    row = row_of(run, "mine.py:drop", "--shape", "x=8x64")
    assert "no error: the results are random" in row["note"] and row["timings"][0]["max_error"] is None


def test_a_reproducer_repeats_the_measurement(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.compile", lambda function, dynamic: function)
    scaled = ("mine.py:scaled", "--shape", "x=8x64", "w=64", "--arg", "by=0.5", "--backward")
    total = ("mine.py:total", "--shape", *(f"{letter}=8x64" for letter in "abcdefghijk"))
    for words in (scaled, total, ("mine.py:placed", "--shape", "x=8x64", "y=8x64", "--arg", "backward=true")):
        with case(words):
            row = row_of(run, *words)
            program = row["reproducer"]
            assert len(program.splitlines()) <= 15
            exec(program, {})
            assert f"{row['timings'][0]['max_error']:.1e}" in capsys.readouterr().out


@pytest.mark.deep  # a process
def test_a_reproducer_of_a_file_that_is_named_like_a_module_of_python(run: Run) -> None:
    Path("random.py").write_text("import fusegen as fg\n\n@fg.kernel\ndef double(x):\n    return x * 2\n")
    Path("repeat.py").write_text(row_of(run, "random.py", "--shape", "x=8x64")["reproducer"])
    done = subprocess.run([sys.executable, "repeat.py"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "double x=8x64" in done.stdout, done.stderr


def test_a_keyword_parameter_named_like_a_setting_has_no_reproducer(run: Run) -> None:
    assert row_of(run, "mine.py:flagged", "--shape", "x=8x64")["reproducer"] is None


def test_a_file_that_is_no_record_is_not_replaced(run: Run) -> None:
    for path, message in (("mine.py", "mine.py is not a record"), (".", "cannot write .: Is a directory")):
        with case(path):
            refused = run(*QUICK, "mine.py:drop", "--shape", "x=8x64", "--out", path)
            assert refused.code == 2 and message in refused.err
    refused = run(*QUICK, "mine.py:drop", "--shape", "x=8x64", "--report", "mine.py")
    assert refused.code == 2 and "--report would replace mine.py" in refused.err
    assert Path("mine.py").read_text() == FILE


def test_figures_stay_in_the_record_and_its_page(run: Run) -> None:
    words = ("mine.py:scaled", "--call", "x=8x64,w=64", "--call", "x=16x64,w=64", "--out", "run.json")
    assert run(*QUICK, *words).code == 0
    shown = run("bench", "--show", "run.json", "--report", "run.html").out
    assert shown.count("load('mine.py:scaled').kernel") == 1, "one is printed, for the worst case"
    page = Path("run.html").read_text()
    assert page.count("<svg") == 2 and page.count("<pre>") == 2 and "script" not in page
