"""Scans: in the graph they run along the last dim; along another one it is the last of a permutation."""

from __future__ import annotations

from typing import Any

import torch

from fusegen.ir.ops import Op
from fusegen.lang.functions.common import cast, dtype_of, floats, normalize_dim
from fusegen.lang.functions.creation import full_like
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


@implements("cummax")
def cummax(input: TracedTensor, dim: int) -> Any:
    """The greatest of the elements of a dim up to each, and the last index at which it stands."""
    return torch.return_types.cummax(_extremes(Op.CUMMAX, Op.LAST_MAX, input, dim))  # type: ignore[arg-type]


@implements("cummin")
def cummin(input: TracedTensor, dim: int) -> Any:
    """The least of the elements of a dim up to each, and the last index at which it stands."""
    return torch.return_types.cummin(_extremes(Op.CUMMIN, Op.LAST_MIN, input, dim))  # type: ignore[arg-type]


def _extremes(op: Op, last: Op, input: TracedTensor, dim: int) -> tuple[TracedTensor, TracedTensor]:
    place = normalize_dim(dim, input.ndim)
    if not input.ndim:
        return cast(input, input.dtype), full_like(input, 0, dtype=torch.int64)
    x = movedim(input if dtype_of(input).is_float else cast(input, torch.int64), place, -1)
    values = cast(movedim(x._tracer.add(op, x), -1, place), input.dtype)
    return values, movedim(x._tracer.add(last, x, part="indices"), -1, place)


@implements("logcumsumexp")
def logcumsumexp(input: TracedTensor, dim: int) -> TracedTensor:
    """log(sum of e^x) of the elements of a dim up to each."""
    return _scanned(Op.LOGCUMSUMEXP, floats("logcumsumexp", input), dim, None)
