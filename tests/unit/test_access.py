"""Accesses: which axes merge, what lanes do, and how wide a vector may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch

import fusegen as fg
from fusegen.families.pointwise.plan import PointwiseBody
from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Dim, axis_symbol, size_symbol, stride_symbol
from fusegen.schedule.access import Access, AccessPattern, is_uniform, vector_width

N = size_symbol("n")
ROW, LANE = axis_symbol("i0"), axis_symbol("i1")
S = stride_symbol("x_stride0")


@pytest.mark.parametrize(
    ("index", "lower", "upper", "alike"),
    [
        (LANE, 64, 128, True),
        (LANE, None, 12, False),
        (LANE + 4, 8, 16, False),
        (LANE + ROW * 8, 0, 64, True),
        (LANE + ROW * 4, 0, 64, False),
        (LANE, None, N, False),
        (LANE, None, 8 * N, True),
    ],
)
def test_eight_neighbours_decide_alike(index: sympy.Expr, lower: int | None, upper: Dim | None, alike: bool) -> None:
    assert is_uniform(Bounds(index, lower, upper), LANE, 8, {}) is alike


@pytest.mark.parametrize(
    ("offset", "alignment", "itemsize", "width"),
    [
        (ROW * 64 + LANE, 16, 2, 8),
        (ROW * 64 + LANE, 4, 2, 2),
        (ROW * 64 + LANE, 2, 2, 1),
        (ROW * 64 + LANE + 1, 16, 2, 1),
        (ROW * 64 + LANE + 4, 16, 2, 4),
        (ROW * 12 + LANE, 16, 2, 4),
        (ROW * S + LANE, 16, 2, 8),
        (ROW * S + LANE, 8, 2, 4),
        (ROW * N + LANE, 16, 2, 1),
        (ROW * 64 + LANE, 16, 4, 4),
    ],
)
def test_vector_widths(offset: sympy.Expr, alignment: int, itemsize: int, width: int) -> None:
    assert vector_width(offset, LANE, 8, alignment, itemsize, {}) == width


def reads(function: Callable[..., Any], *tensors: torch.Tensor) -> dict[str, Access]:
    low = fg.kernel(function).lower(*tensors, target="sm_90a")
    body = low.program.launches[0].kernel.body
    assert isinstance(body, PointwiseBody)
    return {a.name: a for a in body.reads}


BF = torch.bfloat16


def test_an_unaligned_input_is_read_narrower_and_the_others_are_not() -> None:
    base = torch.empty(4 * 64 + 8, dtype=BF)
    found = reads(lambda x, y: x + y, base[1 : 1 + 256].view(4, 64), torch.empty(4, 64, dtype=BF))
    assert (found["x"].width, found["y"].width) == (1, 8)
    assert reads(lambda x, y: x + y, base[2 : 2 + 256].view(4, 64), torch.empty(4, 64, dtype=BF))["x"].width == 2


def test_reads_under_a_condition_that_lanes_differ_in_are_gathered() -> None:
    found = reads(lambda x, y: torch.cat([x, y], -1) * 2, torch.empty(4, 61), torch.empty(4, 67))
    assert all(a.conditions and a.pattern is AccessPattern.GATHER for a in found.values())
