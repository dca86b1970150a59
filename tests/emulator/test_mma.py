"""Products by warps (`mma.sync`) in the emulator: asynchronous copies as early and as late as they may come, threads in either
order, operands that the copy engine could not read, and every epilogue that the other pipeline has."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.emulator import test_epilogues as epilogues
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, check, results, run
from tests.emulator.test_tensor_cores import bias_relu, gated, rotated_heads, takes_a_plan_for_few_rows
from tests.emulator.test_weights import channels, nibbles, numbers, of_groups, scales
from tests.naming import case

BF16, F16 = torch.bfloat16, torch.float16
OLD = "sm_80"


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


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
    ("rows", "columns", "sms"), [(1300, 264, 1), (300, 520, 108)], ids=["more-rows-than-are-walked-together", "wide"]
)
def test_blocks_cover_all_tiles(rows: int, columns: int, sms: int) -> None:
    inputs = randn(rows, 40), randn(columns, 40), randn(rows, columns)
    check(residual, *inputs, target=OLD, sms=sms, timings=ONCE)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(136, 152, 144), (70, 37, 45)], ids=["eights", "odd"])
def test_operands_contiguous_along_either_dim(rows: int, columns: int, depth: int) -> None:

    def function(x: Tensor, w: Tensor, x_turned: bool, w_turned: bool) -> Tensor:
        return torch.tanh((x.mT if x_turned else x) @ (w.mT if w_turned else w) * 0.1)

    for turned in product((False, True), repeat=2):
        with case(turned):
            a = randn(depth, rows) if turned[0] else randn(rows, depth)
            b = randn(columns, depth) if turned[1] else randn(depth, columns)
            check(function, a, b, *turned, target=OLD, sms=16, timings=EVERY_TIMING[1:3])


@pytest.mark.parametrize("b_major", ["k", "n"])
def test_heads_of_96_in_lines_longer_than_they_are(b_major: str) -> None:
    def function(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = (x @ (w.mT if b_major == "k" else w)).unflatten(-1, (-1, 96)).transpose(1, 2)
        return epilogues.rotated(y, cos, sin)

    w = epilogues.weight(192, 72)
    w = w if b_major == "k" else w.mT.contiguous()
    check(function, randn(2, 70, 72), w, randn(70, 96), randn(70, 96), target=OLD, timings=EVERY_TIMING[1:3])


def test_operands_at_an_offset_with_gaps_between_their_rows() -> None:
    """However narrow the copies are that their addresses allow."""
    for left, right in ((8, 16), (4, 12), (2, 6), (1, 3), (8, 1)):
        with case((left, right)):
            a, b, r = randn(140, 208), randn(100, 160 + left), randn(130, 72)
            check(residual, a[3:133, left : left + 100], b[10:82, right : right + 100], r, target=OLD, timings=EVERY_TIMING[1:3])


def test_operands_that_share_memory_and_a_depth_of_none() -> None:
    check(lambda x: F.linear(x, x).relu() + x, randn(72, 72), target=OLD)
    check(bias_relu, randn(1, 64).expand(70, -1), randn(40, 64), randn(40), target=OLD)
    check(lambda x, w, b: F.linear(x[:, :0], w[:, :0]) + b, randn(70, 8), randn(40, 8), randn(40), target=OLD)


def test_a_float32_result_of_an_odd_number_of_columns() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        return (y * 0.5 + b).float(), y

    x, w, b = randn(70, 64), epilogues.weight(39, 64), randn(39)
    for _, got in results({function: (x, w, b)}, OLD, 1, EVERY_TIMING):
        epilogues.compare(got, function(*(t.double() for t in (x, w, b))))


@pytest.mark.parametrize("part", epilogues.PARTS)
def test_epilogues(part: str) -> None:
    cases = epilogues.PARTS[part]
    for function, arguments in cases.items():
        assert len(fg.kernel(function).lower(*arguments, target=OLD).program.steps) == 1
    for function, got in results(cases, OLD, 108, ONCE):
        epilogues.compare(got, function(*map(epilogues.wide, cases[function])))


# Few rows.


def interleaved(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w.mT).unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up


def gated_columns(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate) * (x @ up)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "target"), [(1, 72, 200, "sm_80"), (9, 8, 8, "sm_120"), (16, 40, 1152, "sm_80")]
)
def test_few_rows(rows: int, columns: int, depth: int, target: str) -> None:
    x, w = randn(rows, depth), randn(columns, depth) / depth**0.5
    columns_first = w.mT.contiguous()
    cases = {
        bias_relu: (x, w, randn(columns)),
        gated: (x, w, w + 0.1),
        interleaved: (x, torch.cat((w, w + 0.1))),
        gated_columns: (x, columns_first, columns_first + 0.1),
    }
    for function, arguments in cases.items():
        assert takes_a_plan_for_few_rows(function, *arguments, target=target)
    for function, got in results(cases, target, 108, ONCE):
        epilogues.compare(got, function(*map(epilogues.wide, cases[function])))


def test_few_rows_of_rotated_heads() -> None:
    x, *weights = randn(2, 7, 136), *(randn(columns, 136) * 0.1 for columns in (256, 128, 128))
    arguments = x, *weights, randn(2, 1, 7, 64), randn(2, 1, 7, 64)
    assert takes_a_plan_for_few_rows(rotated_heads, *arguments, target=OLD)
    for got, wanted in zip(run(rotated_heads, *arguments, target=OLD), rotated_heads(*map(epilogues.wide, arguments)), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0.01, atol=0.03)


def test_few_rows_whose_lines_are_not_aligned() -> None:
    """Odd columns, an odd depth and lines with gaps take tiles of many rows; so do more than 16 rows."""
    for rows, columns, depth, pitch in ((3, 37, 64, 64), (3, 40, 45, 45), (3, 40, 64, 66), (17, 40, 64, 64)):
        with case((rows, columns, depth, pitch)):
            arguments = randn(rows, pitch)[:, :depth], randn(columns, depth), randn(columns)
            assert not takes_a_plan_for_few_rows(bias_relu, *arguments, target=OLD)
            check(bias_relu, *arguments, target=OLD, timings=ONCE)


@pytest.mark.parametrize(("rows", "target"), [(1, "sm_80"), (16, "sm_120"), (64, "sm_80"), (64, "sm_86")])
def test_weights_computed_on_load(rows: int, target: str) -> None:
    """With 64 rows, the widest tiles need more shared memory than a block of ``sm_86`` has."""
    x, packed = randn(rows, 128), numbers(40, 64, dtype=torch.uint8)
    cases = {
        channels: (x, numbers(40, 128), scales(40)),
        lambda x, p, s: F.linear(x, of_groups(nibbles(p).to(x.dtype) - 8, s)): (x, packed, scales(40, 4)),
    }
    for function, arguments in cases.items():
        assert takes_a_plan_for_few_rows(function, *arguments, target=target)
    for function, got in results(cases, target, 1, ONCE):
        wanted = function(*cases[function]).double()
        torch.testing.assert_close(got.double(), wanted, rtol=2.0**-6, atol=2.0**-6 * wanted.abs().max().item())
