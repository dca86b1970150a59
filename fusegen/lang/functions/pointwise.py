"""Pointwise functions: one handler for every row of the operation table, and those with arguments of their own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from fusegen.dtypes import DType, from_torch
from fusegen.errors import TraceError
from fusegen.ir.infer import Operand, operand_dtype
from fusegen.ir.ops import Family, Op
from fusegen.lang.functions.common import cast, check_device, dtype_of, floats, numbers, tracer_of, unsupported_argument, written
from fusegen.lang.registry import implements
from fusegen.lang.scalars import TracedScalar
from fusegen.lang.tracer import Tracer
from fusegen.lang.values import SymbolicSize, TracedTensor

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
                f"{row.name}: {len(args)} arguments", mend=f"it takes {arity} tensors and {', '.join(names) or 'no more'}"
            )
        operands = [given.pop(key) for key in (*_OPERANDS, "exponent") if key in given]
        unknown = set(given) - set(names)
        if unknown or len(operands) != arity:
            what = f"{row.name}: {'unexpected argument ' + sorted(unknown)[0] if unknown else 'missing operand'}"
            raise TraceError(what, mend=f"it takes {arity} tensors and {', '.join(names) or 'no more'}")
        if given.get("approximate", "none") not in ("none", "tanh"):
            raise TraceError(f"{row.name}: approximate={given['approximate']!r}", mend="use 'none' or 'tanh'")
        for name, value in given.items():
            if isinstance(value, TracedTensor):
                value.require_static()
            if isinstance(value, np.generic):
                given[name] = value = value.item()
            if not isinstance(value, (bool, int, float, str)):
                raise TraceError(f"{row.name}: {name} is a {type(value).__name__}", mend="pass a number")
        tracer = tracer_of(*operands)
        lifted = [tracer.lift(o) for o in operands]
        return written(lifted[0], tracer.add(op, *lifted, **(defaults | given)), inplace)


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
    if type(alpha) in (bool, int, float) and alpha == 1:
        return value
    scaled, common = _in_common(value, other)
    if common is DType.BOOL:
        raise TraceError(f"bools scaled by {alpha}", mend="convert to a number dtype first")
    if isinstance(alpha, float) and not common.is_float:
        raise TraceError(f"integers scaled by {alpha}", mend="convert to a float dtype first, as torch asks as well")
    return _binary(Op.MUL, scaled, alpha)


def _in_common(value: Any, other: Any) -> tuple[TracedTensor, DType]:
    """A value in the dtype that it has in common with another one, which a factor does not change; floats stay as they are."""
    tracer = tracer_of(value, other)
    pair = [tracer.lift(value), tracer.lift(other)]
    common = operand_dtype(Op.ADD, [Operand(x._node.shape, dtype_of(x), x._node.weak) for x in pair])
    is_kept = pair[0]._node.weak or dtype_of(pair[0]).is_float
    return pair[0] if is_kept else cast(pair[0], common.torch), common


def _binary(op: Op, a: Any, b: Any) -> TracedTensor:
    tracer = tracer_of(a, b)
    return tracer.add(op, tracer.lift(a), tracer.lift(b))


def mul(input: Any, other: Any) -> TracedTensor:
    """input * other."""
    return _binary(Op.MUL, input, other)


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
    a, b = tracer.lift(input), tracer.lift(other)
    if dtype_of(a).is_float or dtype_of(b).is_float:
        return tracer.add(Op.TRUNC, _binary(Op.DIV, a, b))
    floored = _binary(Op.FLOOR_DIVIDE, a, b)
    return where(_rounds_away(a, b), _binary(Op.ADD, floored, 1), floored)


def _rounds_away(a: TracedTensor, b: TracedTensor) -> TracedTensor:
    """Whether a quotient of integers rounded down is one less than rounded towards zero."""
    common = operand_dtype(Op.ADD, [Operand(x._node.shape, dtype_of(x), x._node.weak) for x in (a, b)]).torch
    a, b = cast(a, common), cast(b, common)  # a number wraps to the type in which it takes part
    negative = _binary(Op.LOGICAL_XOR, _binary(Op.LT, a, 0), _binary(Op.LT, b, 0))
    return _binary(Op.LOGICAL_AND, negative, _binary(Op.NE, _binary(Op.REMAINDER, a, b), 0))


@implements("fmod")
def fmod(input: Any, other: Any) -> TracedTensor:
    """The remainder of a division that rounds towards zero; it has the sign of input."""
    tracer = tracer_of(input, other)
    a, b = tracer.lift(input), tracer.lift(other)
    if dtype_of(a).is_float or dtype_of(b).is_float:
        rest = _binary(Op.REMAINDER, tracer.add(Op.ABS, a), tracer.add(Op.ABS, b))
        return where(_binary(Op.LT, a, 0), tracer.add(Op.NEG, rest), rest)
    rest = _binary(Op.REMAINDER, a, b)
    return where(_rounds_away(a, b), _binary(Op.SUB, rest, b), rest)


@implements("where")
def where(condition: TracedTensor, input: Any, other: Any) -> TracedTensor:
    """input where the condition holds, other elsewhere."""
    tracer = tracer_of(condition, input, other)
    chosen = tracer.lift(condition)
    if dtype_of(chosen) is not DType.BOOL:
        raise TraceError(f"where: the condition is {dtype_of(chosen)}, not bool", mend="compare it: condition != 0")
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


@implements("addcdiv")
def addcdiv(input: TracedTensor, tensor1: Any, tensor2: Any, *, value: Any = 1) -> TracedTensor:
    """input + value * tensor1 / tensor2."""
    return add(input, div(tensor1, tensor2), alpha=value)


@implements("lerp")
def lerp(input: TracedTensor, end: Any, weight: Any) -> TracedTensor:
    """input + weight * (end - input)."""
    way = floats("lerp", _binary(Op.SUB, end, input))
    return _binary(Op.ADD, input, _binary(Op.MUL, weight, way))


@implements("isnan")
def isnan(input: TracedTensor) -> TracedTensor:
    """Whether the value is NaN."""
    return _binary(Op.NE, input, input)


@implements("isinf")
def isinf(input: TracedTensor) -> TracedTensor:
    """Whether the value is an infinity; integers never are."""
    if not dtype_of(input).is_float:
        return _binary(Op.NE, input, input)
    return _binary(Op.EQ, input._tracer.add(Op.ABS, input), math.inf)


@implements("isposinf")
def isposinf(input: TracedTensor) -> TracedTensor:
    """Whether the value is the positive infinity."""
    return _binary(Op.EQ, input, math.inf)


@implements("isneginf")
def isneginf(input: TracedTensor) -> TracedTensor:
    """Whether the value is the negative infinity."""
    return _binary(Op.EQ, input, -math.inf)


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
    """Whether the value is neither an infinity nor NaN, as integers always are."""
    if not dtype_of(input).is_float:
        return _binary(Op.EQ, input, input)
    return _binary(Op.LT, input._tracer.add(Op.ABS, input), math.inf)


# Casts.


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


@implements("positive", "__pos__")
def positive(input: TracedTensor) -> TracedTensor:
    """The same numbers."""
    return numbers("positive", input)


@implements("relu6")
def relu6(input: TracedTensor, inplace: bool = False) -> TracedTensor:
    """min(max(x, 0), 6)."""
    return hardtanh(input, 0, 6, inplace)


@implements("hardtanh")
def hardtanh(input: TracedTensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> TracedTensor:
    """The value between two bounds, which are whole numbers for integers."""
    if dtype_of(numbers("hardtanh", input)) is DType.UINT8 and (min_val < 0 or max_val < 0):
        raise TraceError("hardtanh of uint8 with a negative bound", mend="convert to a signed dtype first")
    bounds = (min_val, max_val) if dtype_of(input).is_float else (int(min_val), int(max_val))
    return written(input, clamp(input, *bounds), inplace)


@implements("threshold")
def threshold(input: TracedTensor, threshold: float, value: float, inplace: bool = False) -> TracedTensor:
    """What is above a threshold, and a value in place of the rest."""
    below = _binary(Op.LE, numbers("threshold", input), threshold)
    return written(input, where(below, value, input), inplace)


@implements("selu")
def selu(input: TracedTensor, inplace: bool = False) -> TracedTensor:
    """Klambauer et al., Self-Normalizing Neural Networks (arXiv 1706.02515)."""
    scaled = _binary(Op.MUL, input._tracer.add(Op.ELU, input, alpha=1.6732632423543772), 1.0507009873554805)
    return written(input, scaled, inplace)


@implements("celu")
def celu(input: TracedTensor, alpha: float = 1.0, inplace: bool = False) -> TracedTensor:
    """x above 0, alpha (exp(x / alpha) - 1) below."""
    below = _binary(Op.MUL, input._tracer.add(Op.EXPM1, div(floats("celu", input), alpha)), alpha)
    return written(input, where(_binary(Op.GT, input, 0), input, below), inplace)


@implements("tanhshrink")
def tanhshrink(input: TracedTensor) -> TracedTensor:
    """x - tanh(x)."""
    return sub(input, input._tracer.add(Op.TANH, input))


@implements("hardshrink")
def hardshrink(input: TracedTensor, lambd: float = 0.5) -> TracedTensor:
    """0 between -lambd and lambd."""
    return where(_binary(Op.LE, input._tracer.add(Op.ABS, floats("hardshrink", input)), lambd), 0.0, input)


@implements("softshrink")
def softshrink(input: TracedTensor, lambd: float = 0.5) -> TracedTensor:
    """Values moved towards 0 by lambd, and 0 between."""
    small = _binary(Op.LE, input._tracer.add(Op.ABS, floats("softshrink", input)), lambd)
    return where(small, 0.0, sub(input, _binary(Op.MUL, input._tracer.add(Op.SIGN, input), lambd)))


@implements("prelu")
def prelu(input: TracedTensor, weight: Any) -> TracedTensor:
    """x above 0, weight * x below; a weight of several elements is one a channel (dim 1)."""
    slope = input._tracer.lift(weight)
    if slope.ndim == 1 and input.ndim > 1:
        slope = slope.reshape((-1, *(1 for _ in range(input.ndim - 2))))
    return where(_binary(Op.GT, input, 0), input, _binary(Op.MUL, slope, input))


@implements("logit")
def logit(input: TracedTensor, eps: float | None = None) -> TracedTensor:
    """log(x / (1 - x)), of x between eps and 1 - eps."""
    x = input if eps is None else clamp(input, eps, 1 - eps)
    return input._tracer.add(Op.LOG, div(x, rsub(x, 1)))


@implements("logaddexp")
def logaddexp(input: Any, other: Any) -> TracedTensor:
    """log(exp(input) + exp(other)), without overflow."""
    tracer = tracer_of(input, other)
    greater = floats("logaddexp", _binary(Op.MAXIMUM, input, other))
    distance = tracer.add(Op.ABS, sub(input, other))
    more = tracer.add(Op.LOG1P, tracer.add(Op.EXP, tracer.add(Op.NEG, distance)))
    return where(isinf(greater), greater, add(greater, more))


@implements("xlogy")
def xlogy(input: Any, other: Any) -> TracedTensor:
    """input * log(other), and 0 for an input of 0."""
    tracer = tracer_of(input, other)
    x, y = tracer.lift(input), tracer.lift(other)
    product = _binary(Op.MUL, x, tracer.add(Op.LOG, y))
    return where(_binary(Op.LOGICAL_AND, _binary(Op.EQ, x, 0), _binary(Op.EQ, y, y)), 0.0, product)


@implements("tan")
def tan(input: TracedTensor) -> TracedTensor:
    """sin(x) / cos(x)."""
    return div(input._tracer.add(Op.SIN, input), input._tracer.add(Op.COS, input))


@implements("sinh")
def sinh(input: TracedTensor) -> TracedTensor:
    """(exp(x) - exp(-x)) / 2, by two terms of one sign, which do not cancel."""
    rising, falling = (input._tracer.add(Op.EXPM1, x) for x in (input, _binary(Op.MUL, input, -1)))
    return _binary(Op.MUL, sub(rising, falling), 0.5)


@implements("cosh")
def cosh(input: TracedTensor) -> TracedTensor:
    """(exp(x) + exp(-x)) / 2."""
    rising, falling = (input._tracer.add(Op.EXP, x) for x in (input, _binary(Op.MUL, input, -1)))
    return _binary(Op.MUL, add(rising, falling), 0.5)


@implements("frac")
def frac(input: TracedTensor) -> TracedTensor:
    """What follows the point, with the sign of the value."""
    return sub(input, input._tracer.add(Op.TRUNC, floats("frac", input)))


@implements("round")
def round(input: TracedTensor, *, decimals: int = 0) -> TracedTensor:
    """The nearest whole number, of two the even one; or the nearest of so many decimals."""
    if not decimals:
        return input._tracer.add(Op.ROUND, numbers("round", input))
    floats("round to decimals", input)
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return _binary(Op.MUL, input._tracer.add(Op.ROUND, div(input, scale)), scale)
    return div(input._tracer.add(Op.ROUND, _binary(Op.MUL, input, scale)), scale)


@implements("full_like")
def full_like(
    input: TracedTensor,
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
    memory_format: Any = None,
) -> TracedTensor:
    """A constant of the input's shape."""
    check_device(input._tracer, device)
    strange = None if layout is torch.strided else layout
    unsupported_argument("full_like", requires_grad=requires_grad, pin_memory=pin_memory, layout=strange)
    filled = scalar_tensor(input._tracer, fill_value, dtype or input.dtype)
    return input._tracer.add(Op.EXPAND, filled, shape=input._node.shape)


def scalar_tensor(tracer: Tracer, value: Any, dtype: torch.dtype) -> TracedTensor:
    """A number, which may be a run-time scalar, as a zero-dimensional tensor."""
    if isinstance(value, (TracedTensor, TracedScalar, SymbolicSize)):
        return cast(tracer.lift(value), dtype)
    kind = from_torch(dtype)
    return tracer.constant(bool(value) if kind is DType.BOOL else float(value) if kind.is_float else int(value), kind)


@implements("zeros_like")
def zeros_like(input: TracedTensor, **settings: Any) -> TracedTensor:
    """Zeros of the input's shape."""
    return full_like(input, 0, **settings)


@implements("ones_like")
def ones_like(input: TracedTensor, **settings: Any) -> TracedTensor:
    """Ones of the input's shape."""
    return full_like(input, 1, **settings)
