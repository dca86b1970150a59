"""C++ spelling of the primitive operations for the CPU: primitives of ours that vectorise, and the compiler's built-ins."""

from __future__ import annotations

from fusegen.dtypes import DType
from fusegen.emit.spelling import Form, Language, Precedence, bitwise, function
from fusegen.ir.ops import Op

_NAMES = {
    Op.FLOOR: "floor",
    Op.CEIL: "ceil",
    Op.TRUNC: "trunc",
    Op.ROUND: "rint",
    Op.EXP: "exp",
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
}


_AND, _OR = bitwise("&"), bitwise("|")  # of bools: a short circuit would be a branch in a vectorised loop

_FLOAT = {
    **{op: function(f"{name}_f32") for op, name in _NAMES.items()},
    Op.ABS: function("__builtin_fabsf"),
    Op.EXP2: function("__builtin_exp2f"),
    Op.POW: function("pow_f32", 2),
    Op.ATAN2: function("__builtin_atan2f", 2),
    Op.ERFC: function("__builtin_erfcf"),
    Op.LGAMMA: function("__builtin_lgammaf"),
    Op.SIGMOID: Form("1.0f / (1.0f + exp_f32(-{0}))", Precedence.PRODUCT, (Precedence.ATOM,)),
    Op.ONE_PLUS_ERF: Form("1.0f + erf_f32({0})", Precedence.SUM, (Precedence.CONDITIONAL,)),
    Op.EXP_BELOW: Form("{0} == {1} ? 1.0f : exp_f32({0} - {1})", Precedence.CONDITIONAL, (Precedence.PRODUCT,)),
}
_DOUBLE = {
    **{op: function(f"{name}_f64") for op, name in _NAMES.items()},
    Op.ABS: function("__builtin_fabs"),
    Op.EXP2: function("__builtin_exp2"),
    Op.POW: function("pow_f64", 2),
    Op.ATAN2: function("__builtin_atan2", 2),
    Op.ERFC: function("__builtin_erfc"),
    Op.LGAMMA: function("__builtin_lgamma"),
    Op.SIGMOID: Form("1.0 / (1.0 + exp_f64(-{0}))", Precedence.PRODUCT, (Precedence.ATOM,)),
    Op.ONE_PLUS_ERF: Form("1.0 + erf_f64({0})", Precedence.SUM, (Precedence.CONDITIONAL,)),
    Op.EXP_BELOW: Form("{0} == {1} ? 1.0 : exp_f64({0} - {1})", Precedence.CONDITIONAL, (Precedence.PRODUCT,)),
}
_INTEGER = {
    Op.ABS: function("__builtin_llabs"),
    Op.FLOOR: function(""),
    Op.CEIL: function(""),
    Op.TRUNC: function(""),
    Op.ROUND: function(""),
    Op.POW: function("integer_power", 2),
}
_BOOL = {
    Op.MUL: _AND,
    Op.ADD: _OR,
    Op.MINIMUM: _AND,
    Op.MAXIMUM: _OR,
    Op.LOGICAL_AND: _AND,
    Op.LOGICAL_OR: _OR,
}

CPP = Language(
    forms={DType.FLOAT32: _FLOAT, DType.FLOAT64: _DOUBLE, DType.INT64: _INTEGER, DType.BOOL: _BOOL},
    fast={},
    infinity={DType.FLOAT32: "__builtin_inff()", DType.FLOAT64: "__builtin_inf()"},
    nan={DType.FLOAT32: '__builtin_nanf("")', DType.FLOAT64: '__builtin_nan("")'},
)
"""The language of every CPU kernel."""
