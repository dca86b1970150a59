"""Indices that are values beside products and in attention: each epilogue and each score reads what they name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.attention.match import ATTENTION
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.pointwise.lower import POINTWISE
from fusegen.families.rows.match import ROW
from fusegen.fusion import GroupKind
from tests.emulator.tensor_cores import run
from tests.emulator.test_epilogues import BF16, heads, tensor, weight
from tests.unit.indexed import indices


def residual_rows(x: Tensor, w: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w)) + F.embedding(ids, table)


def rotary_at(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    first, second = (h := heads(F.linear(x, w))).chunk(2, -1)
    return h * cos[positions][:, None] + torch.cat((-second, first), -1) * sin[positions][:, None]


def of_embedded(table: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.layer_norm(F.embedding(ids, table), table.shape[-1:]), w) + 1


def rows_of_a_product(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return F.relu(F.linear(x, w))[ids]


def biased(q: Tensor, k: Tensor, v: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 8 + table[ids].permute(2, 0, 1), -1).to(BF16) @ v


CASES: list[tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]], list[GroupKind]]] = [
    (residual_rows, lambda: (tensor(2, 35, 64), weight(64, 64), tensor(9, 64), indices(2, 35, below=9)), [CONTRACTION]),
    (
        rotary_at,
        lambda: (tensor(2, 16, 64), weight(128, 64), tensor(50, 64), tensor(50, 64), indices(2, 16, below=50)),
        [CONTRACTION],
    ),
    (of_embedded, lambda: (tensor(9, 64), indices(70, below=9), weight(64, 64)), [ROW, CONTRACTION]),
    (rows_of_a_product, lambda: (tensor(70, 64), weight(64, 64), indices(33, below=70)), [CONTRACTION, POINTWISE]),
    (
        biased,
        lambda: (tensor(1, 2, 17, 64), tensor(1, 2, 19, 64), tensor(1, 2, 19, 64), torch.randn(32, 2), indices(17, 19, below=32)),
        [ATTENTION],
    ),
]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("function", "arguments", "kinds"), CASES, ids=[f.__name__ for f, _, _ in CASES])
def test_beside_products(
    function: Callable[..., Tensor], arguments: Callable[[], tuple[Tensor, ...]], kinds: list[GroupKind]
) -> None:
    given = arguments()
    kernel = fg.kernel(function)
    low = kernel.lower(*given, target="sm_90a")
    assert [group.kind for group in low.groups] == kinds
    assert low.asm["ptx"]
    got, wanted = kernel(*given), function(*given)
    torch.testing.assert_close(got.double(), wanted.double(), rtol=2**-6, atol=2**-6 * (1 + wanted.abs().max().item()))


def scaled_by_one(x: Tensor, w: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    return F.linear(x, w) * table[ids]


def of_constants(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 8 + torch.ones(32)[ids], -1).to(BF16) @ v


@pytest.mark.usefixtures("emulated")
def test_indices_that_no_offset_mentions() -> None:
    """Of a table of one element, and of constants: also where the last pair of lanes is half a pair."""
    x, w, table, ids = tensor(70, 64), weight(64, 64), tensor(1), indices(64, below=1)
    given = tensor(1, 2, 17, 64), tensor(1, 2, 19, 64), tensor(1, 2, 19, 64), indices(17, 19, below=32)
    for function, arguments in ((scaled_by_one, (x, w, table, ids)), (of_constants, given)):
        got, wanted = fg.kernel(function)(*arguments), function(*arguments)
        torch.testing.assert_close(got.double(), wanted.double(), rtol=2**-6, atol=2**-6 * (1 + wanted.abs().max().item()))
    ids[63] = 1
    with pytest.raises(IndexError, match=r"fusegen: scaled_by_one: index of 'table' out of range \[-1, 1\)"):
        fg.kernel(scaled_by_one)(x, w, table, ids)
    given[3][16, 18] = 32
    with pytest.raises(IndexError, match=r"fusegen: of_constants: index of a computed tensor out of range \[-32, 32\)"):
        fg.kernel(of_constants)(*given)


@pytest.mark.usefixtures("emulated")
def test_an_epilogue_s_index_out_of_range() -> None:
    x, w, table, ids = tensor(70, 64), weight(64, 64), tensor(9, 64), indices(70, below=9)
    ids[69] = 9
    with pytest.raises(IndexError, match=r"fusegen: residual_rows: index of 'table' out of range \[0, 9\)"):
        fg.kernel(residual_rows)(x, w, table, ids)


def test_a_product_of_sizes_beyond_32_bits_is_a_value_of_the_math() -> None:
    """Offsets have 32 bits, but a size that the math reads has 64."""
    x, w = tensor(256, 64), weight(64, 64)
    got = run(lambda x, w: F.linear(x, w).float() + x.shape[0] * 10_000_000, x, w)
    torch.testing.assert_close(got, torch.full((256, 64), 2.56e9), atol=1e3, rtol=0)
    torch.testing.assert_close(
        run(lambda x: x.float() + x.shape[0] * 10_000_000, x), torch.full((256, 64), 2.56e9), atol=1e3, rtol=0
    )


def test_a_size_beyond_32_bits_of_a_tensor_without_elements() -> None:
    got = run(lambda x, empty: x.sum(1) * empty.shape[0], torch.ones(5, 64), torch.empty(2**33, 0))
    torch.testing.assert_close(got, torch.full((5,), 64.0 * 2**33))
