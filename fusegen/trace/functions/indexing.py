"""Subscripts and indices that are values: elements that tensors of integers name, and sums at such places in one fixed order."""

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


def checked(index: TracedTensor, length: Dim, *, wraps: bool) -> TracedTensor:
    """The index, counted from the front, as numbers that are gathered: that says which of them names no element."""
    _require_integers(index)
    flat = reshaped(index, (simplify_dim(product(index._node.shape)),))
    places = iota(index._tracer, length)
    return reshaped(index._tracer.add(Op.GATHER, places, flat, dim=0, wraps=wraps), index._node.shape)


def _expanded(index: TracedTensor, shape: tuple[Dim, ...]) -> TracedTensor:
    """The index in a shape; itself where it has that already."""
    own = index._node.shape
    is_same = len(own) == len(shape) and all(map(same, own, shape))
    return index if is_same else index._tracer.add(Op.EXPAND, index, shape=shape)


@dataclass(frozen=True)
class Coordinates:
    """The elements that some indices name.

    Attributes:
        sizes: of the tensor.
        dims: those that are indexed, in order.
        shape: of the indices, which broadcast.
        indices: one for each of the dims, flat; negative numbers count from the end.
    """

    sizes: tuple[Dim, ...]
    dims: tuple[int, ...]
    shape: tuple[Dim, ...]
    indices: tuple[TracedTensor, ...]

    @classmethod
    def of(cls, x: TracedTensor, dims: Sequence[int], indices: Sequence[TracedTensor]) -> Coordinates:
        """The coordinates that an index for each of some dims gives."""
        shape = x._tracer.common_shape(*(index._node.shape for index in indices))
        flat = (simplify_dim(product(shape)),)
        wide = [reshaped(_expanded(index, shape), flat) for index in indices]
        return cls(x._node.shape, tuple(dims), shape, tuple(wide))

    @property
    def count(self) -> Dim:
        """The number of elements of each index."""
        return self.indices[0]._node.shape[0]

    def number(self) -> TracedTensor:
        """The indices as one along all indexed dims, in row-major order, of numbers that are checked."""
        total: TracedTensor | None = None
        for dim, index in zip(self.dims, self.indices, strict=True):
            along = checked(index, self.sizes[dim], wraps=True)
            size = index._tracer.size(self.sizes[dim])
            total = along if total is None else pointwise.add(pointwise.mul(total, size), along)
        assert total is not None
        return total

    @property
    def length(self) -> Dim:
        """The size of the indexed dims as one."""
        return simplify_dim(product(self.sizes[d] for d in self.dims))

    @property
    def others(self) -> tuple[int, ...]:
        """The dims that are not indexed."""
        return tuple(d for d in range(len(self.sizes)) if d not in self.dims)

    def in_front(self, x: TracedTensor) -> TracedTensor:
        """The tensor with the indexed dims as one, before the others."""
        return reshaped(permuted(x, (*self.dims, *self.others)), (self.length, *(self.sizes[d] for d in self.others)))

    def chosen(self, x: TracedTensor) -> TracedTensor:
        """Gathers along one dim after the other: each index chooses among what the one before it chose."""
        pairs = sorted(zip(self.dims, self.indices, strict=True), key=lambda pair: not self._is_every(*pair))
        found = permuted(x, (*(dim for dim, _ in pairs), *self.others))
        for number, (of, index) in enumerate(pairs):
            if not number and self._is_every(of, index):
                continue
            dim = min(number, 1)
            behind = found._node.shape[dim + 1 :]
            along = reshaped(index, (self.count, *(1 for _ in found._node.shape[1:])))
            wide = x._tracer.add(Op.EXPAND, along, shape=(self.count, *(1,) * dim, *behind))
            found = reshaped(x._tracer.add(Op.GATHER, found, wide, dim=dim, wraps=True), (self.count, *behind))
        return self.placed(reshaped(found, (*self.shape, *(self.sizes[d] for d in self.others))))

    def back(self, x: TracedTensor) -> TracedTensor:
        """Brings a value from the order of `in_front` into the tensor's shape."""
        order = (*self.dims, *self.others)
        return permuted(reshaped(x, tuple(self.sizes[d] for d in order)), [order.index(d) for d in range(len(order))])

    def chosen_at_once(self, x: TracedTensor) -> TracedTensor:
        """The same by one index along all indexed dims, so that what two indices name is one element."""
        front = self.in_front(x)
        along = reshaped(self.number(), (self.count, *(1 for _ in self.others)))
        wide = x._tracer.add(Op.EXPAND, along, shape=(self.count, *front._node.shape[1:]))
        found = x._tracer.add(Op.GATHER, front, wide, dim=0, wraps=False)
        return self.placed(reshaped(found, (*self.shape, *front._node.shape[1:])))

    def _is_every(self, dim: int, index: TracedTensor) -> bool:
        """True if an index is every number along its dim, as ``torch.arange`` gives them."""
        return index._node.op is Op.IOTA and same(index._node.shape[0], self.sizes[dim])

    def placed(self, chosen: TracedTensor) -> TracedTensor:
        """The chosen elements, with the indices' dims where torch has them: in place of neighbouring indices, else in front."""
        first, rank = self.dims[0], len(self.shape)
        if self.dims != tuple(range(first, first + len(self.dims))):
            return chosen
        before = range(rank, rank + first)
        return permuted(chosen, (*before, *range(rank), *range(rank + first, chosen.ndim)))


_KEYS = (int, np.integer, slice, SymbolicSize, torch.Tensor)
_MOST_NUMBERS = 64  # in a list between brackets: each is a view of its own


def taken(x: TracedTensor, dim: int, index: TracedTensor, *, wraps: bool) -> TracedTensor:
    """Slices of a tensor along a dim, in the place of which the index's dims come; a negative index may count from the end."""
    shape, count = x._node.shape, simplify_dim(product(index._node.shape))
    along = [1] * dim + [count] + [1] * (x.ndim - dim - 1)
    wide = x._tracer.add(Op.EXPAND, reshaped(index, along), shape=(*shape[:dim], count, *shape[dim + 1 :]))
    return reshaped(_gathered(x, dim, wide, wraps=wraps), (*shape[:dim], *index._node.shape, *shape[dim + 1 :]))


def _gathered(x: TracedTensor, dim: int, index: TracedTensor, *, wraps: bool = False) -> TracedTensor:
    _require_integers(index)
    if 0 not in index._node.shape and same(x._node.shape[dim], 0):
        raise ShapeError(f"indices into a dim of size 0 of a tensor of shape {shape_text(x._node.shape)}", hint="give it elements")
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
        raise DimError(f"{used} indices for a tensor of {input.ndim} dims", hint="give one index a dim at most")
    gap = next((n for n, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[gap : gap + 1] = [slice(None)] * (input.ndim - used)
    return input, keys


def _check_keys(keys: list[Any]) -> None:
    for k in keys:
        if not (k is None or k is Ellipsis or isinstance(k, _KEYS) or _is_numbers(k)) or isinstance(k, bool):
            raise UnsupportedError(
                f"indexing by a {type(k).__name__} cannot be traced",
                hint="use ints, slices, None, ... and tensors or short lists of integers; torch.where for masks",
            )
    if sum(k is Ellipsis for k in keys) > 1:
        raise ShapeError("an index with several ellipses", hint="use one; the dims that it stands for follow from the others")


def _is_numbers(key: Any) -> bool:
    """True if a key is a list of a few ints."""
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
            result, place = taken(result, place, _index(input._tracer, k), wraps=True), place + k.ndim
        elif isinstance(k, list):
            chosen = [unsqueeze(select(result, place, number), place) for number in k]
            result, place = cat(chosen, place) if chosen else sliced(result, place, 0, 0), place + 1
        elif isinstance(k, slice):
            result, place = _slice_dim(result, place, k), place + 1
        else:
            result = select(result, place, k)
    if not indices:
        return result
    coordinates = Coordinates.of(result, tuple(indices), tuple(indices.values()))
    return coordinates.chosen_at_once(result) if at_once else coordinates.chosen(result)


def _index(tracer: Tracer, key: Any) -> TracedTensor:
    """A key between brackets: a tensor of integers, or a list as one."""
    if isinstance(key, list):
        numbers = [reshaped(tracer.constant(int(number), DType.INT64), (1,)) for number in key]
        return cat(numbers, 0) if numbers else iota(tracer, 0)
    index = tracer.lift(key)
    if dtype_of(index) in (DType.BOOL, DType.UINT8):
        what = "indexing by a mask cannot be traced: the result's size depends on its values"
        raise UnsupportedError(what, hint="use torch.where(mask, x, other)")
    _require_integers(index)
    return index


def _require_integers(index: TracedTensor) -> None:
    if dtype_of(index) not in (DType.INT32, DType.INT64):
        raise TraceError(f"an index of {dtype_of(index)}", hint="convert it to torch.int64")


def _slice_dim(x: TracedTensor, dim: int, key: slice) -> TracedTensor:
    size = x._node.shape[dim]
    step = 1 if key.step is None else int(key.step)
    if step <= 0:
        raise ShapeError("a slice's step must be positive", hint="torch has no negative steps either")
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
        raise UnsupportedError(text, hint="lower with example tensors")
    return sliced(x, dim, start, length, step)


def _clipped(tracer: Tracer, index: Any, size: Dim) -> Dim:
    """A border of a slice counted from the front, between 0 and the size; a guard where the size is symbolic."""
    place = dim_of(index)
    if is_negative(tracer, place):
        place = simplify_dim(size + place)
        if is_negative(tracer, place):
            return 0
    return place if holds(tracer, place <= size) else size


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
        raise ShapeError(f"embedding by a table of {table.ndim} dims", hint="give it the shape (rows, features)")
    if padding_idx is not None:
        size = table._node.shape[0]
        if not (holds(tracer, size > padding_idx) and holds(tracer, size >= -padding_idx)):
            raise ShapeError(f"padding_idx {padding_idx} of a table of {size} rows", hint="name a row of the table")
    rows = taken(table, 0, ids, wraps=False)
    if padding_idx is None:
        return rows
    padding = padding_idx if padding_idx >= 0 else tracer.size(table._node.shape[0]) + padding_idx
    is_padding = unsqueeze(binary(Op.EQ, ids, padding), -1)
    return pointwise.where(is_padding, tracer.add(Op.DETACH, rows), rows)


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
                    hint=f"an index may be larger than the tensor along dim {place} alone",
                )
    return _gathered(x, place, chosen)


@implements("take_along_dim")
def take_along_dim(input: Any, indices: Any, dim: int | None = None) -> TracedTensor:
    """As gather, of a tensor and an index that broadcast along all other dims; without dim, of the flat ones. Along a
    dim, negative values count from the end; what lies beyond is out of range, where torch takes the remainder."""
    tracer = tracer_of(input, indices)
    x, chosen = tracer.lift(input), tracer.lift(indices)
    if dtype_of(chosen) is not DType.INT64:
        raise TraceError(f"take_along_dim by indices of {dtype_of(chosen)}", hint="convert them to torch.int64")
    if dim is None:
        x, chosen = (reshaped(t, (simplify_dim(product(t._node.shape)),)) for t in (x, chosen))
    if x.ndim != chosen.ndim:
        raise ShapeError(f"take_along_dim of {x.ndim} dims by indices of {chosen.ndim} dims", hint="give both as many dims")
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
        raise ShapeError(f"index_select by an index of {chosen.ndim} dims", hint="give a vector")
    place = normalize_dim(dim, x.ndim)
    if not x.ndim:
        return reshaped(taken(reshaped(x, (1,)), 0, reshaped(chosen, (1,)), wraps=False), ())
    return taken(x, place, reshaped(chosen, (simplify_dim(product(chosen._node.shape)),)), wraps=False)


@implements("take")
def take(input: Any, index: Any) -> TracedTensor:
    """Elements by their numbers in row-major order; negative ones count from the end."""
    tracer = tracer_of(input, index)
    x, chosen = tracer.lift(input), tracer.lift(index)
    if dtype_of(chosen) is not DType.INT64:
        raise TraceError(f"take by indices of {dtype_of(chosen)}", hint="convert them to torch.int64")
    return taken(reshaped(x, (simplify_dim(product(x._node.shape)),)), 0, chosen, wraps=True)


# Sums at indices, of slices and of single elements.


@implements("index_add")
def index_add(input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> TracedTensor:
    """The tensor plus slices along a dim, each at the place that a vector names."""
    tracer = tracer_of(input, index, source)
    x, chosen, slices = tracer.lift(input), tracer.lift(index), tracer.lift(source)
    require_one_dtype("index_add", x, slices)
    place = normalize_dim(dim, x.ndim)
    if chosen.ndim > 1:
        raise ShapeError(f"index_add by an index of {chosen.ndim} dims", hint="give a vector")
    if not x.ndim:
        return reshaped(index_add(reshaped(x, (1,)), 0, chosen, reshaped(slices, (1,)), alpha=alpha), ())
    count = simplify_dim(product(chosen._node.shape))
    require_shape("index_add: the source", slices, (*x._node.shape[:place], count, *x._node.shape[place + 1 :]))
    values = slices if isinstance(alpha, (int, float)) and alpha == 1 else pointwise.mul(slices, alpha)
    return pointwise.add(x, _sums_of_slices(values, reshaped(chosen, (count,)), place, x._node.shape[place], wraps=False))


def index_added(input: Any, indices: Any, values: Any) -> TracedTensor:
    """The tensor plus values, each at the place that tensors of integers name along its first dims."""
    tracer = tracer_of(input, *indices, values)
    x, given, chosen = tracer.lift(input), tracer.lift(values), [tracer.lift(index) for index in indices]
    require_one_dtype("index_put", x, given)
    if any(dtype_of(index) in (DType.BOOL, DType.UINT8) for index in chosen) or not x.ndim:
        raise UnsupportedError("index_put by a mask cannot be traced", hint="use torch.where(mask, x + value, x)")
    if not 0 < len(chosen) <= x.ndim:
        raise ShapeError(f"index_put by {len(chosen)} indices to {x.ndim} dims", hint="give one index a dim at most")
    coordinates = Coordinates.of(x, range(len(chosen)), chosen)
    shape = (*coordinates.shape, *x._node.shape[len(chosen) :])
    if tracer.common_shape(shape, given._node.shape) != shape:
        text = f"index_put of {shape_text(given._node.shape)} at {shape_text(shape)}"
        raise ShapeError(text, hint="give values that broadcast to the indexed part")
    wide = reshaped(tracer.add(Op.EXPAND, given, shape=shape), (coordinates.count, *x._node.shape[len(chosen) :]))
    sums = _sums_of_slices(wide, coordinates.number(), 0, coordinates.length, wraps=False)
    return pointwise.add(x, coordinates.back(sums))


@implements("scatter_add")
def scatter_add(input: Any, dim: int, index: Any, src: Any) -> TracedTensor:
    """The tensor plus elements, each at the place along a dim that the index names, and at its own along all others."""
    tracer = tracer_of(input, index, src)
    x, chosen, source = tracer.lift(input), tracer.lift(index), tracer.lift(src)
    require_one_dtype("scatter_add", x, source)
    place = normalize_dim(dim, x.ndim)
    if not x.ndim == chosen.ndim == source.ndim:
        text = f"scatter_add of {source.ndim} dims by an index of {chosen.ndim} dims to {x.ndim} dims"
        raise ShapeError(text, hint="give all three as many dims")
    if not x.ndim:
        return reshaped(scatter_add(reshaped(x, (1,)), 0, reshaped(chosen, (1,)), reshaped(source, (1,))), ())
    for d, size in enumerate(chosen._node.shape):
        if not holds(tracer, size <= source._node.shape[d]) or (d != place and not holds(tracer, size <= x._node.shape[d])):
            shapes = " and ".join(shape_text(t._node.shape) for t in (source, x))
            text = f"scatter_add by an index of shape {shape_text(chosen._node.shape)}, a source and a tensor of shape {shapes}"
            raise ShapeError(text, hint=f"an index may be larger than the tensor along dim {place} alone")
        source = source if same(size, source._node.shape[d]) else sliced(source, d, 0, size)
    number = _numbers(checked(chosen, x._node.shape[place], wraps=False), place, x._node.shape)
    count, total = (simplify_dim(product(t._node.shape)) for t in (chosen, x))
    sums = tracer.add(Op.SCATTER_ADD, reshaped(source, (count, 1)), reshaped(number, (count,)), length=total)
    return pointwise.add(x, reshaped(sums, x._node.shape))


def require_one_dtype(name: str, x: TracedTensor, other: TracedTensor) -> None:
    if dtype_of(x) is not dtype_of(other):
        raise TraceError(f"{name} of {dtype_of(other)} to {dtype_of(x)}", hint="convert one of them")


def _sums_of_slices(slices: TracedTensor, index: TracedTensor, dim: int, length: Dim, *, wraps: bool) -> TracedTensor:
    """Sums of slices along a dim, as many as its length, each of those that its number is the index of."""
    first = movedim(slices, dim, 0)
    count, *others = first._node.shape
    rows = reshaped(first, (count, simplify_dim(product(others))))
    sums = slices._tracer.add(Op.SCATTER_ADD, rows, checked(index, length, wraps=wraps), length=length)
    return movedim(reshaped(sums, (length, *others)), 0, dim)


def _numbers(index: TracedTensor, dim: int, shape: tuple[Dim, ...]) -> TracedTensor:
    """The row-major numbers, in a shape, of elements that an index names along a dim."""
    tracer = index._tracer
    total = pointwise.mul(index, tracer.size(contiguous_strides(shape)[dim]))
    for d, stride in enumerate(contiguous_strides(shape)):
        if d != dim:
            size = index._node.shape[d]
            along = reshaped(iota(tracer, size), (size, *(1,) * (index.ndim - 1 - d)))
            total = pointwise.add(total, pointwise.mul(along, tracer.size(stride)))
    return total
