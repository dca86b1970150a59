"""Every form of a plan, on a machine so small that a block has several rows, tiles and parts to work on, and in 64-bit indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import target as targets
from fusegen.compiler import backends, variants
from fusegen.families.rows.plan import Persistence, RowBody, RowPlan
from fusegen.target import Target
from tests.naming import case
from tests.unit.eager import agree, randn

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SMALL = replace(targets.target("sm_90a"), wgmma=False, sms=1)
pytestmark = pytest.mark.usefixtures("emulated", "first_plans")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated GPU has one multiprocessor."""
    monkeypatch.setattr(backends, "_EMULATED", SMALL)


@pytest.fixture
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices of either width."""
    if request.param == "64-bit":
        monkeypatch.setattr(variants, "WIDE", 0)


both_widths = pytest.mark.parametrize("width", ["32-bit", "64-bit"], indirect=True)
each_width = pytest.mark.parametrize("width", ["32-bit", pytest.param("64-bit", marks=pytest.mark.deep)], indirect=True)


def row_plan(function: Callable[..., Any], *arguments: Any, machine: Target = SMALL) -> RowPlan:
    kernel = fg.kernel(function)
    variant, _ = kernel._dispatcher.variants.variant_of(list(arguments), machine, torch.device("cpu"))
    body = variant.program.launches[0].kernel.body
    assert isinstance(body, RowBody)
    return body.plan


# Pointwise.


@both_widths
def test_several_blocks_and_a_rest(width: None) -> None:  # noqa: ARG001
    agree(lambda x, y: x * 2 + y, *((randn(count), randn(count)) for count in (2047, 2048, 2049, 4100, 6151)))


@each_width
def test_several_blocks_over_several_axes(width: None) -> None:  # noqa: ARG001
    agree(lambda x, y, b: (x.mT * 2 + y, x.mT[1:] * b), (randn(5, 67, 33), randn(5, 33, 67), randn(67)))
    agree(lambda x, y: torch.cat([x, y], -1) * x[:, :1], (randn(61, 40), randn(61, 37)))


# Rows.


def softmax_and_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(-1) * x.shape[-1], (x * x).mean(-1)


@both_widths
def test_rows_in_registers(width: None) -> None:  # noqa: ARG001
    agree(softmax_and_norm, *((randn(*shape),) for shape in ((9, 64), (17, 40), (3, 1000), (3, 1024))))


def standardized(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],))


STAGED = {"whole": (5, 24576, BF16), "with-a-tail": (5, 24592, BF16), "wide-values": (4, 17408, F32)}


@each_width
def test_a_block_works_on_several_staged_rows(width: None) -> None:  # noqa: ARG001
    """Slots are used in turn, the next rows are under way, and more rows come than there are slots."""
    for name, (rows, columns, dtype) in STAGED.items():
        with case(name):
            x = randn(rows, columns, dtype=dtype)
            plan = row_plan(standardized, x)
            assert plan.persistence is Persistence.STAGED and plan.persistent_blocks == 1 and plan.exact is (name == "whole")
            agree(standardized, (x,))


def test_rows_that_are_staged_until_the_first_phase_only() -> None:
    """The slots are free again before the row is finished."""
    agree(lambda x: (x.amax(-1, keepdim=True), x.float().sum(-1)), (randn(5, 24576, dtype=BF16),))


# Column sums.


@each_width
def test_blocks_sum_columns_over_many_rows(width: None) -> None:  # noqa: ARG001
    agree(lambda x: (x.sum(0), x.amax(0)), *((randn(*shape),) for shape in ((1, 5), (70, 40), (3, 1024), (37, 300), (100, 33))))


def normalized_sums(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    normalized = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)
    return normalized * dy, (dy * normalized).sum(0), dy.sum(0)


@each_width
def test_rows_and_columns_share_a_block(width: None) -> None:  # noqa: ARG001
    """Many rows a block: the scratch of a reduction is used again, in turn."""
    agree(normalized_sums, *((randn(*shape), randn(*shape)) for shape in ((40, 64), (33, 40), (30, 1024), (9, 2000))))


# Addresses.


def test_an_address_that_is_not_aligned_is_another_kernel() -> None:
    base = randn(100, dtype=BF16)
    kernel = fg.kernel(lambda x: x * 2)
    agree(kernel, *((base[offset : offset + 64],) for offset in (0, 8, 4, 2, 1, 0)))


def test_rows_that_are_not_aligned_are_another_kernel() -> None:
    base = randn(4 * 72, dtype=BF16)
    kernel = fg.kernel(lambda x: x.softmax(-1))
    agree(kernel, *((base.as_strided((3, 64), (stride, 1)),) for stride in (64, 72, 68, 66, 65, 72)))


def test_one_reduction_a_row_uses_its_scratch_in_turn() -> None:
    """No other barrier lies between a row's partial results and the next row's."""
    agree(lambda x: (x.sum(-1), x.sum(0)), (randn(30, 64),), (randn(30, 3000),))
