"""Orders of the elements of a dim: sorted, the first few, the middle one; and places of numbers in short sorted tables."""

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
from fusegen.trace.functions.common import binary, cast, dtype_of, normalize_dim, numbers, tracer_of, unsupported_argument
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
        raise ShapeError("kthvalue with k=0", hint="count from 1")
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
        raise ShapeError(f"{name} of no elements", hint="there is no middle of nothing")
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
    """A number of elements that a dim has."""
    if isinstance(k, bool) or not hasattr(k, "__index__"):
        raise TraceError(f"{name} with k={k!r}", hint="give an int")
    count = int(k)
    size = x.shape[dim] if x.ndim else 1
    if count < 0 or not holds(x._tracer, count <= size):
        raise ShapeError(f"{name} with k={count} of a dim of {size} elements", hint="give a k that the dim has")
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


_LONGEST_TABLE = 1024  # entries: each is compared with each number


# Places of numbers in short sorted tables.


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
    """Counts the entries of a sorted table before each number: those below it, or, from the right, those not above it.

    Args:
        sorted_sequence: a vector, or a table for each row of `input`.
        input: numbers to look up, or one Python number.
        out_int32: counts are int32, and not int64.
        right, side: from the right: `right=True` or `side="right"`.
        sorter: int64 of the table's shape: the order in which the table's last dim is sorted.
    """
    if side not in (None, "left", "right") or (side == "left" and right):
        raise TraceError(f"searchsorted with side={side!r} and right={right}", hint="give one of them")
    tracer = tracer_of(sorted_sequence, input)
    table = numbers("searchsorted", tracer.lift(sorted_sequence))
    if sorter is not None:
        table = _in_order(table, tracer.lift(sorter))
    x = numbers("searchsorted", tracer.lift(input) if isinstance(input, torch.Tensor) else cast(tracer.lift(input), table.dtype))
    if dtype_of(table) is not dtype_of(x):
        raise TraceError(f"searchsorted of {dtype_of(x)} among {dtype_of(table)}", hint="convert one of them")
    if not table.ndim or (table.ndim > 1 and table.ndim != x.ndim):
        shapes = " and ".join(shape_text(t._node.shape) for t in (table, x))
        raise ShapeError(f"searchsorted of shapes {shapes}", hint="give a vector, or a table for each row")
    if table.ndim > 1:
        require_shape("searchsorted: the table", table, (*x._node.shape[:-1], table._node.shape[-1]))
        table = unsqueeze(table, -2)
    _require_short("searchsorted", table)
    is_behind = binary(Op.GT if right or side == "right" else Op.GE, table, unsqueeze(x, -1))
    count = reductions.sum(_negated(is_behind), -1)
    return cast(count, torch.int32) if out_int32 else count


def _in_order(table: TracedTensor, sorter: TracedTensor) -> TracedTensor:
    """A table along its last dim in the order that a sorter gives."""
    if dtype_of(sorter) is not DType.INT64:
        raise TraceError(f"searchsorted with a sorter of {dtype_of(sorter)}", hint="convert it to torch.int64")
    require_shape("searchsorted: the sorter", sorter, table._node.shape)
    return gather(table, -1, sorter)


@implements("bucketize")
def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> TracedTensor:
    """The number of the bucket that each number falls into: how many boundaries come before it."""
    if tracer_of(input, boundaries).lift(boundaries).ndim != 1:
        raise ShapeError("bucketize by boundaries that are no vector", hint="give a vector")
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


@implements("isin")
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> TracedTensor:
    """True for each number that is among some others."""
    tracer = tracer_of(elements, test_elements)
    x, others = (numbers("isin", tracer.lift(t)) for t in (elements, test_elements))
    table = reshaped(others, (simplify_dim(product(others._node.shape)),))
    _require_short("isin", table)
    found = reductions.any_(binary(Op.EQ, unsqueeze(x, -1), table), -1)
    return _negated(found) if invert else found


def _negated(x: TracedTensor) -> TracedTensor:
    return x._tracer.add(Op.LOGICAL_NOT, x)


def _require_short(name: str, table: TracedTensor) -> None:
    size = table._node.shape[-1]
    table._tracer.require_literal(size)
    if (literal(size) or 0) > _LONGEST_TABLE:
        what = f"{name} of a table of {size} entries, each of which would be compared with each number"
        raise UnsupportedError(what, hint=f"give {_LONGEST_TABLE} entries at most, or call it outside of the kernel")
