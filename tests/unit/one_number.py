"""Programs that are right only where a value is the same number at each of its uses; they give 0 or False everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusegen as fg

Program = Callable[..., Any]


def masked_softmax(x: Tensor, s: Tensor) -> Tensor:
    """Rows of a masked value, which all weigh the same."""
    hidden = -3e4 if x.dtype is torch.float16 else -1e30
    return ((x + hidden) * s).softmax(-1).isnan()


def difference_of_products(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    y = x * s
    return (y - x * s, -(x * s) + y, (x * s + x) - (y + x))


def own_maximum(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = x * s
    return ((y.amax(-1, keepdim=True) == y).sum(-1) < 1, y > y.amax(-1, keepdim=True))


def own_maximum_of_a_column(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = x * s + x
    return ((y.amin(0) == y).sum(0) < 1, y < y.amin(0))


def maxima_of_two_kernels(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """The maxima are results, in the dtype of x, and are compared with what they are the maxima of."""
    y = x * s
    columns, rows = y.amax(0, keepdim=True), y.amax(-1, keepdim=True)
    return columns * 0, rows * 0, y > columns, y > rows, columns - columns.clone()


def stored_maxima(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x * s
    columns, rows = y.amax(0, keepdim=True), y.amax(-1, keepdim=True)
    return columns, columns != y, rows != y


def roots_of_distances(x: Tensor, s: Tensor) -> Tensor:
    """An exponential that one kernel takes the maximum of and another computes again."""
    y = torch.exp(x * s)
    return ((y.amax(0) - y).sqrt() + (y.amax(-1, keepdim=True) - y).sqrt()).isnan()


def roots_of_distances_of_weights(x: Tensor, s: Tensor) -> Tensor:
    y = (x * s).softmax(-1)
    return (y.amax(0) - y).sqrt().isnan()


PROGRAMS: tuple[Program, ...] = (
    masked_softmax, difference_of_products, own_maximum, own_maximum_of_a_column, maxima_of_two_kernels,
    roots_of_distances, roots_of_distances_of_weights,
)  # fmt: skip


def operands(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A matrix, and positive factors of its columns."""
    generator = torch.Generator().manual_seed(rows * columns)
    x, s = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((rows, columns), (columns,)))
    return x, s.abs() + 0.5


def check(program: Program, rows: int, columns: int, dtype: torch.dtype, device: str = "cpu", *, fast_math: bool = False) -> None:
    """All that the program's kernel gives is 0 or False."""
    results = fg.kernel(program, fast_math=fast_math)(*operands(rows, columns, dtype, device))
    for number, result in enumerate(results if isinstance(results, tuple) else (results,)):
        wrong = (result != 0).sum().item()
        assert wrong == 0, f"{program.__name__}, result {number}: {wrong} of {result.numel()}"


def check_stored_maxima(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Each column and each row holds its maximum, although a kernel's result lies between."""
    stored, differs_in_columns, differs_in_rows = fg.kernel(stored_maxima)(*operands(rows, columns, dtype, device))
    assert stored.dtype is dtype and not differs_in_columns.all(0).any() and not differs_in_rows.all(1).any()


def check_equal_squares(count: int, dtype: torch.dtype, device: str = "cpu", *, fast_math: bool = False) -> None:
    """Products of two tensors that are equal are equal, which only their values say."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(device, dtype)
    assert not fg.kernel(lambda x, y: (x * x - y * y).sqrt(), fast_math=fast_math)(x, x.clone()).any()
