"""Pointwise functions: one handler for every row of the operation table, and those with arguments of their own."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusegen.dtypes import DType, from_torch
from fusegen.errors import TraceError
from fusegen.ir.ops import Family, Op
from fusegen.lang.functions.common import cast, dtype_of, tracer_of
from fusegen.lang.registry import implements
from fusegen.lang.tracer import Tracer
from fusegen.lang.values import TracedTensor

_OF_NUMBERS = frozenset(
    {Op.NEG, Op.ABS, Op.SIGN, Op.FLOOR, Op.CEIL, Op.TRUNC, Op.ROUND, Op.FLOOR_DIVIDE, Op.REMAINDER, Op.POW, Op.RELU, Op.SQUARE}
)
"""Operations that have no meaning for bools; torch refuses most of them as well."""


def _register_row(op: Op) -> None:
    """Makes an operation of the table available under all of its torch names."""
    row = op.row
    arity = row.arity or 0
    names = [name for name, _ in row.parameters]
    defaults = dict(row.parameters)

    @implements(*row.twins)
    def handler(*args: Any, **kwargs: Any) -> TracedTensor:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("inplace", "out") or value}
        given = dict(zip(["input", "other"][:arity], args, strict=False)) | dict(zip(names, args[arity:], strict=False)) | kwargs
        operands = [given.pop(key) for key in ("input", "other", "exponent") if key in given]
        unknown = set(given) - set(names)
        if unknown or len(operands) != arity:
            raise TraceError(f"{row.name}: {'unexpected argument ' + sorted(unknown)[0] if unknown else 'missing operand'}")
        if given.get("approximate", "none") not in ("none", "tanh"):
            raise TraceError(f"{row.name}: approximate={given['approximate']!r}", mend="use 'none' or 'tanh'")
        for name, value in given.items():
            if isinstance(value, TracedTensor):
                value.require_static()
            if not isinstance(value, (bool, int, float, str)):
                raise TraceError(f"{row.name}: {name} is a {type(value).__name__}", mend="pass a number")
        tracer = tracer_of(*operands)
        lifted = [tracer.lift(o) for o in operands]
        if op in _OF_NUMBERS and all(dtype_of(x) is DType.BOOL for x in lifted):
            raise TraceError(f"{row.name} of bool", mend="convert to a number dtype first")
        return tracer.add(op, *lifted, **(defaults | given))


for _op in Op:
    if _op.family is Family.POINTWISE and _op.row.twins:
        _register_row(_op)


@implements("add")
def add(input: Any, other: Any, *, alpha: Any = 1) -> TracedTensor:
    """input + alpha * other."""
    return _binary(Op.ADD, input, _scaled(other, alpha, input))


@implements("sub", "subtract")
def sub(input: Any, other: Any, *, alpha: Any = 1) -> TracedTensor:
    """input - alpha * other."""
    return _difference(input, _scaled(other, alpha, input))


@implements("rsub")
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> TracedTensor:
    """other - alpha * input."""
    return _difference(other, _scaled(input, alpha, other))


def _difference(a: Any, b: Any) -> TracedTensor:
    tracer = tracer_of(a, b)
    if any(dtype_of(x) is DType.BOOL and not x._node.weak for x in (tracer.lift(a), tracer.lift(b))):
        raise TraceError("subtraction of bools", mend="use ^ or ~, or convert to a number dtype first")
    return _binary(Op.SUB, a, b)


def _scaled(value: Any, alpha: Any, other: Any) -> Any:
    if isinstance(alpha, (int, float)) and alpha == 1:
        return value
    return _binary(Op.MUL, tracer_of(value, other).lift(value), alpha)


def _binary(op: Op, a: Any, b: Any) -> TracedTensor:
    tracer = tracer_of(a, b)
    return tracer.add(op, tracer.lift(a), tracer.lift(b))


@implements("div", "divide", "true_divide")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> TracedTensor:
    """Division: true, or rounded down (``floor``) or towards zero (``trunc``)."""
    if rounding_mode is None:
        return _binary(Op.DIV, input, other)
    if rounding_mode == "floor":
        return _binary(Op.FLOOR_DIVIDE, input, other)
    if rounding_mode != "trunc":
        raise TraceError(f"div: rounding_mode {rounding_mode!r}", mend="use None, 'floor' or 'trunc'")
    tracer = tracer_of(input, other)
    if not (dtype_of(tracer.lift(input)).is_float or dtype_of(tracer.lift(other)).is_float):
        raise TraceError("div with rounding_mode='trunc' of integers is not supported", mend="use rounding_mode='floor'")
    return tracer.add(Op.TRUNC, _binary(Op.DIV, input, other))


@implements("where")
def where(condition: TracedTensor, input: Any, other: Any) -> TracedTensor:
    """input where the condition holds, other elsewhere."""
    tracer = tracer_of(condition, input, other)
    chosen = tracer.lift(condition)
    if dtype_of(chosen) is not DType.BOOL:
        raise TraceError(f"where: the condition is {dtype_of(chosen)}, not bool", mend="compare it: condition != 0")
    return tracer.add(Op.WHERE, chosen, tracer.lift(input), tracer.lift(other))


@implements("masked_fill")
def masked_fill(input: TracedTensor, mask: Any, value: Any) -> TracedTensor:
    """value where the mask holds, input elsewhere; keeps the input's dtype."""
    return cast(where(mask, value, input), input.dtype)


@implements("clamp", "clip")
def clamp(input: TracedTensor, min: Any = None, max: Any = None) -> TracedTensor:
    """Values below min raised to it, values above max lowered to it."""
    if min is None and max is None:
        raise TraceError("clamp without bounds", mend="give min, max or both")
    result = input
    if min is not None:
        result = _binary(Op.MAXIMUM, result, min)
    return result if max is None else _binary(Op.MINIMUM, result, max)


@implements("clamp_min")
def clamp_min(input: TracedTensor, min: Any) -> TracedTensor:
    """Values below min raised to it."""
    return clamp(input, min)


@implements("clamp_max")
def clamp_max(input: TracedTensor, max: Any) -> TracedTensor:
    """Values above max lowered to it."""
    return clamp(input, None, max)


@implements("addcmul")
def addcmul(input: TracedTensor, tensor1: Any, tensor2: Any, *, value: Any = 1) -> TracedTensor:
    """input + value * tensor1 * tensor2."""
    return add(input, _binary(Op.MUL, tensor1, tensor2), alpha=value)


@implements("lerp")
def lerp(input: TracedTensor, end: Any, weight: Any) -> TracedTensor:
    """input + weight * (end - input)."""
    return _binary(Op.ADD, input, _binary(Op.MUL, weight, _binary(Op.SUB, end, input)))


@implements("isnan")
def isnan(input: TracedTensor) -> TracedTensor:
    """Whether the value is NaN."""
    return _binary(Op.NE, input, input)


@implements("isinf")
def isinf(input: TracedTensor) -> TracedTensor:
    """Whether the value is an infinity."""
    return _binary(Op.EQ, input._tracer.add(Op.ABS, input), math.inf)


@implements("isfinite")
def isfinite(input: TracedTensor) -> TracedTensor:
    """Whether the value is neither an infinity nor NaN."""
    return _binary(Op.LT, input._tracer.add(Op.ABS, input), math.inf)


@implements("__and__", "bitwise_and", "__rand__")
def logical_and(input: Any, other: Any) -> TracedTensor:
    """Conjunction of bools."""
    return _logical(Op.LOGICAL_AND, input, other)


@implements("__or__", "bitwise_or", "__ror__")
def logical_or(input: Any, other: Any) -> TracedTensor:
    """Disjunction of bools."""
    return _logical(Op.LOGICAL_OR, input, other)


@implements("__xor__", "bitwise_xor", "__rxor__")
def logical_xor(input: Any, other: Any) -> TracedTensor:
    """Exclusive disjunction of bools."""
    return _logical(Op.LOGICAL_XOR, input, other)


@implements("__invert__", "bitwise_not")
def logical_not(input: TracedTensor) -> TracedTensor:
    """Negation of bools."""
    _require_bool(input)
    return input._tracer.add(Op.LOGICAL_NOT, input)


def _logical(op: Op, input: Any, other: Any) -> TracedTensor:
    tracer = tracer_of(input, other)
    operands = [tracer.lift(input), tracer.lift(other)]
    for operand in operands:
        _require_bool(operand)
    return tracer.add(op, *operands)


def _require_bool(value: TracedTensor) -> None:
    if dtype_of(value) is not DType.BOOL:
        raise TraceError("bitwise operations on integers are not supported", mend="use them on bool tensors")


@implements("dropout")
def dropout(input: TracedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> TracedTensor:
    """The identity for p=0 or training=False; random masks are not supported yet."""
    if training and p:
        raise TraceError("dropout with p > 0 is not supported yet", mend="pass training=False, or apply it outside of the kernel")
    return input


# Casts.


@implements("to", "type")
def to(input: TracedTensor, *args: Any, **kwargs: Any) -> TracedTensor:
    """Tensor.to: dtypes cast; the tensor's own device is accepted, another is refused."""
    named = [kwargs.pop(key) for key in ("dtype", "device", "other") if kwargs.get(key) is not None]
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
    def handler(input: TracedTensor) -> TracedTensor:
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
}.items():
    _register_cast(_name, _dtype)


@implements("contiguous", "clone", "detach", "alias", "positive")
def identity(input: TracedTensor, *, memory_format: Any = None) -> TracedTensor:
    """The same values: in a kernel nothing has a memory layout of its own."""
    return input


@implements("relu6")
def relu6(input: TracedTensor, inplace: bool = False) -> TracedTensor:
    """min(max(x, 0), 6)."""
    return clamp(input, 0, 6)


@implements("full_like")
def full_like(input: TracedTensor, fill_value: float, *, dtype: torch.dtype | None = None, device: Any = None) -> TracedTensor:
    """A constant of the input's shape."""
    filled = scalar_tensor(input._tracer, fill_value, dtype or input.dtype)
    return input._tracer.add(Op.EXPAND, filled, shape=input._node.shape)


def scalar_tensor(tracer: Tracer, value: Any, dtype: torch.dtype) -> TracedTensor:
    """A number, which may be a run-time scalar, as a zero-dimensional tensor."""
    if isinstance(value, TracedTensor):
        return cast(value, dtype)
    kind = from_torch(dtype)
    return tracer.constant(bool(value) if kind is DType.BOOL else float(value) if kind.is_float else int(value), kind)


@implements("zeros_like")
def zeros_like(input: TracedTensor, *, dtype: torch.dtype | None = None, device: Any = None) -> TracedTensor:
    """Zeros of the input's shape."""
    return full_like(input, 0, dtype=dtype)


@implements("ones_like")
def ones_like(input: TracedTensor, *, dtype: torch.dtype | None = None, device: Any = None) -> TracedTensor:
    """Ones of the input's shape."""
    return full_like(input, 1, dtype=dtype)
