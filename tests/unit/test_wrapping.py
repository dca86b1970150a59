"""Integers wrap as torch's do, although C++ leaves it undefined: at every operation and in every width."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import fusegen as fg
from tests.unit.eager import agree, agree_over

WIDTHS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def edges(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All pairs of the integers where a type ends, and of some others."""
    info = torch.iinfo(dtype)
    known = [info.min, info.min + 1, info.max, info.max - 1, info.max // 2 + 1, 0, 1, 2, 3, 7, *((-1, -2) if info.min else ())]
    a, b = torch.meshgrid(torch.tensor(known, dtype=dtype), torch.tensor(known, dtype=dtype), indexing="ij")
    return a.flatten(), b.flatten()


def arithmetic(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return a + b, a - b, a * b, -a, a.abs(), a * a, a - 1 + b * 3


def comparisons(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """What a compiler that takes overflow for impossible decides at once."""
    return a + 1 > a, a - 1 < a, a + b > a, -a < 0, a.abs() >= 0, (a * 2) // 2 == a, a * a >= 0, (-a) * -1 == a, b - a > 0


def both(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return *arithmetic(a, b), *comparisons(a, b)


@pytest.mark.usefixtures("either")
def test_what_leaves_a_type_wraps() -> None:
    agree_over(both, {str(dtype): edges(dtype) for dtype in WIDTHS}, at_once=1)


@pytest.mark.usefixtures("either")
def test_sums_and_products_with_numbers_wrap() -> None:
    a, b = edges(torch.int64)
    agree(
        lambda a, b: (a.sum(), (a + b).sum(), (a * b).view(-1, 11).sum(-1), (a + b).view(-1, 11).amax(0)),
        (a.repeat(12)[:1331], b.repeat(12)[:1331]),
    )


@pytest.mark.usefixtures("either")
def test_shifts_by_any_count_and_powers() -> None:
    cases = {}
    for dtype in (torch.int64, torch.int32):
        a, count = edges(dtype)
        cases[str(dtype)] = torch.cat([a, a, a]), torch.cat([count, count % 70, count % 70 - 5])
    agree_over(lambda a, n: (a << n, a >> n, a ** n.clamp(0, 70), a**2, a**3, a**5), cases)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", WIDTHS[:2], ids=str)
def test_quotients_of_the_least_integer(dtype: torch.dtype) -> None:
    """By -1 too, where a processor's division traps: torch's own does so, and the quotient wraps like a negation."""
    least = torch.iinfo(dtype).min
    a, b = torch.tensor([least, least, 7, least + 1], dtype=dtype), torch.tensor([-1, 3, -1, -1], dtype=dtype)
    quotient, rest = fg.kernel(lambda a, b: (a // b, a % b))(a, b)
    assert quotient.tolist() == [least, least // 3, -7, -(least + 1)] and rest.tolist() == [0, least % 3, 0, 0]


def test_the_compiler_for_cuda_decides_nothing_in_advance() -> None:
    """The comparison stands in the machine's text, and so does what is compared."""
    ptx = fg.kernel(lambda x: torch.where(x + 1 > x, 5, 7)).lower(torch.arange(64), target="sm_90a").asm["ptx"]
    assert re.search(rf"setp\.\w+\.s64.*({2**63 - 1}|%rd\d+);", ptx), "x + 1 > x was taken to hold"
