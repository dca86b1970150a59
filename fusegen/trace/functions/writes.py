"""Functions that write to tensors: in-place methods, subscript assignment, writes at indices, and their out-of-place versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError, UnsupportedError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import product, same, simplify_dim
from fusegen.trace import memory, registry
from fusegen.trace.functions import pointwise
from fusegen.trace.functions.arrangements import diagonal_of
from fusegen.trace.functions.common import dtype_of, normalize_dim, tracer_of
from fusegen.trace.functions.indexing import (
    gather,
    gather_slices,
    getitem,
    index_put_accumulate,
    index_select,
    require_one_dtype,
    scatter_add,
    write_target,
)
from fusegen.trace.functions.views import holds, require_shape, reshaped, select, sliced
from fusegen.trace.memory import overwrite, require_filled, with_value
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor, assigned

_ARITHMETIC = """
    add sub mul div multiply subtract divide true_divide floor_divide remainder fmod pow square sqrt rsqrt reciprocal
    exp exp2 expm1 log log1p log2 sin cos tan tanh sigmoid erf abs absolute neg negative sign floor ceil round trunc
    clamp clamp_min clamp_max clip relu masked_fill lerp addcmul addcdiv tril triu nan_to_num eq ne lt le gt ge
    logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or bitwise_xor
"""
"""Methods that have an in-place version with a trailing underscore."""


def _in_place(name: str, function: Callable[..., Any]) -> Callable[..., TracedTensor]:
    def apply(input: TracedTensor, *args: Any, **kwargs: Any) -> TracedTensor:
        return assigned(name, input, registry.call(function, (input, *args), kwargs))

    return apply


for _name in _ARITHMETIC.split():
    if registry.handler_of(getattr(torch.Tensor, _name)) is not None:
        implements(f"Tensor.{_name}_")(_in_place(f"{_name}_", getattr(torch.Tensor, _name)))


def _converted(target: TracedTensor, value: Any) -> TracedTensor:
    """Converts a value to a target's dtype and shape."""
    tracer = target._tracer
    source = tracer.lift(value)
    require_filled(source)
    if source._node.weak or source._node.dtype is not target._node.dtype:
        source = tracer.add(Op.CAST, source, dtype=target._node.dtype)
    while source.ndim > target.ndim and same(source._node.shape[0], 1):
        source = reshaped(source, source._node.shape[1:])
    shape = target._node.shape
    if len(shape) == source.ndim and all(map(same, shape, source._node.shape)):
        return source
    return tracer.add(Op.EXPAND, source, shape=shape)


@implements("Tensor.copy_")
def copy_(input: TracedTensor, src: Any, non_blocking: bool = False) -> TracedTensor:
    """Writes another tensor's elements, cast and expanded."""
    overwrite(input, _with_zero_gradient(input, input, _converted(input, src)))
    return input


def _with_zero_gradient(base: TracedTensor, target: TracedTensor, value: TracedTensor) -> TracedTensor:
    """Returns the value to write. In torch, a float tensor that requires a gradient and is overwritten as a whole gets a zero
    gradient. The value then depends on the old one, with a derivative of 0."""
    tracer = target._tracer
    is_whole = base._position == base._root and base.ndim == target.ndim and all(map(same, base._node.shape, target._node.shape))
    if not is_whole or base._memory.declared or not target._node.dtype.is_float or not tracer.requires_grad(target._position):
        return value
    never = tracer.add(Op.EXPAND, tracer.add(Op.CAST, tracer.lift(0), dtype=DType.BOOL), shape=target._node.shape)
    return tracer.add(Op.WHERE, never, target, value)


@implements("Tensor.fill_")
def fill_(input: TracedTensor, value: Any) -> TracedTensor:
    return copy_(input, value)


@implements("Tensor.zero_")
def zero_(input: TracedTensor) -> TracedTensor:
    return copy_(input, 0)


# Writes at indices.


def _write(input: TracedTensor, target: TracedTensor, value: Any) -> None:
    memory.put(input, target._position, _with_zero_gradient(input, target, _converted(target, value)))


@implements("__setitem__")
def setitem(input: Any, key: Any, value: Any) -> None:
    """Subscript assignment: ints, slices and integer tensors; or a bool mask, with a number.

    If several indices select one element, the last value wins, except in the caller's memory, where it is undefined as in torch.
    """
    if not isinstance(input, TracedTensor):
        message = "writing into a part of a tensor that the kernel closes over cannot be traced"
        raise UnsupportedError(message, hint="pass it as a parameter, and declare it: @fg.kernel(mutates=(...))")
    input._memory.unfilled = False
    key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    if isinstance(key, torch.Tensor) and key.dtype is torch.bool:
        overwrite(input, _masked_write(input, input._tracer.lift(key), value))
        return
    target = write_target(input, key)
    _write(input, target, value)


def _masked_write(x: TracedTensor, mask: TracedTensor, value: Any, *, accumulate: bool = False) -> TracedTensor:
    """Writes or adds a number where a mask of the first dims is True.

    Raises:
        UnsupportedError: the value is not a single number.
        ShapeError: the mask's shape does not match the tensor's first dims.
    """
    source = x._tracer.lift(value)
    if not all(same(size, 1) for size in source._node.shape):
        message = "writing a tensor where a mask is true cannot be traced: the number of values depends on the mask"
        raise UnsupportedError(message, hint="write a number, or use torch.where(mask, values, x) with values of x's shape")
    if mask.ndim > x.ndim:
        raise ShapeError(f"the mask has {mask.ndim} dims, the tensor only {x.ndim}", hint="give a mask of the tensor's first dims")
    require_shape("the mask", mask, x._node.shape[: mask.ndim])
    mask_view = reshaped(mask, (*mask._node.shape, *(1,) * (x.ndim - mask.ndim)))
    number = x._tracer.add(Op.CAST, reshaped(source, ()), dtype=x._node.dtype)
    return x._tracer.add(Op.WHERE, mask_view, pointwise.add(x, number) if accumulate else number, x)


@implements("Tensor.index_copy_")
def index_copy_(input: TracedTensor, dim: int, index: Any, source: Any) -> TracedTensor:
    input._memory.unfilled = False
    target = index_select(input, dim, index)
    _require_same_shape("index_copy_", target, source)
    _write(input, target, source)
    return input


@implements("Tensor.index_put_")
def index_put_(input: TracedTensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> TracedTensor:
    """Subscript assignment, or accumulation."""
    if accumulate:
        return assigned("index_put_", input, registry.call(torch.Tensor.index_put, (input, indices, values, True), {}))
    setitem(input, tuple(slice(None) if index is None else index for index in indices), values)
    return input


@implements("Tensor.scatter_")
def scatter_(input: TracedTensor, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: Any = None) -> TracedTensor:
    if reduce is not None:
        arguments = scatter_arguments(src, value, reduce)
        return assigned("scatter_", input, registry.call(torch.Tensor.scatter, (input, dim, index), arguments))
    input._memory.unfilled = False
    target = gather(input, dim, index)
    _write(input, target, scatter_values("scatter_", target, value if src is None else src))
    return input


def scatter_arguments(src: Any, value: Any, reduce: Any) -> dict[str, Any]:
    """Returns the arguments of `scatter` other than None."""
    named = {"src": src, "value": value, "reduce": reduce}
    return {name: argument for name, argument in named.items() if argument is not None}


def scatter_values(name: str, target: TracedTensor, source: Any) -> Any:
    """Returns the source; a tensor is cropped to the shape of the index."""
    if not isinstance(source, torch.Tensor) or not source.ndim:
        return source
    values = target._tracer.lift(source)
    if values.ndim == target.ndim:
        for dim, size in enumerate(target._node.shape):
            is_whole = same(size, values._node.shape[dim]) or not holds(target._tracer, size <= values._node.shape[dim])
            values = values if is_whole else sliced(values, dim, 0, size)
    _require_same_shape(name, target, values)
    return values


for _name in ("index_add", "scatter_add", "index_fill"):
    implements(f"Tensor.{_name}_")(_in_place(f"{_name}_", getattr(torch.Tensor, _name)))


# Out-of-place writes. If several indices select one element, the last value wins.


def _with_written(input: Any, target: TracedTensor, value: TracedTensor) -> TracedTensor:
    tracer = target._tracer
    return tracer.value(with_value(tracer.builder, target._position, tracer.lift(input)._position, value._position))


def _checked_source(name: str, target: TracedTensor, value: Any) -> TracedTensor:
    """Requires a source of the target's shape and dtype."""
    _require_same_shape(name, target, value)
    return target._tracer.lift(value)


@implements("scatter")
def scatter(input: Any, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: Any = None) -> TracedTensor:
    tracer = tracer_of(input, index, src)
    x, source = tracer.lift(input), value if src is None else src
    if source is None or reduce not in (None, "add"):
        raise UnsupportedError(
            f"scatter with reduce={reduce!r} cannot be traced", hint="give src or value, and reduce='add' or None"
        )
    target = gather(x, dim, index)
    values = _converted(target, scatter_values("scatter", target, source))
    return scatter_add(x, dim, index, values) if reduce else _with_written(x, target, values)


@implements("index_copy")
def index_copy(input: Any, dim: int, index: Any, source: Any) -> TracedTensor:
    target = index_select(input, dim, index)
    return _with_written(input, target, _checked_source("index_copy", target, source))


@implements("index_fill")
def index_fill(input: Any, dim: int, index: Any, value: Any) -> TracedTensor:
    tracer = tracer_of(input, index)
    x, indices = tracer.lift(input), tracer.lift(index)
    if isinstance(value, torch.Tensor) and value.ndim:
        raise ShapeError(f"index_fill: the value has {value.ndim} dims", hint="give a number")
    if indices.ndim > 1:
        raise ShapeError(f"index_fill: the index has {indices.ndim} dims", hint="give a vector")
    if not x.ndim:
        return reshaped(index_fill(reshaped(x, (1,)), dim, indices, value), ())
    target = gather_slices(x, normalize_dim(dim, x.ndim), reshaped(indices, (1,)) if not indices.ndim else indices, wraps=True)
    return _with_written(x, target, _converted(target, value))


@implements("slice_scatter")
def slice_scatter(input: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> TracedTensor:
    x = tracer_of(input, src).lift(input)
    target = getitem(x, (*(slice(None) for _ in range(normalize_dim(dim, x.ndim))), slice(start, end, step)))
    return _with_written(x, target, _checked_source("slice_scatter", target, src))


@implements("select_scatter")
def select_scatter(input: Any, src: Any, dim: int, index: Any) -> TracedTensor:
    target = select(tracer_of(input, src).lift(input), dim, index)
    return _with_written(input, target, _checked_source("select_scatter", target, src))


@implements("diagonal_scatter")
def diagonal_scatter(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TracedTensor:
    target = diagonal_of(tracer_of(input, src).lift(input), offset, dim1, dim2)
    return _with_written(input, target, _checked_source("diagonal_scatter", target, src))


@implements("index_put")
def index_put(input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> TracedTensor:
    """Writes or adds values at tensor indices of the first dims, or a number under a mask."""
    tracer = tracer_of(input, *indices, values)
    if len(indices) == 1 and isinstance(indices[0], torch.Tensor) and indices[0].dtype is torch.bool:
        x, number = tracer.lift(input), tracer.lift(values)
        require_one_dtype("index_put", x, number)
        return _masked_write(x, tracer.lift(indices[0]), number, accumulate=accumulate)
    if accumulate:
        return index_put_accumulate(input, indices, values)
    return _index_replaced(tracer.lift(input), indices, values)


@implements("put")
def put(input: Any, index: Any, source: Any, accumulate: bool = False) -> TracedTensor:
    """Writes or adds elements at row-major indices; negative ones count from the end."""
    tracer = tracer_of(input, index, source)
    x, indices, values = tracer.lift(input), tracer.lift(index), tracer.lift(source)
    if dtype_of(indices) is not DType.INT64:
        raise TraceError(f"put: the indices are {dtype_of(indices)}", hint="convert them to torch.int64")
    flat, number, source_values = (reshaped(t, (simplify_dim(product(t._node.shape)),)) for t in (x, indices, values))
    require_shape("put: the source", source_values, number._node.shape)
    return reshaped(index_put(flat, (number,), source_values, accumulate), x._node.shape)


def _index_replaced(x: TracedTensor, indices: Sequence[Any], values: Any) -> TracedTensor:
    if not all(isinstance(index, torch.Tensor) for index in indices):
        raise UnsupportedError("index_put: every index must be a tensor", hint="give a tuple of tensors of integers")
    target = write_target(x._tracer.value(x._position), tuple(indices))
    require_one_dtype("index_put", x, x._tracer.lift(values))
    return _with_written(x, target, _converted(target, values))


def _require_same_shape(name: str, target: TracedTensor, value: Any) -> None:
    source = target._tracer.lift(value)
    pairs = tuple(zip(source._node.shape, target._node.shape, strict=False))
    if source.ndim == target.ndim and not all(same(a, b) for a, b in pairs):
        target._tracer.require_equal(pairs)
    if source.ndim != target.ndim or not all(same(a, b) for a, b in pairs):
        texts = [shape_text(t._node.shape) for t in (source, target)]
        raise ShapeError(f"{name}: the source has shape {texts[0]}, the target {texts[1]}", hint="give both the same shape")
    if source._node.dtype is not target._node.dtype:
        message = f"{name}: the source is {source._node.dtype}, the target {target._node.dtype}"
        raise TraceError(message, hint="convert it, as in torch")
