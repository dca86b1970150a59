"""Rows whose elements alternate between variables, as those of interleaved gates do: one vector, taken apart in registers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.unit.eager import agree, randn

pytestmark = pytest.mark.usefixtures("emulated", "first_plans")


def scaled_gates(x: Tensor) -> Tensor:
    """One phase reads pairs, and keeps what it makes of them."""
    h = F.silu(x[..., ::2]) * x[..., 1::2]
    return h / (h.abs().amax(-1, keepdim=True) + 1)


def normalized_pairs(x: Tensor, weight: Tensor) -> Tensor:
    """Pairs are read, and written, and so are those of what all rows share."""
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1)
    h = x * scale * weight
    a, b = h[..., ::2], h[..., 1::2]
    return torch.stack((a - b, a + b), -1).flatten(-2)


def late_gates(x: Tensor) -> Tensor:
    """One phase reads one of two alone."""
    a, b = x[..., ::2], x[..., 1::2]
    return b * torch.softmax(a, -1)


def scaled_thirds(x: Tensor) -> Tensor:
    a, b, c = (x[..., k::3] for k in range(3))
    return (a + b * c).softmax(-1)


@pytest.mark.parametrize("columns", [64, 520, 22, 7, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates(columns: int, dtype: torch.dtype) -> None:
    agree(scaled_gates, (randn(5, 2 * columns, dtype=dtype),))


@pytest.mark.parametrize("columns", [64, 264, 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_that_are_written(columns: int, dtype: torch.dtype) -> None:
    agree(normalized_pairs, (randn(5, 2 * columns, dtype=dtype), randn(2 * columns, dtype=dtype)))


@pytest.mark.parametrize("columns", [64, 264, 33])
def test_phases_that_use_one_of_two(columns: int) -> None:
    agree(late_gates, (randn(5, 2 * columns, dtype=torch.bfloat16),))


@pytest.mark.parametrize("columns", [64, 33])
def test_thirds(columns: int) -> None:
    agree(scaled_thirds, (randn(5, 3 * columns),))


def test_gates_that_are_looped_over() -> None:
    agree(scaled_gates, (randn(2, 2 * 70000, dtype=torch.bfloat16),))


def test_gates_at_an_odd_place() -> None:
    agree(scaled_gates, (randn(5, 129, dtype=torch.bfloat16)[:, 1:],))


def test_gates_are_read_in_vectors() -> None:
    found = fg.kernel(scaled_gates).lower(randn(5, 1024, dtype=torch.bfloat16), target="sm_90a").asm["cuda"]
    assert "load_lanes<8>(x_in_turn_raw" in found and "load(x_ptr" not in found


def test_pairs_are_written_in_vectors() -> None:
    x, weight = randn(5, 1024, dtype=torch.bfloat16), randn(1024, dtype=torch.bfloat16)
    found = fg.kernel(normalized_pairs).lower(x, weight, target="sm_90a").asm["cuda"]
    assert "store_lanes<8>(out_ptr" in found and "load_lanes<8>(weight_in_turn_raw" in found
