"""Corners where torch's meaning is easy to miss: factors of 0, whole numbers, nothing at all, no dims, results put together."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ShapeError, TraceError, UnsupportedError
from tests.naming import case
from tests.unit.eager import agree, agree_each, ints, randn, refused

X, Y = randn(5, 6), randn(5, 6)
MASK = torch.rand(5, 6) > 0.5


# Methods whose parameters stand elsewhere than the function's.


def test_the_tensor_of_where_is_what_is_chosen() -> None:
    agree(lambda x, y: (x.where(x > 0, y), x.where(y > 0, 0.5)), (X, Y))
    agree(lambda m, c, n: (m.where(c, n), torch.where(m, c, n)), (MASK, X > 0, Y > 0))


def test_norms_of_torch_itself_take_weights_first() -> None:
    def norms(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        batch = torch.batch_norm(x, w, b, mean, var, False, 0.1, 1e-5, False)
        return batch, torch.instance_norm(x[None], w[:5], b[:5], None, None, True, 0.1, 1e-5, False)

    agree(norms, (X, *(randn(6).abs() for _ in range(4))))


# Products.


def test_a_factor_of_zero_leaves_no_trace_of_the_input() -> None:
    nothing = torch.full((5, 5), math.nan)
    agree(lambda i, x: torch.addmm(i, x, x.mT, beta=0), (nothing, X))
    agree(lambda i, x: torch.baddbmm(i[None], x[None], x.mT[None], beta=0, alpha=2), (nothing, X))


def test_products_of_integers_stay_what_they_are() -> None:
    for dtype in [torch.int32, torch.int64, torch.int8]:
        with case(dtype):
            a, b = ints(6, dtype=dtype), ints(6, dtype=dtype) * 9
            agree(lambda a, b: (torch.dot(a, b), torch.vdot(a, b), torch.inner(a, b), a @ b, torch.outer(a, b)), (a, b))
            m = ints(6, 6, dtype=dtype)
            agree(lambda m, a: (torch.addmm(m, m, m, beta=2.5, alpha=1.5), torch.mv(m, a), torch.einsum("ij,j->i", m, a)), (m, a))


def test_products_that_torch_refuses() -> None:
    for call in [
        lambda x: torch.addmm(x.double(), x, x),
        lambda x: torch.baddbmm(x.half(), x[None], x[None]),
        lambda x: F.linear(x, x, x[0].half()),
        lambda x: F.linear(x.half(), x.half(), x[0]),
        lambda x: F.linear(x[:1], x, x),
        lambda x: F.linear(x, x, x[None]),
        lambda x: torch.dot(x[0], x[0].double()),
        lambda x: torch.dot(x[0] > 0, x[1] > 0),
        lambda x: torch.dot(x[0], x[0, :1]),
    ]:
        with case(call):
            refused(call, randn(6, 6), error=TraceError, says="", line="lambda")


# Nothing to reduce.


EMPTY: list[Callable[[Any], Any]] = [
    lambda x: (x[:, :0].any(-1), x[:, :0].all(-1), x[:, :0].any(), x[:0].all(), x[:, :0].any(-1, keepdim=True), x[:, :0].any(0)),
    lambda x: (x[:, :0].sum(-1), x[:, :0].mean(-1), x[:, :0].logsumexp(-1), x[:, :0].var(-1), x[:0].std(0), x[:, :0].amax(0)),
    lambda x: (x[:, :0].norm(dim=-1), x[:0].norm(p=3), x[:, :0].norm(p=0, dim=-1), x[:, :0].count_nonzero(-1)),
    lambda x: (x[:, :0].softmax(-1), F.layer_norm(x[:, :0], (0,)), F.mse_loss(x[:0], x[:0]), x[:, :0].roll(1, 1)),
    lambda x: (x.repeat(1, 0), x.repeat(0, 2), x.tile(0), x[:, :0].repeat(2, 3), x.repeat(0, 0).sum()),
    lambda x: (torch.cat([x[:, :0], x], 1).sum(-1), x[:, :0] @ x[:, :0].mT, F.pad(x[:, :0], (1, 1)), torch.zeros(0).sum() + x),
    lambda x: (*x[:, :0].split(2, 1), *x[:, :0].chunk(3, 1), *x[:, :0].unbind(1)),
]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_reductions_of_nothing() -> None:
    for function in EMPTY:
        with case(function):
            agree(function, (X,))


EXTREMES: list[Callable[[Any], Any]] = [
    lambda x: x[:, :0].amax(-1), lambda x: x[:, :0].amin(), lambda x: x[:, :0].max(-1), lambda x: x[:0].min(),
    lambda x: x[:, :0].argmax(-1), lambda x: x[:0].argmin(), lambda x: x[:, :0].aminmax(dim=-1),
    lambda x: x[:, :0].norm(p=math.inf, dim=-1), lambda x: x[:0].norm(p=-1),
]  # fmt: skip


def test_extremes_of_nothing_are_refused_as_in_torch() -> None:
    for function in EXTREMES:
        with case(function):
            with pytest.raises((RuntimeError, IndexError)):
                function(X)
            refused(function, X, error=ShapeError, says="of no elements", line="lambda")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variances_of_more_degrees_than_there_are() -> None:
    def variances(x: Tensor) -> list[Tensor]:
        of_each = [
            (x.var(-1, correction=c), x.std(0, correction=c), x.var(correction=c), (x * 0).var(0, correction=c))
            for c in (0, 1, 2.5, 5, 6, 8, 100, -3)
        ]
        return [part for parts in of_each for part in parts]

    agree(variances, (X,))


# Without dims.


SCALAR: list[Callable[[Any], Any]] = [
    lambda x: (x.transpose(0, 0), x.transpose(-1, 0), x.swapaxes(0, -1), x.permute(()), x.T, x.t(), x.movedim(0, 0)),
    lambda x: (x.flatten(), x.squeeze(0), x.unsqueeze(0), x.repeat(3), x.tile(3), x.roll(1), x.expand(3), x.adjoint()),
    lambda x: (x.sum(0), x.softmax(0), x.argmax(0), *x.max(0), x.norm(), x.any(), x.logsumexp(0), x.amax(0)),
    lambda x: (torch.stack([x, x]), torch.vstack([x, x]), torch.hstack([x, x]), torch.outer(x[None], x[None])),
]


@pytest.mark.filterwarnings("ignore:Tensor.T")
def test_tensors_without_dims() -> None:
    for function in SCALAR:
        with case(function):
            agree(function, (torch.tensor(1.5),))


# Numbers where torch wants numbers.


TAKING: list[Callable[[Any, Any], Any]] = [
    lambda x, n: (x[n], x[:, n], x[:n], x[::n], x.select(0, n), x.narrow(0, n, 1)),
    lambda x, n: (x + torch.tensor(n), torch.tensor(n, dtype=torch.float64) * x, x.norm(p=n), torch.linalg.vector_norm(x, n)),
    lambda x, n: (*x.split(n), *x.chunk(n), x.repeat(n, 1), torch.zeros(n, 6) + x[:1], torch.eye(n) + x[0, 0]),
    lambda x, n: (
        x[:n, :n] + torch.eye(n),
        x[0] + torch.linspace(0, n, 6),
        x + torch.full((n, 1, 1), 2.0),
        torch.ones(n) * x[:, :1],
    ),
]


def test_a_run_time_number_that_selects_code() -> None:
    for function in TAKING:
        with case(function):
            agree(function, (X, 2), (X, 3))


def test_shapes_are_sizes() -> None:
    agree(lambda x: x * x.shape.numel() + x.size().numel() + (x.shape[:1] + x.shape)[1] + (x.shape * 2)[3], (X,))
    agree(lambda x: torch.zeros(x.shape) + torch.ones(*x.size()) + x.new_zeros(x.shape), (X,))


def test_new_matrices() -> None:
    agree(lambda x: (x[:, :5] + torch.eye(5), torch.eye(5, 6) * x, torch.eye(5, 6, dtype=torch.int64) + x.long()), (X,))
    agree(lambda x: (x + torch.linspace(-1, 1, 6), x + torch.linspace(3, 3, 1), x * torch.linspace(2.0, -7.0, 6)), (X,))


# Arguments that would be lost.


IGNORED: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda x, y: torch.exp(x, out=y), "out="),
    (lambda x, y: torch.zeros(3, out=y), "out="),
    (lambda x, y: x + torch.zeros(6, device="meta"), "on meta"),
    (lambda x, y: x + torch.ones(6, requires_grad=True), "requires_grad"),
    (lambda x, y: x.new_full((3,), 1.0, pin_memory=True), "pin_memory"),
    (lambda x, y: x.to(torch.float64, foo=1), "foo"),
    (lambda x, y: x.relu(False, 3), "arguments"),
]


def test_no_argument_is_ignored() -> None:
    for function, says in IGNORED:
        with case(says):
            refused(function, X, Y, error=TraceError, says=says, line="lambda")


def test_an_accident_in_a_handler_names_the_line() -> None:
    refused(lambda x: x.to("nowhere"), X, error=TraceError, says="to:", line="lambda")


def test_errors_of_the_users_own_pass_as_they_are() -> None:
    def function(x: Tensor) -> Tensor:
        raise LookupError(f"mine {x.ndim}")

    with pytest.raises(LookupError, match="mine"):
        fg.kernel(function)(X)


# Results put together.


class Pair(NamedTuple):
    first: Tensor
    second: Any


STRUCTURES: list[Callable[[Tensor], Any]] = [
    lambda x: x + 1,
    lambda x: (x + 1,),
    lambda x: [x + 1, x * 2],
    lambda x: {"a": x + 1, "b": (x * 2, [x * 3])},
    lambda x: OrderedDict(a=x + 1),
    lambda x: Pair(x + 1, Pair(x * 2, [x * 3])),
    lambda x: x.max(1),
    lambda x: (x.min(0), x.aminmax()),
    lambda x: (x + 1, None),
    lambda x: {"a": None, "b": [x * 2, (None, x * 3)], "c": Pair(x + 1, None)},
]


def shape_of(value: Any) -> Any:
    """The types of a result and of its parts."""
    if isinstance(value, dict):
        return type(value), {key: shape_of(part) for key, part in value.items()}
    return (type(value), [shape_of(part) for part in value]) if isinstance(value, (tuple, list)) else type(value)


def test_results_come_back_as_they_were_put_together() -> None:
    for function in STRUCTURES:
        with case(function):
            kernel = fg.kernel(function)
            for tensor in (
                (X, X, X[:0]) if "min" not in function.__code__.co_names and "max" not in function.__code__.co_names else (X, X)
            ):
                got, wanted = kernel(tensor), function(tensor)
                assert shape_of(got) == shape_of(wanted)
                torch.testing.assert_close(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted))


def test_lists_of_numbers_are_constants() -> None:
    agree_each(
        "x",
        """
        x * torch.tensor([1.0, 2, 3, 4, 5, 6]) | x + torch.tensor([[1], [2], [3], [4], [5]])
        torch.tensor([True, False, True, True, False, True]) & (x > 0)
        x + torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.float64) | torch.as_tensor([1.5, 2.5])[0] * x | torch.tensor([])
        """,
        (X,),
    )
    agree(lambda x: x * torch.tensor([x.shape[0], 1]), *[(randn(n, 2),) for n in (3, 5, 7)])


def test_a_list_may_hold_run_time_numbers() -> None:
    def scaled(x: Tensor, *, s: float = 2.0) -> Tensor:
        return x * torch.tensor([s, 1.0])

    kernel = fg.kernel(scaled)
    for s in (2.0, 3.0, 5.5):
        agree(kernel, (randn(3, 2),), s=s)
    assert "s" in str(kernel.lower(randn(3, 2), s=2.0, target="cpu").graph).splitlines()[1]


LISTS: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda x: x + torch.tensor([x.sum(), 1.0]), "a list of tensors"),
    (lambda x: x + torch.tensor([[1, 2], [3]]), "expected sequence of length 2"),
    (lambda x: x + torch.tensor(list(range(100))), "of 100 numbers"),
    (lambda x: x + torch.tensor(["a"]), "of this list cannot be traced"),
]


def test_lists_that_are_no_constants() -> None:
    for function, says in LISTS:
        with case(says):
            refused(function, X, error=TraceError, says=says, line="lambda")


def test_integers_between_bounds_of_integers() -> None:
    agree(lambda x: (F.hardtanh(x, -1.5, 2.5), F.relu6(x)), (ints(5, 6),))
    agree(lambda x, y: F.cosine_similarity(x[None], y[:, None], dim=-2), (randn(2, 3), randn(2, 3)))


def test_bools_have_no_arithmetic() -> None:
    for function in (lambda m: m.fmod(m), lambda m: torch.div(m, m, rounding_mode="floor"), lambda m: F.logsigmoid(m)):
        refused(function, MASK, error=TraceError, says="of bool", line="lambda")
    refused(lambda x: torch.fft.fft(x), X, error=UnsupportedError, says="fft", line="lambda")
