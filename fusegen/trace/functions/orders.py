"""Sorting, top-k and medians along a dim, and look-ups in short sorted tables."""

from __future__ import annotations

from typing import Any

import torch

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError, UnsupportedError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.reductions import SHORT_ROW
from fusegen.ir.symbolic import Dim, literal, product, simplify_dim
from fusegen.trace.functions import pointwise, reductions
from fusegen.trace.functions.common import binary, cast, dtype_of, normalize_dim, require_number, tracer_of, unsupported_argument
from fusegen.trace.functions.creation import full_like
from fusegen.trace.functions.indexing import gather, take_along_dim
from fusegen.trace.functions.reductions import any_, argmax, count_nonzero
from fusegen.trace.functions.views import holds, movedim, require_shape, reshaped, sliced, squeeze, unsqueeze
from fusegen.trace.modes import no_arithmetic
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor


@implements("topk")
def topk(
    input: TracedTensor, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None
) -> torch.return_types.topk:
    """The k largest or smallest elements of a dim and their indices, always sorted."""
    unsupported_argument("topk", out=out)
    axis = normalize_dim(dim, input.ndim)
    ordered = _ordered_prefix(input, axis, _checked_k("topk", input, axis, k), descending=bool(largest))
    return torch.return_types.topk(ordered)  # type: ignore[arg-type]


@implements("sort")
def sort(
    input: TracedTensor, dim: int = -1, descending: bool = False, stable: bool | None = None, *, out: Any = None
) -> torch.return_types.sort:
    """Stable sort of a dim, and the indices."""
    unsupported_argument("sort", out=out)
    axis = normalize_dim(dim, input.ndim)
    ordered = _ordered_prefix(input, axis, _dim_size(input, axis), descending=bool(descending))
    return torch.return_types.sort(ordered)  # type: ignore[arg-type]


@implements("argsort")
def argsort(input: TracedTensor, dim: int = -1, descending: bool = False, stable: bool = False) -> TracedTensor:
    axis = normalize_dim(dim, input.ndim)
    return _ordered_prefix(input, axis, _dim_size(input, axis), descending=bool(descending))[1]


@implements("msort")
def msort(input: TracedTensor, *, out: Any = None) -> TracedTensor:
    unsupported_argument("msort", out=out)
    return _ordered_prefix(input, 0, _dim_size(input, 0), descending=False)[0]


@implements("kthvalue")
def kthvalue(input: TracedTensor, k: Any, dim: int = -1, keepdim: bool = False, *, out: Any = None) -> torch.return_types.kthvalue:
    unsupported_argument("kthvalue", out=out)
    axis = normalize_dim(dim, input.ndim)
    count = _checked_k("kthvalue", input, axis, k)
    if count < 1:
        raise ShapeError("kthvalue: k=0 selects no element", hint="count from 1")
    return torch.return_types.kthvalue(_select_along(input, _kth_index(input, axis, count), axis, keepdim))  # type: ignore[arg-type]


@implements("median")
def median(input: TracedTensor, dim: int | None = None, keepdim: bool = False, *, out: Any = None) -> Any:
    """The lower median of a dim and its index, or NaN if there is one. Without a dim, the median value of all elements."""
    return _median("median", input, dim, keepdim, out)


@implements("nanmedian")
def nanmedian(input: TracedTensor, dim: int | None = None, keepdim: bool = False, *, out: Any = None) -> Any:
    """The median that ignores NaN."""
    return _median("nanmedian", input, dim, keepdim, out)


def _median(name: str, input: TracedTensor, dim: int | None, keepdim: bool, out: Any) -> Any:
    unsupported_argument(name, out=out)
    require_number(name, input)
    if dim is None:
        flat = reshaped(input, (simplify_dim(product(input._node.shape)),))
        return _select_along(flat, _median_index(name, flat, 0), 0, keepdim=False)[0]
    axis = normalize_dim(dim, input.ndim)
    result = _select_along(input, _median_index(name, input, axis), axis, keepdim)
    return getattr(torch.return_types, name)(result)


def _median_index(name: str, x: TracedTensor, dim: int) -> TracedTensor:
    """Returns the index of the median; the dim is kept."""
    if not x.ndim:
        return full_like(x, 0, dtype=torch.int64)
    size = literal(_dim_size(x, dim))
    if size == 0:
        raise ShapeError(f"{name} of no elements has no result", hint="give one element or more")
    if name == "median" and size is not None:
        index = _kth_index(x, dim, (size + 1) // 2)
    else:
        excluded = pointwise.isnan(x) if name == "nanmedian" else full_like(x, False, dtype=torch.bool)
        count = unsqueeze(count_nonzero(binary(Op.EQ, excluded, False), dim), dim)
        position = pointwise.clamp(binary(Op.FLOOR_DIVIDE, pointwise.sub(count, 1), 2), min=0)
        index = take_along_dim(_ordered_prefix(x, dim, _dim_size(x, dim), descending=False)[1], position, dim)
    if name == "nanmedian" or not dtype_of(x).is_float:
        return index
    has_nan = any_(pointwise.isnan(x), dim, keepdim=True)
    return pointwise.where(has_nan, argmax(x, dim, keepdim=True), index)


def _kth_index(x: TracedTensor, dim: int, count: int) -> TracedTensor:
    """Returns the index of the k-th smallest element, sorting from the end that is closer; the dim is kept."""
    if not x.ndim:
        return full_like(x, 0, dtype=torch.int64)
    size = literal(_dim_size(x, dim))
    is_near_end = size is not None and size - count + 1 < count
    first = size - count + 1 if size is not None and is_near_end else count
    indices = _ordered_prefix(x, dim, first, descending=is_near_end)[1]
    return sliced(indices, dim, first - 1, 1)


def _select_along(x: TracedTensor, index: TracedTensor, dim: int, keepdim: bool) -> tuple[TracedTensor, TracedTensor]:
    """Returns the elements at indices along a dim, and the indices."""
    if not x.ndim:
        return cast(x, x.dtype), index
    selected = take_along_dim(x, index, dim), index
    return selected if keepdim else (squeeze(selected[0], dim), squeeze(selected[1], dim))


def _dim_size(x: TracedTensor, dim: int) -> Dim:
    return x._node.shape[dim] if x.ndim else 1


def _checked_k(name: str, x: TracedTensor, dim: int, k: Any) -> int:
    """Checks that k is an int from 0 to the dim's size."""
    if isinstance(k, bool) or not hasattr(k, "__index__"):
        raise TraceError(f"{name}: k={k!r} is not an int", hint="give an int")
    count = int(k)
    size = x.shape[dim] if x.ndim else 1
    if count < 0 or not holds(x._tracer, count <= size):
        raise ShapeError(
            f"{name}: k={count} is more than the {size} elements of the dim", hint="give a k of at most the size of the dim"
        )
    return count


def _ordered_prefix(x: TracedTensor, dim: int, count: Dim, *, descending: bool) -> tuple[TracedTensor, TracedTensor]:
    """Returns the first elements of a dim in order, and their indices."""
    original_dtype = dtype_of(x)
    if original_dtype.is_float8:
        raise no_arithmetic("topk", original_dtype)
    if not x.ndim:
        return cast(x, x.dtype), full_like(x, 0, dtype=torch.int64)
    if x._tracer.expects_at_most(x._node.shape[dim], SHORT_ROW):  # a generated kernel orders short rows
        x._tracer.require_literal_feature(x._node.shape[dim])
    rows = movedim(cast(x, torch.uint8) if original_dtype is DType.BOOL else x, dim, -1)
    results = ((0, dtype_of(rows)), (1, DType.INT64))
    values, indices = (
        rows._tracer.add(Op.TOPK, rows, length=count, descending=descending, result=number, dtype=dtype)
        for number, dtype in results
    )
    return cast(movedim(values, -1, dim), x.dtype), movedim(indices, -1, dim)


_LONGEST_TABLE = 1024  # entries: every value is compared with all


# Look-ups in short sorted tables.


@implements("searchsorted")
def searchsorted(
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> TracedTensor:
    """Counts the table entries below each number; with `right`, those not above it.

    Args:
        sorted_sequence: a vector, or a table for each row of `input`.
        input: numbers to look up, or one Python number.
        sorter: int64 of the table's shape: the order in which the table's last dim is sorted.
    """
    if side not in (None, "left", "right") or (side == "left" and right):
        raise TraceError(
            f"searchsorted: side={side!r} is invalid with right={right}", hint="give side='left', side='right' or right=True"
        )
    tracer = tracer_of(sorted_sequence, input)
    table = require_number("searchsorted", tracer.lift(sorted_sequence))
    if sorter is not None:
        table = _in_order(table, tracer.lift(sorter))
    x = require_number(
        "searchsorted", tracer.lift(input) if isinstance(input, torch.Tensor) else cast(tracer.lift(input), table.dtype)
    )
    if dtype_of(table) is not dtype_of(x):
        raise TraceError(f"searchsorted: the values are {dtype_of(x)}, the table {dtype_of(table)}", hint="convert one of them")
    if not table.ndim or (table.ndim > 1 and table.ndim != x.ndim):
        shapes = " and ".join(shape_text(t._node.shape) for t in (table, x))
        raise ShapeError(
            f"searchsorted: a table and values of shapes {shapes} do not fit",
            hint="give a table that is a vector, or one for each row",
        )
    if table.ndim > 1:
        require_shape("searchsorted: the table", table, (*x._node.shape[:-1], table._node.shape[-1]))
        table = unsqueeze(table, -2)
    _require_short("searchsorted", table)
    is_after = binary(Op.GT if right or side == "right" else Op.GE, table, unsqueeze(x, -1))
    count = reductions.sum(_negated(is_after), -1)
    return cast(count, torch.int32) if out_int32 else count


def _in_order(table: TracedTensor, sorter: TracedTensor) -> TracedTensor:
    """Orders the last dim of a table by a sorter."""
    if dtype_of(sorter) is not DType.INT64:
        raise TraceError(f"searchsorted: the sorter is {dtype_of(sorter)}", hint="convert it to torch.int64")
    require_shape("searchsorted: the sorter", sorter, table._node.shape)
    return gather(table, -1, sorter)


@implements("bucketize")
def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> TracedTensor:
    """Counts the boundaries before each number."""
    if tracer_of(input, boundaries).lift(boundaries).ndim != 1:
        raise ShapeError("bucketize: boundaries must be a vector", hint="give a vector")
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


@implements("isin")
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> TracedTensor:
    tracer = tracer_of(elements, test_elements)
    x, test_values = (require_number("isin", tracer.lift(t)) for t in (elements, test_elements))
    table = reshaped(test_values, (simplify_dim(product(test_values._node.shape)),))
    _require_short("isin", table)
    is_member = reductions.any_(binary(Op.EQ, unsqueeze(x, -1), table), -1)
    return _negated(is_member) if invert else is_member


def _negated(x: TracedTensor) -> TracedTensor:
    return x._tracer.add(Op.LOGICAL_NOT, x)


def _require_short(name: str, table: TracedTensor) -> None:
    size = table._node.shape[-1]
    table._tracer.require_literal(size)
    if (literal(size) or 0) > _LONGEST_TABLE:
        message = f"{name}: a table of {size} entries is too long, because each number is compared with all entries"
        raise UnsupportedError(message, hint=f"give at most {_LONGEST_TABLE} entries, or call it outside the kernel")
