"""From a call to a program: what is guarded, what is shared, what is found again in each call."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusegen as fg
from fusegen.errors import TraceError
from tests.unit.eager import agree, ints, randn

X = randn(6, 8)


def variants(kernel: fg.Kernel[..., Any]) -> int:
    return len(kernel._dispatcher.variants.known)


def test_rows_are_a_run_time_size() -> None:
    kernel = agree(lambda x, w: F.rms_norm(x, (8,), w), *[(randn(n, 8), randn(8)) for n in (2, 3, 17, 100, 2)])
    assert variants(kernel) == 1


def test_a_guard_that_fails_makes_a_variant_and_both_are_kept() -> None:
    kernel = agree(lambda x: x * 2 if x.shape[0] > 8 else x * 3, *[(randn(n, 4),) for n in (3, 20, 8, 9, 5)])
    assert variants(kernel) == 2


def test_a_size_used_as_a_number_binds_the_variant() -> None:
    kernel = agree(lambda x: x * int(x.shape[0]), *[(randn(n, 4),) for n in (3, 5, 3, 5)])
    assert variants(kernel) == 2


def test_a_literal_extent_that_changes_becomes_a_bounded_one() -> None:
    kernel = agree(lambda x: x * 2, *[(randn(3, n),) for n in (64, 72, 88, 104, 120)])
    assert variants(kernel) == 2
    assert kernel._dispatcher.variants.history.run_time == {("x", 1)}


def test_many_variants_are_warned_of_once() -> None:
    kernel = fg.kernel(lambda x, n: x * n)
    kernel.function.__annotations__["n"] = fg.Static[int]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(40):
            kernel.lower(X, n, target="sm_90a")
    assert len([w for w in caught if "variants" in str(w.message)]) == 1


def test_empty_inputs_go_to_torch() -> None:
    agree(lambda x, w: ((x + w).sum(0), F.gelu(x)), (X[:0], randn(8)), (X[:, :0], randn(0)))


# Settings.


def test_what_selects_code() -> None:
    def function(
        x: Tensor,
        flag: bool = True,
        mode: str = "a",
        n: fg.Static[int] = 2,
        m: fg.Static[int] | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        y = x * n if flag else x / n
        y = y + 1 if mode == "a" else y - 1
        y = y if m is None else y.reshape(-1, m)
        return y if bias is None else y + bias

    kernel = fg.kernel(function)
    for settings in ({}, {"flag": False}, {"mode": "b"}, {"n": 3}, {"m": 4}, {"bias": randn(8)}, {"bias": None}, {"flag": 1}):
        agree(kernel, (X,), **settings)


def test_equal_settings_of_different_types_are_different() -> None:
    def function(x: Tensor, n: fg.Static[float]) -> Tensor:
        return x * n

    kernel = fg.kernel(function)
    for n in (True, 1, 1.0, 2, 2.0, False, 0, 0.0):
        agree(kernel, (ints(5), n))


def test_keyword_only_parameters_and_defaults() -> None:
    def function(x: Tensor, *, p: float = 2.0, q: float = 3.0) -> Tensor:
        return x * p + q

    kernel = fg.kernel(function)
    assert torch.equal(kernel(X), X * 2 + 3)
    assert torch.equal(kernel(X, q=1.0, p=1.0), X + 1)
    assert torch.equal(kernel(x=X, p=4.0), X * 4 + 3)


# Tensors and settings that a function closes over.


def scaled_by(weight: Any) -> tuple[fg.Kernel[..., Any], Callable[[Any], None]]:
    """A kernel that closes over a variable, and what changes the variable."""

    def change(value: Any) -> None:
        nonlocal weight
        weight = value

    return fg.kernel(lambda x: x * weight), change


def test_a_closed_over_tensor_is_found_again_in_each_call() -> None:
    kernel, change = scaled_by(randn(8))
    agree(kernel, (X,))
    values = (
        randn(8) * 5,
        randn(6, 1),
        randn(8).half(),
        randn(16)[::2],
        2.0,
        randn(6, 8),
        3,
        3.0,
        randn(()),
        randn(8),
        ints(8),
        randn(1, 8),
        randn(9)[1:],
    )
    for value in values:
        change(value)
        agree(kernel, (X,), (randn(6, 8),))


TABLE = randn(6, 8)


def test_a_tensor_that_cannot_be_found_again_is_refused() -> None:
    keep = weakref.WeakValueDictionary({"w": X})
    with pytest.raises(TraceError, match="neither a parameter nor") as caught:
        fg.kernel(lambda x: x * keep["w"].clone().T.contiguous().resolve_conj().new_tensor([1.0]))(X)
    assert "keep[" in (caught.value.where or "")


# Kernels that call kernels.


@fg.kernel
def inner(x: Tensor, s: float = 2.0) -> Tensor:
    return x * s + TABLE


def test_a_kernel_inside_of_a_kernel_is_inlined() -> None:
    kernel = fg.kernel(lambda x: inner(x) * 2 + inner(x, s=3.0) + inner(x, 1))
    nested = fg.kernel(lambda x: x + inner(TABLE))
    agree(nested, (X,), (X,))
    agree(inner, (X,), (TABLE,))
    agree(nested, (X,))
    plain = fg.kernel(lambda x: (x * 2.0 + TABLE) * 2 + (x * 3.0 + TABLE) + (x * 1 + TABLE))
    torch.testing.assert_close(kernel(X), plain.function(X))
    assert len(kernel.lower(X).program.steps) == 1


# Threads.


def ended(*functions: Callable[[], object]) -> None:
    """Runs each in a thread of its own, and expects all of them to end."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"


@pytest.mark.parametrize("one_kernel", [False, True])
def test_a_function_that_waits_for_a_thread_that_makes_a_first_call(one_kernel: bool) -> None:
    users, traces, holds = threading.Lock(), threading.Event(), threading.Event()

    def waits(x: Tensor) -> Tensor:
        if x.ndim == 2:
            traces.set()
            holds.wait(60)
            with users:
                return x * 2
        return x + 1

    kernel, x = fg.kernel(waits), torch.ones(4)
    other = kernel if one_kernel else fg.kernel(lambda x: x + 1)
    results = {}

    def second() -> None:
        traces.wait(60)
        with users:
            holds.set()
            results["other"] = other(x)

    ended(lambda: results.update(first=kernel(x[None])), second)
    assert torch.equal(results["first"], x[None] * 2) and torch.equal(results["other"], x + 1)


def test_a_function_that_starts_a_thread() -> None:
    """Its reads are not seen: an error, and neither a wait without end."""
    other, pool, errors = fg.kernel(lambda x: x + 1), ThreadPoolExecutor(1), []

    def joins(x: Tensor) -> Tensor:
        ended(lambda: other(torch.ones(4)))
        return x * 2

    def submits(x: Tensor) -> Tensor:
        return x * pool.submit(lambda: 2.0).result()

    def call() -> None:
        for function in (joins, submits):
            with pytest.raises(TraceError, match="thread while it is traced") as error:
                fg.kernel(function)(torch.ones(4))
            errors.append(error.value.where)

    ended(call)
    assert all("test_dispatch.py" in where for where in errors) and len(errors) == 2


def test_threads_that_call_for_the_first_time_together() -> None:
    kernel = fg.kernel(lambda x, w: (x * w * 1.234567).softmax(-1))
    weight = randn(8)
    failures: list[object] = []

    def call() -> None:
        for n in (3, 5, 7):
            x = torch.full((n, 8), 0.5)
            if not torch.allclose(kernel(x, weight), (x * weight * 1.234567).softmax(-1), atol=1e-5):
                failures.append(n)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert variants(kernel) == 1


def test_inference_mode_and_no_grad() -> None:
    with torch.inference_mode():
        agree(lambda x: x * 2, (X + 0,))
    with torch.no_grad():
        agree(lambda x: x * 2, (X.clone().requires_grad_(),))


def test_a_scalar_whose_value_is_needed_selects_code_by_itself() -> None:
    @fg.kernel
    def normalized(x: Tensor, groups: int = 2, eps: float = 1e-5, factor: float = 2.0) -> Tensor:
        y = F.layer_norm(x.reshape(x.shape[0], groups, -1), (x.shape[-1] // groups,), eps=eps).flatten(1)
        return y * factor if factor > 1 else y

    x = torch.randn(4, 8)
    for options in ({}, {"groups": 4}, {"eps": 0.1}, {"factor": 0.5}, {}):
        torch.testing.assert_close(normalized(x, **options), normalized.function(x, **options))


def test_fake_tensors_are_lowered_and_give_fake_results() -> None:
    kernel = fg.kernel(lambda x: F.silu(x) * 2)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.empty(8, 64)
        assert len(kernel.lower(x, target="sm_90a").program.steps) == 1
        assert kernel(x).shape == (8, 64)


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
def test_integers_that_would_become_the_default_dtype_are_refused() -> None:
    with pytest.raises(fg.FusegenError, match=r"div of integers gives torch's default dtype, which is torch\.float64"):
        fg.kernel(lambda x: x / 2)(torch.arange(8))
    assert fg.kernel(lambda x, y: x * y)(torch.arange(8), torch.ones(8, dtype=torch.float32)).dtype is torch.float32


def test_lower_shows_64_bit_indices_where_a_call_has_them() -> None:
    """The result is larger than every input."""
    outer = fg.kernel(lambda x, y: x[:, None] * y)
    x, y = (torch.empty(n, dtype=torch.float16, device="meta") for n in ((1 << 16) + 1, 1 << 15))
    assert "using Index = i64" in outer.lower(x, y, target="sm_90a").sources[0].text
