"""Writes to declared parameters: what torch leaves there, in torch's order; launches; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError, FusegenError, GradientError, IndexRangeError, ShapeError, TraceError, UnsupportedError
from fusegen.runtime.arguments import overlap
from tests.naming import case
from tests.unit import written
from tests.unit.eager import expressions, randn
from tests.unit.written import CASES, agree_in_place

X = randn(4, 8)


def mutating(function: Callable[..., Any], *names: str) -> fg.Kernel[..., Any]:
    return fg.kernel(mutates=names)(function)


@pytest.mark.parametrize("part", range(3))
def test_what_torch_leaves(part: int) -> None:
    for name in list(CASES)[part::3]:
        with case(name):
            agree_in_place(*CASES[name])


def test_a_product_of_what_it_is_added_to() -> None:
    """A library that adds as it writes would read what it has written."""
    for function in (
        lambda x, y: x.add_(y @ x),
        lambda x, y: x.add_(x @ x),
        lambda x, y: x.add_(x.t() @ y),
        lambda x, y: x.add_(torch.mm(y, x[:, :])),
        lambda x, y: x.add_(x @ (y * 2)),
    ):
        x, y = randn(33, 33), randn(33, 33)
        exact = x.double()
        function(exact, y.double())
        mutating(function, "x")(x, y)
        torch.testing.assert_close(x, exact.float(), rtol=1e-4, atol=1e-3)


EMULATED = """
    split_rotate_write torch.bfloat16 | grouped_write | static_cache strided | add_norm torch.bfloat16 64
    add_norm torch.float32 600
    operators strided | shifted | before_and_after | rows_twice | product_added | into integers | swapped
"""


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("part", range(4))
def test_what_torch_leaves_on_a_gpu(part: int) -> None:
    for name in expressions(EMULATED)[part::4]:
        with case(name):
            agree_in_place(*CASES[name])


# Launches.


def test_slices_that_meet_are_written_one_after_the_other() -> None:
    for one, other, launches in ((0, 2, 1), (0, 1, 2), (2, 0, 1), (1, 0, 2)):

        def write(x: Tensor, y: Tensor, one: fg.Static[int] = one, other: fg.Static[int] = other) -> None:
            x[one : one + 2] = y
            x[other : other + 2] = y + 1

        with case((one, other)):
            kernel = agree_in_place(write, ("x",), (randn(4, 8), randn(2, 8)))
            assert len(kernel.lower(randn(4, 8), randn(2, 8)).program.steps) == launches


# What a call leaves.


def test_elements_that_are_named_twice_are_read_before_they_are_written() -> None:
    def count(x: Tensor, at: Tensor) -> None:
        x[at] += 1

    x = torch.zeros(6, 9)
    mutating(count, "x")(x, torch.tensor([4, 2, 4, 4]))
    assert x[:, 0].tolist() == [0, 0, 1, 0, 1, 0]


def test_a_result_is_the_tensor_itself() -> None:
    def each(x: Tensor) -> tuple[Tensor, ...]:
        x[1:] += 1
        return x, x.clone(), x[0], x * 1, x.view(-1)

    x, wanted = X.clone(), X.clone()
    wanted[1:] += 1
    same, *others = mutating(each, "x")(x)
    assert same is x
    assert all(other.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for other in others)
    for other in (x, others[0], others[2], others[3].view_as(x)):
        torch.testing.assert_close(other, wanted)


def test_what_is_declared_need_not_be_written() -> None:
    def maybe(x: Tensor, *, write: bool) -> Tensor:
        if write:
            x.zero_()
        return x * 2

    kernel, x = mutating(maybe, "x"), X.clone()
    torch.testing.assert_close(kernel(x, write=False), X * 2)
    assert torch.equal(x, X)
    assert torch.equal(kernel(x, write=True), torch.zeros_like(X))


def test_autograd_sees_the_write() -> None:
    def add(x: Tensor) -> None:
        x += 1

    kernel, weight = mutating(add, "x"), torch.ones(4, 8, requires_grad=True)
    for _ in range(2):  # the first call and a later one
        x = X.clone()
        product, before = weight * x, x._version
        kernel(x)
        assert x._version == before + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
    with pytest.raises(GradientError):
        kernel(weight)
    with torch.no_grad():
        kernel(weight)
    torch.testing.assert_close(weight.detach(), torch.full((4, 8), 2.0))


def test_tensors_of_inference_mode() -> None:
    kernel = mutating(lambda x: x.add_(1), "x")
    with torch.inference_mode():
        x = X.clone()
        kernel(x)
    torch.testing.assert_close(x, X + 1)
    with pytest.raises(ArgumentError, match="inference mode"):
        kernel(x)


def test_no_elements() -> None:
    cache = X.clone()
    kernel = mutating(written.static_cache, "cache")
    k = torch.empty(1, 1, 0, 8)
    whole = cache.view(1, 1, 4, 8)
    assert kernel(whole, torch.empty(0, dtype=torch.int64), k) is whole
    assert torch.equal(cache, X)


def test_later_calls_with_other_sizes() -> None:
    def write(cache: Tensor, k: Tensor, at: Tensor) -> Tensor:
        cache[at] = k + 1
        return cache.sum()

    calls = [(randn(9, 8), randn(n, 8), torch.randperm(9)[:n]) for n in (3, 5, 1, 9, 3)]
    agree_in_place(write, ("cache",), *calls)


def test_a_kernel_in_a_kernel() -> None:
    @fg.kernel(mutates=("x",))
    def inner(x: Tensor, y: Tensor) -> Tensor:
        x += y
        return x * 2

    def outer(a: Tensor, b: Tensor) -> Tensor:
        return inner(a[1:], b[1:]) + inner(b * 1, a)[1:]

    agree_in_place(outer, ("a",), (randn(4, 8), randn(4, 8)))
    with pytest.raises(UnsupportedError, match="parameter 'a'"):
        fg.kernel(outer)(randn(4, 8), randn(4, 8))


# Memory.


def test_memory_that_is_shared_is_refused() -> None:
    kernel = mutating(written.operators, "x")
    x = randn(5, 8)
    kernel(x[:4].clone(), x[1:])
    for other in (x[:4], x[1:]):
        with pytest.raises(ArgumentError, match="'x' is written to, but shares memory with 'y'"):
            kernel(x[:4], other)
    with pytest.raises(ArgumentError, match="several of its elements share one memory location"):
        kernel(randn(1, 8).expand(4, 8), x[:4])


def test_overlap() -> None:
    x = torch.zeros(6, 4, 8)
    for one, other in ((x[:3], x[3:]), (x[:, 0], x[:, 1]), (x[..., :4], x[..., 4:]), (x[:, :2, :3], x[:, 2:]), (x[:0], x)):
        assert not overlap(one, other) and not overlap(other, one), (one.stride(), other.stride())
    for one, other in [(x, x), (x[:3], x[2:]), (x[:, :2], x[:, 1:]), (x[..., :5], x[..., 4:]), (x[0], x.permute(2, 1, 0)[..., 0])]:
        assert overlap(one, other) and overlap(other, one)


def test_a_refused_place_is_no_other_one() -> None:
    """Of a dim of one element as well, where the offset does not depend on the index; and of what is read at it."""

    def write(cache: Tensor, at: Tensor, value: Tensor) -> None:
        cache[at] = value

    def read(cache: Tensor, at: Tensor, value: Tensor) -> None:
        cache.copy_(value[at])

    writes, reads = mutating(write, "cache"), mutating(read, "cache")
    for rows in (1, 5):
        for index in (-6, 5):
            with case((rows, index)):
                cache, at = torch.zeros(rows, 4), torch.tensor([index])
                with pytest.raises(IndexRangeError, match="index of 'cache'"):
                    writes(cache, at, torch.ones(1, 4))
                with pytest.raises(IndexRangeError, match="index of 'value'"):
                    reads(cache, at, torch.ones(rows, 4))
                assert not cache.any()


def test_an_index_out_of_range_writes_nothing() -> None:
    def write(cache: Tensor, at: Tensor, k: Tensor) -> None:
        cache[at] = k

    def rows(cache: Tensor, at: Tensor, k: Tensor) -> None:
        cache[at] = k.softmax(-1)

    def elements(cache: Tensor, at: Tensor, k: Tensor) -> None:
        cache.scatter_(1, at, k)

    cache = X.clone()
    with pytest.raises(IndexRangeError, match="write: index of 'cache'"):
        mutating(write, "cache")(cache, torch.tensor([4, 7]), randn(2, 8))
    with pytest.raises(IndexRangeError, match="rows: index of 'cache'"):
        mutating(rows, "cache")(cache, torch.tensor([4, 7]), randn(2, 8))
    with pytest.raises(IndexRangeError):
        mutating(elements, "cache")(cache, torch.full((4, 2), -1), randn(4, 2))
    assert torch.equal(cache, X)


# Refusals.


def _undeclared(x: Tensor) -> Tensor:
    x += 1
    return x


def _view_of_undeclared(x: Tensor) -> Tensor:
    x.view(-1)[0].zero_()
    return x * 1


def _function_in_place(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


def _between_brackets(x: Tensor) -> Tensor:
    x[0] = 1
    return x * 1


def test_a_write_that_is_not_declared() -> None:
    for function in (_undeclared, _view_of_undeclared, _function_in_place, _between_brackets):
        x = X.clone()
        with case(function), pytest.raises(UnsupportedError, match="writes to its parameter 'x'") as error:
            fg.kernel(function)(x)
        assert "mutates=('x',)" in str(error.value)
        assert str(error.value.where).startswith(__file__)
        assert torch.equal(x, X)
        agree_in_place(function, ("x",), (X,))


REFUSED: dict[str, tuple[Callable[..., Any], type[FusegenError], str]] = {
    "expanded": (lambda x: x[:1].expand(4, 8).add_(1), UnsupportedError, "expanded tensor"),
    "a larger result": (lambda x: x[0].add_(x), ShapeError, "in place"),
    "floats in integers": (lambda x: x.to(torch.int32).add_(0.5), TraceError, "does not hold"),
    "a value too large": (lambda x: x[0].copy_(x), ShapeError, "expand"),
    "values at a mask": (lambda x: x.__setitem__(x > 0, x[0]), UnsupportedError, "mask"),
    "another dtype": (lambda x: x.index_copy_(0, torch.arange(2), x[:2].double()), TraceError, "index_copy_"),
    "another shape": (lambda x: x.index_copy_(0, torch.arange(2), x[:1]), ShapeError, "index_copy_"),
}


def test_refused() -> None:
    for name, (function, error, words) in REFUSED.items():
        x = X.clone()
        with case(name), pytest.raises(error, match=words):
            mutating(function, "x")(x)
        assert torch.equal(x, X)


def test_names_that_no_parameter_has() -> None:
    with pytest.raises(ArgumentError, match="'y', which is not a parameter"):
        mutating(_undeclared, "y")
    with pytest.raises(ArgumentError, match="tuple"):
        fg.kernel(mutates="x")
    for names in (5, None, (1,)):
        with pytest.raises(ArgumentError, match="names of parameters"):
            fg.kernel(mutates=names)


def test_no_gradients_of_writes() -> None:
    with pytest.raises(UnsupportedError, match="writes to its parameters"):
        fg.vjp(mutating(_undeclared, "x"), X)


# out=.

SCALE = 2.0


def scaled_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w) * SCALE


@pytest.mark.usefixtures("either")
def test_out(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16
    kernel, x, w = fg.kernel(scaled_norm), randn(3, 40, dtype=dtype), randn(40, dtype=dtype)
    for out in (torch.empty_like(x), torch.empty(40, 3, dtype=dtype).T, torch.empty(5, 80, dtype=dtype)[1:4, ::2]):
        assert kernel(x, w, out=out) is out
        torch.testing.assert_close(out, scaled_norm(x, w), rtol=1e-2, atol=1e-2)
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    torch.testing.assert_close(kernel(x, w, out=out), scaled_norm(x, w), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(kernel(x, w), scaled_norm(x, w), rtol=1e-2, atol=1e-2)
    assert len(kernel.lower(x, w, out=out).program.steps) == 1


def test_out_that_does_not_fit() -> None:
    kernel, x, w = fg.kernel(scaled_norm), randn(3, 40), randn(40)
    for out, words in (
        (torch.empty(3, 41), "shape"),
        (torch.empty(1, 40), "shape"),
        (torch.empty(3, 40).double(), "float64"),
        (torch.empty(1, 40).expand(3, 40), "share one memory location"),
        (x, "shares memory with 'x'"),
    ):
        with pytest.raises(ArgumentError, match=words):
            kernel(x, w, out=out)
    with pytest.raises(ArgumentError, match="one tensor"):
        fg.kernel(lambda x: (x, x + 1))(x, out=torch.empty(3, 40))
    named = fg.kernel(lambda x, out: x + out)
    torch.testing.assert_close(named(x, out=x), x + x)
