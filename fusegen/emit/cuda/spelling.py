"""CUDA's spelling of the primitive operations: built-ins of the compiler, or primitives of ours."""

from __future__ import annotations

from fusegen.dtypes import DType
from fusegen.emit.cuda.fast_math import FAST_MATH
from fusegen.emit.spelling import Form, Language, Precedence, function
from fusegen.ir.ops import Op
from fusegen.schedule.math import Fast

_BUILTINS = {
    Op.ABS: "fabs",
    Op.FLOOR: "floor",
    Op.CEIL: "ceil",
    Op.TRUNC: "trunc",
    Op.ROUND: "rint",
    Op.EXP: "exp",
    Op.EXP2: "exp2",
    Op.EXPM1: "expm1",
    Op.LOG: "log",
    Op.LOG1P: "log1p",
    Op.LOG2: "log2",
    Op.SQRT: "sqrt",
    Op.RSQRT: "rsqrt",
    Op.SIN: "sin",
    Op.COS: "cos",
    Op.TANH: "tanh",
    Op.ERF: "erf",
    Op.ERFC: "erfc",
    Op.LGAMMA: "lgamma",
}

_DOUBLE = {
    **{op: function(name) for op, name in _BUILTINS.items()},
    Op.POW: function("pow", 2),
    Op.ATAN2: function("atan2", 2),
    Op.SIGMOID: Form("1.0 / (1.0 + exp(-{0}))", Precedence.PRODUCT, (Precedence.ATOM,)),
    Op.ONE_PLUS_ERF: Form("1.0 + erf({0})", Precedence.SUM, (Precedence.CONDITIONAL,)),
    Op.EXP_BELOW: Form("{0} == {1} ? 1.0 : exp({0} - {1})", Precedence.CONDITIONAL, (Precedence.PRODUCT,)),
}
_FLOAT = {
    **{op: function(f"{name}f") for op, name in _BUILTINS.items()},
    Op.POW: function("powf", 2),
    Op.ATAN2: function("atan2f", 2),
    Op.SIGMOID: Form("1.0f / (1.0f + expf(-{0}))", Precedence.PRODUCT, (Precedence.ATOM,)),
    Op.ONE_PLUS_ERF: Form("1.0f + erff({0})", Precedence.SUM, (Precedence.CONDITIONAL,)),
    Op.EXP_BELOW: function("exp_below", 2),
}
_INTEGER = {  # torch's integers wrap; signed arithmetic of C++ does not say what it does then, and NVRTC has no option for it
    Op.ADD: function("wrap_add", 2),
    Op.SUB: function("wrap_sub", 2),
    Op.MUL: function("wrap_mul", 2),
    Op.NEG: function("wrap_neg"),
    Op.ABS: function("wrap_abs"),
    Op.FLOOR: function(""),
    Op.CEIL: function(""),
    Op.TRUNC: function(""),
    Op.ROUND: function(""),
    Op.POW: function("integer_power", 2),
}
_BOOL = {
    Op.MUL: Form("{0} && {1}", Precedence.AND, (Precedence.AND, Precedence.EQUALITY)),
    Op.ADD: Form("{0} || {1}", Precedence.OR, (Precedence.OR, Precedence.AND)),
    Op.MAXIMUM: Form("{0} || {1}", Precedence.OR, (Precedence.OR, Precedence.AND)),
    Op.MINIMUM: Form("{0} && {1}", Precedence.AND, (Precedence.AND, Precedence.EQUALITY)),
}

# Relative errors of a few 2^-22 (2^-18 of those that must not cancel), far below half a unit of a 16-bit result whatever they are
# composed with; what lies below 2^-126 may become zero. The logarithm is not here, since its absolute error shows near 1, nor the
# hardware's hyperbolic tangent, whose error is a quarter of half a unit of bfloat16, and more where something cancels.
# `fusegen.emit.cuda.fast_math` has what a user may ask for.
_SMALL = (Op.EXP, Op.EXPM1, Op.LOG1P, Op.RSQRT, Op.DIV, Op.SIGMOID, Op.ONE_PLUS_ERF)
_ROUNDED = {**{op: FAST_MATH[op].form for op in _SMALL}, Op.TANH: function("tanh_by_exp")}

CUDA = Language(
    forms={DType.FLOAT32: _FLOAT, DType.FLOAT64: _DOUBLE, DType.INT64: _INTEGER, DType.BOOL: _BOOL},
    fast={Fast.ROUNDED: _ROUNDED, Fast.FAST_MATH: {op: each.form for op, each in FAST_MATH.items()}},
    infinity={DType.FLOAT32: "bit_cast<float>(0x7f800000u)", DType.FLOAT64: "bit_cast<double>(0x7ff0000000000000ull)"},
    nan={DType.FLOAT32: "bit_cast<float>(0x7fc00000u)", DType.FLOAT64: "bit_cast<double>(0x7ff8000000000000ull)"},
    sine_and_cosine="sincosf",
    power="power_of",
)
"""The language of every CUDA kernel."""
