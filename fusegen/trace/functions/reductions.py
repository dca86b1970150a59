"""Reductions and scans. A reduced dim is kept with extent 1 in the graph, and a view drops it; a scan runs along the last dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import product, same, simplify_dim
from fusegen.trace.functions.common import (
    cast,
    dtype_of,
    floats,
    normalize_dim,
    normalize_dims,
    numbers,
    sequence,
    setting,
    unsupported_argument,
)
from fusegen.trace.functions.creation import full_like
from fusegen.trace.functions.views import movedim, reshaped
from fusegen.trace.registry import implements
from fusegen.trace.scalars import dim_of
from fusegen.trace.values import TracedTensor

Dims: TypeAlias = int | Sequence[int] | None


def reduced(op: Op, x: TracedTensor, dims: Dims, keepdim: bool, **attrs: object) -> TracedTensor:
    """A reduction over some dims (None is all)."""
    chosen = normalize_dims(dims, x.ndim)
    if not isinstance(keepdim, (bool, np.bool_)):
        raise TraceError(f"{op.row.name}: keepdim={keepdim!r} is no bool", hint="give several dims as a tuple")
    if op in _EXTREMES and _is_of_nothing(x, chosen):
        raise ShapeError(f"{op.row.name} of no elements", hint="there is no extreme value of nothing; torch refuses it as well")
    if not x.ndim:  # of one element, which stands for a row of one
        return reshaped(x._tracer.add(op, reshaped(x, (1,)), dims=(0,), **attrs), ())
    kept = x._tracer.add(op, x, dims=chosen, **attrs) if chosen else x
    if keepdim:
        return kept
    return reshaped(kept, [size for d, size in enumerate(kept._node.shape) if d not in chosen])


_EXTREMES = (Op.AMAX, Op.AMIN, Op.MAX, Op.MIN)


def _is_of_nothing(x: TracedTensor, dims: Sequence[int]) -> bool:
    """True if each result of a reduction is one of no elements."""
    return any(x._node.shape[d] == 0 for d in dims)


@implements("sum")
def sum(input: TracedTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TracedTensor:
    """The sum; of bools and integers in int64."""
    x = cast(input, dtype)
    if not dtype_of(x).is_float:
        x = cast(x, torch.int64)
    return cast(reduced(Op.SUM, x, dim, keepdim), dtype)


@implements("sum_to_size")
def sum_to_size(input: TracedTensor, *size: Any) -> TracedTensor:
    """The sums over all dims that a shape lacks, or has one element in."""
    sizes = [dim_of(each) for each in sequence(size)]
    missing = input.ndim - len(sizes)
    kept = input._node.shape[missing:] if missing > 0 else input._node.shape
    pairs = [(a, b) for a, b in zip(sizes, kept, strict=False) if not same(a, 1) and not same(a, b)]
    input._tracer.require_equal(pairs)
    if missing < 0 or pairs:
        raise ShapeError(f"a tensor of shape {input.shape} is no sum of shape {size}", hint="give sizes that it has, or 1")
    ones = tuple(missing + d for d, n in enumerate(sizes) if same(n, 1) and not same(input._node.shape[missing + d], 1))
    found = sum(input, ones, keepdim=True) if ones else input
    return sum(found, tuple(range(missing))) if missing else found


@implements("prod")
def prod(input: TracedTensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TracedTensor:
    """The product; of bools and integers in int64."""
    x = cast(input, dtype)
    if not dtype_of(x).is_float:
        x = cast(x, torch.int64)
    return cast(reduced(Op.PROD, x, _one_of(x, dim), keepdim), dtype)


@implements("mean")
def mean(input: TracedTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TracedTensor:
    """The mean of floats."""
    return reduced(Op.MEAN, cast(input, dtype), dim, keepdim)


@implements("var")
def var(
    input: TracedTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> TracedTensor:
    """The variance, by default unbiased."""
    dims, degrees = _degrees(dim, unbiased, correction)
    return reduced(Op.VAR, input, dims, keepdim, correction=degrees)


@implements("std")
def std(
    input: TracedTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> TracedTensor:
    """The square root of the variance."""
    dims, degrees = _degrees(dim, unbiased, correction)
    return reduced(Op.STD, input, dims, keepdim, correction=degrees)


def _degrees(dim: Any, unbiased: bool, correction: float | None) -> tuple[Dims, float]:
    """The dims of a variance, and what is taken off their count: torch.var(x, unbiased) has the latter first."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return dim, float(unbiased) if correction is None else setting("correction", correction)


@implements("amax")
def amax(input: TracedTensor, dim: Dims = None, keepdim: bool = False) -> TracedTensor:
    """The greatest value; NaN if there is one."""
    return reduced(Op.AMAX, numbers("amax", input), dim, keepdim)


@implements("amin")
def amin(input: TracedTensor, dim: Dims = None, keepdim: bool = False) -> TracedTensor:
    """The least value; NaN if there is one."""
    return reduced(Op.AMIN, numbers("amin", input), dim, keepdim)


@implements("max")
def max(input: TracedTensor, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> Any:
    """The greatest value of all, those of a dim with their indices, or the greater of two tensors."""
    return _extreme(Op.MAX, Op.MAXIMUM, input, dim if other is None else other, keepdim)


@implements("min")
def min(input: TracedTensor, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> Any:
    """The least value of all, those of a dim with their indices, or the lesser of two tensors."""
    return _extreme(Op.MIN, Op.MINIMUM, input, dim if other is None else other, keepdim)


def _extreme(reduction: Op, binary: Op, input: TracedTensor, other: Any, keepdim: bool) -> Any:
    if isinstance(other, (TracedTensor, torch.Tensor)):
        return input._tracer.add(binary, input, input._tracer.lift(other))
    x = numbers(reduction.row.name, input)
    if other is None:
        return reduced(Op.AMAX if reduction is Op.MAX else Op.AMIN, x, None, False)
    kind = torch.return_types.max if reduction is Op.MAX else torch.return_types.min
    return kind((_part(reduction, x, other, keepdim, "values"), _part(reduction, x, other, keepdim, "indices")))  # type: ignore[arg-type]


def _part(reduction: Op, x: TracedTensor, dim: int, keepdim: bool, part: str) -> TracedTensor:
    """The extreme value along a dim, or the first index at which it stands; NaN is it where there is one."""
    place = normalize_dim(dim, x.ndim)
    if not x.ndim and part == "indices":
        return full_like(x, 0, dtype=torch.int64)
    return reduced(reduction, x, place, keepdim, part=part)


def _one_of(x: TracedTensor, dim: int | None) -> int | None:
    """The only dim that a function takes, or None for all."""
    return None if dim is None else normalize_dim(dim, x.ndim)


@implements("argmax")
def argmax(input: TracedTensor, dim: int | None = None, keepdim: bool = False) -> TracedTensor:
    """The index of the greatest value: the first of equal ones."""
    return _argument(Op.MAX, numbers("argmax", input), dim, keepdim)


@implements("argmin")
def argmin(input: TracedTensor, dim: int | None = None, keepdim: bool = False) -> TracedTensor:
    """The index of the least value: the first of equal ones."""
    return _argument(Op.MIN, numbers("argmin", input), dim, keepdim)


def _argument(op: Op, x: TracedTensor, dim: int | None, keepdim: bool) -> TracedTensor:
    if dim is not None:
        return _part(op, x, dim, keepdim, "indices")
    place = _part(op, reshaped(x, (simplify_dim(product(x._node.shape)),)), 0, False, "indices")
    return reshaped(place, (1,) * x.ndim) if keepdim else place


@implements("aminmax")
def aminmax(input: TracedTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """The least and the greatest value."""
    place = _one_of(input, dim)
    extremes = (amin(input, place, keepdim), amax(input, place, keepdim))
    return torch.return_types.aminmax(extremes)  # type: ignore[arg-type]


@implements("any")
def any_(input: TracedTensor, dim: Dims = None, keepdim: bool = False) -> TracedTensor:
    """True if some value is not 0."""
    return _decided(Op.AMAX, input, dim, keepdim)


@implements("all")
def all_(input: TracedTensor, dim: Dims = None, keepdim: bool = False) -> TracedTensor:
    """True if no value is 0."""
    return _decided(Op.AMIN, input, dim, keepdim)


def _decided(op: Op, input: TracedTensor, dim: Dims, keepdim: bool) -> TracedTensor:
    """A decision about values that are 0 or not; torch gives it as uint8 for uint8."""
    kind = torch.uint8 if dtype_of(input) is DType.UINT8 else torch.bool
    if _is_of_nothing(input, normalize_dims(dim, input.ndim)):
        return full_like(reduced(Op.SUM, input, dim, keepdim), op is Op.AMIN, dtype=kind)
    bits = cast(cast(input, torch.bool), torch.uint8)
    found = reduced(op, bits, dim, keepdim)
    return cast(found, kind)


@implements("count_nonzero")
def count_nonzero(input: TracedTensor, dim: Dims = None) -> TracedTensor:
    """The number of values that are not 0."""
    return sum(cast(input, torch.bool), dim)


@implements("var_mean")
def var_mean(
    input: TracedTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> tuple[TracedTensor, TracedTensor]:
    """The variance and the mean."""
    return var(input, dim, unbiased, keepdim, correction=correction), mean(input, None if isinstance(dim, bool) else dim, keepdim)


@implements("std_mean")
def std_mean(
    input: TracedTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> tuple[TracedTensor, TracedTensor]:
    """The square root of the variance, and the mean."""
    return std(input, dim, unbiased, keepdim, correction=correction), mean(input, None if isinstance(dim, bool) else dim, keepdim)


@implements("norm")
def norm(
    input: TracedTensor,
    p: float | str | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: torch.dtype | None = None,
) -> TracedTensor:
    """The p-norm of the values, of a dim or of all."""
    unsupported_argument("norm", out=out)
    if isinstance(p, TracedTensor):
        p.require_static()
    return vector_norm(input, 2 if p in (None, "fro") else p, dim, keepdim, dtype=dtype)


@implements("linalg.vector_norm")
def vector_norm(
    x: TracedTensor, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TracedTensor:
    """(sum |x|^ord)^(1/ord); the greatest or the least |x| for an infinite ord, and how many are not 0 for ord=0."""
    ord = ord.item() if isinstance(ord, np.number) else ord
    if not isinstance(ord, (int, float)):
        raise TraceError(f"norm: ord={ord!r} is not supported", hint="give a number")
    given = floats("norm", cast(x, dtype))
    return cast(_norm(cast(given, dtype_of(given).compute.torch), ord, dim, keepdim), given.dtype)  # squares need the range


def _norm(x: TracedTensor, ord: float, dim: Dims, keepdim: bool) -> TracedTensor:
    tracer = x._tracer
    size = tracer.add(Op.ABS, x)
    if ord < 0 and _is_of_nothing(x, normalize_dims(dim, x.ndim)):
        raise ShapeError(f"the {ord}-norm of no elements", hint="torch refuses it as well")
    if math.isinf(ord):
        return reduced(Op.AMAX if ord > 0 else Op.AMIN, size, dim, keepdim)
    if ord == 0:
        return reduced(Op.SUM, cast(cast(x, torch.bool), x.dtype), dim, keepdim)
    if ord == 1:
        return reduced(Op.SUM, size, dim, keepdim)
    return reduced(Op.VECTOR_NORM, x, dim, keepdim, ord=2.0 if ord == 2 else setting("ord", ord))


@implements("linalg.norm")
def linalg_norm(
    A: TracedTensor, ord: Any = None, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TracedTensor:
    """The norm of vectors, and of a matrix as of a vector of its elements."""
    dims = normalize_dims(dim, A.ndim)
    if isinstance(dim, (tuple, list)) and not dim:
        raise ShapeError("linalg.norm along no dim", hint="give one dim or two, or leave dim out")
    if ord is not None and (len(dims) == 2 if dim is not None else A.ndim != 1) and ord != "fro":
        text = f"linalg.norm of matrices with ord={ord!r} is not supported"
        raise TraceError(text, hint="use linalg.vector_norm, or give one dim")
    return vector_norm(A, 2 if ord in (None, "fro") else ord, dim, keepdim, dtype=dtype)


@implements("logsumexp")
def logsumexp(input: TracedTensor, dim: Dims, keepdim: bool = False) -> TracedTensor:
    """log(sum(exp(x))), without overflow.

    Raises:
        TraceError: no dim is given, which torch wants to know of this function.
    """
    if dim is None or (input.ndim and isinstance(dim, (tuple, list)) and not dim):
        raise TraceError("logsumexp without dim", hint="give the dims")
    x = input if dtype_of(input).is_float else cast(input, torch.get_default_dtype())
    return reduced(Op.LOGSUMEXP, x, dim, keepdim)


# Scans.


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
