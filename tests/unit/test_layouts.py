"""What is normalized and then arranged in other dims is one kernel with what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.families.pointwise.lower import POINTWISE
from fusegen.families.rows.match import ROW
from tests.naming import case
from tests.unit.eager import PERMUTATIONS, agree, keeps_bits, nans, randn
from tests.unit.gate import some
from tests.unit.lowering import kinds, lowered

HEADS, HEAD = 3, 16


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD))


def of_heads(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(F.rms_norm(heads(x), (HEAD,), weight[:HEAD]).transpose(1, 2), cos, sin)


def of_whole_rows(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(heads(F.rms_norm(x, x.shape[-1:], weight)).transpose(1, 2), cos, sin)


def centered(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return heads(F.layer_norm(x, x.shape[-1:], weight, weight)).permute(2, 0, 1, 3) * cos + sin


def of_a_sum(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(heads((x + weight).softmax(-1) * x.amax(-1, keepdim=True)).transpose(1, 2), cos, sin)


def in_three_parts(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    parts = F.rms_norm(x, x.shape[-1:], weight).reshape(*x.shape[:2], HEADS, 2, 8).permute(0, 3, 1, 2, 4)
    return parts.exp() + cos[:, None, :8] - sin[:, None, :8]


ONE_KERNEL = (of_heads, of_whole_rows, centered, of_a_sum, in_three_parts)


def arguments(*, rows: int = 5) -> tuple[Tensor, ...]:
    shapes = (2, rows, HEADS * HEAD), (HEADS * HEAD,), (rows, HEAD), (rows, HEAD)
    return tuple(randn(*shape, dtype=torch.bfloat16) for shape in shapes)


def test_is_one_kernel() -> None:
    for function in ONE_KERNEL:
        with case(function.__name__):
            assert kinds(lowered(function, *arguments())) == [ROW]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("function", some(ONE_KERNEL, [of_whole_rows, in_three_parts]))
def test_values(function: Callable[..., Tensor]) -> None:
    agree(function, arguments(), arguments(rows=7))


@pytest.mark.deep
def test_rows_that_are_read_in_pieces() -> None:
    """Their moments are combined."""

    def function(x: Tensor) -> Tensor:
        normed = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)
        return normed.unflatten(-1, (HEADS, -1)).transpose(1, 2).exp()

    agree(function, (randn(2, 2, HEADS * 16000),))


def arranged(x: Tensor) -> Tensor:
    return heads(x).transpose(1, 2)


ELSEWHERE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a result": lambda x, y: (n := F.normalize(x, dim=-1), arranged(n) * y),
    "a statistic that is a result": lambda x, y: (s := x.amax(-1, keepdim=True), arranged(x - s) * y),
    "a view that is a result": lambda x, y: (v := arranged(F.normalize(x, dim=-1)), v * y),
    "rows as columns": lambda x, y: F.normalize(x, dim=-1).transpose(1, 2) * y.sum(),
    "dims that become one": lambda x, y: F.normalize(x, dim=-1).flatten() * y.sum(),
    "two directions": lambda x, y: arranged(x / x.sum(-1, keepdim=True) - x.sum(1, keepdim=True)) * y,
    "the place of a maximum": lambda x, y: arranged(x - x.max(-1, keepdim=True)[1]) * y,
    "without the dim": lambda x, y: arranged(x - x.mean(-1)[..., None]) * y,
}


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", some(ELSEWHERE, ["a statistic that is a result", "two directions", "rows as columns"]))
def test_values_of_what_is_used_otherwise_too(name: str) -> None:
    agree(ELSEWHERE[name], (randn(2, 5, HEADS * HEAD), randn(HEADS, 5, HEAD)))


def test_a_norm_that_is_a_result_too_is_not_computed_twice() -> None:
    low = lowered(lambda x: (n := F.normalize(x, dim=-1), arranged(n) * 2), torch.empty(2, 5, HEADS * HEAD))
    assert kinds(low) == [ROW, POINTWISE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("function", PERMUTATIONS)
def test_a_permutation_keeps_the_bits_of_nans(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    keeps_bits(function, nans(66, 96, dtype=dtype), nans(70, 240, dtype=dtype))
