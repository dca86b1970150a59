"""Pointwise functions: one handler for each row of the operation table, arithmetic with extra arguments, and conversions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from fusegen.dtypes import DType
from fusegen.errors import TraceError, UnsupportedError
from fusegen.ir.infer import Operand, operand_dtype
from fusegen.ir.ops import Family, Op
from fusegen.trace.functions.common import (
    binary,
    cast,
    dtype_of,
    in_place,
    require_float,
    require_number,
    tracer_of,
    unsupported_argument,
)
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor

_OPERANDS = ("input", "other")


def _register_row(op: Op) -> None:
    """Registers a handler for all torch names of an operation."""
    row = op.row
    arity = row.arity or 0
    names = [name for name, _ in row.parameters]
    defaults = dict(row.parameters)

    @implements(*row.torch_names)
    def handler(*args: Any, **kwargs: Any) -> TracedTensor:
        arguments = dict(zip([*_OPERANDS[:arity], *names, "inplace"], args, strict=False)) | kwargs
        inplace = arguments.pop("inplace", False) if len(args) <= arity + len(names) + 1 else None
        if inplace not in (True, False):
            raise TraceError(
                f"{row.name} got {len(args)} arguments",
                hint=f"it takes {arity} tensors and {', '.join(names) or 'no other arguments'}",
            )
        operands = [arguments.pop(key) for key in (*_OPERANDS, "exponent") if key in arguments]
        unknown = set(arguments) - set(names)
        if unknown or len(operands) != arity:
            message = f"{row.name}: {'unexpected argument ' + sorted(unknown)[0] if unknown else 'missing operand'}"
            raise TraceError(message, hint=f"it takes {arity} tensors and {', '.join(names) or 'no other arguments'}")
        if arguments.get("approximate", "none") not in ("none", "tanh"):
            raise TraceError(f"{row.name}: approximate={arguments['approximate']!r} is not supported", hint="use 'none' or 'tanh'")
        for name, value in arguments.items():
            if isinstance(value, TracedTensor):
                value.require_static()
            if isinstance(value, np.generic):
                arguments[name] = value = value.item()
            if name != "approximate" and not isinstance(value, (bool, int, float)):
                raise TraceError(f"{row.name}: {name} is a {type(value).__name__}, not a number", hint="pass a number")
        tracer = tracer_of(*operands)
        lifted = [tracer.lift(o) for o in operands]
        return in_place(lifted[0], tracer.add(op, *lifted, **(defaults | arguments)), inplace)


for _op in Op:
    if _op.family is Family.POINTWISE and _op.row.torch_names:
        _register_row(_op)


@implements("add")
def add(input: Any, other: Any, *, alpha: Any = 1) -> TracedTensor:
    return binary(Op.ADD, input, _scaled(other, alpha, input))


@implements("sub", "subtract")
def sub(input: Any, other: Any, *, alpha: Any = 1) -> TracedTensor:
    return _difference(input, _scaled(other, alpha, input))


@implements("rsub")
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> TracedTensor:
    """other - alpha * input."""
    return _difference(other, _scaled(input, alpha, other))


def _difference(a: Any, b: Any) -> TracedTensor:
    tracer = tracer_of(a, b)
    if any(dtype_of(x) is DType.BOOL and not x._node.weak for x in (tracer.lift(a), tracer.lift(b))):
        raise TraceError("subtraction of bools is not defined", hint="use ^ or ~, or convert to a numeric dtype first")
    return binary(Op.SUB, a, b)


def _scaled(value: Any, alpha: Any, other: Any) -> Any:
    if type(alpha) in (bool, int, float) and alpha == 1:
        return value
    scaled, common = _promoted(value, other)
    if common is DType.BOOL:
        raise TraceError(f"bools cannot be scaled by alpha={alpha}", hint="convert to a numeric dtype first")
    if isinstance(alpha, float) and not common.is_float:
        raise TraceError(f"integers cannot be scaled by alpha={alpha}", hint="convert to a float dtype first, as in torch")
    return binary(Op.MUL, scaled, alpha)


def _promoted(value: Any, other: Any) -> tuple[TracedTensor, DType]:
    """Returns a value cast to the dtype it shares with another operand, and that dtype. Floats and weak scalars are not cast."""
    tracer = tracer_of(value, other)
    pair = [tracer.lift(value), tracer.lift(other)]
    common = operand_dtype(Op.ADD, [Operand(x._node.shape, dtype_of(x), x._node.weak) for x in pair])
    is_unchanged = pair[0]._node.weak or dtype_of(pair[0]).is_float
    return pair[0] if is_unchanged else cast(pair[0], common.torch), common


def mul(input: Any, other: Any) -> TracedTensor:
    return binary(Op.MUL, input, other)


@implements("div", "divide", "true_divide")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> TracedTensor:
    """True division, or rounded down (`floor`) or towards zero (`trunc`)."""
    if rounding_mode is None:
        return binary(Op.DIV, input, other)
    if rounding_mode == "floor":
        return binary(Op.FLOOR_DIVIDE, input, other)
    if rounding_mode != "trunc":
        raise TraceError(f"div: rounding_mode={rounding_mode!r} is not supported", hint="use None, 'floor' or 'trunc'")
    tracer = tracer_of(input, other)
    a, b = tracer.lift(input), tracer.lift(other)
    if dtype_of(a).is_float or dtype_of(b).is_float:
        return tracer.add(Op.TRUNC, binary(Op.DIV, a, b))
    floored = binary(Op.FLOOR_DIVIDE, a, b)
    return where(_floor_differs_from_trunc(a, b), binary(Op.ADD, floored, 1), floored)


def _floor_differs_from_trunc(a: TracedTensor, b: TracedTensor) -> TracedTensor:
    """True if integer floor division and truncation differ (by one)."""
    common = operand_dtype(Op.ADD, [Operand(x._node.shape, dtype_of(x), x._node.weak) for x in (a, b)]).torch
    a, b = cast(a, common), cast(b, common)  # a Python number wraps to the common dtype
    negative = binary(Op.LOGICAL_XOR, binary(Op.LT, a, 0), binary(Op.LT, b, 0))
    return binary(Op.LOGICAL_AND, negative, binary(Op.NE, binary(Op.REMAINDER, a, b), 0))


@implements("fmod")
def fmod(input: Any, other: Any) -> TracedTensor:
    """The remainder of a truncated division, with the input's sign."""
    tracer = tracer_of(input, other)
    a, b = tracer.lift(input), tracer.lift(other)
    if dtype_of(a).is_float or dtype_of(b).is_float:
        return tracer.add(Op.FMOD, a, b)
    remainder = binary(Op.REMAINDER, a, b)
    return where(_floor_differs_from_trunc(a, b), binary(Op.SUB, remainder, cast(b, remainder.dtype)), remainder)


@implements("where")
def where(condition: TracedTensor, input: Any = None, other: Any = None) -> TracedTensor:
    if input is None or other is None:
        message = "where(condition) cannot be traced: the size of its result depends on values"
        raise UnsupportedError(message, hint="give both values: torch.where(condition, x, 0)")
    tracer = tracer_of(condition, input, other)
    mask = tracer.lift(condition)
    if dtype_of(mask) is not DType.BOOL:
        raise TraceError(f"where: the condition is {dtype_of(mask)}, not bool", hint="compare it: condition != 0")
    return tracer.add(Op.WHERE, mask, tracer.lift(input), tracer.lift(other))


@implements("Tensor.where")
def where_method(input: TracedTensor, condition: Any, other: Any) -> TracedTensor:
    """`input.where(condition, other)`: the condition is the second argument."""
    return where(condition, input, other)


@implements("masked_fill")
def masked_fill(input: TracedTensor, mask: Any, value: Any) -> TracedTensor:
    """value where the mask is True, else input, in the input's dtype."""
    filled = input._tracer.lift(value)
    if not dtype_of(input).is_float:  # promotion to float would round large integers
        filled = cast(filled, input.dtype)
    return cast(where(mask, filled, input), input.dtype)


@implements("clamp", "clip")
def clamp(input: TracedTensor, min: Any = None, max: Any = None) -> TracedTensor:
    if min is None and max is None:
        raise TraceError("clamp has no bounds", hint="give min, max or both")
    result = input
    if min is not None:
        result = binary(Op.CLAMP_MIN, result, min)
    return result if max is None else binary(Op.CLAMP_MAX, result, max)


@implements("clamp_min")
def clamp_min(input: TracedTensor, min: Any) -> TracedTensor:
    return clamp(input, min)


@implements("clamp_max")
def clamp_max(input: TracedTensor, max: Any) -> TracedTensor:
    return clamp(input, None, max)


@implements("addcmul")
def addcmul(input: TracedTensor, tensor1: Any, tensor2: Any, *, value: Any = 1) -> TracedTensor:
    return add(input, binary(Op.MUL, tensor1, tensor2), alpha=value)


@implements("addcdiv")
def addcdiv(input: TracedTensor, tensor1: Any, tensor2: Any, *, value: Any = 1) -> TracedTensor:
    return add(input, div(tensor1, tensor2), alpha=value)


@implements("lerp")
def lerp(input: TracedTensor, end: Any, weight: Any) -> TracedTensor:
    difference = require_float("lerp", binary(Op.SUB, end, input))
    return binary(Op.ADD, input, binary(Op.MUL, weight, difference))


@implements("isnan")
def isnan(input: TracedTensor) -> TracedTensor:
    return binary(Op.NE, input, input)


@implements("isinf")
def isinf(input: TracedTensor) -> TracedTensor:
    if not dtype_of(input).is_float:
        return binary(Op.NE, input, input)
    return binary(Op.EQ, input._tracer.add(Op.ABS, input), math.inf)


@implements("isposinf")
def isposinf(input: TracedTensor) -> TracedTensor:
    return binary(Op.EQ, input, math.inf)


@implements("isneginf")
def isneginf(input: TracedTensor) -> TracedTensor:
    return binary(Op.EQ, input, -math.inf)


@implements("nan_to_num")
def nan_to_num(
    input: TracedTensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> TracedTensor:
    """Replaces NaN and infinities, by default with 0 and the largest finite values."""
    if not dtype_of(input).is_float:
        return input
    limits = torch.finfo(input.dtype)
    finite = where(isposinf(input), limits.max if posinf is None else posinf, input)
    finite = where(isneginf(input), limits.min if neginf is None else neginf, finite)
    return where(isnan(input), 0.0 if nan is None else nan, finite)


@implements("isfinite")
def isfinite(input: TracedTensor) -> TracedTensor:
    if not dtype_of(input).is_float:
        return binary(Op.EQ, input, input)
    return binary(Op.LT, input._tracer.add(Op.ABS, input), math.inf)


@implements("positive", "__pos__")
def positive(input: TracedTensor) -> TracedTensor:
    return require_number("positive", input)


@implements("logit")
def logit(input: TracedTensor, eps: float | None = None) -> TracedTensor:
    """log(x / (1 - x)) with x clamped to [eps, 1 - eps]."""
    x = input if eps is None else clamp(input, eps, 1 - eps)
    return input._tracer.add(Op.LOGIT, x)


@implements("logaddexp")
def logaddexp(input: Any, other: Any) -> TracedTensor:
    """log(exp(input) + exp(other)), without overflow."""
    tracer = tracer_of(input, other)
    greater = require_float("logaddexp", binary(Op.MAXIMUM, input, other))
    distance = tracer.add(Op.ABS, sub(input, other))
    correction = tracer.add(Op.LOG1P, tracer.add(Op.EXP, tracer.add(Op.NEG, distance)))
    return where(isinf(greater), greater, add(greater, correction))


@implements("xlogy")
def xlogy(input: Any, other: Any) -> TracedTensor:
    return binary(Op.XLOGY, input, other)


@implements("tan")
def tan(input: TracedTensor) -> TracedTensor:
    return div(input._tracer.add(Op.SIN, input), input._tracer.add(Op.COS, input))


@implements("frac")
def frac(input: TracedTensor) -> TracedTensor:
    return sub(input, input._tracer.add(Op.TRUNC, require_float("frac", input)))


@implements("round")
def round(input: TracedTensor, *, decimals: int = 0) -> TracedTensor:
    """Rounds half to even, to a number of decimals."""
    if not decimals:
        return input._tracer.add(Op.ROUND, require_number("round", input))
    require_float("round to decimals", input)
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return binary(Op.MUL, input._tracer.add(Op.ROUND, div(input, scale)), scale)
    return div(input._tracer.add(Op.ROUND, binary(Op.MUL, input, scale)), scale)


# Conversions and identities.


@implements("type")
def type_(input: TracedTensor, dtype: Any = None, non_blocking: bool = False) -> TracedTensor:
    if not isinstance(dtype, torch.dtype):
        raise TraceError(
            f"Tensor.type({'' if dtype is None else repr(dtype)}) cannot be traced", hint="use x.dtype, or x.to(dtype)"
        )
    return cast(input, dtype)


@implements("to")
def to(input: TracedTensor, *args: Any, **kwargs: Any) -> TracedTensor:
    """Casts to dtypes. The tensor's own device is accepted, others are errors."""
    named = [kwargs.pop(key) for key in ("dtype", "device", "other") if kwargs.get(key) is not None]
    for key in ("copy", "non_blocking", "memory_format"):  # ignored in a kernel
        kwargs.pop(key, None)
    unsupported_argument("to", **{key: value for key, value in kwargs.items() if key not in ("dtype", "device", "other")})
    result = input
    for value in [*(a for a in args if not isinstance(a, bool)), *named]:
        if isinstance(value, torch.dtype):
            result = cast(result, value)
        elif isinstance(value, (TracedTensor, torch.Tensor)):
            result = cast(result, value.dtype)
        elif torch.device(value).type != input.device.type:
            raise TraceError(f"to: a kernel cannot move a tensor to {value}", hint="move it before the call")
    return result


@implements("type_as")
def type_as(input: TracedTensor, other: Any) -> TracedTensor:
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
    """Returns the input: values in a kernel have no memory layout."""
    return input


@implements("detach")
def detach(input: TracedTensor) -> TracedTensor:
    """Stops gradients; the memory is shared."""
    return input._tracer.add(Op.DETACH, input)
