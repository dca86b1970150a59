"""Sums at indices that are values, forward and as gradients of what was chosen: on the CPU target and in the emulated CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError, IndexRangeError, ShapeError, TraceError, UnsupportedError
from tests.naming import case
from tests.unit.eager import agree, ints, randn, refused

IDS = ints(5, 9, low=0, high=6, dtype=torch.int64)
X = randn(6, 8)

CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "rows": (lambda x, i, s: x.index_add(0, i, s.tanh()) * 2, (X, IDS[0], randn(9, 8))),
    "rows of halves": (lambda x, i, s: x.index_add(0, i, s), (X.bfloat16(), IDS[0], randn(9, 8).bfloat16())),
    "columns": (lambda x, i, s: x.index_add(-1, i, s, alpha=0.5), (X, IDS[0], randn(6, 9))),
    "columns of planes": (lambda x, i, s: torch.index_add(x, 1, i, s), (randn(3, 6, 8), IDS[0], randn(3, 9, 8))),
    "integers": (lambda x, i, s: x.index_add(0, i, s), (ints(6, 8), IDS[0].int(), ints(9, 8))),
    "elements": (lambda x, i, s: x.scatter_add(0, i, s.exp()), (randn(6, 12), IDS, randn(7, 10))),
    "elements along the last dim": (lambda x, i, s: x.scatter_add(1, i, s), (randn(9, 7), IDS, randn(5, 9))),
    "at a tensor": (lambda x, i, s: x.index_put((i - 3,), s, accumulate=True), (X, IDS, randn(9, 8))),
    "none": (lambda x, i, s: x.index_add(0, i, s), (X, IDS[0, :0], randn(0, 8))),
    "one number": (lambda x, i, s: x.scatter_add(0, i, s) + x.index_add(0, i, s), (X[0, 0], IDS[0, 0] * 0, randn(1)[0])),
}


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    function, arguments = CASES[name]
    agree(function, arguments)


def trained(function: Callable[..., Tensor], *arguments: Tensor) -> list[Tensor]:
    """The result and the gradients by floats."""
    given = [a.clone().requires_grad_(a.is_floating_point()) for a in arguments]
    result = function(*given)
    result.backward(torch.cos(result.detach()))
    return [result.detach(), *(a.grad for a in given if a.grad is not None)]


TABLES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a table": (lambda i, t: F.embedding(i, t).sin(), (IDS, X)),
    "a table with padding": (lambda i, t: F.embedding(i, t, padding_idx=2) * 2, (IDS, X)),
    "a table and a norm": (lambda i, t, p: F.layer_norm(F.embedding(i, t) + p, (8,)), (IDS, X, randn(9, 8))),
    "a scaled table": (lambda i, t: F.embedding(i, t) * 8**0.5, (IDS.int(), X.bfloat16())),
    "columns": (lambda i, t: t[:, i], (IDS, X)),
    "elements": (lambda i, t: t.gather(1, i), (IDS, randn(5, 6))),
    "nothing chosen": (lambda i, t: F.embedding(i, t) * 2, (IDS[:0], X)),
}


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", TABLES)
def test_what_is_chosen_from_has_a_gradient(name: str) -> None:
    function, arguments = TABLES[name]
    ours, theirs = trained(fg.kernel(function), *arguments), trained(function, *arguments)
    torch.testing.assert_close(ours, theirs)


def test_many_halves_are_summed_in_float32() -> None:
    ids, table = torch.zeros(4096, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.bfloat16, requires_grad=True)
    fg.kernel(lambda i, t: F.embedding(i, t) * 1.5)(ids, table).sum().backward()
    assert table.grad is not None and table.grad[0].tolist() == [4096 * 1.5] * 8


def test_an_index_that_names_no_element_is_an_error() -> None:
    for function in (
        lambda x, i, s: x.index_add(0, i, s),
        lambda x, i, s: x.scatter_add(0, i[:, None], s),
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
    ):
        for number in (6, -7):
            with pytest.raises(IndexRangeError, match=r"out of range \[(0|-6), 6\)"):
                fg.kernel(function)(X, torch.tensor([1, number]), randn(2, 8))


REFUSED: list[tuple[Callable[..., Any], tuple[Tensor, ...], type[FusegenError], str]] = [
    (
        lambda x, i, s: x.index_add(0, i, s),
        (X, IDS[0], randn(8, 8)),
        ShapeError,
        "index_add: the source",
    ),
    (lambda x, i, s: x.index_add(0, i, s), (X, IDS, randn(5, 8)), ShapeError, "index has 2 dims"),
    (
        lambda x, i, s: x.index_add(0, i, s),
        (X, IDS[0], randn(9, 8).double()),
        TraceError,
        "index_add: the source is float64, the tensor float32",
    ),
    (lambda x, i, s: x.index_add(0, i, s), (X, IDS[0].to(torch.int16), randn(9, 8)), TraceError, "index tensor is int16"),
    (lambda x, i, s: x.scatter_add(0, i, s), (X, IDS[:, :8], randn(4, 8)), ShapeError, "scatter_add by an index of shape"),
    (lambda x, i, s: x.scatter_add(0, i, s), (X, IDS[0], randn(9, 8)), ShapeError, "the index 1,"),
    (
        lambda x, i, s: x.index_put((i > 2,), s, accumulate=True),
        (X, IDS[0, :6], randn(8)),
        UnsupportedError,
        "a tensor where a mask is true",
    ),
    (lambda x, i, s: x.index_put((i,), s, accumulate=True), (X, IDS[0], randn(4, 8)), ShapeError, "do not broadcast"),
    (lambda i, t: F.embedding(i, t, scale_grad_by_freq=True), (IDS, X), TraceError, "scale_grad_by_freq"),
]


def test_what_is_refused() -> None:
    for function, arguments, error, text in REFUSED:
        with case(text):
            refused(function, *arguments, error=error, says=text)
