"""How an argument lies in memory: shape, strides, offset; and tensors that lie so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from fusegen.dtypes import from_torch

Fill: TypeAlias = Callable[[tuple[int, ...]], Tensor]
"""Makes a contiguous tensor of a shape."""


@dataclass(frozen=True)
class Layout:
    """A tensor without its values.

    Attributes:
        dtype: of the elements.
        shape: extents.
        strides: in elements; 0 along a dim that is expanded.
        offset: of the first element from the beginning of the storage, in elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def stored(self) -> int:
        """Elements of the storage."""
        if 0 in self.shape:
            return 0
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def __str__(self) -> str:
        """As in ``bf16 5x33 strides 40x1 offset 1``; row-major strides and an offset of 0 are not mentioned."""
        text = f"{from_torch(self.dtype)!r} {_sizes(self.shape)}"
        text += "" if self.strides == row_major(self.shape) else f" strides {_sizes(self.strides)}"
        return text + (f" offset {self.offset}" if self.offset else "")

    def stand_in(self) -> Tensor:
        """A tensor that tells compilers as much as a real one; its values mean nothing.

        A meta tensor has no address, so that memory of the host, which nobody touches, stands for what begins at an offset.
        """
        device = "cpu" if self.offset else "meta"
        storage = torch.empty(self.stored, dtype=self.dtype, device=device)
        return storage.as_strided(self.shape, self.strides, self.offset)

    def tensor(self, fill: Fill, device: torch.device) -> Tensor:
        """A tensor with values. Whatever else its storage holds is NaN (of integers, the greatest), which a kernel that reads it
        cannot hide.

        Args:
            fill: gives the values; along an expanded dim there is one.
            device: where.
        """
        values = fill(tuple(1 if stride == 0 else size for size, stride in zip(self.shape, self.strides, strict=True)))
        if self == Layout(self.dtype, self.shape, row_major(self.shape)):
            return values
        unread = math.nan if self.dtype.is_floating_point else torch.iinfo(self.dtype).max
        storage = torch.full((self.stored,), unread, dtype=self.dtype, device=device)
        storage.as_strided(values.shape, self.strides, self.offset).copy_(values)
        return storage.as_strided(self.shape, self.strides, self.offset)

    # Other layouts of the same shape.

    def shifted(self) -> Layout:
        """Begins one element later, so that no vector is aligned."""
        return replace(self, offset=self.offset + 1)

    def padded(self, amount: int) -> Layout:
        """Rows that are longer than what is used of them."""
        return replace(self, strides=row_major(self.shape, row=self.shape[-1] + amount))

    def stepped(self) -> Layout:
        """Every second element of a row."""
        return replace(self, strides=row_major(self.shape, step=2))

    def swapped(self, first: int, second: int) -> Layout:
        """Two dims trade places in memory."""
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        inner = row_major(tuple(self.shape[d] for d in order))
        return replace(self, strides=tuple(inner[order.index(d)] for d in range(len(order))))

    def expanded(self) -> Layout:
        """One element along the first dim, seen as many."""
        return replace(self, strides=(0, *self.strides[1:]))

    def far_apart(self, stride: int) -> Layout:
        """A stride between elements of the first dim that is as large as that."""
        return replace(self, strides=(stride, *self.strides[1:]))


def row_major(shape: tuple[int, ...], step: int = 1, row: int | None = None) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch gives them.

    Args:
        step: between neighbours along the last dim.
        row: from a row to the next, where that is not what a row takes.
    """
    strides: list[int] = []
    stride = step
    for dim in reversed(range(len(shape))):
        strides.insert(0, stride)
        stride = row if row is not None and len(strides) == 1 else stride * max(1, shape[dim])
    return tuple(strides)


def _sizes(values: tuple[int, ...]) -> str:
    return "x".join(map(str, values)) or "()"
