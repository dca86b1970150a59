"""Kernels against what torch gives for the same call; errors with their place and their hint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def nans(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers among which there are NaNs with other bits than arithmetic gives."""
    x = randn(*shape, dtype=dtype)
    bits = x.view(torch.int32 if dtype is torch.float32 else torch.int16).view(-1)
    nan = torch.full((1,), torch.nan, dtype=dtype).view(bits.dtype)
    bits[::7], bits[3::11] = nan + 5, -nan + 9
    return x


PERMUTATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.t().contiguous(),
    lambda x: x.view(-1, 6, 8).transpose(0, 1).contiguous(),
    lambda x: x.flip(1),
)


def keeps_bits(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> None:
    """Each call gives the bits that torch gives."""
    for x in inputs:
        assert torch.equal(fg.kernel(function)(x).view(torch.uint8), function(x).view(torch.uint8))


def ints(*shape: int, low: int = -9, high: int = 9, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(low, high, shape).to(dtype)


def agree(function: Callable[..., Any], *calls: tuple[Any, ...], **settings: Any) -> fg.Kernel[..., Any]:
    """Each call of the kernel gives what torch gives: dtype, shape and values, NaN and infinities in the same places."""
    kernel = function if isinstance(function, fg.Kernel) else fg.kernel(function)
    for number, arguments in enumerate(calls):
        wanted = kernel.function(*arguments, **settings)
        same(kernel(*arguments, **settings), wanted, f"call {number}")
    return kernel


def programs(kernel: fg.Kernel[..., Any]) -> int:
    """Counts the programs that a kernel compiled."""
    return kernel._dispatcher.variants.programs


def expressions(table: str) -> list[str]:
    """The expressions of a table, which stand between ` | `."""
    return [text.strip() for line in table.strip().splitlines() for text in line.split(" | ") if text.strip()]


def function_of(text: str, parameters: str, **scope: Any) -> Callable[..., Any]:
    """An expression as a function."""
    function: Callable[..., Any] = eval(f"lambda {parameters}: {text}", {"torch": torch, "F": F, "math": math, **scope})
    return function


def agree_each(parameters: str, table: str, *calls: tuple[Any, ...], at_once: int = 12) -> None:
    """One kernel returns a few expressions of a table; an error names the expression that is wrong."""
    texts = expressions(table)
    for start in range(0, len(texts), at_once):
        few = texts[start : start + at_once]
        function = function_of(f"[{', '.join(few)}]", parameters)
        kernel = fg.kernel(function)
        for number, arguments in enumerate(calls):
            for text, ours, theirs in zip(few, kernel(*arguments), function(*arguments), strict=True):
                same(ours, theirs, f"call {number}, {text}")


def agree_over(function: Callable[..., Any], cases: Mapping[str, tuple[Tensor, ...]], at_once: int = 4) -> None:
    """One kernel applies the function to the arguments of a few cases; an error names the case that is wrong."""
    for start in range(0, len(cases), at_once):
        few = list(cases)[start : start + at_once]
        names = [[f"x{number}_{place}" for place in range(len(cases[name]))] for number, name in enumerate(few)]
        parts = [f"function({', '.join(part)})" for part in names]
        together = function_of(f"[{', '.join(parts)}]", ", ".join(name for part in names for name in part), function=function)
        given = [a for name in few for a in cases[name]]
        for name, ours, theirs in zip(few, fg.kernel(together)(*given), together(*given), strict=True):
            same(ours, theirs, name)


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
    if theirs.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs.resolve_conj())
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
    """The call is refused with a message that says something, names this line of the user's, and gives a hint.

    Args:
        line: what the named line holds; None where no line is to blame.
    """
    kernel = function if isinstance(function, fg.Kernel) else fg.kernel(function)
    with pytest.raises(error) as caught:
        kernel(*arguments)
    assert says in caught.value.what
    assert caught.value.hint, f"no hint: {caught.value}"
    if line is not None:
        assert caught.value.where is not None and ".py:" in caught.value.where and line in caught.value.where
