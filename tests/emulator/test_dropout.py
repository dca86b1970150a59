"""Random bits in matmul epilogues: lanes of a quad draw them together, and get those of every other kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import target as targets
from fusegen.families.gemm.choice import MatmulChoice
from tests.emulator.tensor_cores import ONCE, lowered

BF16 = torch.bfloat16
SEED = 2**62 + 3


def dropped(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """No sum is 0, so that the zeros are those of the mask."""
    return fg.dropout(F.linear(x, w) + r, 0.3, seed=SEED)


def dropped_twice(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w) + r
    return fg.dropout(y, 0.3, seed=SEED), fg.dropout(y, 0.5, seed=-1)


def dropped_heads(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return fg.dropout((F.linear(x, w) + r).unflatten(-1, (-1, 24)).transpose(1, 2), 0.3, seed=SEED)


def dropped_parts(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Two matmuls of a launch."""
    y, z = F.linear(x, w[:40]) + r[:, :40], F.linear(x, w[40:]) + r[:, 40:]
    return fg.dropout(y, 0.3, seed=SEED), fg.dropout(z.relu(), 0.5, seed=-1)


def dropped_columns(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """A row of the mask begins anywhere in a call."""
    return fg.dropout(F.pad(F.linear(x, w) + r, (4, 0)), 0.3, seed=SEED)[..., 4:]


def repeated_rows(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """Three rows share a row of the mask."""
    y = F.linear(x, w) + r
    mask = fg.dropout(torch.ones_like(y[: y.shape[0] // 3]), 0.3, seed=SEED)
    return y * mask.repeat_interleave(3, 0)


def padded_rows(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """The rows of the mask are longer than those of the matmul."""
    y = F.linear(x, w) + r
    return fg.dropout(F.pad(y, (0, 72 - y.shape[-1])), 0.3, seed=SEED)[..., : y.shape[-1]]


def joined_columns(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """Each mask covers a part of the columns."""
    y = F.linear(x, w) + r
    return torch.cat((fg.dropout(y[:, :32], 0.3, seed=SEED), fg.dropout(y[:, 32:], 0.5, seed=-1)), -1)


def arguments(rows: Sequence[int], columns: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(*rows, 64).to(BF16)
    return x, (torch.randn(columns, 64) / 8).to(BF16), torch.full((*rows, columns), 64.0, dtype=BF16)


def masks(values: Any) -> list[Tensor]:
    return [value != 0 for value in (values if isinstance(values, tuple) else (values,))]


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "whole tiles": (dropped, (128,), 64),
    "ragged tiles": (dropped, (130,), 200),
    "less than four fragments": (dropped, (70,), 24),
    "two masks": (dropped_twice, (130,), 72),
    "heads": (dropped_heads, (2, 70), 72),
    "parts": (dropped_parts, (70,), 72),
    "longer rows of the mask": (padded_rows, (70,), 34),
    "a mask from the middle of a call": (dropped_columns, (130,), 64),
    "masks of columns": (joined_columns, (70,), 72),
    "a mask of repeated rows": (repeated_rows, (129,), 40),
    "rows of half a call": (dropped, (130,), 36),
    "odd rows": (dropped, (130,), 33),
    "few rows": (dropped, (16,), 64),
}
TOGETHER = list(CASES)[:7]
"""The cases in which the lanes of a quad share their calls of the generator."""


@pytest.mark.parametrize(
    ("target", "name"),
    [("sm_90a", name) for name, (*_, columns) in CASES.items() if columns % 8 == 0]
    + [("sm_80", name) for name, (_, rows, _) in CASES.items() if rows != (128,)],
)
def test_an_epilogue_has_the_mask_of_every_kernel(target: str, name: str) -> None:
    function, rows, columns = CASES[name]
    machine, given = replace(targets.target(target), sms=1), arguments(rows, columns)
    ready = lowered(function, given, machine, torch.device("cpu"))
    (source,), (got,) = ready.variant.sources, ready.results(machine, ONCE)
    assert ("random_pairs(" in source.pipeline) == (name in TOGETHER)
    for ours, wanted in zip(masks(got), masks(function(*given)), strict=True):
        assert torch.equal(ours, wanted) and 0.3 < wanted.double().mean() < 0.8


@pytest.mark.usefixtures("emulated")
def test_a_backward_pass_draws_the_mask_of_the_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatmulChoice, "takes_library", False)
    x, w, r = arguments((70,), 72)
    y = fg.kernel(dropped)(x, w, r.requires_grad_())
    y.sum().backward()
    assert r.grad is not None
    assert torch.equal(y != 0, r.grad != 0) and torch.equal(y != 0, dropped(x, w, r) != 0)
