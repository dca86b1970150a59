"""`fg.benchmark`: the figures of one call, and refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError
from tests.naming import case


@fg.kernel
def halved(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x) * y / 2


@fg.kernel(mutates=("x",))
def added(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x * 2


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile takes seconds."""
    monkeypatch.setattr("torch.compile", lambda function, dynamic: function)


def test_the_figures_of_a_call() -> None:
    x = torch.randn(256, 64)
    halved(x, x)  # earlier calls of other sizes change nothing
    for backward in (False, True):
        with case(backward):
            result = fg.benchmark(halved, torch.randn(512, 64), y=torch.randn(512, 64), backward=backward, quick=True)
            assert result.fusegen and result.eager and result.compile
            assert result.fusegen.microseconds and result.fusegen.launches and result.eager.launches
            assert result.fusegen.launches < result.eager.launches
            assert result.fusegen.max_error is not None and result.fusegen.max_error < 1e-5
            assert result.row.shape == "x=512x64 y=512x64" and str(result) == repr(result)
            for part in ("halved x=512x64", "fastest–slowest", "no peak memory", "compile"):
                assert part in str(result)
            assert ("forward and backward" in str(result)) is backward


def test_tensors_that_a_kernel_writes_to_stay() -> None:
    x = torch.ones(8, 64)
    result = fg.benchmark(added, x, x.clone(), quick=True)
    assert result.fusegen and result.fusegen.max_error == 0 and bool((x == 1).all())


@fg.kernel
def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k + bias, v)


def test_a_gradient_of_rounding_errors_is_not_wrong() -> None:
    q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
    result = fg.benchmark(attended, q, k, v, torch.randn(32), backward=True, quick=True)
    assert result.fusegen and result.fusegen.microseconds
    assert result.fusegen.max_error is not None and result.fusegen.max_error < 1e-4


def test_a_module_and_a_method() -> None:
    norm = fg.kernel(torch.nn.LayerNorm(64))
    result = fg.benchmark(norm, torch.randn(8, 64), backward=True, quick=True)
    assert result.fusegen and result.fusegen.microseconds


def test_refused_arguments() -> None:
    x = torch.randn(8, 64)
    meta = torch.empty(8, 64, device="meta")
    calls: tuple[tuple[Any, tuple[Any, ...], dict[str, Any], str], ...] = (
        (torch.tanh, (x,), {}, "fg.benchmark times kernels"),
        (halved, (x,), {}, "missing a required argument"),
        (halved, (meta, meta), {}, "'x' is a tensor without values"),
        (halved, (torch.empty(0, 64), x), {}, "'x' is a tensor without values"),
        (halved, (x, meta), {}, "'y' is a tensor without values"),
        (halved, (2.0, 3.0), {}, "halved takes no tensor"),
        (halved, ([x], x), {}, "'x' contains tensors"),
        (added, (x, x), {"backward": True}, "writes to x"),
        (halved, (x.int(), x.int()), {"backward": True}, "halved"),
    )
    for kernel, args, settings, message in calls:
        with case(message), pytest.raises(FusegenError, match=message) as caught:
            fg.benchmark(kernel, *args, **settings)
        assert caught.value.hint
