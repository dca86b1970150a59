"""A user's own kernels, as methods and modules too: every command takes them by FILE.py:NAME."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusegen.cli.load import load
from tests.naming import case
from tests.unit.commands import Run

FILE = """
import torch
from torch import Tensor, nn
import torch.nn.functional as F
import fusegen as fg

class Scale:
    def __init__(self, by):
        self.by = by

    @fg.kernel
    def scaled(self, x):
        return x * self.by

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return F.gelu(self.norm(x))

scale = Scale(2.0)
bound = scale.scaled
unfused = Block()
block = fg.kernel(unfused)

def plain(x):
    return x
"""

KEPT = """
from functools import partial
from torch import nn
import fusegen as fg

declare = partial(fg.kernel, compiler="extension", recompute="all")

@declare
def plus(x):
    return x + 1

class Adder:
    @declare
    def plus(self, x):
        return x + 1

adder = Adder()
block = declare(nn.SiLU())
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file with kernels of a user's."""
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_a_method_and_a_module_are_shown(run: Run, file: str) -> None:
    for name, part in (("bound", "scaled(x: bf16["), ("scale.scaled", "scaled(x: bf16["), ("block", "layer_norm(x, ")):
        with case(name):
            result = run("show", f"{file}:{name}", "--shape", "x=8x64", "--stage", "trace")
            assert result.code == 0 and part in result.out, result.err


def test_tensors_have_the_dtype_of_a_modules_parameters(run: Run, file: str) -> None:
    for words, dtype in (((), "f32"), (("--dtype", "f16"), "f16")):
        result = run("show", f"{file}:block", "--shape", "x=8x64", "--target", "sm_90a", "--stage", "trace", *words)
        assert result.code == 0 and f"(x: {dtype}[" in result.out, result.out + result.err


def test_a_method_is_built_under_its_name(run: Run, file: str, tmp_path: Path) -> None:
    result = run("build", f"{file}:scale.scaled", "--shape", "x=8x64", "--arch", "cpu", "--out", str(tmp_path / "built"))
    assert result.code == 0 and "== scaled ==" in result.out, result.err


def test_a_method_of_a_class_wants_an_object(run: Run, file: str) -> None:
    refused = run("explain", f"{file}:Scale.scaled", "--shape", "x=8x64")
    assert refused.code == 2 and f"{file}:OBJECT.scaled" in refused.err


def test_calls_that_a_file_makes_while_it_is_imported_are_forgotten(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "called.py"
    called = "plus(torch.ones(2, 64))\nplus(torch.ones(2, 96))\n"
    path.write_text(f"import torch\nimport fusegen as fg\n\n@fg.kernel\ndef plus(x):\n    return x + 1\n\n{called}")
    result = run("show", f"{path}:plus", "--shape", "x=8x128", "--stage", "trace")
    assert result.code == 0 and "plus(x: bf16[x_dim0, 128])" in result.out, result.out + result.err


def test_a_file_of_several_kernels_is_imported_once(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    kernels = "".join(f"@fg.kernel\ndef {name}(x: Annotated[Tensor, '8 64']):\n    return x + 1\n\n" for name in ("one", "two"))
    head = "from typing import Annotated\nfrom torch import Tensor\nimport fusegen as fg\nprint('imported')\n\n"
    path.write_text(head + kernels)
    result = run("build", f"{path}:one", f"{path}:two", "--arch", "cpu", "--out", str(tmp_path / "built"))
    assert result.code == 0 and result.err.count("imported") == 1, result.err


def test_a_declaration_that_is_refused_has_a_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "refused.py"
    path.write_text("import fusegen as fg\n\n@fg.kernel(mutates=('y',))\ndef every(x):\n    return x\n")
    refused = run("explain", f"{path}:every")
    assert refused.code == 2 and f"mutates= names 'y', which is not a parameter · at: {path}:3" in refused.err


def test_a_kernel_of_any_number_of_tensors_has_no_shapes(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "any.py"
    path.write_text("import fusegen as fg\n\n@fg.kernel\ndef every(*xs):\n    return xs[0]\n")
    refused = run("explain", f"{path}:every", "--shape", "xs=4")
    assert refused.code == 2 and "'xs' takes any number of arguments" in refused.err


def test_modules_that_are_not_fused(run: Run, file: str) -> None:
    for name, hint in (
        ("Block", "fusegen.kernel(Block(…))"),
        ("unfused", "fusegen.kernel(unfused)"),
        ("plain", "with @fusegen.kernel"),
    ):
        refused = run("show", f"{file}:{name}", "--shape", "x=8x64")
        assert refused.code == 2 and "not a kernel" in refused.err and hint in refused.err, refused.err


def test_a_file_without_kernels(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "none.py"
    path.write_text("number = 1\n")
    for name, what in ((str(path), "no kernel"), (f"{path}:number", "no kernel 'number'")):
        refused = run("show", name)
        assert refused.code == 2 and refused.err == f"error: {what} in {path} · try: decorate a function with @fusegen.kernel\n"


def test_a_missing_argument_without_annotation_may_be_a_number(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "scaled.py"
    path.write_text("from torch import Tensor\nimport fusegen as fg\n\n@fg.kernel\ndef scaled(x: Tensor, by):\n    return x * by\n")
    tensor, number = run("show", f"{path}:scaled", "--arg", "by=2"), run("show", f"{path}:scaled", "--shape", "x=8x64")
    assert tensor.code == 2 and tensor.err.endswith("try: --shape x=SIZES; SIZES such as 16384x4096\n")
    assert number.code == 2 and number.err.endswith("by=SIZES, or --arg by=… if it is a number; SIZES such as 16384x4096\n")


def test_a_dtype_that_is_empty(run: Run, file: str, tmp_path: Path) -> None:
    refused = run("build", f"{file}:block", "--shape", "x=8x64", "--dtype", "f32,", "--arch", "cpu", "--out", str(tmp_path / "out"))
    assert refused.code == 2 and "unknown dtype ''" in refused.err


GATHERED = 4 * 64 * 4 + 4 * 8 + 4 * 64 * 4
"""Bytes of four rows, their indices and the result."""


def rows(tmp_path: Path) -> tuple[str, ...]:
    """The words that name a kernel which takes four rows of a thousand."""
    path = tmp_path / "rows.py"
    path.write_text("import fusegen as fg\n\n@fg.kernel\ndef rows(table, i):\n    return table[i] * 2\n")
    return f"{path}:rows", "--shape", "table=1000x64:f32", "i=4:i64"


def test_explain_counts_the_rows_that_are_gathered(run: Run, tmp_path: Path) -> None:
    explained = json.loads(run("explain", *rows(tmp_path), "--target", "cpu", "--json").out)
    assert explained["fusegen"] == {"launches": 1, "moved_bytes": GATHERED}
    assert explained["eager"]["moved_bytes"] == GATHERED + 2 * 4 * 64 * 4, "it writes the rows, and reads them again"


def test_bench_counts_the_rows_that_are_gathered(run: Run, tmp_path: Path) -> None:
    words = ("bench", *rows(tmp_path), "--quick", "--device", "cpu", "--providers", "fusegen", "--json")
    (row,) = json.loads(run(*words).out)["rows"]
    assert row["bytes"] == GATHERED


@pytest.mark.parametrize(
    ("body", "elements"),
    [
        ("return x[:, :64] + x[:, 32:]", 8 * 96 + 8 * 64),
        ("return x[:, ::2] * x[:, 1::2]", 8 * 96 + 8 * 48),
        ("return torch.cat((x[:, 48:], x[:, :48]), 1)", 2 * 8 * 96),
        ("return torch.stack([x[:, i : i + 50] for i in range(40)])", 8 * 89 + 40 * 8 * 50),
        ("y = x * 2; y[:, :32] = x[:, 64:]; return y", 2 * 8 * 96 + 2 * 8 * 32),
    ],
)
def test_explain_counts_what_eager_touches_of_slices(run: Run, tmp_path: Path, body: str, elements: int) -> None:
    path = tmp_path / "slices.py"
    path.write_text(f"import torch\nimport fusegen as fg\n\n@fg.kernel\ndef slices(x):\n    {body}\n")
    explained = json.loads(run("explain", f"{path}:slices", "--shape", "x=8x96:f32", "--target", "cpu", "--json").out)
    assert explained["eager"]["moved_bytes"] == 4 * elements


def test_a_name_that_leads_nowhere(run: Run, file: str) -> None:
    refused = run("show", f"{file}:scale.scald", "--shape", "x=8x64")
    assert refused.code == 2 and "no kernel 'scale.scald'" in refused.err and f"{file}:bound" in refused.err


def test_a_kernel_keeps_what_it_was_declared_with(tmp_path: Path) -> None:
    path = tmp_path / "kept.py"
    path.write_text(KEPT)
    for name in ("plus", "adder.plus", "block"):
        kernel = load(f"{path}:{name}").kernel
        assert (kernel.options.compiler, kernel.options.recompute) == ("extension", "all"), name
