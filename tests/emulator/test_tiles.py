"""Operands that lie across the results: tiles through shared memory, with ragged edges, batches and other operands."""

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
from fusegen.compiler import backends, variants
from fusegen.families.pointwise.plan import TilePlan
from tests.naming import case
from tests.unit.eager import PERMUTATIONS, agree, ints, keeps_bits, nans, randn

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
I8, U8, I64, BOOL = torch.int8, torch.uint8, torch.int64, torch.bool
MACHINE = replace(targets.target("sm_90a"), wgmma=False)
pytestmark = pytest.mark.usefixtures("emulated", "first_plans")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_EMULATED", MACHINE)


def in_tiles(function: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    """Each call gives what torch gives, by tiles."""
    kernel = agree(function, *calls)
    for arguments in calls:
        variant, _ = kernel._dispatcher.variants.variant_of(list(arguments), MACHINE, torch.device("cpu"))
        assert any(isinstance(launch.plan, TilePlan) for launch in variant.program.launches)


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    return randn(*shape, dtype=dtype) if dtype.is_floating_point else ints(*shape, low=0, high=2, dtype=dtype)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("function", PERMUTATIONS)
def test_a_permutation_keeps_the_bits_of_nans(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    keeps_bits(function, nans(66, 96, dtype=dtype), nans(70, 240, dtype=dtype))


@pytest.mark.parametrize("dtypes", [(BF16, F16, F32, F64), (I8, U8, I64, BOOL)], ids=["floats", "integers"])
def test_elements_of_every_size(dtypes: Sequence[torch.dtype]) -> None:
    """One kernel for rows that are aligned in the result, and for those that are not."""
    for dtype in dtypes:
        with case(dtype):
            in_tiles(transposed, *((of(dtype, rows, columns),) for rows in (40, 35) for columns in (32, 35)))


def test_edges_of_tiles() -> None:
    """A kernel of its own for each shape, so that the extents are those of the first call."""
    for shape in ((32, 32), (33, 200), (130, 70), (2, 64), (64, 129)):
        with case(shape):
            in_tiles(transposed, (randn(*shape),), (randn(*shape, dtype=BF16),))


def test_indices_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "WIDE", 0)
    in_tiles(lambda x, y: x.mT * 2 + y, (randn(2, 67, 40), randn(2, 40, 67)))


def test_batches_and_math() -> None:
    in_tiles(lambda x: F.gelu(x).transpose(1, 2).contiguous(), (randn(3, 40, 72),), (randn(2, 35, 72),))
    in_tiles(lambda x: x.permute(0, 3, 1, 2).contiguous() + 1, (randn(2, 5, 8, 40),))
    in_tiles(lambda x: x.permute(2, 1, 0).contiguous(), (randn(40, 3, 64, dtype=BF16),))


def test_other_operands_lie_along_the_results() -> None:
    in_tiles(lambda x, y, row, column: (x.t() + y) * row + column[:, None], (randn(70, 72), randn(72, 70), randn(70), randn(72)))
    in_tiles(lambda x, y: x + y.to(x.dtype), (randn(64, 48, dtype=BF16).t(), randn(48, 64, dtype=F32)))


def test_an_operand_lies_both_ways() -> None:
    in_tiles(lambda x: x + x.t(), (randn(72, 72, dtype=BF16),), (randn(67, 67, dtype=BF16),))


def test_operands_with_strides_and_places_of_their_own() -> None:
    base = randn(70, 100, dtype=BF16)
    in_tiles(transposed, (base[:, :64],), (base[:, 8:72],), (base[:, 4:68],), (base[1:, 1:65],), (base[:, 3:63],))
    in_tiles(lambda x, y: x + y, (base.t()[:64], randn(64, 70, dtype=BF16)))
    in_tiles(lambda x, y: x + y, (randn(70, 64).t()[:61], randn(61, 70)))
    in_tiles(transposed, (randn(70, 64)[:, :61],))


def test_a_part_of_a_batch_lies_elsewhere() -> None:
    in_tiles(lambda x, y: torch.stack([x.t(), y.t() * 2], 0), (randn(40, 64), randn(40, 64)))
    in_tiles(lambda x, y: torch.cat([x.mT, y.mT], 0), (randn(2, 40, 64), randn(1, 40, 64)))


def test_parts_within_a_tile_lie_elsewhere() -> None:
    """They are gathered, whatever lies across beside them."""
    in_tiles(lambda x, y, z: torch.cat([x.t(), y.t()], 1) + z.t(), (randn(40, 64), randn(37, 64), randn(77, 64)))
    in_tiles(lambda x, y, z: torch.cat([x.t(), y.t()], 0) + z.t(), (randn(40, 33), randn(40, 64), randn(40, 97)))


def test_a_transposed_tensor_is_worked_on_in_place() -> None:
    def scaled(x: Tensor, row: Tensor) -> None:
        x.mT.mul_(row)

    kernel = fg.kernel(mutates=("x",))(scaled)
    x, row = randn(3, 72, 41), randn(72)
    wanted = x * row[:, None]
    kernel(x, row)
    assert torch.equal(x, wanted)
