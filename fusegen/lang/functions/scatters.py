"""Sums at indices that are values: of slices, and of single elements. They have one order, so that two calls give equal bits."""

from __future__ import annotations

from typing import Any

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError, UnsupportedError
from fusegen.ir.index_map import contiguous_strides
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, product, same, simplify_dim
from fusegen.lang.functions import pointwise
from fusegen.lang.functions.common import dtype_of, normalize_dim, tracer_of
from fusegen.lang.functions.coordinates import Coordinates, checked
from fusegen.lang.functions.views import holds, movedim, require_shape, reshaped, sliced
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("index_add")
def index_add(input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> TracedTensor:
    """The tensor plus slices along a dim, each at the place that a vector names."""
    tracer = tracer_of(input, index, source)
    x, chosen, slices = tracer.lift(input), tracer.lift(index), tracer.lift(source)
    require_one_dtype("index_add", x, slices)
    place = normalize_dim(dim, x.ndim)
    if chosen.ndim > 1:
        raise ShapeError(f"index_add by an index of {chosen.ndim} dims", mend="give a vector")
    if not x.ndim:
        return reshaped(index_add(reshaped(x, (1,)), 0, chosen, reshaped(slices, (1,)), alpha=alpha), ())
    count = simplify_dim(product(chosen._node.shape))
    require_shape("index_add: the source", slices, (*x._node.shape[:place], count, *x._node.shape[place + 1 :]))
    values = slices if isinstance(alpha, (int, float)) and alpha == 1 else pointwise.mul(slices, alpha)
    return pointwise.add(x, _sums_of_slices(values, reshaped(chosen, (count,)), place, x._node.shape[place], wraps=False))


def index_added(input: Any, indices: Any, values: Any) -> TracedTensor:
    """The tensor plus values, each at the place that tensors of integers name along its first dims.

    Raises:
        UnsupportedError: an index is a mask.
    """
    tracer = tracer_of(input, *indices, values)
    x, given, chosen = tracer.lift(input), tracer.lift(values), [tracer.lift(index) for index in indices]
    require_one_dtype("index_put", x, given)
    if any(dtype_of(index) in (DType.BOOL, DType.UINT8) for index in chosen) or not x.ndim:
        raise UnsupportedError("index_put by a mask cannot be traced", mend="use torch.where(mask, x + value, x)")
    if not 0 < len(chosen) <= x.ndim:
        raise ShapeError(f"index_put by {len(chosen)} indices to {x.ndim} dims", mend="give one index a dim at most")
    coordinates = Coordinates.of(x, range(len(chosen)), chosen)
    shape = (*coordinates.shape, *x._node.shape[len(chosen) :])
    if tracer.common_shape(shape, given._node.shape) != shape:
        text = f"index_put of {shape_text(given._node.shape)} at {shape_text(shape)}"
        raise ShapeError(text, mend="give values that broadcast to the indexed part")
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
        raise ShapeError(text, mend="give all three as many dims")
    if not x.ndim:
        return reshaped(scatter_add(reshaped(x, (1,)), 0, reshaped(chosen, (1,)), reshaped(source, (1,))), ())
    for d, size in enumerate(chosen._node.shape):
        if not holds(tracer, size <= source._node.shape[d]) or (d != place and not holds(tracer, size <= x._node.shape[d])):
            shapes = " and ".join(shape_text(t._node.shape) for t in (source, x))
            text = f"scatter_add by an index of shape {shape_text(chosen._node.shape)}, a source and a tensor of shape {shapes}"
            raise ShapeError(text, mend=f"an index may be larger than the tensor along dim {place} alone")
        source = source if same(size, source._node.shape[d]) else sliced(source, d, 0, size)
    number = _numbers(checked(chosen, x._node.shape[place], wraps=False), place, x._node.shape)
    count, total = (simplify_dim(product(t._node.shape)) for t in (chosen, x))
    sums = tracer.add(Op.SCATTER_ADD, reshaped(source, (count, 1)), reshaped(number, (count,)), length=total)
    return pointwise.add(x, reshaped(sums, x._node.shape))


def require_one_dtype(name: str, x: TracedTensor, other: TracedTensor) -> None:
    if dtype_of(x) is not dtype_of(other):
        raise TraceError(f"{name} of {dtype_of(other)} to {dtype_of(x)}", mend="convert one of them")


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
            along = reshaped(tracer.add(Op.IOTA, shape=(size,), dtype=DType.INT64), (size, *(1,) * (index.ndim - 1 - d)))
            total = pointwise.add(total, pointwise.mul(along, tracer.size(stride)))
    return total
