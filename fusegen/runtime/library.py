"""Functions of torch that are steps of calls: matrix products, into memory that is there, and those that allocate their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def scatter_add(shape: Sequence[int], dtype: torch.dtype, rows: Tensor, index: Tensor) -> Tensor:
    """Sums of those rows of which the index names the sum, in float32 at least, in the same order at each call.

    Args:
        shape, dtype: of the sums: (length, width).
        rows: (n, width).
        index: (n,), int32 or int64, from 0 to below the length.
    """
    total = torch.float32 if rows.is_floating_point() and rows.itemsize < 4 else rows.dtype
    if rows.is_cuda and rows.is_floating_point() and len(rows):
        return _sums_of_runs(shape, dtype, rows.to(total), index)
    return rows.new_zeros(shape, dtype=total).index_add_(0, index, rows.to(total)).to(dtype)


def _sums_of_runs(shape: Sequence[int], dtype: torch.dtype, rows: Tensor, index: Tensor) -> Tensor:
    """The sums by sorting: equal indices are a run. torch's own index_add and gradient of embeddings add in any order on a GPU."""
    count, (length, width) = len(index), shape
    ordered, order = index.sort(stable=True)
    is_last = torch.cat([ordered[1:] != ordered[:-1], ordered.new_ones(1, dtype=torch.bool)])
    run = is_last.cumsum(0) - is_last.long()
    starts = torch.searchsorted(run, torch.arange(count + 1, device=run.device))  # the count for runs that there are not
    sums = torch.segment_reduce(rows[order], "sum", offsets=starts, unsafe=True, initial=0)
    place = ordered.new_full((count + 1,), length)  # and a row behind the last for these
    place[:count] = ordered
    found = rows.new_zeros(length + 1, width, dtype=dtype)
    return found.index_copy_(0, place[starts[:count]].long(), sums.to(dtype))[:length]


FUNCTIONS: dict[str, Callable[..., Any]] = {"scatter_add": scatter_add}
"""Functions by name: of the shape and the dtype of their result, and of their tensors."""
