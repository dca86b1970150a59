"""Lowered kernels and the objects on them, as a terminal and a notebook show them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.lowered import Lowered
from tests.unit.lowering import lowered, meta


def gated(x: Tensor, weight: Tensor) -> Tensor:
    hidden = F.gelu(x @ weight)
    return hidden * hidden.float().square().mean(-1, keepdim=True)


def low(target: str = "sm_90a") -> Lowered:
    return lowered(gated, meta(64, 512), meta(512, 512), target=target)


def test_a_summary_names_inputs_results_and_kernels() -> None:
    assert str(low()).splitlines() == [
        "gated for sm_90a: 2 kernels at x_dim0=64",
        "  inputs: x: bf16[x_dim0, 512], weight: bf16[512, 512]",
        "  results: f32[x_dim0, 512]",
        "  1. gated_0: matmul with epilogue; reads 576.0 KiB, writes 64.0 KiB",
        "  2. gated_1: row reduction, 2 phases, rows read once into registers; reads 64.0 KiB, writes 128.0 KiB",
        '  more: .explain(), .traced, .graph, .groups, .program, .plans, .asm["cuda"], .asm["ptx"], .asm["sass"]',
    ]


def test_a_summary_names_matmuls_of_the_library() -> None:
    assert "  1. torch.matmul (library): " in repr(low("cpu"))


def test_a_summary_names_numbers_and_tensors_that_are_written() -> None:
    def shift(x: Tensor, s: float) -> Tensor:
        return x.add_(s)

    text = str(fg.kernel(shift, mutates=("x",)).lower(meta(8, 64), 0.5, target="cpu"))
    assert "  inputs: x: bf16[x_dim0, 64], s: f32\n" in text
    assert "  results: x, written in place: bf16[x_dim0, 64]\n" in text


def test_a_summary_of_a_forward_pass_says_what_it_saves() -> None:
    passes = fg.vjp(fg.kernel(gated), meta(64, 512), meta(512, 512), target="sm_90a")
    assert "\n  saved for the backward pass: " in str(passes.forward.lower())
    assert "saved" not in str(fg.kernel(gated).lower(meta(64, 512), meta(512, 512), target="sm_90a"))


def test_a_summary_of_a_backward_pass() -> None:
    text = str(fg.kernel(gated).backward.lower(meta(64, 512), meta(512, 512), target="cpu"))
    assert text.startswith("gated_backward for cpu: ") and "grad: f32[x_dim0, 512]" in text


def test_objects_of_a_lowered_kernel_are_readable() -> None:
    found = low()
    assert repr(found.graph) == str(found.graph) and "  %2 = matmul(x, weight)" in repr(found.graph)
    assert repr(found.asm) == "<asm of fg_gated_0, fg_gated_1 for sm_90a: cuda, ptx, sass>"
    assert repr(found.program).splitlines()[0] == "<program of gated for sm_90a, 4 buffers>"
    assert repr(found.program.launches[1]) == "<launch of gated_1: row reduction, grid ((x_dim0 + 7) // 8), block 256>"
    assert repr(found.program.launches[1].kernel) == "<kernel gated_1: RowBody>"
    assert repr(found.sources[1]).startswith("<cuda source of fg_gated_1, ")
    assert repr(found.plans[0]).startswith("<program for x_dim0 from 1 to ")
    assert repr(low("cpu").program.steps[0]).startswith("<torch.matmul of the library: ")


def test_passes_are_readable() -> None:
    x = torch.ones(2, 3)
    passes = fg.vjp(fg.kernel(lambda x: x.exp()), x)
    _, saved = passes.forward(x)
    assert repr(passes.forward) == "<fusegen forward pass of <lambda> by x>"
    assert repr(passes.backward) == "<fusegen backward pass of <lambda> by x>"
    assert repr(saved) == "<saved by the forward pass of <lambda>: float32[2, 3]>"
