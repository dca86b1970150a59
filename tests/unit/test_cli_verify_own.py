"""``fusegen verify FILE.py:NAME``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegen.cli import verify
from fusegen.ir.graph import Graph
from fusegen.ir.reference import differentiate
from fusegen.verify import work
from tests.naming import case
from tests.unit.commands import Run

FILE = """
import torch
import torch.nn.functional as F
from torch import nn
import fusegen as fg

@fg.kernel
def product(x, w):
    return F.gelu(x @ w.T)

@fg.kernel
def normed(x, by: float):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * by

@fg.kernel(mutates=("x",))
def add(x, y):
    x.add_(y)
    return x * 2

@fg.kernel
def places(x, i):
    return x.argmax(-1), {"rows": x[i]}

@fg.kernel
def drop(x):
    return F.dropout(x, 0.5)

@fg.kernel
def seeded(x):
    return fg.dropout(x, 0.5, seed=7)

@fg.kernel
def integers(x):
    return x * 2

@fg.kernel
def quantized(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale

@fg.kernel
def dequantized(x, scale):
    return x.float() * scale

@fg.kernel
def untraceable(x):
    return x.nonzero()

@fg.kernel
def traced(x):
    if type(x) is torch.Tensor:
        raise RuntimeError("torch runs the kernel inside")
    return x + 1

@fg.kernel
def outer(x):
    return traced(x) + 1

block = fg.kernel(nn.LayerNorm(64))
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with kernels of a user's in the current folder, on a machine without a GPU."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify, "_device", lambda: torch.device("cpu"))


def tensors(run: Run, *words: str, code: int = 0) -> dict[str, str]:
    """The verdict on each tensor of a kernel, by its name."""
    result = run("verify", *words, "--json")
    assert result.code == code, result.out + result.err
    (row,) = json.loads(result.out)["rows"]
    assert row["passed"] is (code == 0)
    return {tensor["name"]: tensor["verdict"] for tensor in row["cases"]}


def test_results_and_gradients_are_verified(run: Run) -> None:
    result = run("verify", "mine.py:product", "--shape", "x=8x64", "w=32x64", "--dtype", "f32", "--dtype", "bf16")
    assert result.code == 0, result.err
    cells = [line.split() for line in result.out.splitlines()[1:]]
    assert [row[1] for row in cells] == ["f32"] * 3 + ["bf16"] * 3
    assert {row[3] for row in cells} == {"passed"}
    for row, name in zip(cells, ["result", "gradient by x", "gradient by w"] * 2, strict=True):
        assert " ".join(row).count(name) == 2, "the worst error and the largest root mean square are of this tensor"


def test_numbers_are_given_and_dtypes_that_the_function_widens_are_followed(run: Run) -> None:
    found = tensors(run, "mine.py:normed", "--shape", "x=8x64:bf16", "--arg", "by=3.0")
    assert found == {"result": "passed", "gradient by x": "passed"}


def test_captured_parameters_have_gradients(run: Run) -> None:
    found = tensors(run, "mine.py:block", "--shape", "input=8x64")
    assert set(found.values()) == {"passed"} and sum("gradient by" in name for name in found) == 3


def test_writes_are_verified_and_have_no_gradients(run: Run) -> None:
    assert tensors(run, "mine.py:add", "--shape", "x=8x64", "y=8x64") == {"result": "passed", "x, written to": "passed"}


def test_integers_are_verified_beside_gradients(run: Run) -> None:
    found = tensors(run, "mine.py:places", "--shape", "x=16x64", "i=20:i64")
    assert found == {"result 0": "passed", "result 1": "passed", "gradient by x": "passed"}


def test_eight_bits_are_verified(run: Run) -> None:
    found = tensors(run, "mine.py:dequantized", "--shape", "x=8x64:f8e5m2", "scale=8x1:f32")
    assert found == {"result": "passed", "gradient by x": "passed", "gradient by scale": "passed"}
    found = tensors(run, "mine.py:quantized", "--shape", "x=8x64:bf16")
    assert found == {"result 0": "passed", "result 1": "passed", "gradient by x": "passed"}


def test_integers_alone_have_no_gradients(run: Run) -> None:
    assert tensors(run, "mine.py:integers", "--shape", "x=8x64:i32") == {"result": "passed"}


def test_masks_of_a_seed_are_verified(run: Run) -> None:
    assert tensors(run, "mine.py:seeded", "--shape", "x=8x64") == {"result": "passed", "gradient by x": "passed"}


def test_a_wrong_result_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.api.Kernel.__call__", lambda self, **given: self.function(**given) * 1.001)
    words = ("mine.py:product", "--shape", "x=8x64", "w=32x64")
    result = run("verify", *words)
    assert result.code == 1 and "is more than twice eager's greatest" in result.out
    assert set(tensors(run, *words, code=1).values()) == {"failed"}


def test_wrong_integers_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.api.Kernel.__call__", lambda self, x: self.function(x) + 1)
    result = run("verify", "mine.py:integers", "--shape", "x=8x64:i32")
    assert result.code == 1 and "512 of 512 elements are neither" in result.out


def test_wrong_gradients_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(graph: Graph, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(2 * gradient for gradient in differentiate(graph, *args, **kwargs))

    monkeypatch.setattr("fusegen.verify.check.differentiate", doubled)
    monkeypatch.setattr("fusegen.verify.accuracy._GREATEST", 0.5)
    found = tensors(run, "mine.py:normed", "--shape", "x=8x64", "--arg", "by=3.0", code=1)
    assert found["gradient by x"] == "failed"


def test_torch_runs_the_kernels_inside(run: Run) -> None:
    refused = run("verify", "mine.py:outer", "--shape", "x=8x64:i32")
    assert refused.code == 1 and "torch runs the kernel inside" in refused.err


def test_no_record_is_written(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verify, "store", lambda *_, **__: pytest.fail("a record is written"))
    monkeypatch.setattr(verify, "own_folder", lambda: tmp_path / "generated")
    assert run("verify", "mine.py:integers", "--shape", "x=8x64:i32").code == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["mine.py"]


MISTAKES = [
    (("mine.py:product", "--shape", "x=8x64"), ("w of product", "--shape w=")),
    (("mine.py:prodct",), ("no kernel 'prodct'", "mine.py:product")),
    (("no.py:product",), ("no file no.py",)),
    (("mine.py:product", "gelu"), ("mine.py:product is your own kernel, and gelu is a prebuilt one",)),
    (("gelu", "--shape", "x=8"), ("--shape applies to your own kernels",)),
    (("mine.py:integers", "--shape", "x=8", "--check"), ("--check applies to prebuilt kernels only", "mine.py:integers")),
    (("mine.py:integers", "--shape", "x=8", "--case", "odd"), ("--case applies to prebuilt kernels only",)),
    (("mine.py:integers", "--shape", "x=8", "--dtype", "f31"), ("f31", "bf16")),
    (("mine.py:drop", "--shape", "x=8x64"), ("drop draws random numbers", "seed")),
    (("mine.py:integers", "--shape", "x=8:f64"), ("a float64 result", "--dtype f32")),
]


def test_mistakes(run: Run) -> None:
    for words, parts in MISTAKES:
        with case(words):
            refused = run("verify", *words)
            assert refused.code == 2 and refused.out == "", refused.err
            for part in parts:
                assert part in refused.err.splitlines()[-1]


def test_what_fails_is_one_line(run: Run) -> None:
    for words, part in (
        (("mine.py:untraceable", "--shape", "x=8x64"), "nonzero"),
        (("mine.py:product", "--shape", "x=8x64", "w=8x3"), "make the inner sizes equal"),
        (("mine.py:places", "--shape", "x=1x64", "i=8:i64"), "torch cannot run places: IndexError"),
    ):
        with case(words):
            refused = run("verify", *words)
            assert refused.code == 1 and refused.out == "" and part in refused.err.splitlines()[-1]


def test_sizes_that_take_too_long_are_refused_with_smaller_ones(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "LIMIT", 1.0)
    refused = run("verify", "mine.py:seeded", "--shape", "x=65536x64")
    assert refused.code == 2 and "comparing seeded with float64 at these sizes takes about" in refused.err
    smaller = refused.err.partition("--shape ")[2].partition(",")[0]
    assert smaller.startswith("x=") and smaller.endswith("x64:f32")
    assert run("verify", "mine.py:seeded", "--shape", smaller).code == 0
