"""Products by warps (`mma.sync`) in the emulator: asynchronous copies as early and as late as they may come, threads in either
order, operands that the copy engine could not read, and every epilogue that the other skeleton has."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.emulator import test_epilogues as epilogues
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, check, results
from tests.naming import case

BF16, F16 = torch.bfloat16, torch.float16
OLD = "sm_80"


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def bias_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w) + b)


def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, w) - r


PRODUCTS = {
    "few-stages": (130, 72, 64, BF16),
    "tails-of-all-three": (200, 264, 200, F16),
    "more-stages-than-the-ring": (64, 136, 704, BF16),
    "less-than-a-tile": (3, 8, 8, F16),
    "one-too-many": (129, 129, 33, F16),
    "odd": (65, 37, 51, BF16),
    "tiny": (2, 3, 1, BF16),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_bias(name: str) -> None:
    rows, columns, depth, dtype = PRODUCTS[name]
    inputs = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype), randn(columns, dtype=dtype)
    check(bias_relu, *inputs, target=OLD)


@pytest.mark.parametrize(
    ("rows", "columns", "processors"), [(1300, 264, 1), (300, 520, 108)], ids=["more-rows-than-are-walked-together", "wide"]
)
def test_blocks_cover_all_tiles(rows: int, columns: int, processors: int) -> None:
    inputs = randn(rows, 40), randn(columns, 40), randn(rows, columns)
    check(residual, *inputs, target=OLD, processors=processors, timings=ONCE)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(136, 152, 144), (70, 37, 45)], ids=["eights", "odd"])
def test_operands_contiguous_along_either_dim(rows: int, columns: int, depth: int) -> None:

    def function(x: Tensor, w: Tensor, x_turned: bool, w_turned: bool) -> Tensor:
        return torch.tanh((x.mT if x_turned else x) @ (w.mT if w_turned else w) * 0.1)

    for turned in product((False, True), repeat=2):
        with case(turned):
            a = randn(depth, rows) if turned[0] else randn(rows, depth)
            b = randn(columns, depth) if turned[1] else randn(depth, columns)
            check(function, a, b, *turned, target=OLD, processors=16, timings=EVERY_TIMING[1:3])


@pytest.mark.parametrize("b_major", ["k", "n"])
def test_heads_of_96_in_lines_longer_than_they_are(b_major: str) -> None:
    def function(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = (x @ (w.mT if b_major == "k" else w)).unflatten(-1, (-1, 96)).transpose(1, 2)
        return epilogues.rotated(y, cos, sin)

    w = epilogues.weight(192, 72)
    w = w if b_major == "k" else w.mT.contiguous()
    check(function, randn(2, 70, 72), w, randn(70, 96), randn(70, 96), target=OLD, timings=EVERY_TIMING[1:3])


@pytest.mark.parametrize("function", epilogues.CASES, ids=lambda f: f.__name__)
def test_epilogues(function: Callable[..., Any]) -> None:
    arguments = epilogues.CASES[function]
    assert len(fg.kernel(function).lower(*arguments, target=OLD).program.steps) == 1
    wanted = function(*map(epilogues.wide, arguments))
    for got in results(function, arguments, OLD, 108, ONCE):
        epilogues.compare(got, wanted)


@pytest.mark.parametrize("target", ["sm_86", "sm_120"])
def test_machines_of_less_shared_memory(target: str) -> None:
    check(bias_relu, randn(300, 200), randn(264, 200), randn(264), target=target, timings=ONCE)
