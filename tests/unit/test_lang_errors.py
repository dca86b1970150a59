"""A user's mistakes: each is one of our errors, which names the line and a hint; never an accident of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError, FusegenError, IndexRangeError, ShapeError, TargetError, TraceError, UnsupportedError
from tests.naming import case
from tests.unit.eager import randn, refused

X, V = randn(6, 8), randn(8)

SHAPES: list[tuple[Callable[..., Any], str]] = [
    (lambda x: x[:, 9], "index 9"),
    (lambda x: x[0, 0, 0], "3 indices"),
    (lambda x: x[:, ::-1], "step must be positive"),
    (lambda x: x.narrow(1, 5, 10) * 1, "narrow"),
    (lambda x: x[0].expand(1), "cannot expand"),
    (lambda x: x.expand(-1, 6, 8), "a new leading dim is -1"),
    (lambda x: x.reshape(5, -1), "cannot view"),
    (lambda x: x.sum(3), "dim 3"),
    (lambda x: x.sum((0, 0)), "twice"),
    (lambda x: torch.cat([x, x[0]]), "cat of"),
    (lambda x: torch.cat([x.sum(), x.sum()]), "no dims"),
    (lambda x: x.split([1, 2], -1), "do not add up"),
    (lambda x: x + x[:, :3], "do not broadcast"),
    (lambda x: x @ x, "matmul of"),
    (lambda x: F.layer_norm(x, (7,)), "normalized_shape"),
    (lambda x: x.permute(0, 0), "not a permutation"),
    (lambda x: F.pad(x, (1, 1, 1)), "3 numbers"),
    (lambda x: torch.einsum("ijk->i", x), "names 3 dims of a tensor that has 2"),
    (lambda x: torch.einsum("ii->i", x), "the letter 'i' names dims of"),
    (lambda x: F.glu(x[:, :7]), "glu"),
    (lambda x: F.batch_norm(x[:1], None, None, training=True), "one value per channel"),
    (lambda x: torch.dot(x, x), "dot: the tensors"),
    (lambda x: x[..., ...], "more than one ellipsis"),
    (lambda x: x.movedim(0, (1,)), "movedim: 0 and (1,) do not match"),
    (lambda x: x.tile(-1), "a count of (-1,) is negative"),
    (lambda x: torch.linalg.norm(x, None, ()), "norm: dim is empty"),
]
CAUGHT: list[Callable[..., Any]] = [
    lambda x, y: x.reshape(3, -1),
    lambda x, y: x + y,
    lambda x, y: x.T.topk(4)[0],
    lambda x, y: x[4],
    lambda x, y: x.sum(2),
    lambda x, y: x * x.shape[2],
]
"""Functions of matrices that torch refuses at some numbers of rows."""


def or_doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, and twice its first argument where torch refuses that."""

    def caught(x: Tensor, y: Tensor) -> Tensor:
        try:
            return function(x, y) * 1
        except (RuntimeError, IndexError):
            return x * 2

    return caught


NO_DIMS: list[Callable[..., Any]] = [
    lambda x: x.sum(True),
    lambda x: x.argmin((0,)),
    lambda x: x.any("0"),
    lambda x: x.logsumexp(1.0),
    lambda x: x.transpose(0, True),
    lambda x: x.repeat_interleave(2, ()),
]
"""What torch takes for no dim: bools, floats, texts, and several where there can be one."""


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * 2


VALUES: list[tuple[Callable[..., Any], str]] = [
    (lambda x: x if x.sum() > 0 else -x, "branch on a tensor's value"),
    (lambda x: x * x.sum().item(), "value is needed"),
    (lambda x: scripted(x), "a TorchScript function"),
    (lambda x: x + "a", "a str cannot be used"),
    (lambda x: x.long() + 2**70, "does not fit 64 bits"),
    (lambda x: x.reshape(2.0, -1), "2.0 is not a size"),
    (lambda x: x.reshape(x.sum(), -1), "a tensor cannot be a size"),
    (lambda x: x.int().mean(), "mean of"),
    (lambda x: (x > 0) - (x > 1), "subtraction of bools"),
    (lambda x: -(x > 0), "neg of bool"),
    (lambda x: x & 3, "bit operations take integers"),
    (lambda x: x.norm(p="nuc"), "ord='nuc'"),
    (lambda x: torch.einsum("ij->ii", x), "a letter of the result is repeated"),
    (lambda x: F.batch_norm(x, x[0], x[0], training=True), "writes to its running statistics"),
    (lambda x: F.batch_norm(x, None, None), "no statistics"),
    (lambda x: F.mse_loss(x, x, reduction="all"), "reduction='all'"),
    (lambda x: x.clamp(), "clamp has no bounds"),
    (lambda x: F.gelu(x, approximate="other"), "approximate='other'"),
    (lambda x: F.leaky_relu(x, "0.1"), "negative_slope is a str"),
    (lambda x: F.softmax(x, dim=None, _stacklevel=0), "needs dim"),
    (lambda x: F.dropout(x, 1.5), "not in [0, 1]"),
    (lambda x: fg.dropout(x, 0.5, seed=2.0), "the seed is a float"),
    (lambda x: x.to("cuda"), "cannot move"),
    (lambda x: x + torch.arange(0, 4, -1), "arange from 0 never reaches 4 with the step -1"),
    (lambda x: x * len("".join([x.shape[0]])), "does not accept"),
    (lambda x: torch.where(x, x, x), "not bool"),
]
UNSUPPORTED: list[tuple[Callable[..., Any], str]] = [
    (lambda x: torch.fft.fft(x), "fft"),
    (lambda x: x.add_(1), "writes to its parameter 'x'"),
    (lambda x: x.__setitem__(0, 1), "writes to its parameter 'x'"),
    (lambda x: x[[True, False]], "indexing by a list"),
    (lambda x: x[True], "indexing by a bool"),
    (lambda x: x.grad, "Tensor.grad"),
]


def test_shapes_that_do_not_fit() -> None:
    for function, says in SHAPES:
        with case(says):
            refused(function, X, error=ShapeError, says=says, line="lambda")


def test_the_size_of_a_dim_that_is_not_there() -> None:
    refused(lambda x: x * x.shape[2], X, error=IndexRangeError, says="dim 2 does not exist in a tensor of 2 dims", line="lambda")


def test_a_function_may_catch_what_torch_refuses() -> None:
    for number, function in enumerate(CAUGHT):
        with case(number):
            kernel = fg.kernel(or_doubled(function))
            for rows, others in ((4, 3), (6, 3), (3, 3), (2, 5)):
                x, y = randn(rows, 8), randn(others, 8)
                assert torch.equal(kernel(x, y), or_doubled(function)(x, y)), (rows, others)


def test_a_refusal_of_what_torch_takes_is_not_caught() -> None:
    refused(or_doubled(lambda x, y: x.nonzero() + y), X, X, error=UnsupportedError, says="nonzero")


def test_what_is_no_dim() -> None:
    for number in range(len(NO_DIMS)):
        with case(number):
            with pytest.raises((TypeError, RuntimeError)):
                NO_DIMS[number](X)
            refused(NO_DIMS[number], X, error=TraceError, says="is not an int")


def test_what_cannot_be_known_or_means_nothing() -> None:
    for function, says in VALUES:
        with case(says):
            refused(function, X, error=TraceError, says=says, line="lambda")


def test_what_is_not_supported() -> None:
    for function, says in UNSUPPORTED:
        with case(says):
            refused(function, X, error=UnsupportedError, says=says, line="lambda")


def test_the_line_inside_of_a_longer_function_is_named() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        z = y + y[:, :3]  # the culprit
        return z * 3

    refused(function, X, error=ShapeError, says="do not broadcast", line="# the culprit")


def test_an_unknown_function_is_answered_with_close_ones_where_there_are_some() -> None:
    unknown: dict[str, Callable[[Tensor], Any]] = {
        "; similar names: softmax": lambda x: torch._softmax(x, -1, False),
        "unique": lambda x: x.unique(),
        "conv1d": lambda x: F.conv1d(x, x),
    }
    for name, function in unknown.items():
        with case(name), pytest.raises(UnsupportedError) as caught:
            fg.kernel(function)(X)
        assert ("similar names" in (caught.value.hint or "")) == ("similar names" in name)


def test_an_unknown_target_is_answered_with_a_close_one() -> None:
    for name, meant in {"sm_90": "'sm_90a', or", "CPU": "'cpu', or", "sm_103": "one of", "cuda": "one of"}.items():
        with case(name), pytest.raises(TargetError, match=f"try: choose {meant}"):
            fg.kernel(lambda x: x * 2).lower(X, target=name)


def test_a_size_in_a_text_of_the_users_is_a_number() -> None:
    def checked(x: Tensor) -> Tensor:
        n = x.shape[0]
        assert n == 3, f"{x.shape} {n} {n * 2:>3} {[n]} {n!r}"
        return x * (2 if str(n) == "3" else 1)

    with pytest.raises(AssertionError, match=r"torch.Size\(\[6, 8\]\) 6  12 \[6\] 6"):
        fg.kernel(checked)(X)
    plural = fg.kernel(lambda x: x * (2 if f"{x.shape[0]}" == "3" else 1))
    for rows in (6, 3, 5):
        assert torch.equal(plural(X[:rows]), plural.function(X[:rows]))
    assert torch.equal(fg.kernel(checked)(X[:3]), X[:3] * 2)


# Arguments.

KERNEL = fg.kernel(lambda x, w: x + w)
ARGUMENTS: list[tuple[tuple[Any, ...], type[FusegenError], str]] = [
    (([1], V), TraceError, "a list"),
    (([object()], V), ArgumentError, "'x' is a list"),
    ((X,), ArgumentError, "missing a required argument: 'w'"),
    ((X, V, V), ArgumentError, "too many positional arguments"),
    ((1, 2), ArgumentError, "no argument is a tensor"),
    ((None, V), TraceError, "NoneType"),
    ((X, "a"), TraceError, "a str"),
    ((X.to(torch.float8_e4m3fnuz), V), ArgumentError, "float8_e4m3fnuz"),
    ((X.to_sparse(), V), ArgumentError, "sparse"),
    ((X, 2**70), ArgumentError, "does not fit 64 bits"),
]


def test_arguments() -> None:
    for arguments, error, says in ARGUMENTS:
        with case(says):
            refused(KERNEL, *arguments, error=error, says=says)


def test_what_is_no_function_cannot_be_declared() -> None:
    for declared in [torch.relu, 5]:
        with case(declared), pytest.raises(ArgumentError, match="not a Python function"):
            fg.kernel(declared)


def test_a_function_whose_call_runs_no_code_cannot_be_declared() -> None:
    async def later(x: Tensor) -> Tensor:
        return x * 2

    def parts(x: Tensor) -> Any:
        yield x * 2

    class Later(torch.nn.Module):
        async def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Parts:
        def __call__(self, x: Tensor) -> Any:
            yield x * 2

    for declared, name in ((later, "later"), (parts, "parts"), (partial(later), "later"), (Later(), "Later"), (Parts(), "Parts")):
        with case(name), pytest.raises(ArgumentError, match=f"{name} returns a coroutine or a generator.*\n.*by def, with return"):
            fg.kernel(declared)
