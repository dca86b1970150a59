"""How a tensor lies in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

WIDE = (1 << 31) - (1 << 22)
"""Elements from which on indices need 64 bits; below it, a launch that is rounded up to whole blocks still fits 31."""

MOST_ALIGNED = 16
"""Bytes: no access is wider."""


def alignment(tensor: torch.Tensor, is_symbol: Sequence[bool]) -> int:
    """Bytes, up to 16, that divide the address and every stride that no literal gives.

    A tensor without memory lies where its view of a fresh allocation would.

    Args:
        is_symbol: for each dim, whether its stride is none of the literal ones.
    """
    itemsize = tensor.element_size()
    bits = tensor.data_ptr() if has_memory(tensor) else int(tensor.storage_offset()) * itemsize
    for value, counts in zip(tensor.stride(), is_symbol, strict=True):
        if counts:
            bits |= value * itemsize
    return min(MOST_ALIGNED, bits & -bits) if bits else MOST_ALIGNED


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements: a meta or fake one stands for what an allocator would give."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def span(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
