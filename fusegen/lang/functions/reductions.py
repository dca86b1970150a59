"""Reductions: in the graph a reduced dim is kept with extent 1; dropping it is a view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from fusegen.dtypes import DType
from fusegen.errors import TraceError, UnsupportedError
from fusegen.ir.ops import Op
from fusegen.lang.functions.common import cast, dtype_of, normalize_dims
from fusegen.lang.functions.views import reshaped
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor

Dims: TypeAlias = int | Sequence[int] | None


def reduced(op: Op, x: TracedTensor, dims: Dims, keepdim: bool, **attrs: object) -> TracedTensor:
    """A reduction over some dims (None is all)."""
    chosen = normalize_dims(dims, x.ndim)
    if not x.ndim:  # of one element, which stands for a row of one
        return reshaped(x._tracer.add(op, reshaped(x, (1,)), dims=(0,), **attrs), ())
    kept = x._tracer.add(op, x, dims=chosen, **attrs) if chosen else x
    if keepdim:
        return kept
    return reshaped(kept, [size for d, size in enumerate(kept._node.shape) if d not in chosen])


@implements("sum")
def sum(input: TracedTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TracedTensor:
    """The sum; of bools and integers in int64."""
    x = cast(input, dtype)
    if not dtype_of(x).is_float:
        x = cast(x, torch.int64)
    return cast(reduced(Op.SUM, x, dim, keepdim), dtype)


@implements("mean")
def mean(input: TracedTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TracedTensor:
    """The mean of floats."""
    return reduced(Op.MEAN, _floats("mean", cast(input, dtype)), dim, keepdim)


@implements("var")
def var(
    input: TracedTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> TracedTensor:
    """The variance, by default unbiased."""
    if isinstance(dim, bool):  # torch.var(x, unbiased)
        dim, unbiased = None, dim
    degrees = float(unbiased) if correction is None else float(correction)
    return reduced(Op.VAR, _floats("var", input), dim, keepdim, correction=degrees)


@implements("std")
def std(
    input: TracedTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> TracedTensor:
    """The square root of the variance."""
    return input._tracer.add(Op.SQRT, var(input, dim, unbiased, keepdim, correction=correction))


@implements("amax")
def amax(input: TracedTensor, dim: Dims = None, keepdim: bool = False) -> TracedTensor:
    """The greatest value; NaN if there is one."""
    return reduced(Op.AMAX, _numbers("amax", input), dim, keepdim)


@implements("amin")
def amin(input: TracedTensor, dim: Dims = None, keepdim: bool = False) -> TracedTensor:
    """The least value; NaN if there is one."""
    return reduced(Op.AMIN, _numbers("amin", input), dim, keepdim)


@implements("max")
def max(input: TracedTensor, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> TracedTensor:
    """The greatest value of all, or the greater of two tensors."""
    return _extreme(Op.AMAX, Op.MAXIMUM, input, other, dim)


@implements("min")
def min(input: TracedTensor, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> TracedTensor:
    """The least value of all, or the lesser of two tensors."""
    return _extreme(Op.AMIN, Op.MINIMUM, input, other, dim)


def _extreme(reduction: Op, binary: Op, input: TracedTensor, other: Any, dim: Any) -> TracedTensor:
    if isinstance(other, (TracedTensor, torch.Tensor)):
        return input._tracer.add(binary, input, input._tracer.lift(other))
    if other is not None or dim is not None:
        raise UnsupportedError("max and min with indices cannot be traced", mend="use amax(dim) or amin(dim) for the values")
    return reduced(reduction, _numbers("max", input), None, False)


@implements("logsumexp")
def logsumexp(input: TracedTensor, dim: Dims, keepdim: bool = False) -> TracedTensor:
    """log(sum(exp(x))), without overflow."""
    return reduced(Op.LOGSUMEXP, _floats("logsumexp", input), dim, keepdim)


def _floats(name: str, x: TracedTensor) -> TracedTensor:
    if not dtype_of(x).is_float:
        raise TraceError(f"{name} of {dtype_of(x)}", mend="convert to a float dtype first")
    return x


def _numbers(name: str, x: TracedTensor) -> TracedTensor:
    if dtype_of(x) is DType.BOOL:
        raise TraceError(f"{name} of bool is not supported", mend="convert to an integer dtype first")
    return x
