"""CUDA's spelling of the primitive operations: built-ins of the compiler, or primitives of ours."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.emit.math import Form, Language, Precedence, function
from fusegen.fusion import Group
from fusegen.fusion.groups import computed
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.reductions import REDUCTIONS
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

# The approximate functions of the hardware in float32, which a kernel uses that was declared with ``fast_math=True``. Errors are
# documented maxima. Those of instructions are in NVIDIA, PTX ISA, "Floating Point Instructions"; those of accurate functions in
# CUDA C++ Programming Guide, "Mathematical Functions", "Single-Precision Mathematical Standard Library Functions with Maximum ULP
# Error". nvcc's ``--use_fast_math`` takes the same instructions, but for angles, which are reduced first, for powers, of which it
# loses negative bases, and for divisors beyond 2^126, by which it gives 0.


@dataclass(frozen=True)
class Approximation:
    """An operation by an approximate function.

    Attributes:
        form: the function's call.
        error: the maximum error; "ulp" are units in the last place of float32.
        accurate: that of the function that is used otherwise.
    """

    form: Form
    error: str
    accurate: str


FAST_MATH = {
    Op.EXP: Approximation(function("fast_exp"), "2 + |1.2 x| ulp", "1 ulp"),
    Op.EXP2: Approximation(function("fast_exp2"), "2 ulp", "2 ulp"),
    Op.EXPM1: Approximation(function("fast_expm1"), "2^-18 + 2^-22.7 |x| relative", "1 ulp"),
    Op.LOG: Approximation(function("fast_log"), "2^-22 absolute for 0.5 < x < 2, 3 ulp elsewhere", "1 ulp"),
    Op.LOG1P: Approximation(function("fast_log1p"), "2^-18 relative", "1 ulp"),
    Op.LOG2: Approximation(function("fast_log2"), "2^-22 absolute for 0.5 < x < 2, 2^-22 relative elsewhere", "1 ulp"),
    Op.SIN: Approximation(function("fast_sin"), "2^-20 absolute for |x| < 2^17", "2 ulp"),
    Op.COS: Approximation(function("fast_cos"), "2^-20 absolute for |x| < 2^17", "2 ulp"),
    Op.TANH: Approximation(function("fast_tanh"), "2^-11 relative", "2 ulp"),
    Op.SQRT: Approximation(function("fast_sqrt"), "2^-23 relative", "0.5 ulp"),
    Op.RSQRT: Approximation(function("fast_rsqrt"), "2^-22.9 relative", "2 ulp"),
    Op.DIV: Approximation(function("fast_divide", 2), "2 ulp", "0.5 ulp"),
    Op.SIGMOID: Approximation(
        Form("fast_reciprocal(1.0f + fast_exp(-{0}))", Precedence.ATOM, (Precedence.ATOM,)), "4 + |1.2 x| ulp", "3 ulp"
    ),
    Op.ONE_PLUS_ERF: Approximation(function("fast_one_plus_erf"), "2^-19 + 2^-22 x^2 relative", "2^-23 absolute"),
}
"""The operations that have one."""


# Relative errors of a few 2^-22 (2^-18 of those that must not cancel), far below half a unit of a 16-bit result whatever they are
# composed with; what lies below 2^-126 may become zero. The logarithm is not here, since its absolute error shows near 1, nor the
# hardware's hyperbolic tangent, whose error is a quarter of half a unit of bfloat16, and more where something cancels.
# `FAST_MATH` is for users to ask for.
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


def approximated(graph: Graph, group: Group) -> tuple[Op, ...]:
    """The operations of a group that are approximate because its kernel asks for it."""
    if not graph.fast_math:
        return ()
    nodes = [graph.nodes[position] for position in sorted(computed(graph, group))]
    single = [node.op for node in nodes if node.args and graph.nodes[node.args[-1]].dtype.compute is DType.FLOAT32]
    if any(node.op in REDUCTIONS and REDUCTIONS[node.op].approximable for node in nodes):
        single.append(Op.EXP)  # combines normalizers
    return tuple(op for op in FAST_MATH if op in single)
