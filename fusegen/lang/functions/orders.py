"""Orders of the elements of a dim: sorted, the first few, the middle one. In the graph they run along the last dim."""

from __future__ import annotations

from typing import Any

import torch

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.ir.reductions import SHORT_ROW
from fusegen.ir.symbolic import Dim, literal, product, simplify_dim
from fusegen.lang.float8 import no_arithmetic
from fusegen.lang.functions import pointwise
from fusegen.lang.functions.common import binary, cast, dtype_of, normalize_dim, numbers, unsupported_argument
from fusegen.lang.functions.creation import full_like
from fusegen.lang.functions.indexing import take_along_dim
from fusegen.lang.functions.reductions import any_, argmax, count_nonzero
from fusegen.lang.functions.views import holds, movedim, reshaped, sliced, squeeze, unsqueeze
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("topk")
def topk(
    input: TracedTensor, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None
) -> torch.return_types.topk:
    """The greatest or the least k elements of a dim, in order, with ``sorted`` or without, and their indices."""
    unsupported_argument("topk", out=out)
    place = normalize_dim(dim, input.ndim)
    found = _first(input, place, _count("topk", input, place, k), descending=bool(largest))
    return torch.return_types.topk(found)  # type: ignore[arg-type]


@implements("sort")
def sort(
    input: TracedTensor, dim: int = -1, descending: bool = False, stable: bool | None = None, *, out: Any = None
) -> torch.return_types.sort:
    """The elements of a dim in order, equal ones in their own, and their indices."""
    unsupported_argument("sort", out=out)
    place = normalize_dim(dim, input.ndim)
    found = _first(input, place, _length(input, place), descending=bool(descending))
    return torch.return_types.sort(found)  # type: ignore[arg-type]


@implements("argsort")
def argsort(input: TracedTensor, dim: int = -1, descending: bool = False, stable: bool = False) -> TracedTensor:
    """The indices of the elements of a dim in order."""
    place = normalize_dim(dim, input.ndim)
    return _first(input, place, _length(input, place), descending=bool(descending))[1]


@implements("msort")
def msort(input: TracedTensor, *, out: Any = None) -> TracedTensor:
    """The elements of the first dim in order."""
    unsupported_argument("msort", out=out)
    return _first(input, 0, _length(input, 0), descending=False)[0]


@implements("kthvalue")
def kthvalue(input: TracedTensor, k: Any, dim: int = -1, keepdim: bool = False, *, out: Any = None) -> torch.return_types.kthvalue:
    """The k-th least element of a dim, and its index."""
    unsupported_argument("kthvalue", out=out)
    place = normalize_dim(dim, input.ndim)
    count = _count("kthvalue", input, place, k)
    if count < 1:
        raise ShapeError("kthvalue with k=0", mend="count from 1")
    return torch.return_types.kthvalue(_chosen(input, _kth(input, place, count), place, keepdim))  # type: ignore[arg-type]


@implements("median")
def median(input: TracedTensor, dim: int | None = None, keepdim: bool = False, *, out: Any = None) -> Any:
    """The element in the middle of a dim, the lesser of two, and its index; NaN where there is one. Without a dim, its value."""
    return _median("median", input, dim, keepdim, out)


@implements("nanmedian")
def nanmedian(input: TracedTensor, dim: int | None = None, keepdim: bool = False, *, out: Any = None) -> Any:
    """The same of all that is no NaN."""
    return _median("nanmedian", input, dim, keepdim, out)


def _median(name: str, input: TracedTensor, dim: int | None, keepdim: bool, out: Any) -> Any:
    unsupported_argument(name, out=out)
    numbers(name, input)
    if dim is None:
        flat = reshaped(input, (simplify_dim(product(input._node.shape)),))
        return _chosen(flat, _middle(name, flat, 0), 0, keepdim=False)[0]
    place = normalize_dim(dim, input.ndim)
    found = _chosen(input, _middle(name, input, place), place, keepdim)
    return getattr(torch.return_types, name)(found)


def _middle(name: str, x: TracedTensor, dim: int) -> TracedTensor:
    """The index of the middle element of a dim, which is kept."""
    if not x.ndim:
        return full_like(x, 0, dtype=torch.int64)
    size = literal(_length(x, dim))
    if size == 0:
        raise ShapeError(f"{name} of no elements", mend="there is no middle of nothing")
    if name == "median" and size is not None:
        middle = _kth(x, dim, (size + 1) // 2)
    else:
        counted = pointwise.isnan(x) if name == "nanmedian" else full_like(x, False, dtype=torch.bool)
        count = unsqueeze(count_nonzero(binary(Op.EQ, counted, False), dim), dim)
        place = pointwise.clamp(binary(Op.FLOOR_DIVIDE, pointwise.sub(count, 1), 2), min=0)
        middle = take_along_dim(_first(x, dim, _length(x, dim), descending=False)[1], place, dim)
    if name == "nanmedian" or not dtype_of(x).is_float:
        return middle
    has_nan = any_(pointwise.isnan(x), dim, keepdim=True)
    return pointwise.where(has_nan, argmax(x, dim, keepdim=True), middle)


def _kth(x: TracedTensor, dim: int, count: int) -> TracedTensor:
    """The index of the k-th least element of a dim, which is kept: from the end that is nearer."""
    if not x.ndim:
        return full_like(x, 0, dtype=torch.int64)
    size = literal(_length(x, dim))
    is_near_end = size is not None and size - count + 1 < count
    first = size - count + 1 if size is not None and is_near_end else count
    indices = _first(x, dim, first, descending=is_near_end)[1]
    return sliced(indices, dim, first - 1, 1)


def _chosen(x: TracedTensor, index: TracedTensor, dim: int, keepdim: bool) -> tuple[TracedTensor, TracedTensor]:
    """The elements at indices along a dim, and these, without the dim unless it is kept."""
    if not x.ndim:
        return cast(x, x.dtype), index
    found = take_along_dim(x, index, dim), index
    return found if keepdim else (squeeze(found[0], dim), squeeze(found[1], dim))


def _length(x: TracedTensor, dim: int) -> Dim:
    return x._node.shape[dim] if x.ndim else 1


def _count(name: str, x: TracedTensor, dim: int, k: Any) -> int:
    """A number of elements that a dim has.

    Raises:
        TraceError: it is no int.
        ShapeError: there are not so many.
    """
    if isinstance(k, bool) or not hasattr(k, "__index__"):
        raise TraceError(f"{name} with k={k!r}", mend="give an int")
    count = int(k)
    size = x.shape[dim] if x.ndim else 1
    if count < 0 or not holds(x._tracer, count <= size):
        raise ShapeError(f"{name} with k={count} of a dim of {size} elements", mend="give a k that the dim has")
    return count


def _first(x: TracedTensor, dim: int, count: Dim, *, descending: bool) -> tuple[TracedTensor, TracedTensor]:
    """The first elements of a dim in order, and their indices."""
    own = dtype_of(x)
    if own.is_float8:
        raise no_arithmetic("topk", own)
    if not x.ndim:
        return cast(x, x.dtype), full_like(x, 0, dtype=torch.int64)
    if x._tracer.expects_at_most(x._node.shape[dim], SHORT_ROW):  # a kernel orders such rows itself
        x._tracer.require_literal_feature(x._node.shape[dim])
    rows = movedim(cast(x, torch.uint8) if own is DType.BOOL else x, dim, -1)
    parts = ((0, dtype_of(rows)), (1, DType.INT64))
    values, indices = (
        rows._tracer.add(Op.TOPK, rows, length=count, descending=descending, result=number, dtype=dtype) for number, dtype in parts
    )
    return cast(movedim(values, -1, dim), x.dtype), movedim(indices, -1, dim)
