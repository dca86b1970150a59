"""What torch computes: matrix products, into memory that is there, and functions that allocate their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_FAR = 1 << 31  # elements between the first and the last of a matrix from where on cuBLAS reads at wrong addresses


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, which is not rounded on the way when the result is of float32 and the operands of 16 bits.

    Args:
        a, b: (…, m, k) and (…, k, n), of one dtype; their leading dims broadcast.
        out: (…, m, n), contiguous, of their dtype or of float32.
    """
    a, b = _near(a), _near(b)
    if out.dtype is a.dtype:
        torch.matmul(a, b, out=out)
    elif not out.is_cuda:
        torch.matmul(a.to(out.dtype), b.to(out.dtype), out=out)
    elif b.dim() == 2:
        torch.mm(a.reshape(-1, a.shape[-1]), b, out_dtype=out.dtype, out=out.view(-1, out.shape[-1]))
    else:
        torch.bmm(_batched(a, out), _batched(b, out), out_dtype=out.dtype, out=out.view(-1, *out.shape[-2:]))


def _batched(operand: Tensor, out: Tensor) -> Tensor:
    """An operand with one leading dim, as many as the result has."""
    return operand.expand(*out.shape[:-2], *operand.shape[-2:]).reshape(-1, *operand.shape[-2:])


def _near(operand: Tensor) -> Tensor:
    """An operand whose elements do not lie too far from each other: a copy of one whose strides leave holes of gigabytes."""
    reach = sum((extent - 1) * stride for extent, stride in zip(operand.shape, operand.stride(), strict=True))
    return operand if reach < _FAR or operand.is_contiguous() else operand.contiguous()


def scatter_add(rows: Tensor, index: Tensor, length: int, _width: int) -> Tensor:
    """Sums of those rows of which the index names the sum: (length, width), in the same order at each call.

    Args:
        rows: (n, width).
        index: (n,), int32 or int64, from 0 to below the length.
    """
    if rows.is_cuda and rows.is_floating_point():  # sorts the index, and sums in float32 at least
        sums: Tensor = torch.ops.aten.embedding_dense_backward(rows, index, length, -1, False)
        return sums
    total = torch.float32 if rows.is_floating_point() and rows.itemsize < 4 else rows.dtype
    return rows.new_zeros(length, rows.shape[1], dtype=total).index_add_(0, index, rows.to(total)).to(rows.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {"scatter_add": scatter_add}
"""Functions by name: of their tensors, and the shape of their result."""
