"""Scans: in the graph they run along the last dim; along another one it is the last of a permutation."""

from __future__ import annotations

import torch

from fusegen.ir.ops import Op
from fusegen.lang.functions.common import cast, dtype_of, normalize_dim
from fusegen.lang.functions.views import movedim
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("cumsum")
def cumsum(input: TracedTensor, dim: int, *, dtype: torch.dtype | None = None) -> TracedTensor:
    """The sums of the elements of a dim up to each; of bools and integers in int64."""
    return _scanned(Op.CUMSUM, input, dim, dtype)


@implements("cumprod")
def cumprod(input: TracedTensor, dim: int, *, dtype: torch.dtype | None = None) -> TracedTensor:
    """The products of the elements of a dim up to each; of bools and integers in int64."""
    return _scanned(Op.CUMPROD, input, dim, dtype)


def _scanned(op: Op, input: TracedTensor, dim: int, dtype: torch.dtype | None) -> TracedTensor:
    x = cast(input, dtype)
    if not dtype_of(x).is_float:
        x = cast(x, torch.int64)
    place = normalize_dim(dim, x.ndim)
    if not x.ndim:
        return cast(x, dtype)
    found = x._tracer.add(op, movedim(x, place, -1))
    return cast(movedim(found, -1, place), dtype)
