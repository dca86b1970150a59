"""Functions that write to a tensor: methods in place, assignments between brackets, copies to places that an index names."""

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
    getitem,
    index_added,
    index_select,
    require_one_dtype,
    scatter_add,
    taken,
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
"""Methods that have a twin in place, with an underscore."""


def _in_place(name: str, function: Callable[..., Any]) -> Callable[..., TracedTensor]:
    def apply(input: TracedTensor, *args: Any, **kwargs: Any) -> TracedTensor:
        return assigned(name, input, registry.call(function, (input, *args), kwargs))

    return apply


for _name in _ARITHMETIC.split():
    if registry.handler_of(getattr(torch.Tensor, _name)) is not None:
        implements(f"Tensor.{_name}_")(_in_place(f"{_name}_", getattr(torch.Tensor, _name)))


def _value_for(place: TracedTensor, value: Any) -> TracedTensor:
    """A value as it is written to a place: in its dtype, and expanded to its shape."""
    tracer = place._tracer
    given = tracer.lift(value)
    require_filled(given)
    if given._node.weak or given._node.dtype is not place._node.dtype:
        given = tracer.add(Op.CAST, given, dtype=place._node.dtype)
    while given.ndim > place.ndim and same(given._node.shape[0], 1):
        given = reshaped(given, given._node.shape[1:])
    shape = place._node.shape
    if len(shape) == given.ndim and all(map(same, shape, given._node.shape)):
        return given
    return tracer.add(Op.EXPAND, given, shape=shape)


@implements("Tensor.copy_")
def copy_(input: TracedTensor, src: Any, non_blocking: bool = False) -> TracedTensor:
    """The elements of another tensor, in this one's dtype and expanded to its shape."""
    overwrite(input, _recorded(input, input, _value_for(input, src)))
    return input


def _recorded(whole: TracedTensor, place: TracedTensor, value: TracedTensor) -> TracedTensor:
    """The value that is written to a place of a tensor.

    Where the place is all of a tensor that required a gradient, the value is made a function of what was there: torch records such
    a gradient, and it is zero.
    """
    tracer = place._tracer
    is_all = whole._position == whole._root and whole.ndim == place.ndim and all(map(same, whole._node.shape, place._node.shape))
    if not is_all or whole._memory.declared or not place._node.dtype.is_float or not tracer.requires_grad(place._position):
        return value
    never = tracer.add(Op.EXPAND, tracer.add(Op.CAST, tracer.lift(0), dtype=DType.BOOL), shape=place._node.shape)
    return tracer.add(Op.WHERE, never, place, value)


@implements("Tensor.fill_")
def fill_(input: TracedTensor, value: Any) -> TracedTensor:
    """One number everywhere."""
    return copy_(input, value)


@implements("Tensor.zero_")
def zero_(input: TracedTensor) -> TracedTensor:
    """Zero everywhere."""
    return copy_(input, 0)


# At indices.


def _write(input: TracedTensor, place: TracedTensor, value: Any) -> None:
    """Writes to elements of a tensor."""
    memory.put(input, place._position, _recorded(input, place, _value_for(place, value)))


@implements("__setitem__")
def setitem(input: Any, key: Any, value: Any) -> None:
    """An assignment between brackets: ints, slices, and tensors of integers; or a mask, and a number.

    Where several indices name one element, which of their values is left in the caller's memory is not defined, as in torch; of
    what the function computes it is the last one.
    """
    if not isinstance(input, TracedTensor):
        what = "writing into a part of a tensor that the kernel closes over cannot be traced"
        raise UnsupportedError(what, hint="pass it as a parameter, and declare it: @fg.kernel(mutates=(...))")
    input._memory.unfilled = False
    key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    if isinstance(key, torch.Tensor) and key.dtype is torch.bool:
        overwrite(input, _under_mask(input, input._tracer.lift(key), value))
        return
    place = write_target(input, key)
    _write(input, place, value)


def _under_mask(x: TracedTensor, mask: TracedTensor, value: Any, *, accumulate: bool = False) -> TracedTensor:
    """The tensor with a number, or plus one, where a mask of its first dims is true.

    Raises:
        UnsupportedError: as many values as the mask has that is true.
        ShapeError: the mask has another shape than the tensor's first dims.
    """
    given = x._tracer.lift(value)
    if not all(same(size, 1) for size in given._node.shape):
        what = "writing several values where a mask is true cannot be traced: how many there are depends on the mask"
        raise UnsupportedError(what, hint="write a number, or use torch.where(mask, values, x) with values of x's shape")
    if mask.ndim > x.ndim:
        raise ShapeError(f"a mask of {mask.ndim} dims for a tensor of {x.ndim} dims", hint="give one of its first dims")
    require_shape("a mask", mask, x._node.shape[: mask.ndim])
    wide = reshaped(mask, (*mask._node.shape, *(1,) * (x.ndim - mask.ndim)))
    number = x._tracer.add(Op.CAST, reshaped(given, ()), dtype=x._node.dtype)
    return x._tracer.add(Op.WHERE, wide, pointwise.add(x, number) if accumulate else number, x)


@implements("Tensor.index_copy_")
def index_copy_(input: TracedTensor, dim: int, index: Any, source: Any) -> TracedTensor:
    """Slices along a dim that a vector names."""
    input._memory.unfilled = False
    place = index_select(input, dim, index)
    _require_shape("index_copy_", place, source)
    _write(input, place, source)
    return input


@implements("Tensor.index_put_")
def index_put_(input: TracedTensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> TracedTensor:
    """As an assignment between brackets; or sums."""
    if accumulate:
        return assigned("index_put_", input, registry.call(torch.Tensor.index_put, (input, indices, values, True), {}))
    setitem(input, tuple(slice(None) if index is None else index for index in indices), values)
    return input


@implements("Tensor.scatter_")
def scatter_(input: TracedTensor, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: Any = None) -> TracedTensor:
    """To the elements that an index names along a dim, at its own places along all others."""
    if reduce is not None:
        return assigned("scatter_", input, registry.call(torch.Tensor.scatter, (input, dim, index), given(src, value, reduce)))
    input._memory.unfilled = False
    place = gather(input, dim, index)
    _write(input, place, scattered("scatter_", place, value if src is None else src))
    return input


def given(src: Any, value: Any, reduce: Any) -> dict[str, Any]:
    """The arguments of ``scatter`` that a call names, or leaves out."""
    named = {"src": src, "value": value, "reduce": reduce}
    return {name: each for name, each in named.items() if each is not None}


def scattered(name: str, place: TracedTensor, source: Any) -> Any:
    """The values for the elements that an index names: as many of a tensor as there are, from its first ones on."""
    if not isinstance(source, torch.Tensor) or not source.ndim:
        return source
    values = place._tracer.lift(source)
    if values.ndim == place.ndim:
        for dim, size in enumerate(place._node.shape):
            is_all = same(size, values._node.shape[dim]) or not holds(place._tracer, size <= values._node.shape[dim])
            values = values if is_all else sliced(values, dim, 0, size)
    _require_shape(name, place, values)
    return values


for _name in ("index_add", "scatter_add", "index_fill"):
    implements(f"Tensor.{_name}_")(_in_place(f"{_name}_", getattr(torch.Tensor, _name)))


# As new values.


def _with(input: Any, place: TracedTensor, value: TracedTensor) -> TracedTensor:
    """The tensor with a value at a place."""
    tracer = place._tracer
    return tracer.value(with_value(tracer.builder, place._position, tracer.lift(input)._position, value._position))


def _of_place(name: str, place: TracedTensor, value: Any) -> TracedTensor:
    """A value of a place's shape and dtype."""
    _require_shape(name, place, value)
    return place._tracer.lift(value)


@implements("scatter")
def scatter(input: Any, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: Any = None) -> TracedTensor:
    """The tensor with other elements at the places along a dim that the index names; of several at one place the last is there."""
    tracer = tracer_of(input, index, src)
    x, source = tracer.lift(input), value if src is None else src
    if source is None or reduce not in (None, "add"):
        raise UnsupportedError(
            f"scatter with reduce={reduce!r} cannot be traced", hint="give src or value, and reduce='add' or none"
        )
    place = gather(x, dim, index)
    values = _value_for(place, scattered("scatter", place, source))
    return scatter_add(x, dim, index, values) if reduce else _with(x, place, values)


@implements("index_copy")
def index_copy(input: Any, dim: int, index: Any, source: Any) -> TracedTensor:
    """The tensor with other slices at the places along a dim that a vector names; of several at one place the last is there."""
    place = index_select(input, dim, index)
    return _with(input, place, _of_place("index_copy", place, source))


@implements("index_fill")
def index_fill(input: Any, dim: int, index: Any, value: Any) -> TracedTensor:
    """The tensor with a number in the slices along a dim that a vector names."""
    tracer = tracer_of(input, index)
    x, chosen = tracer.lift(input), tracer.lift(index)
    if isinstance(value, torch.Tensor) and value.ndim:
        raise ShapeError(f"index_fill with a tensor of {value.ndim} dims", hint="give a number")
    if chosen.ndim > 1:
        raise ShapeError(f"index_fill by an index of {chosen.ndim} dims", hint="give a vector")
    if not x.ndim:
        return reshaped(index_fill(reshaped(x, (1,)), dim, chosen, value), ())
    place = taken(x, normalize_dim(dim, x.ndim), reshaped(chosen, (1,)) if not chosen.ndim else chosen, wraps=True)
    return _with(x, place, _value_for(place, value))


@implements("slice_scatter")
def slice_scatter(input: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> TracedTensor:
    """The tensor with other elements in a slice of a dim."""
    x = tracer_of(input, src).lift(input)
    place = getitem(x, (*(slice(None) for _ in range(normalize_dim(dim, x.ndim))), slice(start, end, step)))
    return _with(x, place, _of_place("slice_scatter", place, src))


@implements("select_scatter")
def select_scatter(input: Any, src: Any, dim: int, index: Any) -> TracedTensor:
    """The tensor with other elements at one place of a dim."""
    place = select(tracer_of(input, src).lift(input), dim, index)
    return _with(input, place, _of_place("select_scatter", place, src))


@implements("diagonal_scatter")
def diagonal_scatter(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TracedTensor:
    """The tensor with another diagonal."""
    place = diagonal_of(tracer_of(input, src).lift(input), offset, dim1, dim2)
    return _with(input, place, _of_place("diagonal_scatter", place, src))


@implements("index_put")
def index_put(input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> TracedTensor:
    """The tensor with values, or plus values, at the places that tensors of integers name along its first dims, or under a mask.

    Raises:
        UnsupportedError: a mask's values are more than one number.
    """
    tracer = tracer_of(input, *indices, values)
    if len(indices) == 1 and isinstance(indices[0], torch.Tensor) and indices[0].dtype is torch.bool:
        x, number = tracer.lift(input), tracer.lift(values)
        require_one_dtype("index_put", x, number)
        return _under_mask(x, tracer.lift(indices[0]), number, accumulate=accumulate)
    if accumulate:
        return index_added(input, indices, values)
    return _index_replaced(tracer.lift(input), indices, values)


@implements("put")
def put(input: Any, index: Any, source: Any, accumulate: bool = False) -> TracedTensor:
    """The tensor with other elements, or plus some, at their numbers in row-major order; negative ones count from the end."""
    tracer = tracer_of(input, index, source)
    x, chosen, values = tracer.lift(input), tracer.lift(index), tracer.lift(source)
    if dtype_of(chosen) is not DType.INT64:
        raise TraceError(f"put by indices of {dtype_of(chosen)}", hint="convert them to torch.int64")
    flat, number, given = (reshaped(each, (simplify_dim(product(each._node.shape)),)) for each in (x, chosen, values))
    require_shape("put: the source", given, number._node.shape)
    return reshaped(index_put(flat, (number,), given, accumulate), x._node.shape)


def _index_replaced(x: TracedTensor, indices: Sequence[Any], values: Any) -> TracedTensor:
    """The tensor with other elements at the places that tensors of integers name; of several at one place the last is there."""
    if not all(isinstance(index, torch.Tensor) for index in indices):
        raise UnsupportedError("index_put by what is no tensor cannot be traced", hint="give a tuple of tensors of integers")
    place = write_target(x._tracer.value(x._position), tuple(indices))
    require_one_dtype("index_put", x, x._tracer.lift(values))
    return _with(x, place, _value_for(place, values))


def _require_shape(name: str, place: TracedTensor, value: Any) -> None:
    """Refuses a tensor of another shape than the place."""
    given = place._tracer.lift(value)
    pairs = tuple(zip(given._node.shape, place._node.shape, strict=False))
    if given.ndim == place.ndim and not all(same(a, b) for a, b in pairs):
        place._tracer.require_equal(pairs)
    if given.ndim != place.ndim or not all(same(a, b) for a, b in pairs):
        texts = [shape_text(t._node.shape) for t in (given, place)]
        raise ShapeError(f"{name}: a tensor of shape {texts[0]} for elements of shape {texts[1]}", hint="give it that shape")
    if given._node.dtype is not place._node.dtype:
        what = f"{name}: a tensor of {given._node.dtype} for one of {place._node.dtype}"
        raise TraceError(what, hint="convert it, as torch asks as well")
