"""Kernels against what torch gives for the same call; errors with their place and their mend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def ints(*shape: int, low: int = -9, high: int = 9, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(low, high, shape).to(dtype)


def agree(function: Callable[..., Any], *calls: tuple[Any, ...], **settings: Any) -> fg.Kernel[..., Any]:
    """Each call of the kernel gives what torch gives: dtype, shape and values, NaN and infinities in the same places."""
    kernel = function if isinstance(function, fg.Kernel) else fg.kernel(function)
    for number, arguments in enumerate(calls):
        wanted = kernel.function(*arguments, **settings)
        same(kernel(*arguments, **settings), wanted, f"call {number}")
    return kernel


def same(got: Any, wanted: Any, place: str = "") -> None:
    """One result, or several of them, agree."""
    results = [tuple(v) if isinstance(v, (tuple, list)) else (v,) for v in (got, wanted)]
    assert len(results[0]) == len(results[1]), f"{place}: {len(results[0])} results, torch gives {len(results[1])}"
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        where = f"{place}, result {number}"
        assert ours.dtype is theirs.dtype, f"{where}: {ours.dtype}, torch gives {theirs.dtype}"
        assert ours.shape == theirs.shape, f"{where}: {tuple(ours.shape)}, torch gives {tuple(theirs.shape)}"
        _close(ours, theirs, where)


def _close(ours: Tensor, theirs: Tensor, where: str) -> None:
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), f"{where}: {ours.flatten()[:8].tolist()}, torch gives {theirs.flatten()[:8].tolist()}"
        return
    tolerance = TOLERANCE[theirs.dtype]
    finite = theirs.double()[theirs.isfinite()].abs()
    scale = 1.0 + (finite.max().item() if finite.numel() else 0.0)
    torch.testing.assert_close(
        ours.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda text: f"{where}: {text}"
    )


def refused(function: Callable[..., Any], *arguments: Any, error: type[FusegenError], says: str, line: str | None = None) -> None:
    """The call is refused with a message that says something, names this line of the user's, and gives a mend.

    Args:
        line: what the named line holds; None where no line is to blame.
    """
    kernel = function if isinstance(function, fg.Kernel) else fg.kernel(function)
    with pytest.raises(error) as caught:
        kernel(*arguments)
    assert says in caught.value.what
    assert caught.value.mend, f"no mend: {caught.value}"
    if line is not None:
        assert caught.value.where is not None and ".py:" in caught.value.where and line in caught.value.where
