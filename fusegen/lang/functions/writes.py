"""Functions that write to a tensor: methods in place, assignments between brackets, copies to places that an index names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusegen.errors import ShapeError, TraceError, UnsupportedError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import same
from fusegen.lang import registry
from fusegen.lang.functions.common import unsupported_argument
from fusegen.lang.functions.indexing import gather, getitem, index_select
from fusegen.lang.functions.views import reshaped
from fusegen.lang.memory import overwrite, put, require_own
from fusegen.lang.registry import implements
from fusegen.lang.tensors import assigned
from fusegen.lang.values import TracedTensor

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
    """What is written to a place: in its dtype, and expanded to its shape."""
    tracer = place._tracer
    given = tracer.lift(value)
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
    overwrite(input, _value_for(input, src))
    return input


@implements("Tensor.fill_")
def fill_(input: TracedTensor, value: Any) -> TracedTensor:
    """One number everywhere."""
    return copy_(input, value)


@implements("Tensor.zero_")
def zero_(input: TracedTensor) -> TracedTensor:
    """Zero everywhere."""
    return copy_(input, 0)


# At indices.


def _write(input: Any, place: TracedTensor, value: Any) -> None:
    """Writes to elements of a parameter.

    Raises:
        UnsupportedError: the tensor is none, or one that the kernel does not declare to write to.
    """
    if not isinstance(input, TracedTensor) or not input._memory.declared:
        if isinstance(input, TracedTensor):
            require_own(input._memory)
        what = "writing into a part of a tensor that is no parameter cannot be traced"
        raise UnsupportedError(what, mend="use torch.where or torch.cat; a parameter can be written to: @fg.kernel(mutates=(...))")
    put(input, place._position, _value_for(place, value))


@implements("__setitem__")
def setitem(input: Any, key: Any, value: Any) -> None:
    """An assignment between brackets: ints, slices, and one tensor of integers.

    Where several indices name one element, which of their values is left is not defined, as in torch.
    """
    if isinstance(key, torch.Tensor) and key.dtype is torch.bool:
        what = "writing where a mask is true cannot be traced"
        raise UnsupportedError(what, mend="use x.masked_fill_(mask, number), or x.copy_(torch.where(mask, value, x))")
    _write(input, getitem(input, key), value)


@implements("Tensor.index_copy_")
def index_copy_(input: TracedTensor, dim: int, index: Any, source: Any) -> TracedTensor:
    """Slices along a dim that a vector names."""
    place = index_select(input, dim, index)
    _require_shape("index_copy_", place, source)
    _write(input, place, source)
    return input


@implements("Tensor.index_put_")
def index_put_(input: TracedTensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> TracedTensor:
    """As an assignment between brackets."""
    unsupported_argument("index_put_", accumulate=accumulate)
    setitem(input, tuple(slice(None) if index is None else index for index in indices), values)
    return input


@implements("Tensor.scatter_")
def scatter_(input: TracedTensor, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: Any = None) -> TracedTensor:
    """To the elements that an index names along a dim, at its own places along all others."""
    unsupported_argument("scatter_", reduce=reduce)
    place = gather(input, dim, index)
    source = value if src is None else src
    if isinstance(source, torch.Tensor) and source.ndim:
        _require_shape("scatter_", place, source)
    _write(input, place, source)
    return input


def _require_shape(name: str, place: TracedTensor, value: Any) -> None:
    """Refuses a tensor of another shape than the place.

    Raises:
        ShapeError: it has one.
        TraceError: it has another dtype.
    """
    given = place._tracer.lift(value)
    pairs = tuple(zip(given._node.shape, place._node.shape, strict=False))
    if given.ndim == place.ndim and not all(same(a, b) for a, b in pairs):
        place._tracer.require_equal(pairs)
    if given.ndim != place.ndim or not all(same(a, b) for a, b in pairs):
        texts = [shape_text(t._node.shape) for t in (given, place)]
        raise ShapeError(f"{name}: a tensor of shape {texts[0]} for elements of shape {texts[1]}", mend="give it that shape")
    if given._node.dtype is not place._node.dtype:
        what = f"{name}: a tensor of {given._node.dtype} for one of {place._node.dtype}"
        raise TraceError(what, mend="convert it, as torch asks as well")
