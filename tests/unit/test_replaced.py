"""Elements that are replaced, by functions and by writes to what the function computes; of several at one place the last stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError, IndexRangeError, ShapeError, TraceError, UnsupportedError
from tests.naming import case
from tests.unit.eager import agree, randn, refused
from tests.unit.test_scatter import trained
from tests.unit.written import agree_in_place

X, S = randn(5, 6, 7), randn(12, 7)
AT, BESIDE = torch.tensor([0, -1, 3, 1]), torch.tensor([5, 0, -5, 2])
MANY = torch.tensor([3, 0, 5, 3, 1, 3, 0, 2, 4, 5, 3, 1])
ONCE = torch.tensor([4, 0, 5, 3, 1])


def _assigned(write: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function that writes to a value that it computes."""

    def function(x: Tensor, i: Tensor, j: Tensor, s: Tensor) -> Tensor:
        y = x * 2
        write(y, i, j, s)
        return y

    return function


def _parts(y: Any, *given: Any) -> None:
    s = given[2]
    y[1:3] = s[:2, None]
    y[:, ::2] += 1
    y[..., 1::3] = 5
    y[0, 0, 0] = 3


def _views(y: Any, *given: Any) -> None:
    s = given[2]
    z = y[2]
    z[1:] = s[:5]
    z.mul_(2)
    y.transpose(0, 1)[1] = 7
    y[:, :, None, 3].copy_(s[0, :6, None])
    z += 1


def _indices(y: Any, i: Any, j: Any, s: Any) -> None:
    y[i, j] = s[:4]
    y[:, i[:2], j[:2]] *= 3
    y[1:3, j % 6, 2:4] = s[:4, :2]


def _sums(y: Any, i: Any, j: Any, s: Any) -> None:
    y.index_put_((i, j), s[:4], accumulate=True)
    y.index_add_(1, j % 6, s[:4].expand(5, 4, 7))
    y.index_fill_(0, i[:1], 2.0)
    y.scatter_add_(0, (i % 5)[:, None, None].expand(4, 6, 7), y[:4] * s[0])


def _masks(y: Any, *_: Any) -> None:
    y[y > 1] = 0.5
    y[y[:, 0, 0] > 0] = -1
    y[:, 2].masked_fill_(y[:, 2] < 0, 0.0)


def _scatters(y: Any, *given: Any) -> None:
    s = given[2]
    y.scatter_(1, torch.arange(4)[None, :, None].expand(5, 4, 7), s[:6].expand(5, 6, 7))
    y.scatter_(0, torch.arange(2)[:, None, None].expand(2, 3, 4) * 3, 1.5)
    y[2].index_copy_(0, torch.arange(3) * 2, s[:3])


WRITES = {name: _assigned(f) for name, f in {"parts": _parts, "views": _views, "indices": _indices, "sums": _sums}.items()}
WRITES |= {name: _assigned(f) for name, f in {"masks": _masks, "scatters": _scatters}.items()}

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "index_put": lambda x, i, j, s: x.index_put((i, j), s[:4].sin()),
    "index_put under a mask": lambda x, i, j, s: (
        x.index_put((x > 0,), s[0, 0]) + x.index_put((x[:, :, 0] > 0,), s[0, :1], accumulate=True)
    ),
    "index_put_ under a mask": lambda x, i, j, s: x.clone().index_put_((x > 0,), s[0, 0]) * 2,
    "one number": lambda x, i, j, s: x[0, 0, 0].index_fill(0, i[0] * 0, 2.0) + x.sum().index_add(0, j[0] * 0, s[0, 0]),
    "windows": lambda x, i, j, s: torch.unfold_copy(x, 1, 2, 1).exp() + torch.arange(1, 0, -0.5),
    "index_put of one": lambda x, i, j, s: x.index_put((i[:, None],), s[0, 0]) * 2,
    "scatter": lambda x, i, j, s: x.scatter(1, torch.arange(4)[None, :, None].expand(5, 4, 7), s[:6].expand(5, 6, 7).exp()),
    "scatter a number": lambda x, i, j, s: x.scatter(2, torch.arange(5)[:, None, None].expand(5, 6, 1), 2.5).sin(),
    "scatter and add": lambda x, i, j, s: x.scatter(0, (i % 5)[:, None, None].expand(4, 6, 7), x[:4] * s[0], reduce="add"),
    "index_copy": lambda x, i, j, s: x.index_copy(1, torch.arange(4) + 1, s[:4].expand(5, 4, 7)),
    "index_fill": lambda x, i, j, s: x.exp().index_fill(0, i[:2], 3.0),
    "slice_scatter": lambda x, i, j, s: torch.slice_scatter(x, s[:3].expand(5, 3, 7), 1, 0, -1, 2) * 2,
    "select_scatter": lambda x, i, j, s: torch.select_scatter(x.sin(), s[:6], 0, -2),
    "diagonal_scatter": lambda x, i, j, s: torch.diagonal_scatter(x[:, 0], s[0, :5], 1),
}


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", [*WRITES, *FUNCTIONS])
def test_values(name: str) -> None:
    agree({**WRITES, **FUNCTIONS}[name], (X, AT, BESIDE, S))


NO_GRADIENTS = {"sums", "scatters", "scatter", "scatter and add"}  # torch refuses them: larger sources, sums in place


@pytest.mark.parametrize("name", sorted({*WRITES, *FUNCTIONS} - NO_GRADIENTS))
def test_gradients(name: str) -> None:
    function = {**WRITES, **FUNCTIONS}[name]
    inputs = (X.double(), AT, BESIDE, S.double())  # float32 keeps few digits of differences of exponentials
    torch.testing.assert_close(trained(fg.kernel(function), *inputs), trained(function, *inputs))


def test_gradients_of_scatter() -> None:
    at = torch.arange(4)[None, :, None].expand(5, 4, 7)

    def function(x: Tensor, s: Tensor) -> Tensor:
        return x.scatter(1, at, s[:4].expand(5, 4, 7).exp()).scatter(0, at[:1], 1.5)

    def sums(x: Tensor, s: Tensor) -> Tensor:
        return (x.scatter_add if reduces else x.scatter)(1, at, s[:4].expand(5, 4, 7), **({} if reduces else {"reduce": "add"}))

    torch.testing.assert_close(trained(fg.kernel(function), X, S), trained(function, X, S))
    reduces = False
    ours = trained(fg.kernel(sums), X, S)
    reduces = True
    torch.testing.assert_close(ours, trained(sums, X, S))


LAST: dict[str, Callable[..., Tensor]] = {
    "rows": lambda x, i, s: x.index_copy(0, i, s),
    "few rows": lambda x, i, s: x.index_copy(0, i[:4], s[:4]),
    "elements": lambda x, i, s: x.scatter(0, i[:, None].expand(12, 7), s),
    "columns": lambda x, i, s: x.T.contiguous().index_put((torch.arange(7)[:, None], i), s.T).T,
    "computed": lambda x, i, s: x.exp().index_put((i,), s),
}


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", LAST)
def test_the_last_of_several_stays(name: str) -> None:
    x = randn(6, 7)
    wanted = x.exp() if name == "computed" else x.clone()
    for n, place in enumerate(MANY[:4] if name == "few rows" else MANY):
        wanted[place] = S[n]
    torch.testing.assert_close(fg.kernel(LAST[name])(x, MANY, S), wanted)


def test_gradients_are_by_the_last() -> None:
    x, s = randn(6, 7).requires_grad_(), S.clone().requires_grad_()
    fg.kernel(lambda x, i, s: x.index_copy(0, i, s) * 2)(x, MANY, s).sum().backward()
    last = torch.zeros(12, 1)
    last[[6, 11, 7, 10, 8, 9]] = 2.0
    torch.testing.assert_close(s.grad, last.expand(12, 7))
    assert x.grad is not None and not x.grad.any()


def test_writes_to_arguments() -> None:
    def written(x: Tensor, i: Tensor, s: Tensor) -> None:
        x[x > 1] = 0.0
        x.index_add_(0, i, s)
        x[i, i % 7] += 1.0
        x.index_put_((i,), s, accumulate=True)

    agree_in_place(written, ("x",), (randn(6, 7), ONCE, S[:5]))


@pytest.mark.usefixtures("either")
def test_what_is_empty_is_filled() -> None:
    def rotated(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[..., ::2] = -x[..., 1::2]
        out[..., 1::2] = x[..., ::2]
        return out

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        out, other = torch.empty(x.shape[0], 5), x.new_empty(3)
        out[:, :2] = x[:, :2]
        out[:, 2:].copy_(x[:, 3:])
        return out, other.fill_(2.0)

    agree(rotated, (randn(4, 8),))
    agree(parts, (randn(4, 6),))


EMPTY: list[Callable[[Tensor], Any]] = [
    lambda x: torch.empty_like(x) + x,
    lambda x: torch.empty_like(x),
    lambda x: torch.cat([x, x.new_empty(2, 6)]),
    lambda x: torch.empty(4, 6).add_(1),
    lambda x: torch.empty_like(x).T.sum(),
    lambda x: (x * 1).copy_(torch.empty_like(x)),
]


def test_what_is_empty_is_not_read() -> None:
    for number, function in enumerate(EMPTY):
        with case(number):
            refused(function, randn(4, 6), error=UnsupportedError, says="is read before it is written")


def test_an_index_out_of_range() -> None:
    for function in (LAST["rows"], LAST["elements"], LAST["few rows"]):
        for number in (6, -7):
            with pytest.raises(IndexRangeError, match=r"out of range \[(0|-6), 6\)"):
                fg.kernel(function)(randn(6, 7), torch.tensor([1, number, *[0] * 10]), S)


REFUSED: list[tuple[Callable[..., Any], type[FusegenError], str]] = [
    (lambda x, i, s: x.scatter(0, i[:, None], s, reduce="multiply"), UnsupportedError, "reduce='multiply'"),
    (lambda x, i, s: x.index_copy(0, i, s[:3]), ShapeError, "index_copy"),
    (lambda x, i, s: x.index_put((i,), s.double()), TraceError, "index_put: the source is float64, the tensor float32"),
    (lambda x, i, s: x.index_put((x > 0,), s[0]), UnsupportedError, "a tensor where a mask is true"),
    (lambda x, i, s: x.index_fill(0, i, s), ShapeError, "index_fill: the value has"),
    (lambda x, i, s: (x * 1).__setitem__(x > 0, s[0]), UnsupportedError, "a tensor where a mask is true"),
    (lambda x, i, s: (x * 1).__setitem__(x[:3, 0] > 0, 0), ShapeError, "the mask"),
    (lambda x, i, s: torch.where(x > 0), UnsupportedError, "where(condition) cannot be traced"),
    (lambda x, i, s: x.nonzero(), UnsupportedError, "'nonzero'"),
    (lambda x, i, s: x.unique(), UnsupportedError, "'unique'"),
    (lambda x, i, s: x[x > 0], UnsupportedError, "by a mask"),
    (lambda x, i, s: torch.slice_scatter(x, s, 0, 0, 2), ShapeError, "slice_scatter"),
]


def test_what_is_refused() -> None:
    for function, error, says in REFUSED:
        with case(says):
            refused(function, randn(6, 7), MANY, S, error=error, says=says)


def test_what_depends_on_values_is_answered_with_a_mend() -> None:
    for function in (lambda x: x.nonzero(), lambda x: x.unique(), lambda x: x.masked_select(x > 0)):
        with pytest.raises(UnsupportedError, match=r"try: the size of its result depends on values"):
            fg.kernel(function)(X)
