"""Sums of rows at indices by sorting the indices: on the CPU target, and by the kernels of sorted runs in the emulated CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import IndexRangeError
from fusegen.families.runs import CHUNK
from tests.unit.eager import agree, ints, randn
from tests.unit.test_scatter import trained

pytestmark = pytest.mark.usefixtures("either")


def drawn(rows: int, *shape: int) -> Tensor:
    return torch.randint(0, rows, shape)


IDS = {
    "repeated tokens": drawn(20, 7, 15),
    "one token everywhere": torch.full((10 * CHUNK + 9,), 3),
    "two tokens": torch.arange(10 * CHUNK + 9) // (5 * CHUNK),
    "a long run between short ones": torch.cat([torch.arange(9), torch.full((3 * CHUNK,), 9), torch.arange(10, 19)]),
    "runs as long as a chunk": torch.arange(3 * CHUNK) // CHUNK,
    "runs that cross chunks": torch.arange(3 * CHUNK) // (CHUNK - 20),
    "each token once": torch.randperm(20),
    "few tokens": torch.tensor([19, 0, 19]),
    "one token": torch.tensor(7),
    "no tokens": torch.zeros(0, dtype=torch.int64),
}


def table_gradients(ids: Tensor, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    """The gradient of twice the selected rows of a table of 20 rows, and its exact value rounded once."""
    table, gradient = randn(20, width, dtype=dtype).requires_grad_(), ints(*ids.shape, width, dtype=dtype)
    (found,) = torch.autograd.grad(fg.kernel(lambda i, t: F.embedding(i, t) * 2)(ids, table), table, gradient)
    exact = torch.zeros(20, width, dtype=torch.float64).index_add_(0, ids.flatten(), 2 * gradient.double().reshape(-1, width))
    return found, exact.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", IDS)
def test_the_gradient_of_a_table(name: str, dtype: torch.dtype) -> None:
    found, exact = table_gradients(IDS[name], dtype, 72)
    assert torch.equal(found, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 66, 129, 260, 1032])
def test_widths(width: int, dtype: torch.dtype) -> None:
    found, exact = table_gradients(drawn(20, 70).int(), dtype, width)
    assert torch.equal(found, exact)


def test_the_gradient_of_a_table_before_a_norm() -> None:
    ids, table, positions = drawn(10, 7, 15), randn(10, 128), randn(15, 128)
    function = lambda i, t, p: F.layer_norm(F.embedding(i, t) + p, (128,))  # noqa: E731
    torch.testing.assert_close(trained(fg.kernel(function), ids, table, positions), trained(function, ids, table, positions))


def test_a_row_of_padding_has_no_gradient() -> None:
    ids, table = drawn(4, 150), randn(4, 64)
    function = lambda i, t: F.embedding(i, t, padding_idx=-2).sin()  # noqa: E731
    ours = trained(fg.kernel(function), ids, table)
    torch.testing.assert_close(ours, trained(function, ids, table))
    assert not ours[1][2].any()


def test_two_runs_are_equal_in_every_bit() -> None:
    ids, table = drawn(5, 400), randn(8, 96, dtype=torch.bfloat16)
    kernel = fg.kernel(lambda i, t: F.embedding(i, t).exp())
    one, other = (trained(kernel, ids, table) for _ in range(2))
    assert all(map(torch.equal, one, other))


def test_sums_of_halves_are_rounded_once() -> None:
    ids, ones = torch.zeros(4095, dtype=torch.int64), torch.ones(4095, 64, dtype=torch.bfloat16)
    x = torch.full((2, 64), -4000.0, dtype=torch.bfloat16)
    assert fg.kernel(lambda x, i, s: x.index_add(0, i, s))(x, ids, ones)[0].tolist() == [95.0] * 64


@pytest.mark.parametrize(
    ("function", "x", "source"),
    [
        (lambda x, i, s: x.index_add(1, i, s.mT), (70, 6), (50, 70)),
        (lambda x, i, s: x.index_add(0, i, s[:, 1:]) + x, (6, 80), (50, 81)),
        (lambda x, i, s: x.index_put((i,), s[:1], accumulate=True), (6, 80), (2, 80)),
    ],
    ids=["transposed", "without the first column", "the same row"],
)
def test_sums_of_views(function: Callable[..., Tensor], x: tuple[int, ...], source: tuple[int, ...]) -> None:
    agree(function, (randn(*x), drawn(6, 50), randn(*source)))


def test_sums_have_gradients() -> None:
    ids, x, source = drawn(6, 50), randn(6, 80), randn(50, 80)
    function = lambda i, x, s: x.index_add(0, i, s.sin())  # noqa: E731
    torch.testing.assert_close(trained(fg.kernel(function), ids, x, source), trained(function, ids, x, source))


def test_a_table_of_no_rows() -> None:
    table = randn(0, 64).requires_grad_()
    fg.kernel(lambda i, t: F.embedding(i, t) * 2)(torch.zeros(0, dtype=torch.int64), table).sum().backward()
    assert table.grad is not None and table.grad.shape == (0, 64)


def test_an_index_out_of_range_is_an_error() -> None:
    with pytest.raises(IndexRangeError, match=r"out of range \[0, 6\)"):
        fg.kernel(lambda x, i, s: x.index_add(0, i, s))(randn(6, 64), torch.tensor([1, 6]), randn(2, 64))


def test_kernels_of_runs_sum_wide_rows_only() -> None:
    kernel = fg.kernel(lambda x, i, s: x.index_add(0, i, s))
    for dtype, width, kinds in (
        (torch.float32, 64, {"topk", "run_sum"}),
        (torch.float32, 63, {"scatter_add"}),
        (torch.float64, 64, {"scatter_add"}),
        (torch.int32, 64, {"scatter_add"}),
    ):
        x, i, s = (torch.empty(n, dtype=d, device="meta") for n, d in (((6, width), dtype), (9, torch.int64), ((9, width), dtype)))
        names = {node.op.row.name for _, node in kernel.lower(x, i, s, target="sm_90a").graph}
        assert kinds == names & {"topk", "run_sum", "scatter_add"}
