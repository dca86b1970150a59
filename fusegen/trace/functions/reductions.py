"""Reductions and scans. In the graph a reduced dim keeps size 1, which a view drops, and a scan runs along the last dim."""

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
    float_setting,
    normalize_dim,
    normalize_dims,
    require_float,
    require_number,
    sequence,
    unsupported_argument,
)
from fusegen.trace.functions.creation import full_like
from fusegen.trace.functions.views import movedim, reshaped
from fusegen.trace.registry import implements
from fusegen.trace.scalars import dim_of
from fusegen.trace.values import TracedTensor

Dims: TypeAlias = int | Sequence[int] | None


def reduced(op: Op, x: TracedTensor, dims: Dims, keepdim: bool, **attrs: object) -> TracedTensor:
    """Adds a reduction over dims; None reduces all."""
    reduced_dims = normalize_dims(dims, x.ndim)
    if not isinstance(keepdim, (bool, np.bool_)):
        raise TraceError(f"{op.row.name}: keepdim={keepdim!r} is not a bool", hint="give several dims as a tuple")
    if op in _EXTREMES and _reduces_no_elements(x, reduced_dims):
        raise ShapeError(f"{op.row.name} of no elements has no result", hint="give one element or more; torch raises too")
    if not x.ndim:  # a scalar is a row of one element
        return reshaped(x._tracer.add(op, reshaped(x, (1,)), dims=(0,), **attrs), ())
    result = x._tracer.add(op, x, dims=reduced_dims, **attrs) if reduced_dims else x
    if keepdim:
        return result
    return reshaped(result, [size for d, size in enumerate(result._node.shape) if d not in reduced_dims])


_EXTREMES = (Op.AMAX, Op.AMIN, Op.MAX, Op.MIN)


def _reduces_no_elements(x: TracedTensor, dims: Sequence[int]) -> bool:
    return any(x._node.shape[d] == 0 for d in dims)


@implements("sum")
def sum(input: TracedTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TracedTensor:
    """The sum; bools and integers are summed in int64."""
    x = cast(input, dtype)
    if not dtype_of(x).is_float:
        x = cast(x, torch.int64)
    return cast(reduced(Op.SUM, x, dim, keepdim), dtype)


@implements("sum_to_size")
def sum_to_size(input: TracedTensor, *size: Any) -> TracedTensor:
    """Sums the dims that a shape lacks or has as size 1."""
    sizes = [dim_of(extent) for extent in sequence(size)]
    missing = input.ndim - len(sizes)
    trailing = input._node.shape[missing:] if missing > 0 else input._node.shape
    pairs = [(a, b) for a, b in zip(sizes, trailing, strict=False) if not same(a, 1) and not same(a, b)]
    input._tracer.require_equal(pairs)
    if missing < 0 or pairs:
        raise ShapeError(f"a tensor of shape {input.shape} cannot be summed to shape {size}", hint="give the tensor's sizes, or 1")
    ones = tuple(missing + d for d, n in enumerate(sizes) if same(n, 1) and not same(input._node.shape[missing + d], 1))
    result = sum(input, ones, keepdim=True) if ones else input
    return sum(result, tuple(range(missing))) if missing else result


@implements("prod")
def prod(input: TracedTensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TracedTensor:
    x = cast(input, dtype)
    if not dtype_of(x).is_float:
        x = cast(x, torch.int64)
    return cast(reduced(Op.PROD, x, _single_dim(x, dim), keepdim), dtype)


@implements("mean")
def mean(input: TracedTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TracedTensor:
    return reduced(Op.MEAN, cast(input, dtype), dim, keepdim)


@implements("var")
def var(
    input: TracedTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> TracedTensor:
    dims, degrees = _dims_and_correction(dim, unbiased, correction)
    return reduced(Op.VAR, input, dims, keepdim, correction=degrees)


@implements("std")
def std(
    input: TracedTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> TracedTensor:
    dims, degrees = _dims_and_correction(dim, unbiased, correction)
    return reduced(Op.STD, input, dims, keepdim, correction=degrees)


def _dims_and_correction(dim: Any, unbiased: bool, correction: float | None) -> tuple[Dims, float]:
    """Returns the dims and the correction of a variance; handles `torch.var(x, unbiased)`."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return dim, float(unbiased) if correction is None else float_setting("correction", correction)


@implements("amax")
def amax(input: TracedTensor, dim: Dims = None, keepdim: bool = False) -> TracedTensor:
    return reduced(Op.AMAX, require_number("amax", input), dim, keepdim)


@implements("amin")
def amin(input: TracedTensor, dim: Dims = None, keepdim: bool = False) -> TracedTensor:
    return reduced(Op.AMIN, require_number("amin", input), dim, keepdim)


@implements("max")
def max(input: TracedTensor, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> Any:
    """The maximum of all elements; of a dim, with its indices; or of two tensors."""
    return _extreme(Op.MAX, Op.MAXIMUM, input, dim if other is None else other, keepdim)


@implements("min")
def min(input: TracedTensor, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> Any:
    return _extreme(Op.MIN, Op.MINIMUM, input, dim if other is None else other, keepdim)


def _extreme(reduction: Op, binary: Op, input: TracedTensor, other: Any, keepdim: bool) -> Any:
    if isinstance(other, (TracedTensor, torch.Tensor)):
        return input._tracer.add(binary, input, input._tracer.lift(other))
    x = require_number(reduction.row.name, input)
    if other is None:
        return reduced(Op.AMAX if reduction is Op.MAX else Op.AMIN, x, None, False)
    kind = torch.return_types.max if reduction is Op.MAX else torch.return_types.min
    return kind((_extreme_part(reduction, x, other, keepdim, "values"), _extreme_part(reduction, x, other, keepdim, "indices")))  # type: ignore[arg-type]


def _extreme_part(reduction: Op, x: TracedTensor, dim: int, keepdim: bool, part: str) -> TracedTensor:
    """Returns the extreme along a dim, or its first index. NaN counts as the extreme."""
    axis = normalize_dim(dim, x.ndim)
    if not x.ndim and part == "indices":
        return full_like(x, 0, dtype=torch.int64)
    return reduced(reduction, x, axis, keepdim, part=part)


def _single_dim(x: TracedTensor, dim: int | None) -> int | None:
    return None if dim is None else normalize_dim(dim, x.ndim)


@implements("argmax")
def argmax(input: TracedTensor, dim: int | None = None, keepdim: bool = False) -> TracedTensor:
    """The index of the maximum, the first of equal ones."""
    return _arg_extreme(Op.MAX, require_number("argmax", input), dim, keepdim)


@implements("argmin")
def argmin(input: TracedTensor, dim: int | None = None, keepdim: bool = False) -> TracedTensor:
    return _arg_extreme(Op.MIN, require_number("argmin", input), dim, keepdim)


def _arg_extreme(op: Op, x: TracedTensor, dim: int | None, keepdim: bool) -> TracedTensor:
    if dim is not None:
        return _extreme_part(op, x, dim, keepdim, "indices")
    index = _extreme_part(op, reshaped(x, (simplify_dim(product(x._node.shape)),)), 0, False, "indices")
    return reshaped(index, (1,) * x.ndim) if keepdim else index


@implements("aminmax")
def aminmax(input: TracedTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    axis = _single_dim(input, dim)
    extremes = (amin(input, axis, keepdim), amax(input, axis, keepdim))
    return torch.return_types.aminmax(extremes)  # type: ignore[arg-type]


@implements("any")
def any_(input: TracedTensor, dim: Dims = None, keepdim: bool = False) -> TracedTensor:
    return _any_or_all(Op.AMAX, input, dim, keepdim)


@implements("all")
def all_(input: TracedTensor, dim: Dims = None, keepdim: bool = False) -> TracedTensor:
    return _any_or_all(Op.AMIN, input, dim, keepdim)


def _any_or_all(op: Op, input: TracedTensor, dim: Dims, keepdim: bool) -> TracedTensor:
    """Reduces truth values; the result is uint8 for uint8, as in torch."""
    kind = torch.uint8 if dtype_of(input) is DType.UINT8 else torch.bool
    if _reduces_no_elements(input, normalize_dims(dim, input.ndim)):
        return full_like(reduced(Op.SUM, input, dim, keepdim), op is Op.AMIN, dtype=kind)
    return cast(reduced(op, cast(input, torch.bool), dim, keepdim), kind)


@implements("count_nonzero")
def count_nonzero(input: TracedTensor, dim: Dims = None) -> TracedTensor:
    return sum(cast(input, torch.bool), dim)


@implements("var_mean")
def var_mean(
    input: TracedTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> tuple[TracedTensor, TracedTensor]:
    return var(input, dim, unbiased, keepdim, correction=correction), mean(input, None if isinstance(dim, bool) else dim, keepdim)


@implements("std_mean")
def std_mean(
    input: TracedTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> tuple[TracedTensor, TracedTensor]:
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
    unsupported_argument("norm", out=out)
    if isinstance(p, TracedTensor):
        p.require_static()
    return vector_norm(input, 2 if p in (None, "fro") else p, dim, keepdim, dtype=dtype)


@implements("linalg.vector_norm")
def vector_norm(
    x: TracedTensor, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TracedTensor:
    """(sum |x|^ord)^(1/ord), the max or min of |x| for ord=inf or -inf, the number of nonzeros for ord=0."""
    ord = ord.item() if isinstance(ord, np.number) else ord
    if not isinstance(ord, (int, float)):
        raise TraceError(f"norm: ord={ord!r} is not supported", hint="give a number as ord")
    value = require_float("norm", cast(x, dtype))
    return cast(_norm(cast(value, dtype_of(value).compute.torch), ord, dim, keepdim), value.dtype)  # avoids overflow of squares


def _norm(x: TracedTensor, ord: float, dim: Dims, keepdim: bool) -> TracedTensor:
    tracer = x._tracer
    magnitude = tracer.add(Op.ABS, x)
    if ord < 0 and _reduces_no_elements(x, normalize_dims(dim, x.ndim)):
        raise ShapeError(f"the {ord}-norm of no elements has no result", hint="give one element or more; torch raises too")
    if math.isinf(ord):
        return reduced(Op.AMAX if ord > 0 else Op.AMIN, magnitude, dim, keepdim)
    if ord == 0:
        return reduced(Op.SUM, cast(cast(x, torch.bool), x.dtype), dim, keepdim)
    if ord == 1:
        return reduced(Op.SUM, magnitude, dim, keepdim)
    return reduced(Op.VECTOR_NORM, x, dim, keepdim, ord=2.0 if ord == 2 else float_setting("ord", ord))


@implements("linalg.norm")
def linalg_norm(
    A: TracedTensor, ord: Any = None, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TracedTensor:
    """Vector norms; for matrices, only the Frobenius norm."""
    dims = normalize_dims(dim, A.ndim)
    if isinstance(dim, (tuple, list)) and not dim:
        raise ShapeError("linalg.norm: dim is empty", hint="give one dim or two, or leave dim out")
    if ord is not None and (len(dims) == 2 if dim is not None else A.ndim != 1) and ord != "fro":
        text = f"linalg.norm of matrices with ord={ord!r} is not supported"
        raise TraceError(text, hint="use linalg.vector_norm, or give one dim")
    return vector_norm(A, 2 if ord in (None, "fro") else ord, dim, keepdim, dtype=dtype)


@implements("logsumexp")
def logsumexp(input: TracedTensor, dim: Dims, keepdim: bool = False) -> TracedTensor:
    """log(sum(exp(x))), without overflow."""
    if dim is None or (input.ndim and isinstance(dim, (tuple, list)) and not dim):
        raise TraceError("logsumexp needs dim", hint="give dim, e.g. dim=-1")
    x = input if dtype_of(input).is_float else cast(input, torch.get_default_dtype())
    return reduced(Op.LOGSUMEXP, x, dim, keepdim)


# Scans.


@implements("cumsum")
def cumsum(input: TracedTensor, dim: int, *, dtype: torch.dtype | None = None) -> TracedTensor:
    return _scanned(Op.CUMSUM, input, dim, dtype)


@implements("cumprod")
def cumprod(input: TracedTensor, dim: int, *, dtype: torch.dtype | None = None) -> TracedTensor:
    return _scanned(Op.CUMPROD, input, dim, dtype)


def _scanned(op: Op, input: TracedTensor, dim: int, dtype: torch.dtype | None) -> TracedTensor:
    x = cast(input, dtype)
    if not dtype_of(x).is_float:
        x = cast(x, torch.int64)
    axis = normalize_dim(dim, x.ndim)
    if not x.ndim:
        return cast(x, dtype)
    scanned = x._tracer.add(op, movedim(x, axis, -1))
    return cast(movedim(scanned, -1, axis), dtype)


@implements("cummax")
def cummax(input: TracedTensor, dim: int) -> Any:
    return torch.return_types.cummax(_running_extremes(Op.CUMMAX, Op.LAST_MAX, input, dim))  # type: ignore[arg-type]


@implements("cummin")
def cummin(input: TracedTensor, dim: int) -> Any:
    return torch.return_types.cummin(_running_extremes(Op.CUMMIN, Op.LAST_MIN, input, dim))  # type: ignore[arg-type]


def _running_extremes(op: Op, last: Op, input: TracedTensor, dim: int) -> tuple[TracedTensor, TracedTensor]:
    axis = normalize_dim(dim, input.ndim)
    if not input.ndim:
        return cast(input, input.dtype), full_like(input, 0, dtype=torch.int64)
    x = movedim(input if dtype_of(input).is_float else cast(input, torch.int64), axis, -1)
    values = cast(movedim(x._tracer.add(op, x), -1, axis), input.dtype)
    return values, movedim(x._tracer.add(last, x, part="indices"), -1, axis)


@implements("logcumsumexp")
def logcumsumexp(input: TracedTensor, dim: int) -> TracedTensor:
    return _scanned(Op.LOGCUMSUMEXP, require_float("logcumsumexp", input), dim, None)
