"""Pointwise functions: one handler for every row of the operation table, arithmetic with arguments of its own, and conversions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from fusegen.dtypes import DType
from fusegen.errors import TraceError, UnsupportedError
from fusegen.ir.infer import Operand, operand_dtype
from fusegen.ir.ops import Family, Op
from fusegen.trace.functions.common import binary, cast, dtype_of, floats, numbers, tracer_of, unsupported_argument, written
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor

_OPERANDS = ("input", "other")


def _register_row(op: Op) -> None:
    """Makes an operation of the table available under all of its torch names."""
    row = op.row
    arity = row.arity or 0
    names = [name for name, _ in row.parameters]
    defaults = dict(row.parameters)

    @implements(*row.twins)
    def handler(*args: Any, **kwargs: Any) -> TracedTensor:
        given = dict(zip([*_OPERANDS[:arity], *names, "inplace"], args, strict=False)) | kwargs
        inplace = given.pop("inplace", False) if len(args) <= arity + len(names) + 1 else None
        if inplace not in (True, False):
            raise TraceError(
                f"{row.name}: {len(args)} arguments", hint=f"it takes {arity} tensors and {', '.join(names) or 'no more'}"
            )
        operands = [given.pop(key) for key in (*_OPERANDS, "exponent") if key in given]
        unknown = set(given) - set(names)
        if unknown or len(operands) != arity:
            what = f"{row.name}: {'unexpected argument ' + sorted(unknown)[0] if unknown else 'missing operand'}"
            raise TraceError(what, hint=f"it takes {arity} tensors and {', '.join(names) or 'no more'}")
        if given.get("approximate", "none") not in ("none", "tanh"):
            raise TraceError(f"{row.name}: approximate={given['approximate']!r}", hint="use 'none' or 'tanh'")
        for name, value in given.items():
            if isinstance(value, TracedTensor):
                value.require_static()
            if isinstance(value, np.generic):
                given[name] = value = value.item()
            if name != "approximate" and not isinstance(value, (bool, int, float)):
                raise TraceError(f"{row.name}: {name} is a {type(value).__name__}", hint="pass a number")
        tracer = tracer_of(*operands)
        lifted = [tracer.lift(o) for o in operands]
        return written(lifted[0], tracer.add(op, *lifted, **(defaults | given)), inplace)


for _op in Op:
    if _op.family is Family.POINTWISE and _op.row.twins:
        _register_row(_op)


@implements("add")
def add(input: Any, other: Any, *, alpha: Any = 1) -> TracedTensor:
    """input + alpha * other."""
    return binary(Op.ADD, input, _scaled(other, alpha, input))


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
        raise TraceError("subtraction of bools", hint="use ^ or ~, or convert to a number dtype first")
    return binary(Op.SUB, a, b)


def _scaled(value: Any, alpha: Any, other: Any) -> Any:
    if type(alpha) in (bool, int, float) and alpha == 1:
        return value
    scaled, common = _in_common(value, other)
    if common is DType.BOOL:
        raise TraceError(f"bools scaled by {alpha}", hint="convert to a number dtype first")
    if isinstance(alpha, float) and not common.is_float:
        raise TraceError(f"integers scaled by {alpha}", hint="convert to a float dtype first, as torch asks as well")
    return binary(Op.MUL, scaled, alpha)


def _in_common(value: Any, other: Any) -> tuple[TracedTensor, DType]:
    """A value in the dtype that it has in common with another one, which a factor does not change; floats stay as they are."""
    tracer = tracer_of(value, other)
    pair = [tracer.lift(value), tracer.lift(other)]
    common = operand_dtype(Op.ADD, [Operand(x._node.shape, dtype_of(x), x._node.weak) for x in pair])
    is_kept = pair[0]._node.weak or dtype_of(pair[0]).is_float
    return pair[0] if is_kept else cast(pair[0], common.torch), common


def mul(input: Any, other: Any) -> TracedTensor:
    """input * other."""
    return binary(Op.MUL, input, other)


@implements("div", "divide", "true_divide")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> TracedTensor:
    """Division: true, or rounded down (``floor``) or towards zero (``trunc``)."""
    if rounding_mode is None:
        return binary(Op.DIV, input, other)
    if rounding_mode == "floor":
        return binary(Op.FLOOR_DIVIDE, input, other)
    if rounding_mode != "trunc":
        raise TraceError(f"div: rounding_mode {rounding_mode!r}", hint="use None, 'floor' or 'trunc'")
    tracer = tracer_of(input, other)
    a, b = tracer.lift(input), tracer.lift(other)
    if dtype_of(a).is_float or dtype_of(b).is_float:
        return tracer.add(Op.TRUNC, binary(Op.DIV, a, b))
    floored = binary(Op.FLOOR_DIVIDE, a, b)
    return where(_rounds_away(a, b), binary(Op.ADD, floored, 1), floored)


def _rounds_away(a: TracedTensor, b: TracedTensor) -> TracedTensor:
    """True if a quotient of integers rounded down is one less than rounded towards zero."""
    common = operand_dtype(Op.ADD, [Operand(x._node.shape, dtype_of(x), x._node.weak) for x in (a, b)]).torch
    a, b = cast(a, common), cast(b, common)  # a number wraps to the type in which it takes part
    negative = binary(Op.LOGICAL_XOR, binary(Op.LT, a, 0), binary(Op.LT, b, 0))
    return binary(Op.LOGICAL_AND, negative, binary(Op.NE, binary(Op.REMAINDER, a, b), 0))


@implements("fmod")
def fmod(input: Any, other: Any) -> TracedTensor:
    """The remainder of a division that rounds towards zero; it has the sign of input."""
    tracer = tracer_of(input, other)
    a, b = tracer.lift(input), tracer.lift(other)
    if dtype_of(a).is_float or dtype_of(b).is_float:
        return tracer.add(Op.FMOD, a, b)
    rest = binary(Op.REMAINDER, a, b)
    return where(_rounds_away(a, b), binary(Op.SUB, rest, cast(b, rest.dtype)), rest)  # torch subtracts no bools


@implements("where")
def where(condition: TracedTensor, input: Any = None, other: Any = None) -> TracedTensor:
    """input where the condition holds, other elsewhere."""
    if input is None or other is None:
        what = "where of a condition alone cannot be traced: how many elements it gives depends on its values"
        raise UnsupportedError(what, hint="choose between two values: torch.where(condition, x, 0)")
    tracer = tracer_of(condition, input, other)
    chosen = tracer.lift(condition)
    if dtype_of(chosen) is not DType.BOOL:
        raise TraceError(f"where: the condition is {dtype_of(chosen)}, not bool", hint="compare it: condition != 0")
    return tracer.add(Op.WHERE, chosen, tracer.lift(input), tracer.lift(other))


@implements("Tensor.where")
def where_method(input: TracedTensor, condition: Any, other: Any) -> TracedTensor:
    """As a method the tensor is what is chosen, not the condition."""
    return where(condition, input, other)


@implements("masked_fill")
def masked_fill(input: TracedTensor, mask: Any, value: Any) -> TracedTensor:
    """value where the mask holds, input elsewhere; keeps the input's dtype."""
    filled = input._tracer.lift(value)
    if not dtype_of(input).is_float:  # which a float would take along to where large integers are rounded
        filled = cast(filled, input.dtype)
    return cast(where(mask, filled, input), input.dtype)


@implements("clamp", "clip")
def clamp(input: TracedTensor, min: Any = None, max: Any = None) -> TracedTensor:
    """Values below min raised to it, values above max lowered to it."""
    if min is None and max is None:
        raise TraceError("clamp without bounds", hint="give min, max or both")
    result = input
    if min is not None:
        result = binary(Op.CLAMP_MIN, result, min)
    return result if max is None else binary(Op.CLAMP_MAX, result, max)


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
    return add(input, binary(Op.MUL, tensor1, tensor2), alpha=value)


@implements("addcdiv")
def addcdiv(input: TracedTensor, tensor1: Any, tensor2: Any, *, value: Any = 1) -> TracedTensor:
    """input + value * tensor1 / tensor2."""
    return add(input, div(tensor1, tensor2), alpha=value)


@implements("lerp")
def lerp(input: TracedTensor, end: Any, weight: Any) -> TracedTensor:
    """input + weight * (end - input)."""
    way = floats("lerp", binary(Op.SUB, end, input))
    return binary(Op.ADD, input, binary(Op.MUL, weight, way))


@implements("isnan")
def isnan(input: TracedTensor) -> TracedTensor:
    """True if the value is NaN."""
    return binary(Op.NE, input, input)


@implements("isinf")
def isinf(input: TracedTensor) -> TracedTensor:
    """True if the value is an infinity; integers never are."""
    if not dtype_of(input).is_float:
        return binary(Op.NE, input, input)
    return binary(Op.EQ, input._tracer.add(Op.ABS, input), math.inf)


@implements("isposinf")
def isposinf(input: TracedTensor) -> TracedTensor:
    """True if the value is the positive infinity."""
    return binary(Op.EQ, input, math.inf)


@implements("isneginf")
def isneginf(input: TracedTensor) -> TracedTensor:
    """True if the value is the negative infinity."""
    return binary(Op.EQ, input, -math.inf)


@implements("nan_to_num")
def nan_to_num(
    input: TracedTensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> TracedTensor:
    """NaN and infinities replaced: by 0 and the greatest finite values where nothing else is given."""
    if not dtype_of(input).is_float:
        return input
    limits = torch.finfo(input.dtype)
    finite = where(isposinf(input), limits.max if posinf is None else posinf, input)
    finite = where(isneginf(input), limits.min if neginf is None else neginf, finite)
    return where(isnan(input), 0.0 if nan is None else nan, finite)


@implements("isfinite")
def isfinite(input: TracedTensor) -> TracedTensor:
    """True if the value is neither an infinity nor NaN, as integers always are."""
    if not dtype_of(input).is_float:
        return binary(Op.EQ, input, input)
    return binary(Op.LT, input._tracer.add(Op.ABS, input), math.inf)


@implements("positive", "__pos__")
def positive(input: TracedTensor) -> TracedTensor:
    """The same numbers."""
    return numbers("positive", input)


@implements("logit")
def logit(input: TracedTensor, eps: float | None = None) -> TracedTensor:
    """log(x / (1 - x)), of x between eps and 1 - eps."""
    x = input if eps is None else clamp(input, eps, 1 - eps)
    return input._tracer.add(Op.LOGIT, x)


@implements("logaddexp")
def logaddexp(input: Any, other: Any) -> TracedTensor:
    """log(exp(input) + exp(other)), without overflow."""
    tracer = tracer_of(input, other)
    greater = floats("logaddexp", binary(Op.MAXIMUM, input, other))
    distance = tracer.add(Op.ABS, sub(input, other))
    more = tracer.add(Op.LOG1P, tracer.add(Op.EXP, tracer.add(Op.NEG, distance)))
    return where(isinf(greater), greater, add(greater, more))


@implements("xlogy")
def xlogy(input: Any, other: Any) -> TracedTensor:
    """input * log(other), and 0 for an input of 0."""
    return binary(Op.XLOGY, input, other)


@implements("tan")
def tan(input: TracedTensor) -> TracedTensor:
    """sin(x) / cos(x)."""
    return div(input._tracer.add(Op.SIN, input), input._tracer.add(Op.COS, input))


@implements("frac")
def frac(input: TracedTensor) -> TracedTensor:
    """The digits after the point, with the sign of the value."""
    return sub(input, input._tracer.add(Op.TRUNC, floats("frac", input)))


@implements("round")
def round(input: TracedTensor, *, decimals: int = 0) -> TracedTensor:
    """The nearest whole number, of two the even one; or the nearest of so many decimals."""
    if not decimals:
        return input._tracer.add(Op.ROUND, numbers("round", input))
    floats("round to decimals", input)
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return binary(Op.MUL, input._tracer.add(Op.ROUND, div(input, scale)), scale)
    return div(input._tracer.add(Op.ROUND, binary(Op.MUL, input, scale)), scale)


# Conversions, and functions that give the same values.


@implements("type")
def type_(input: TracedTensor, dtype: Any = None, non_blocking: bool = False) -> TracedTensor:
    """A cast."""
    if not isinstance(dtype, torch.dtype):
        raise TraceError(f"Tensor.type({'' if dtype is None else repr(dtype)}) cannot be traced", hint="use .dtype, or to(dtype)")
    return cast(input, dtype)


@implements("to")
def to(input: TracedTensor, *args: Any, **kwargs: Any) -> TracedTensor:
    """Tensor.to: dtypes cast; the tensor's own device is accepted, another is refused."""
    named = [kwargs.pop(key) for key in ("dtype", "device", "other") if kwargs.get(key) is not None]
    for key in ("copy", "non_blocking", "memory_format"):  # arguments without a meaning in a kernel
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
