"""Subscripts, and indices that are values: elements that a tensor of integers names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusegen.dtypes import DType
from fusegen.errors import DimError, ShapeError, TraceError, UnsupportedError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, exact_quotient, literal, product, same, simplify_dim
from fusegen.lang.functions import pointwise
from fusegen.lang.functions.common import binary, dtype_of, normalize_dim, tracer_of, unsupported_argument
from fusegen.lang.functions.coordinates import Coordinates
from fusegen.lang.functions.views import cat, holds, is_negative, reshaped, select, sliced, unsqueeze
from fusegen.lang.registry import implements
from fusegen.lang.tracer import Tracer
from fusegen.lang.values import SymbolicSize, TracedTensor, dim_of

_KEYS = (int, np.integer, slice, SymbolicSize, torch.Tensor)
_MOST_NUMBERS = 64  # in a list between brackets: each is a view of its own


def taken(x: TracedTensor, dim: int, index: TracedTensor, *, wraps: bool) -> TracedTensor:
    """Slices of a tensor along a dim, in the place of which the index's dims come.

    Args:
        wraps: whether a negative index counts from the end.
    """
    shape, count = x._node.shape, simplify_dim(product(index._node.shape))
    along = [1] * dim + [count] + [1] * (x.ndim - dim - 1)
    wide = x._tracer.add(Op.EXPAND, reshaped(index, along), shape=(*shape[:dim], count, *shape[dim + 1 :]))
    return reshaped(_gathered(x, dim, wide, wraps=wraps), (*shape[:dim], *index._node.shape, *shape[dim + 1 :]))


def _gathered(x: TracedTensor, dim: int, index: TracedTensor, *, wraps: bool = False) -> TracedTensor:
    if dtype_of(index) not in (DType.INT32, DType.INT64):
        raise TraceError(f"an index of {dtype_of(index)}", mend="convert it to torch.int64")
    if 0 not in index._node.shape and same(x._node.shape[dim], 0):
        raise ShapeError(f"indices into a dim of size 0 of a tensor of shape {shape_text(x._node.shape)}", mend="give it elements")
    return x._tracer.add(Op.GATHER, x, index, dim=dim, wraps=wraps)


# Between brackets.


@implements("__getitem__")
def getitem(input: Any, key: Any) -> TracedTensor:
    """Ints, slices with positive steps, None, the ellipsis, and tensors or lists of integers."""
    return _indexed(*_complete(input, key), at_once=False)


def place_of(input: TracedTensor, key: Any) -> TracedTensor:
    """The same, to be written to: of what the function computes one index says where an element is."""
    return _indexed(*_complete(input, key), at_once=not input._memory.declared)


def _complete(input: Any, key: Any) -> tuple[TracedTensor, list[Any]]:
    """The tensor, and keys for all its dims, without an ellipsis."""
    keys = list(key) if isinstance(key, tuple) else [key]
    _check_keys(keys)
    input = tracer_of(input, *keys).lift(input)
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > input.ndim:
        raise DimError(f"{used} indices for a tensor of {input.ndim} dims", mend="give one index a dim at most")
    gap = next((n for n, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[gap : gap + 1] = [slice(None)] * (input.ndim - used)
    return input, keys


def _check_keys(keys: list[Any]) -> None:
    for k in keys:
        if not (k is None or k is Ellipsis or isinstance(k, _KEYS) or _is_numbers(k)) or isinstance(k, bool):
            raise UnsupportedError(
                f"indexing by a {type(k).__name__} cannot be traced",
                mend="use ints, slices, None, ... and tensors or short lists of integers; torch.where for masks",
            )
    if sum(k is Ellipsis for k in keys) > 1:
        raise ShapeError("an index with several ellipses", mend="use one; the dims that it stands for follow from the others")


def _is_numbers(key: Any) -> bool:
    """Whether a key is a list of a few ints."""
    of_ints = isinstance(key, list) and all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in key)
    return of_ints and len(key) <= _MOST_NUMBERS


def _indexed(input: TracedTensor, keys: list[Any], *, at_once: bool) -> TracedTensor:
    result, place = input, 0
    together = sum(isinstance(k, list) or (isinstance(k, torch.Tensor) and k.ndim > 0) for k in keys) > 1
    indices: dict[int, TracedTensor] = {}
    for k in keys:
        if k is None:
            result, place = unsqueeze(result, place), place + 1
        elif together and isinstance(k, (torch.Tensor, list)) and not (isinstance(k, torch.Tensor) and not k.ndim):
            indices[place], place = _index(input._tracer, k), place + 1
        elif isinstance(k, torch.Tensor):
            result, place = _by_tensor(result, place, k), place + k.ndim
        elif isinstance(k, list):
            result, place = _by_numbers(result, place, k), place + 1
        elif isinstance(k, slice):
            result, place = _slice_dim(result, place, k), place + 1
        else:
            result = select(result, place, k)
    if not indices:
        return result
    coordinates = Coordinates.of(result, tuple(indices), tuple(indices.values()))
    return coordinates.chosen_at_once(result) if at_once else coordinates.chosen(result)


def _index(tracer: Tracer, key: Any) -> TracedTensor:
    """One of several keys: a tensor of integers, or a list as one.

    Raises:
        UnsupportedError: it is a mask.
    """
    if isinstance(key, list):
        numbers = [reshaped(tracer.constant(int(number), DType.INT64), (1,)) for number in key]
        return cat(numbers, 0) if numbers else tracer.add(Op.IOTA, shape=(0,), dtype=DType.INT64)
    index = tracer.lift(key)
    if dtype_of(index) in (DType.BOOL, DType.UINT8):
        raise _mask_refused()
    if dtype_of(index) not in (DType.INT32, DType.INT64):
        raise TraceError(f"an index of {dtype_of(index)}", mend="convert it to torch.int64")
    return index


def _mask_refused() -> UnsupportedError:
    what = "indexing by a mask cannot be traced: the result's size depends on its values"
    return UnsupportedError(what, mend="use torch.where(mask, x, other)")


def _slice_dim(x: TracedTensor, dim: int, key: slice) -> TracedTensor:
    size = x._node.shape[dim]
    step = 1 if key.step is None else int(key.step)
    if step <= 0:
        raise ShapeError("a slice's step must be positive", mend="torch has no negative steps either")
    tracer = x._tracer
    start = 0 if key.start is None else _clipped(tracer, key.start, size)
    stop = size if key.stop is None else _clipped(tracer, key.stop, size)
    span = simplify_dim(stop - start)
    if step == 1 and same(start, 0) and same(stop, size):
        return x
    if not holds(tracer, span > 0):
        return sliced(x, dim, 0, 0)
    known = literal(span)
    if known is not None:
        return sliced(x, dim, start, -(-known // step), step)
    length = exact_quotient(span, step)
    if length is None:
        tracer.require_literal(span)
        text = f"a slice of the run-time size {size} by a step of {step} is not supported"
        raise UnsupportedError(text, mend="lower with example tensors")
    return sliced(x, dim, start, length, step)


def _clipped(tracer: Tracer, index: Any, size: Dim) -> Dim:
    """A border of a slice counted from the front, between 0 and the size; a guard where the size is symbolic."""
    place = dim_of(index)
    if is_negative(tracer, place):
        place = simplify_dim(size + place)
        if is_negative(tracer, place):
            return 0
    return place if holds(tracer, place <= size) else size


def _by_tensor(x: TracedTensor, dim: int, index: Any) -> TracedTensor:
    """A tensor as a key between brackets: negative values count from the end.

    Raises:
        UnsupportedError: it is a mask.
    """
    chosen = x._tracer.lift(index)
    if dtype_of(chosen) in (DType.BOOL, DType.UINT8):
        raise _mask_refused()
    return taken(x, dim, chosen, wraps=True)


def _by_numbers(x: TracedTensor, dim: int, numbers: list[int]) -> TracedTensor:
    """A list as a key between brackets: views, one behind the other."""
    chosen = [unsqueeze(select(x, dim, number), dim) for number in numbers]
    return cat(chosen, dim) if chosen else sliced(x, dim, 0, 0)


# By functions.


@implements("F.embedding")
def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TracedTensor:
    """Rows of a table. Those of ``padding_idx`` leave no gradient; gradients are dense, ``sparse`` or not."""
    unsupported_argument("embedding", max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq)
    tracer = tracer_of(input, weight)
    ids, table = tracer.lift(input), tracer.lift(weight)
    if table.ndim != 2:
        raise ShapeError(f"embedding by a table of {table.ndim} dims", mend="give it the shape (rows, features)")
    if padding_idx is not None:
        _require_row(tracer, padding_idx, table._node.shape[0])
    rows = taken(table, 0, ids, wraps=False)
    if padding_idx is None:
        return rows
    padding = padding_idx if padding_idx >= 0 else tracer.size(table._node.shape[0]) + padding_idx
    is_padding = unsqueeze(binary(Op.EQ, ids, padding), -1)
    return pointwise.where(is_padding, tracer.add(Op.DETACH, rows), rows)


def _require_row(tracer: Tracer, index: int, size: Dim) -> None:
    """Refuses a number that is no row.

    Raises:
        ShapeError: it is too large, or too small.
    """
    if not (holds(tracer, size > index) and holds(tracer, size >= -index)):
        raise ShapeError(f"padding_idx {index} of a table of {size} rows", mend="name a row of the table")


@implements("gather")
def gather(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> TracedTensor:
    """The elements that the index names along a dim, at its own places along all others."""
    tracer = tracer_of(input, index)
    x, chosen = tracer.lift(input), tracer.lift(index)
    place = normalize_dim(dim, x.ndim)
    if not x.ndim or not chosen.ndim:
        x, chosen = (reshaped(t, (1,)) if not t.ndim else t for t in (x, chosen))
        return reshaped(gather(x, place, chosen), tracer.lift(index)._node.shape)
    if chosen.ndim == x.ndim:
        for d, (size, most) in enumerate(zip(chosen._node.shape, x._node.shape, strict=True)):
            if d != place and not holds(tracer, size <= most):
                raise ShapeError(
                    f"gather: an index of shape {shape_text(chosen._node.shape)} for a tensor of shape {shape_text(x._node.shape)}",
                    mend=f"an index may be larger than the tensor along dim {place} alone",
                )
    return _gathered(x, place, chosen)


@implements("take_along_dim")
def take_along_dim(input: Any, indices: Any, dim: int | None = None) -> TracedTensor:
    """As gather, of a tensor and an index that broadcast along all other dims; without dim, of the flat ones. Along a
    dim, negative values count from the end; what lies beyond is out of range, where torch takes the remainder."""
    tracer = tracer_of(input, indices)
    x, chosen = tracer.lift(input), tracer.lift(indices)
    if dtype_of(chosen) is not DType.INT64:
        raise TraceError(f"take_along_dim by indices of {dtype_of(chosen)}", mend="convert them to torch.int64")
    if dim is None:
        x, chosen = (reshaped(t, (simplify_dim(product(t._node.shape)),)) for t in (x, chosen))
    if x.ndim != chosen.ndim:
        raise ShapeError(f"take_along_dim of {x.ndim} dims by indices of {chosen.ndim} dims", mend="give both as many dims")
    place = normalize_dim(0 if dim is None else dim, x.ndim)
    common = tracer.common_shape(*((*t._node.shape[:place], 1, *t._node.shape[place + 1 :]) for t in (x, chosen)))
    x, chosen = (tracer.add(Op.EXPAND, t, shape=(*common[:place], t._node.shape[place], *common[place + 1 :])) for t in (x, chosen))
    return _gathered(x, place, chosen, wraps=dim is not None)


@implements("index_select")
def index_select(input: Any, dim: int, index: Any) -> TracedTensor:
    """The slices along a dim that a vector names."""
    tracer = tracer_of(input, index)
    x, chosen = tracer.lift(input), tracer.lift(index)
    if chosen.ndim > 1:
        raise ShapeError(f"index_select by an index of {chosen.ndim} dims", mend="give a vector")
    place = normalize_dim(dim, x.ndim)
    if not x.ndim:
        return reshaped(taken(reshaped(x, (1,)), 0, reshaped(chosen, (1,)), wraps=False), ())
    return taken(x, place, reshaped(chosen, (simplify_dim(product(chosen._node.shape)),)), wraps=False)
