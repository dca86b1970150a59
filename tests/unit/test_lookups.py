"""Places in short tables, against torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusegen as fg
from fusegen.errors import FusegenError, IndexRangeError, ShapeError, TraceError, UnsupportedError
from tests.naming import case
from tests.unit.eager import agree, agree_each, ints, randn, refused
from tests.unit.test_scatter import trained

TABLE = torch.tensor([-1.0, -0.5, 0.0, 0.0, 0.5, math.inf])
X = randn(4, 9)
X[0, :5] = torch.tensor([0.0, 0.5, math.nan, math.inf, -math.inf])

LOOKUPS = """
    torch.bucketize(x, b) | torch.bucketize(x, b, right=True) | torch.searchsorted(b, x) | torch.searchsorted(b, x, side="right")
    torch.searchsorted(b, x, right=True, out_int32=True) | torch.searchsorted(b.expand(4, 6) * 1, x) | torch.isin(x, b)
    torch.isin(x, b.view(2, 3), invert=True) | torch.isin(i, torch.arange(3)) | torch.isin(i, 3)
    torch.bucketize(i, torch.arange(5)) | torch.bucketize(x[0, 0], b) | torch.searchsorted(b, 0.25)
    torch.searchsorted(torch.arange(9, dtype=torch.int32), 3)
    torch.searchsorted(b.flip(0), x, sorter=torch.arange(5, -1, -1)) | x.put(i, -x)
    x.put(i[0, :3] - 9, x[0, :3], accumulate=True)
"""


@pytest.mark.usefixtures("either")
def test_values() -> None:
    agree_each("x, b, i", LOOKUPS, (X, TABLE, ints(4, 9, dtype=torch.int64)))


def exponential(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.take(i).exp()


@pytest.mark.usefixtures("either")
def test_take() -> None:
    at = torch.tensor([[0, -1], [35, 5]])
    agree(lambda x, i: torch.take(x, i) * 2, (randn(4, 9), at), (randn(4, 9).T, at))
    x = randn(4, 9)
    torch.testing.assert_close(trained(fg.kernel(exponential), x, at), trained(exponential, x, at))
    with pytest.raises(IndexRangeError, match="index of 'x' out of range"):
        fg.kernel(lambda x, i: x.take(i))(randn(4, 9), torch.tensor([36]))


REFUSED: list[tuple[Callable[..., Any], type[FusegenError], str]] = [
    (lambda x, b: torch.searchsorted(b.double(), x), TraceError, "the values are float32, the table float64"),
    (lambda x, b: torch.searchsorted(b, x, sorter=b), TraceError, "the sorter is float32"),
    (lambda x, b: torch.searchsorted(b, x, sorter=torch.arange(3)), ShapeError, "the sorter"),
    (lambda x, b: torch.searchsorted(b, x, side="left", right=True), TraceError, "side='left' is invalid with right=True"),
    (lambda x, b: torch.searchsorted(x, b), ShapeError, "a table and values of shapes"),
    (lambda x, b: torch.bucketize(x, x), ShapeError, "must be a vector"),
    (lambda x, b: torch.isin(x, torch.arange(2000)), UnsupportedError, "a table of 2000 entries"),
    (lambda x, b: x.take(b.int()), TraceError, "take: the indices are int32"),
    (lambda x, b: x.put(b.int(), b), TraceError, "put: the indices are int32"),
    (lambda x, b: x.put(b.long(), b[:2]), ShapeError, "put: the source"),
]


def test_what_is_refused() -> None:
    for function, error, says in REFUSED:
        with case(says):
            refused(function, X, TABLE, error=error, says=says)


def test_gradients_of_rows_at_their_coordinates() -> None:
    """The library that adds the rows reads the coordinates from memory."""

    def first(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.index_select(torch.sin(x), 0, torch.arange(other.shape[0], device=x.device))

    x, other = randn(7, 3).requires_grad_(), randn(4)
    weights = randn(4, 3)
    expected = torch.autograd.grad((first(x, other) * weights).sum(), x)
    torch.testing.assert_close(torch.autograd.grad((fg.kernel(first)(x, other) * weights).sum(), x), expected)
