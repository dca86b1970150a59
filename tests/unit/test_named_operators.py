"""A kernel under a name of the user's among torch's operators."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import opcheck

import fusegen as fg
from fusegen.errors import ArgumentError, UnsupportedError
from tests.unit.eager import randn

ROOT = Path(__file__).resolve().parents[2]

OUTER = randn(8)

DECLARED = """
import torch
from torch import Tensor, nn
import fusegen as fg

@fg.kernel(op="fusegen_tests::{name}")
def scaled(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w

class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, self.w) * 2
"""


@fg.kernel(op="fusegen_tests::norm_gelu")
def norm_gelu(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, b, eps)), x


def alike(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_it_is_there_once_it_is_declared() -> None:
    operator = torch.ops.fusegen_tests.norm_gelu
    assert norm_gelu.operator(randn(4, 8), randn(8), randn(8)) is operator.default
    x, w, b = (randn(*shape).requires_grad_() for shape in ((4, 8), (8,), (8,)))
    opcheck(operator, (x, w, b), {"eps": 0.1})
    alike(operator(x, w, b, eps=0.1), norm_gelu.function(x, w, b, eps=0.1))


def test_a_training_step() -> None:
    def step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y, same = norm_gelu(x * 2, w, b=b)
        return y + same

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    w, b = randn(8).requires_grad_(), randn(8)
    for rows in (3, 4):
        x = randn(rows, 8).requires_grad_()
        ours, theirs = compiled(x, w, b), step(x, w, b)
        alike(ours, theirs)
        gradient = torch.randn_like(ours)
        alike(torch.autograd.grad(ours, (x, w), gradient), torch.autograd.grad(theirs, (x, w), gradient))


def test_autocast_reaches_the_kernel_and_not_the_operator() -> None:
    @fg.kernel(op="fusegen_tests::projected")
    def projected(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: (projected(x, w), torch.ops.fusegen_tests.projected(x, w)), fullgraph=True, backend="aot_eager"
    )
    x, w = randn(4, 8).requires_grad_(), randn(8, 8)
    for enabled, wanted in ((False, torch.float32), (True, torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for results in ((projected(x, w), torch.ops.fusegen_tests.projected(x, w)), compiled(x, w)):
                assert [result.dtype for result in results] == [wanted, torch.float32]
                (gradient,) = torch.autograd.grad([result.sum() for result in results], x)
                torch.testing.assert_close(gradient, 2 * w.sum(1).expand(4, 8), rtol=2e-2, atol=4e-2)


def test_a_float_that_changes_in_a_compiled_graph() -> None:
    @fg.kernel(op="fusegen_tests::times")
    def times(x: Tensor, factor: float = 1.0) -> Tensor:
        return torch.exp(x) * factor

    torch._dynamo.reset()
    compiled = torch.compile(times, fullgraph=True, backend="aot_eager")
    for number in range(10):
        x = randn(4, 8).requires_grad_()
        ours, theirs = compiled(x, number / 7), torch.exp(x) * (number / 7)
        alike(ours, theirs)
        alike(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x))


@pytest.mark.deep  # two processes, each of which exports or loads
def test_an_exported_program_is_loaded_where_the_kernel_is_declared(tmp_path: Path) -> None:
    (tmp_path / "declared.py").write_text(DECLARED.format(name="exported"))
    save = "import declared, torch\nx = (torch.ones(4, 8),)\nd = ({0: torch.export.Dim.DYNAMIC},)\n"
    save += "torch.export.save(torch.export.export(declared.Model(), x, dynamic_shapes=d), 'model.pt2')"
    load = "import declared, torch\np = torch.export.load('model.pt2')\n"
    load += "print([str(n.target) for n in p.graph.nodes if 'fusegen' in str(n.target)], p.module()(torch.ones(7, 8))[6, 3].item())"
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    for text in (save, load):
        call = [sys.executable, "-c", text]
        done = subprocess.run(
            call, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
        assert not done.returncode, done.stderr
    names, _, value = done.stdout.strip().rpartition(" ")
    assert names == "['fusegen_tests.exported.default']"
    alike(float(value), 6.0)


def test_what_cannot_be_one_is_refused() -> None:
    def plain(x, w):  # type: ignore[no-untyped-def]
        return x * w

    with pytest.raises(ArgumentError, match=r"Parameter x must have a type annotation.*\n.*annotate all parameters"):
        fg.kernel(op="fusegen_tests::plain")(plain)
    for name in ("gelu", "a b::c", "::x"):
        with pytest.raises(ArgumentError, match="give a library and a name"):
            fg.kernel(op=name)(norm_gelu.function)
    with pytest.raises(ArgumentError, match="torch has an operator fusegen_tests::norm_gelu already"):
        fg.kernel(op="fusegen_tests::norm_gelu")(norm_gelu.function)
    with pytest.raises(ArgumentError, match="a module cannot be the operator"):
        fg.kernel(nn.Linear(2, 2), op="fusegen_tests::linear")

    @fg.kernel(op="fusegen_tests::closing_over")
    def closing_over(x: Tensor) -> Tensor:
        return x * OUTER

    with pytest.raises(UnsupportedError, match=r"captures OUTER, which are not its parameters\n.*make them parameters"):
        closing_over(randn(8))

    @fg.kernel(op="fusegen_tests::drawing")
    def drawing(x: Tensor) -> Tensor:
        return F.dropout(x)

    with pytest.raises(UnsupportedError, match="draws random numbers"):
        torch.ops.fusegen_tests.drawing(randn(8))
