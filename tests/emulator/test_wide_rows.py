"""Reductions of a product's rows that are wider than a tile: of tiles in its epilogue, and a small kernel over these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.rows.match import ROW
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, results
from tests.emulator.test_epilogues import BF16, compare, tensor, weight


def with_bounds(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = F.gelu(F.linear(x, w))
    return y.float(), y.abs().amax(-1), y.amin(-1)


def normalizer_alone(x: Tensor, w: Tensor) -> Tensor:
    return torch.logsumexp(F.linear(x, w).float() * 3, -1)


def masked_normalizer(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    """Tiles, and a row, of nothing but minus infinity."""
    return torch.logsumexp(F.linear(x, w).float() + mask, -1)


def with_moments(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The statistics of a layer norm, far from zero."""
    y = F.linear(x, w, b).float()
    variance, mean = torch.var_mean(y, -1, correction=0)
    return mean, torch.rsqrt(variance + 1e-5)


def sums_of_a_batch(x: Tensor, w: Tensor) -> Tensor:
    return (F.linear(x, w).relu().sum(-1) * 0.25).float() + x[..., 0]


MASK = torch.zeros(70, 384, dtype=BF16)
MASK[3:, :130], MASK[5] = -torch.inf, -torch.inf
CASES: dict[Callable[..., Any], tuple[Tensor, ...]] = {
    with_bounds: (tensor(2, 35, 64), weight(512, 64)),
    normalizer_alone: (tensor(70, 64), weight(640, 64)),
    masked_normalizer: (tensor(70, 64), weight(384, 64), MASK),
    with_moments: (tensor(70, 64), weight(320, 64), tensor(320) + 30),
    sums_of_a_batch: (tensor(2, 35, 64), weight(384, 64)),
}


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("half", range(2))
def test_rows_are_read_once(half: int, target: str) -> None:
    cases = {function: CASES[function] for function in list(CASES)[half::2]}
    for function, given in cases.items():
        many = [torch.empty(4096 if len(t) == len(given[0]) else len(t), *t.shape[1:], dtype=BF16, device="meta") for t in given]
        low = fg.kernel(function).lower(*many, target=target)
        assert [group.kind for group in low.groups] == [CONTRACTION, ROW]
        wide = low.graph.nodes[low.groups[0].core_nodes[0]].shape[-1]
        assert all(low.graph.nodes[p].shape[-1] != wide for p in low.groups[1].inputs)
    for function, got in results(cases, target, 1, ONCE if target == "sm_80" else EVERY_TIMING[1:3]):
        compare(got, function(*(t.double() for t in cases[function])))
