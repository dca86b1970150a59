"""The first slices in the emulator, which runs the emitted CUDA text and checks every access: pointwise chains, norms in every
layout of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.rows.plan import Persistence, RowBody, RowPlan
from tests.naming import case
from tests.unit.eager import agree, randn

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
pytestmark = pytest.mark.usefixtures("emulated", "first_plans")


def row_plan(kernel: fg.Kernel[..., Any], *arguments: Any) -> RowPlan:
    body = kernel.lower(*arguments, target="sm_90a").program.launches[0].kernel.body
    assert isinstance(body, RowBody)
    return body.plan


# Slice 1: pointwise chains.


def gelu_bias_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh") + residual


def test_a_chain_on_strided_and_unaligned_inputs() -> None:
    base = randn(40, 64, dtype=BF16)
    kernel = fg.kernel(gelu_bias_residual)
    agree(
        kernel,
        (base.T[:, :6], base[0, :6], base.flatten()[1 : 1 + 64 * 6].view(64, 6)),
        (base[:, ::2], base[3, 1:33], base[:1, :32]),
    )
    agree(kernel, (base[:, :1].expand(40, 8), base[0, 3:11], base[:, 5:13]))


def test_views_in_a_chain() -> None:
    def rotary(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = y[..., 0::2], y[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    def halves(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = q.shape[-1] // 2
        return q * cos + torch.cat((-q[..., h:], q[..., :h]), -1) * sin

    agree(rotary, (randn(3, 64, dtype=BF16), randn(3, 32, dtype=BF16), randn(3, 32, dtype=BF16)))
    agree(halves, (randn(2, 3, 64, dtype=BF16), randn(3, 64), randn(3, 64)), (randn(2, 3, 10), randn(3, 10), randn(3, 10)))
    agree(lambda x, y: (torch.cat([x, y[1:]], 0).T + 1, x[:, 1:] * 2, x.permute(1, 0).reshape(-1)), (randn(5, 9), randn(4, 9)))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bfloat16", "float32"])
def test_parts_that_begin_anywhere_in_a_vector(dtype: torch.dtype) -> None:
    """Of rows of one alignment, so that the address alone would allow eight at a time."""

    def replaced(x: Tensor, y: Tensor, first: int) -> Tensor:
        return torch.cat((x[:, :first], y[:, first:]), -1) * 2

    def normed(x: Tensor, y: Tensor, first: int) -> Tensor:
        return F.rms_norm(replaced(x, y, first), x.shape[-1:])

    x, y = randn(5, 32, dtype=dtype), randn(5, 32, dtype=dtype)
    for first in (1, 4, 6, 8, 24):
        with case(first):
            agree(replaced, (x, y, first))
            agree(normed, (x, y, first))


def test_integers_bools_and_scalars() -> None:
    x = torch.randint(-9, 9, (5, 13), dtype=torch.int32)
    agree(lambda x, s: (x // 3 + x % 5, (x > 2) & (x < s), x * s, (x.to(torch.int8) * 100).float()), (x, 4), (x, 2.5))


# Slice 2: layer_norm, gelu and a residual, in every layout of a row.


def norm_gelu_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, b)) + r


def norm_inputs(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(randn(*s, dtype=dtype) for s in ((rows, columns), (columns,), (columns,), (rows, columns)))


LAYOUTS: dict[str, tuple[tuple[int, int], torch.dtype, Callable[[RowPlan], bool]]] = {
    "several-rows-a-block": ((19, 256), BF16, lambda p: p.rows > 1 and p.warps == 1),
    "one-lane-a-thread": ((9, 33), F32, lambda p: p.vec == 1),
    "half-empty-warp": ((3, 24), BF16, lambda p: not p.exact),
    "several-warps": ((2, 2048), BF16, lambda p: p.warps > 1 and p.persistence is Persistence.REGISTERS),
    "several-warps-with-a-tail": ((2, 5000), F32, lambda p: p.warps > 1 and not p.exact),
    "looped": ((1, 130_000), F32, lambda p: p.persistence is Persistence.MULTI_PASS),
    "doubles": ((2, 100), F64, lambda p: p.vec <= 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_norm_in_every_layout(name: str) -> None:
    (rows, columns), dtype, holds = LAYOUTS[name]
    inputs = norm_inputs(rows, columns, dtype)
    kernel = fg.kernel(norm_gelu_residual)
    plan = row_plan(kernel, *inputs)
    assert holds(plan), plan
    agree(kernel, inputs)


def test_halves_of_equal_sines_and_cosines() -> None:
    def waves(x: Tensor) -> tuple[Tensor, Tensor]:
        twice = torch.cat((x, x), -1)
        return twice.cos(), twice.sin()

    agree(fg.kernel(waves), (randn(3, 64),))
