"""Conversions, and what gives the same values."""

from __future__ import annotations

from typing import Any

import torch

from fusegen.errors import TraceError
from fusegen.ir.ops import Op
from fusegen.lang.functions.common import cast, unsupported_argument
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("type")
def type_(input: TracedTensor, dtype: Any = None, non_blocking: bool = False) -> TracedTensor:
    """A cast."""
    if not isinstance(dtype, torch.dtype):
        raise TraceError(f"Tensor.type({'' if dtype is None else repr(dtype)}) cannot be traced", mend="use .dtype, or to(dtype)")
    return cast(input, dtype)


@implements("to")
def to(input: TracedTensor, *args: Any, **kwargs: Any) -> TracedTensor:
    """Tensor.to: dtypes cast; the tensor's own device is accepted, another is refused."""
    named = [kwargs.pop(key) for key in ("dtype", "device", "other") if kwargs.get(key) is not None]
    for key in ("copy", "non_blocking", "memory_format"):  # which mean nothing in a kernel
        kwargs.pop(key, None)
    unsupported_argument("to", **{key: value for key, value in kwargs.items() if key not in ("dtype", "device", "other")})
    result = input
    for value in [*(a for a in args if not isinstance(a, bool)), *named]:
        if isinstance(value, torch.dtype):
            result = cast(result, value)
        elif isinstance(value, (TracedTensor, torch.Tensor)):
            result = cast(result, value.dtype)
        elif torch.device(value).type != input.device.type:
            raise TraceError(f"to: a kernel cannot move a tensor to {value}", mend="move it before the call")
    return result


@implements("type_as")
def type_as(input: TracedTensor, other: Any) -> TracedTensor:
    """A cast to another tensor's dtype."""
    return cast(input, other.dtype)


def _register_cast(name: str, dtype: torch.dtype) -> None:
    @implements(name)
    def handler(input: TracedTensor, memory_format: Any = None) -> TracedTensor:
        return cast(input, dtype)


for _name, _dtype in {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "bool": torch.bool,
    "byte": torch.uint8,
    "char": torch.int8,
}.items():
    _register_cast(_name, _dtype)


@implements("contiguous", "clone", "alias", "conj", "resolve_conj", "resolve_neg")
def identity(input: TracedTensor, *, memory_format: Any = None) -> TracedTensor:
    """The same values: in a kernel nothing has a memory layout of its own."""
    return input


@implements("detach")
def detach(input: TracedTensor) -> TracedTensor:
    """The same values in the same memory, through which no gradient flows."""
    return input._tracer.add(Op.DETACH, input)
