"""Subscripts and tensor indices: gathers, and deterministic sums at indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusegen.dtypes import DType
from fusegen.errors import DimError, ShapeError, TraceError, UnsupportedError
from fusegen.ir.index_map import contiguous_strides
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, exact_quotient, literal, product, same, simplify_dim
from fusegen.trace.functions import pointwise
from fusegen.trace.functions.common import binary, dtype_of, normalize_dim, tracer_of, unsupported_argument
from fusegen.trace.functions.creation import iota
from fusegen.trace.functions.views import (
    cat,
    holds,
    is_negative,
    movedim,
    permuted,
    require_shape,
    reshaped,
    select,
    sliced,
    unsqueeze,
)
from fusegen.trace.registry import implements
from fusegen.trace.scalars import SymbolicSize, dim_of
from fusegen.trace.tracer import Tracer
from fusegen.trace.values import TracedTensor


def bounds_checked(index: TracedTensor, length: Dim, *, wraps: bool) -> TracedTensor:
    """Returns indices counted from the front, by gathering from an iota: the gather's bounds check applies to them."""
    _require_integers(index)
    flat = reshaped(index, (simplify_dim(product(index._node.shape)),))
    positions = iota(index._tracer, length)
    return reshaped(index._tracer.add(Op.GATHER, positions, flat, dim=0, wraps=wraps), index._node.shape)


def _expanded(index: TracedTensor, shape: tuple[Dim, ...]) -> TracedTensor:
    """Expands an index to a shape."""
    current = index._node.shape
    is_same = len(current) == len(shape) and all(map(same, current, shape))
    return index if is_same else index._tracer.add(Op.EXPAND, index, shape=shape)


@dataclass(frozen=True)
class Coordinates:
    """The elements that tensor indices select.

    Attributes:
        sizes: shape of the indexed tensor.
        dims: indexed dims, in order.
        shape: common shape of the indices.
        indices: flat, one for each indexed dim; negative values count from the end.
    """

    sizes: tuple[Dim, ...]
    dims: tuple[int, ...]
    shape: tuple[Dim, ...]
    indices: tuple[TracedTensor, ...]

    @classmethod
    def of(cls, x: TracedTensor, dims: Sequence[int], indices: Sequence[TracedTensor]) -> Coordinates:
        shape = x._tracer.common_shape(*(index._node.shape for index in indices))
        flat = (simplify_dim(product(shape)),)
        wide = [reshaped(_expanded(index, shape), flat) for index in indices]
        return cls(x._node.shape, tuple(dims), shape, tuple(wide))

    @property
    def count(self) -> Dim:
        return self.indices[0]._node.shape[0]

    def row_major_index(self) -> TracedTensor:
        """Returns the bounds-checked row-major index over all indexed dims."""
        total: TracedTensor | None = None
        for dim, index in zip(self.dims, self.indices, strict=True):
            along = bounds_checked(index, self.sizes[dim], wraps=True)
            size = index._tracer.size(self.sizes[dim])
            total = along if total is None else pointwise.add(pointwise.mul(total, size), along)
        assert total is not None
        return total

    @property
    def length(self) -> Dim:
        """Number of elements of the indexed dims."""
        return simplify_dim(product(self.sizes[d] for d in self.dims))

    @property
    def other_dims(self) -> tuple[int, ...]:
        """The dims that are not indexed."""
        return tuple(d for d in range(len(self.sizes)) if d not in self.dims)

    def merged_in_front(self, x: TracedTensor) -> TracedTensor:
        """Moves the indexed dims to the front and merges them into one."""
        return reshaped(permuted(x, (*self.dims, *self.other_dims)), (self.length, *(self.sizes[d] for d in self.other_dims)))

    def gathered(self, x: TracedTensor) -> TracedTensor:
        """Gathers along one indexed dim after another. Each index selects from the previous result."""
        pairs = sorted(zip(self.dims, self.indices, strict=True), key=lambda pair: not self._is_full_range(*pair))
        gathered = permuted(x, (*(dim for dim, _ in pairs), *self.other_dims))
        for number, (indexed_dim, index) in enumerate(pairs):
            if not number and self._is_full_range(indexed_dim, index):
                continue
            dim = min(number, 1)
            trailing = gathered._node.shape[dim + 1 :]
            along = reshaped(index, (self.count, *(1 for _ in gathered._node.shape[1:])))
            wide = x._tracer.add(Op.EXPAND, along, shape=(self.count, *(1,) * dim, *trailing))
            gathered = reshaped(x._tracer.add(Op.GATHER, gathered, wide, dim=dim, wraps=True), (self.count, *trailing))
        return self.with_index_dims(reshaped(gathered, (*self.shape, *(self.sizes[d] for d in self.other_dims))))

    def unmerged(self, x: TracedTensor) -> TracedTensor:
        """Inverts `merged_in_front`."""
        order = (*self.dims, *self.other_dims)
        return permuted(reshaped(x, tuple(self.sizes[d] for d in order)), [order.index(d) for d in range(len(order))])

    def gathered_at_once(self, x: TracedTensor) -> TracedTensor:
        """Gathers by one row-major index over all indexed dims: equal coordinates have equal indices."""
        front = self.merged_in_front(x)
        along = reshaped(self.row_major_index(), (self.count, *(1 for _ in self.other_dims)))
        wide = x._tracer.add(Op.EXPAND, along, shape=(self.count, *front._node.shape[1:]))
        gathered = x._tracer.add(Op.GATHER, front, wide, dim=0, wraps=False)
        return self.with_index_dims(reshaped(gathered, (*self.shape, *front._node.shape[1:])))

    def _is_full_range(self, dim: int, index: TracedTensor) -> bool:
        """True if an index is `torch.arange` over its whole dim."""
        return index._node.op is Op.IOTA and same(index._node.shape[0], self.sizes[dim])

    def with_index_dims(self, chosen: TracedTensor) -> TracedTensor:
        """Moves the indices' dims where torch puts them: in place of adjacent indexed dims, else in front."""
        first, rank = self.dims[0], len(self.shape)
        if self.dims != tuple(range(first, first + len(self.dims))):
            return chosen
        before = range(rank, rank + first)
        return permuted(chosen, (*before, *range(rank), *range(rank + first, chosen.ndim)))


_KEYS = (int, np.integer, slice, SymbolicSize, torch.Tensor)
_MOST_NUMBERS = 64  # of a list in a subscript: each becomes a view


def gather_slices(x: TracedTensor, dim: int, index: TracedTensor, *, wraps: bool) -> TracedTensor:
    """Gathers slices along a dim, which the index's dims replace. With `wraps`, negative indices count from the end."""
    shape, count = x._node.shape, simplify_dim(product(index._node.shape))
    along = [1] * dim + [count] + [1] * (x.ndim - dim - 1)
    wide = x._tracer.add(Op.EXPAND, reshaped(index, along), shape=(*shape[:dim], count, *shape[dim + 1 :]))
    return reshaped(_gathered(x, dim, wide, wraps=wraps), (*shape[:dim], *index._node.shape, *shape[dim + 1 :]))


def _gathered(x: TracedTensor, dim: int, index: TracedTensor, *, wraps: bool = False) -> TracedTensor:
    _require_integers(index)
    if 0 not in index._node.shape and same(x._node.shape[dim], 0):
        raise ShapeError(
            f"a dim of size 0 cannot be indexed: the tensor has shape {shape_text(x._node.shape)}",
            hint="give a tensor with elements",
        )
    return x._tracer.add(Op.GATHER, x, index, dim=dim, wraps=wraps)


# Subscripts.


@implements("__getitem__")
def getitem(input: Any, key: Any) -> TracedTensor:
    """Indexing by ints, slices with positive steps, None, an ellipsis, and tensors or lists of integers."""
    return _indexed(*_complete(input, key), at_once=False)


def write_target(input: TracedTensor, key: Any) -> TracedTensor:
    """Returns the indexed elements to write to. One row-major index selects each, except in the caller's memory."""
    return _indexed(*_complete(input, key), at_once=not input._memory.declared)


def _complete(input: Any, key: Any) -> tuple[TracedTensor, list[Any]]:
    """Returns the tensor and a key for each of its dims; an ellipsis is expanded."""
    keys = list(key) if isinstance(key, tuple) else [key]
    _check_keys(keys)
    input = tracer_of(input, *keys).lift(input)
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > input.ndim:
        raise DimError(f"{used} indices for a tensor of {input.ndim} dims", hint="give at most one index per dim")
    gap = next((n for n, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[gap : gap + 1] = [slice(None)] * (input.ndim - used)
    return input, keys


def _check_keys(keys: list[Any]) -> None:
    for k in keys:
        if not (k is None or k is Ellipsis or isinstance(k, _KEYS) or _is_short_list(k)) or isinstance(k, bool):
            raise UnsupportedError(
                f"indexing by a {type(k).__name__} cannot be traced",
                hint="use ints, slices, None, ... and tensors or short lists of integers; torch.where for masks",
            )
    if sum(k is Ellipsis for k in keys) > 1:
        raise ShapeError("an index has more than one ellipsis", hint="use one ellipsis")


def _is_short_list(key: Any) -> bool:
    """True for a list of at most `_MOST_NUMBERS` ints."""
    of_ints = isinstance(key, list) and all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in key)
    return of_ints and len(key) <= _MOST_NUMBERS


def _indexed(input: TracedTensor, keys: list[Any], *, at_once: bool) -> TracedTensor:
    result, dim = input, 0
    is_joint = sum(isinstance(k, list) or (isinstance(k, torch.Tensor) and k.ndim > 0) for k in keys) > 1
    indices: dict[int, TracedTensor] = {}
    for k in keys:
        if k is None:
            result, dim = unsqueeze(result, dim), dim + 1
        elif is_joint and isinstance(k, (torch.Tensor, list)) and not (isinstance(k, torch.Tensor) and not k.ndim):
            indices[dim], dim = _index(input._tracer, k), dim + 1
        elif isinstance(k, torch.Tensor):
            result, dim = gather_slices(result, dim, _index(input._tracer, k), wraps=True), dim + k.ndim
        elif isinstance(k, list):
            chosen = [unsqueeze(select(result, dim, number), dim) for number in k]
            result, dim = cat(chosen, dim) if chosen else sliced(result, dim, 0, 0), dim + 1
        elif isinstance(k, slice):
            result, dim = _slice_dim(result, dim, k), dim + 1
        else:
            result = select(result, dim, k)
    if not indices:
        return result
    coordinates = Coordinates.of(result, tuple(indices), tuple(indices.values()))
    return coordinates.gathered_at_once(result) if at_once else coordinates.gathered(result)


def _index(tracer: Tracer, key: Any) -> TracedTensor:
    """Converts a tensor or list key to an index tensor."""
    if isinstance(key, list):
        numbers = [reshaped(tracer.constant(int(number), DType.INT64), (1,)) for number in key]
        return cat(numbers, 0) if numbers else iota(tracer, 0)
    index = tracer.lift(key)
    if dtype_of(index) in (DType.BOOL, DType.UINT8):
        message = "indexing by a mask cannot be traced: the result's size depends on its values"
        raise UnsupportedError(message, hint="use torch.where(mask, x, other)")
    _require_integers(index)
    return index


def _require_integers(index: TracedTensor) -> None:
    if dtype_of(index) not in (DType.INT32, DType.INT64):
        raise TraceError(f"the index tensor is {dtype_of(index)}", hint="convert it to torch.int64")


def _slice_dim(x: TracedTensor, dim: int, key: slice) -> TracedTensor:
    size = x._node.shape[dim]
    step = 1 if key.step is None else int(key.step)
    if step <= 0:
        raise ShapeError(
            "a slice's step must be positive", hint="flip the tensor first; torch does not support negative steps either"
        )
    tracer = x._tracer
    start = 0 if key.start is None else _clipped(tracer, key.start, size)
    stop = size if key.stop is None else _clipped(tracer, key.stop, size)
    span = simplify_dim(stop - start)
    if step == 1 and same(start, 0) and same(stop, size):
        return x
    if not holds(tracer, span > 0):
        return sliced(x, dim, 0, 0)
    static_span = literal(span)
    if static_span is not None:
        return sliced(x, dim, start, -(-static_span // step), step)
    length = exact_quotient(span, step)
    if length is None:
        tracer.require_literal(span)
        text = f"a slice of the run-time size {size} by a step of {step} is not supported"
        raise UnsupportedError(text, hint="lower with example tensors")
    return sliced(x, dim, start, length, step)


def _clipped(tracer: Tracer, index: Any, size: Dim) -> Dim:
    """Returns a slice bound as an index from 0 to the size; adds guards on symbolic sizes."""
    position = dim_of(index)
    if is_negative(tracer, position):
        position = simplify_dim(size + position)
        if is_negative(tracer, position):
            return 0
    return position if holds(tracer, position <= size) else size


# Functions.


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
    """Table look-up. Rows of `padding_idx` get no gradient. Gradients are dense, even with `sparse`."""
    unsupported_argument("embedding", max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq)
    tracer = tracer_of(input, weight)
    ids, table = tracer.lift(input), tracer.lift(weight)
    if table.ndim != 2:
        raise ShapeError(f"embedding: the table has {table.ndim} dims", hint="give a table of shape (rows, features)")
    if padding_idx is not None:
        size = table._node.shape[0]
        if not (holds(tracer, size > padding_idx) and holds(tracer, size >= -padding_idx)):
            raise ShapeError(f"padding_idx {padding_idx} is not a row of a table of {size} rows", hint="give the index of a row")
    rows = gather_slices(table, 0, ids, wraps=False)
    if padding_idx is None:
        return rows
    padding = padding_idx if padding_idx >= 0 else tracer.size(table._node.shape[0]) + padding_idx
    is_padding = unsqueeze(binary(Op.EQ, ids, padding), -1)
    return pointwise.where(is_padding, tracer.add(Op.DETACH, rows), rows)


@implements("gather")
def gather(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> TracedTensor:
    tracer = tracer_of(input, index)
    x, ids = tracer.lift(input), tracer.lift(index)
    axis = normalize_dim(dim, x.ndim)
    if not x.ndim or not ids.ndim:
        x, ids = (reshaped(t, (1,)) if not t.ndim else t for t in (x, ids))
        return reshaped(gather(x, axis, ids), tracer.lift(index)._node.shape)
    if ids.ndim == x.ndim:
        for d, (size, limit) in enumerate(zip(ids._node.shape, x._node.shape, strict=True)):
            if d != axis and not holds(tracer, size <= limit):
                raise ShapeError(
                    f"gather: an index of shape {shape_text(ids._node.shape)} does not fit a tensor of {shape_text(x._node.shape)}",
                    hint=f"an index may be larger than the tensor along dim {axis} only",
                )
    return _gathered(x, axis, ids)


@implements("take_along_dim")
def take_along_dim(input: Any, indices: Any, dim: int | None = None) -> TracedTensor:
    """As gather; tensor and index broadcast along the other dims. Out-of-range indices are errors; torch wraps them."""
    tracer = tracer_of(input, indices)
    x, index = tracer.lift(input), tracer.lift(indices)
    if dtype_of(index) is not DType.INT64:
        raise TraceError(f"take_along_dim: the indices are {dtype_of(index)}", hint="convert them to torch.int64")
    if dim is None:
        x, index = (reshaped(t, (simplify_dim(product(t._node.shape)),)) for t in (x, index))
    if x.ndim != index.ndim:
        raise ShapeError(
            f"take_along_dim: the tensor has {x.ndim} dims, the indices {index.ndim}", hint="give both the same number of dims"
        )
    axis = normalize_dim(0 if dim is None else dim, x.ndim)
    common = tracer.common_shape(*((*t._node.shape[:axis], 1, *t._node.shape[axis + 1 :]) for t in (x, index)))
    x, index = (tracer.add(Op.EXPAND, t, shape=(*common[:axis], t._node.shape[axis], *common[axis + 1 :])) for t in (x, index))
    return _gathered(x, axis, index, wraps=dim is not None)


@implements("index_select")
def index_select(input: Any, dim: int, index: Any) -> TracedTensor:
    tracer = tracer_of(input, index)
    x, indices = tracer.lift(input), tracer.lift(index)
    if indices.ndim > 1:
        raise ShapeError(f"index_select: the index has {indices.ndim} dims", hint="give a vector")
    axis = normalize_dim(dim, x.ndim)
    if not x.ndim:
        return reshaped(gather_slices(reshaped(x, (1,)), 0, reshaped(indices, (1,)), wraps=False), ())
    return gather_slices(x, axis, reshaped(indices, (simplify_dim(product(indices._node.shape)),)), wraps=False)


@implements("take")
def take(input: Any, index: Any) -> TracedTensor:
    tracer = tracer_of(input, index)
    x, indices = tracer.lift(input), tracer.lift(index)
    if dtype_of(indices) is not DType.INT64:
        raise TraceError(f"take: the indices are {dtype_of(indices)}", hint="convert them to torch.int64")
    return gather_slices(reshaped(x, (simplify_dim(product(x._node.shape)),)), 0, indices, wraps=True)


# Sums at indices, of slices and of single elements.


@implements("index_add")
def index_add(input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> TracedTensor:
    """Adds slices along a dim at the indices of a vector."""
    tracer = tracer_of(input, index, source)
    x, indices, slices = tracer.lift(input), tracer.lift(index), tracer.lift(source)
    require_one_dtype("index_add", x, slices)
    axis = normalize_dim(dim, x.ndim)
    if indices.ndim > 1:
        raise ShapeError(f"index_add: the index has {indices.ndim} dims", hint="give a vector")
    if not x.ndim:
        return reshaped(index_add(reshaped(x, (1,)), 0, indices, reshaped(slices, (1,)), alpha=alpha), ())
    count = simplify_dim(product(indices._node.shape))
    require_shape("index_add: the source", slices, (*x._node.shape[:axis], count, *x._node.shape[axis + 1 :]))
    values = slices if isinstance(alpha, (int, float)) and alpha == 1 else pointwise.mul(slices, alpha)
    return pointwise.add(x, _segment_sums(values, reshaped(indices, (count,)), axis, x._node.shape[axis], wraps=False))


def index_put_accumulate(input: Any, indices: Any, values: Any) -> TracedTensor:
    """Adds values at tensor indices along the first dims."""
    tracer = tracer_of(input, *indices, values)
    x, added, index_tensors = tracer.lift(input), tracer.lift(values), [tracer.lift(index) for index in indices]
    require_one_dtype("index_put", x, added)
    if any(dtype_of(index) in (DType.BOOL, DType.UINT8) for index in index_tensors) or not x.ndim:
        raise UnsupportedError("index_put by a mask cannot be traced", hint="use torch.where(mask, x + value, x)")
    if not 0 < len(index_tensors) <= x.ndim:
        raise ShapeError(f"index_put: {len(index_tensors)} indices for {x.ndim} dims", hint="give at most one index per dim")
    coordinates = Coordinates.of(x, range(len(index_tensors)), index_tensors)
    shape = (*coordinates.shape, *x._node.shape[len(index_tensors) :])
    if tracer.common_shape(shape, added._node.shape) != shape:
        text = f"index_put: values of {shape_text(added._node.shape)} do not fit the indexed part of {shape_text(shape)}"
        raise ShapeError(text, hint="give values that broadcast to the indexed part")
    wide = reshaped(tracer.add(Op.EXPAND, added, shape=shape), (coordinates.count, *x._node.shape[len(index_tensors) :]))
    sums = _segment_sums(wide, coordinates.row_major_index(), 0, coordinates.length, wraps=False)
    return pointwise.add(x, coordinates.unmerged(sums))


@implements("scatter_add")
def scatter_add(input: Any, dim: int, index: Any, src: Any) -> TracedTensor:
    """Adds elements at indices along a dim."""
    tracer = tracer_of(input, index, src)
    x, indices, source = tracer.lift(input), tracer.lift(index), tracer.lift(src)
    require_one_dtype("scatter_add", x, source)
    axis = normalize_dim(dim, x.ndim)
    if not x.ndim == indices.ndim == source.ndim:
        text = f"scatter_add: the source has {source.ndim} dims, the index {indices.ndim}, the tensor {x.ndim}"
        raise ShapeError(text, hint="give all three the same number of dims")
    if not x.ndim:
        return reshaped(scatter_add(reshaped(x, (1,)), 0, reshaped(indices, (1,)), reshaped(source, (1,))), ())
    for d, size in enumerate(indices._node.shape):
        if not holds(tracer, size <= source._node.shape[d]) or (d != axis and not holds(tracer, size <= x._node.shape[d])):
            shapes = " and ".join(shape_text(t._node.shape) for t in (source, x))
            text = f"scatter_add by an index of shape {shape_text(indices._node.shape)}, a source and a tensor of shape {shapes}"
            raise ShapeError(text, hint=f"an index may be larger than the tensor along dim {axis} only")
        source = source if same(size, source._node.shape[d]) else sliced(source, d, 0, size)
    number = _row_major_numbers(bounds_checked(indices, x._node.shape[axis], wraps=False), axis, x._node.shape)
    count, total = (simplify_dim(product(t._node.shape)) for t in (indices, x))
    sums = tracer.add(Op.SCATTER_ADD, reshaped(source, (count, 1)), reshaped(number, (count,)), length=total)
    return pointwise.add(x, reshaped(sums, x._node.shape))


def require_one_dtype(name: str, x: TracedTensor, other: TracedTensor) -> None:
    if dtype_of(x) is not dtype_of(other):
        raise TraceError(f"{name}: the source is {dtype_of(other)}, the tensor {dtype_of(x)}", hint="convert one of them")


def _segment_sums(slices: TracedTensor, index: TracedTensor, dim: int, length: Dim, *, wraps: bool) -> TracedTensor:
    """Sums the slices of equal index; the result has `length` slices along the dim."""
    first = movedim(slices, dim, 0)
    count, *other_dims = first._node.shape
    rows = reshaped(first, (count, simplify_dim(product(other_dims))))
    sums = slices._tracer.add(Op.SCATTER_ADD, rows, bounds_checked(index, length, wraps=wraps), length=length)
    return movedim(reshaped(sums, (length, *other_dims)), 0, dim)


def _row_major_numbers(index: TracedTensor, dim: int, shape: tuple[Dim, ...]) -> TracedTensor:
    """Returns the row-major numbers, in a shape, of the elements that an index selects along a dim."""
    tracer = index._tracer
    total = pointwise.mul(index, tracer.size(contiguous_strides(shape)[dim]))
    for d, stride in enumerate(contiguous_strides(shape)):
        if d != dim:
            size = index._node.shape[d]
            along = reshaped(iota(tracer, size), (size, *(1,) * (index.ndim - 1 - d)))
            total = pointwise.add(total, pointwise.mul(along, tracer.size(stride)))
    return total
