"""Elementary functions, activations and bit operations that are composed of a few graph operations."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusegen.dtypes import DType
from fusegen.errors import TraceError
from fusegen.ir.ops import Op
from fusegen.trace.functions.common import binary, cast, dtype_of, float_setting, in_place, require_float, require_number, tracer_of
from fusegen.trace.functions.pointwise import add, clamp, div, isinf, isnan, mul, sub, where
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor


def _unary(op: Op, x: TracedTensor) -> TracedTensor:
    return x._tracer.add(op, x)


def _as_float(x: TracedTensor) -> TracedTensor:
    """Casts integers to the default float dtype."""
    return x if dtype_of(x).is_float else cast(x, torch.get_default_dtype())


def _signed_as(x: TracedTensor, magnitude: TracedTensor) -> TracedTensor:
    """Applies the sign of x, including that of -0.0, to a magnitude."""
    return where(signbit(x), _unary(Op.NEG, magnitude), magnitude)


def _register(op: Op, *names: str) -> None:
    @implements(*names)
    def handler(input: TracedTensor) -> TracedTensor:
        return _unary(op, _as_float(input))


for _op, *_names in (
    (Op.ASIN, "asin", "arcsin"),
    (Op.ACOS, "acos", "arccos"),
    (Op.ASINH, "asinh", "arcsinh"),
    (Op.ACOSH, "acosh", "arccosh"),
    (Op.SINC, "sinc"),
    (Op.ENTR, "entr"),
):
    _register(_op, *_names)


# Functions of the normal distribution, and the gamma function.


@implements("ndtr")
def ndtr(input: TracedTensor) -> TracedTensor:
    """The normal CDF by erfc, which avoids cancellation for small values."""
    return mul(_unary(Op.ERFC, mul(_as_float(input), -math.sqrt(0.5))), 0.5)


@implements("mvlgamma", "multigammaln")
def mvlgamma(input: TracedTensor, p: int) -> TracedTensor:
    x = _as_float(input)
    total = _unary(Op.LGAMMA, x)
    for k in range(1, p):
        total = add(total, _unary(Op.LGAMMA, sub(x, k / 2.0)))
    return add(total, p * (p - 1) / 4.0 * math.log(math.pi))


# Angles.


@implements("atan", "arctan")
def atan(input: TracedTensor) -> TracedTensor:
    return binary(Op.ATAN2, _as_float(input), 1.0)


@implements("deg2rad")
def deg2rad(input: TracedTensor) -> TracedTensor:
    return mul(_as_float(input), math.pi / 180.0)


@implements("rad2deg")
def rad2deg(input: TracedTensor) -> TracedTensor:
    return mul(_as_float(input), 180.0 / math.pi)


@implements("hypot")
def hypot(input: Any, other: Any) -> TracedTensor:
    tracer = tracer_of(input, other)
    return binary(Op.HYPOT, *(require_float("hypot", tracer.lift(value)) for value in (input, other)))


# Inverse hyperbolic functions.


@implements("atanh", "arctanh")
def atanh(input: TracedTensor) -> TracedTensor:
    """(log(1 + x) - log(1 - x)) / 2, without cancellation for small x."""
    x = _as_float(input)
    return mul(sub(_unary(Op.LOG1P, x), _unary(Op.LOG1P, _unary(Op.NEG, x))), 0.5)


# Logarithms and powers.


@implements("log10")
def log10(input: TracedTensor) -> TracedTensor:
    return mul(_unary(Op.LOG, _as_float(input)), 1.0 / math.log(10.0))


@implements("xlog1py")
def xlog1py(input: Any, other: Any) -> TracedTensor:
    return binary(Op.XLOG1PY, input, other)


@implements("logaddexp2")
def logaddexp2(input: Any, other: Any) -> TracedTensor:
    greater = require_float("logaddexp2", binary(Op.MAXIMUM, input, other))
    tracer = greater._tracer
    distance = tracer.add(Op.ABS, sub(input, other))
    correction = mul(_unary(Op.LOG1P, _unary(Op.EXP2, _unary(Op.NEG, distance))), 1.0 / math.log(2.0))
    return where(isinf(greater), greater, add(greater, correction))


@implements("float_power")
def float_power(input: Any, exponent: Any) -> TracedTensor:
    tracer = tracer_of(input, exponent)
    base, power = (cast(tracer.lift(value), torch.float64) for value in (input, exponent))
    return binary(Op.POW, base, power)


@implements("ldexp")
def ldexp(input: Any, other: Any) -> TracedTensor:
    """input * 2^other. An integer exponent is split into three factors, since 2^other may overflow where the result does not."""
    tracer = tracer_of(input, other)
    x, exponent = tracer.lift(input), tracer.lift(other)
    if dtype_of(exponent).is_float:
        return mul(x if dtype_of(x).is_float else cast(x, exponent.dtype), _unary(Op.EXP2, exponent))
    x = _as_float(x)
    lowest, highest = _EXPONENTS[dtype_of(x).compute]
    third = clamp(binary(Op.FLOOR_DIVIDE, cast(exponent, torch.int64), 3), lowest, highest)
    last = clamp(sub(exponent, mul(third, 2)), lowest, highest)
    outer, inner = (_unary(Op.EXP2, cast(n, x.dtype if dtype_of(x) is DType.FLOAT64 else torch.float32)) for n in (third, last))
    wide = cast(x, dtype_of(x).compute.torch)
    return cast(mul(mul(mul(wide, outer), outer), inner), x.dtype)


_EXPONENTS = {DType.FLOAT32: (-126, 127), DType.FLOAT64: (-1022, 1023)}
"""Ranges of exponents of normal numbers. Three powers of two reach any finite number from any other."""


# Signs and comparisons.


@implements("signbit")
def signbit(input: TracedTensor) -> TracedTensor:
    """True for negative values and -0.0; the sign of NaN is unknown."""
    below = binary(Op.LT, input, 0)
    if not dtype_of(input).is_float:
        return below
    return binary(Op.LOGICAL_OR, below, binary(Op.LT, div(1.0, input), 0))


@implements("sgn")
def sgn(input: TracedTensor) -> TracedTensor:
    return input if dtype_of(input) is DType.BOOL else _unary(Op.SIGN, input)


@implements("copysign")
def copysign(input: Any, other: Any) -> TracedTensor:
    tracer = tracer_of(input, other)
    x, y = tracer.lift(input), tracer.lift(other)
    wide = _as_float(binary(Op.ADD, x, y)).dtype  # common float dtype
    return _signed_as(y, _unary(Op.ABS, cast(x, wide)))


@implements("heaviside")
def heaviside(input: Any, values: Any) -> TracedTensor:
    tracer = tracer_of(input, values)
    x, at_zero = tracer.lift(input), tracer.lift(values)
    if dtype_of(x) is not dtype_of(at_zero):
        raise TraceError(
            f"heaviside: the dtypes {dtype_of(x)} and {dtype_of(at_zero)} differ", hint="give both the same dtype, as in torch"
        )
    return where(binary(Op.EQ, x, 0), at_zero, cast(binary(Op.GT, x, 0), x.dtype))


@implements("fmax")
def fmax(input: Any, other: Any) -> TracedTensor:
    return _extreme_ignoring_nan(Op.GE, input, other)


@implements("fmin")
def fmin(input: Any, other: Any) -> TracedTensor:
    return _extreme_ignoring_nan(Op.LE, input, other)


def _extreme_ignoring_nan(comparison: Op, input: Any, other: Any) -> TracedTensor:
    """Returns the operand that a comparison selects; NaN operands are ignored."""
    return where(binary(Op.LOGICAL_OR, binary(comparison, input, other), isnan(other)), input, other)


@implements("isclose")
def isclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> TracedTensor:
    """True if |input - other| <= atol + rtol |other|, or both are the same infinity."""
    tracer = tracer_of(input, other)
    x, y = tracer.lift(input), tracer.lift(other)
    if dtype_of(x) is not dtype_of(y):
        raise TraceError(
            f"isclose: the dtypes {dtype_of(x)} and {dtype_of(y)} differ", hint="give both the same dtype, as in torch"
        )
    equal = binary(Op.EQ, x, y)
    if dtype_of(x) is DType.BOOL:
        return equal
    if equal_nan and dtype_of(x).is_float:
        equal = binary(Op.LOGICAL_OR, equal, binary(Op.LOGICAL_AND, isnan(x), isnan(y)))
    x, y = _as_float(x), _as_float(y)
    tolerance = add(mul(_unary(Op.ABS, y), float_setting("rtol", rtol)), float_setting("atol", atol))
    distance = _unary(Op.ABS, sub(x, y))
    near = binary(Op.LOGICAL_AND, binary(Op.LE, distance, tolerance), binary(Op.LT, distance, math.inf))
    return binary(Op.LOGICAL_OR, equal, near)


# Activations.


@implements("relu6")
def relu6(input: TracedTensor, inplace: bool = False) -> TracedTensor:
    return hardtanh(input, 0, 6, inplace)


@implements("hardtanh")
def hardtanh(input: TracedTensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> TracedTensor:
    """Clamps to two bounds, which are truncated for integers."""
    if dtype_of(require_number("hardtanh", input)) is DType.UINT8 and (min_val < 0 or max_val < 0):
        raise TraceError("hardtanh of uint8 cannot have a negative bound", hint="convert to a signed dtype first")
    bounds = (min_val, max_val) if dtype_of(input).is_float else (int(min_val), int(max_val))
    return in_place(input, input._tracer.add(Op.HARDTANH, input, *map(input._tracer.lift, bounds)), inplace)


@implements("threshold")
def threshold(input: TracedTensor, threshold: float, value: float, inplace: bool = False) -> TracedTensor:
    below = binary(Op.LE, require_number("threshold", input), threshold)
    return in_place(input, where(below, value, input), inplace)


@implements("selu")
def selu(input: TracedTensor, inplace: bool = False) -> TracedTensor:
    """Klambauer et al., Self-Normalizing Neural Networks (arXiv 1706.02515)."""
    scaled = binary(Op.MUL, input._tracer.add(Op.ELU, input, alpha=1.6732632423543772), 1.0507009873554805)
    return in_place(input, scaled, inplace)


@implements("tanhshrink")
def tanhshrink(input: TracedTensor) -> TracedTensor:
    return sub(input, input._tracer.add(Op.TANH, input))


@implements("hardshrink")
def hardshrink(input: TracedTensor, lambd: float = 0.5) -> TracedTensor:
    return where(binary(Op.LE, input._tracer.add(Op.ABS, require_float("hardshrink", input)), lambd), 0.0, input)


@implements("softshrink")
def softshrink(input: TracedTensor, lambd: float = 0.5) -> TracedTensor:
    small = binary(Op.LE, input._tracer.add(Op.ABS, require_float("softshrink", input)), lambd)
    return where(small, 0.0, sub(input, binary(Op.MUL, input._tracer.add(Op.SIGN, input), lambd)))


@implements("prelu")
def prelu(input: TracedTensor, weight: Any) -> TracedTensor:
    """x above 0, weight * x below. A weight of several elements has one per channel (dim 1)."""
    slope = input._tracer.lift(weight)
    if slope.ndim == 1 and input.ndim != 1:
        slope = slope.reshape((-1, *(1 for _ in range(input.ndim - 2))) if input.ndim else ())
    return binary(Op.PRELU, input, slope)


# Bitwise operations, which are logical ones for bools.


@implements("__and__", "bitwise_and")
def bitwise_and(input: Any, other: Any) -> TracedTensor:
    return _bitwise(Op.LOGICAL_AND, Op.BITWISE_AND, input, other)


@implements("__or__", "bitwise_or")
def bitwise_or(input: Any, other: Any) -> TracedTensor:
    return _bitwise(Op.LOGICAL_OR, Op.BITWISE_OR, input, other)


@implements("__xor__", "bitwise_xor")
def bitwise_xor(input: Any, other: Any) -> TracedTensor:
    return _bitwise(Op.LOGICAL_XOR, Op.BITWISE_XOR, input, other)


@implements("__invert__", "bitwise_not")
def bitwise_not(input: TracedTensor) -> TracedTensor:
    if dtype_of(input) is DType.BOOL:
        return input._tracer.add(Op.LOGICAL_NOT, input)
    return _bitwise(Op.LOGICAL_XOR, Op.BITWISE_XOR, input, -1)


@implements("__lshift__", "bitwise_left_shift")
def bitwise_left_shift(input: Any, other: Any) -> TracedTensor:
    return _integer_op(Op.LEFT_SHIFT, input, other)


@implements("__rshift__", "bitwise_right_shift")
def bitwise_right_shift(input: Any, other: Any) -> TracedTensor:
    return _integer_op(Op.RIGHT_SHIFT, input, other)


def _bitwise(logical: Op, integral: Op, input: Any, other: Any) -> TracedTensor:
    tracer = tracer_of(input, other)
    operands = [tracer.lift(input), tracer.lift(other)]
    if all(dtype_of(x) is DType.BOOL for x in operands):
        return tracer.add(logical, *operands)
    return _integer_op(integral, *operands)


def _integer_op(op: Op, input: Any, other: Any) -> TracedTensor:
    tracer = tracer_of(input, other)
    operands = [tracer.lift(input), tracer.lift(other)]
    dtypes = [dtype_of(x) for x in operands]
    if any(dtype.is_float for dtype in dtypes) or all(dtype is DType.BOOL for dtype in dtypes):
        names = " and ".join(map(repr, dtypes))
        raise TraceError(
            f"{op.row.name} of {names} is not supported: bit operations take integers", hint="convert to an integer dtype first"
        )
    return tracer.add(op, *operands)
