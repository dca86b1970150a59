"""C++ text with SIMD and OpenMP: loop nests, complete files, and the spelling of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusegen.dtypes import DType
from fusegen.emit.environment import EVERYTHING, PrimitiveUses, banner, c_text, primitives_of
from fusegen.emit.math import Language, Precedence, Spelling, bitwise, function, function_text, with_quotes
from fusegen.emit.views import decode, entry, kernel_parameters
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Axes, product
from fusegen.schedule.kernel import LoweredKernel
from fusegen.schedule.math import MathFunction
from fusegen.schedule.program import Launch
from fusegen.source import Source, fitted, section
from fusegen.target import Target

# Loop nests over axes: chunks run along the last axis, all others are one loop.


@dataclass(frozen=True)
class NestView:
    """Axes as a template loops over them.

    Attributes:
        lane: the last axis.
        extent: its length.
        outer: the index over all outer axes; empty if there are none.
        outer_count: the number of its values.
        decode: statements that compute the outer axes from `outer`.
    """

    lane: str
    extent: str
    outer: str
    outer_count: str
    decode: list[str]

    @classmethod
    def of(cls, axes: Axes, outer: str) -> NestView:
        """Returns the view of axes; ``outer`` names the index over several outer axes."""
        before = Axes(axes.symbols[:-1], axes.extents[:-1])
        several = len(before.symbols) > 1
        return cls(
            lane=axes.symbols[-1].name,
            extent=c_text(axes.extents[-1]),
            outer=outer if several else "".join(s.name for s in before.symbols),
            outer_count=c_text(product(before.extents)),
            decode=decode(before, outer, "Index") if several else [],
        )

    @property
    def flat(self) -> bool:
        return not self.outer


@dataclass(frozen=True)
class DeclaredParameter:
    """A parameter of a kernel as templates declare and pass it."""

    type: str
    name: str


@dataclass(frozen=True)
class KernelNames:
    """The names of a kernel's functions, and the parameters that all of them take.

    Attributes:
        entry: the exported symbol.
        stem: prefix of the names of the pipeline's own functions.
        parameters: buffers, sizes, scalars; with checked indices also the output for an error message.
    """

    entry: str
    stem: str
    parameters: tuple[DeclaredParameter, ...]

    @property
    def declared(self) -> str:
        return ", ".join(f"{p.type} {p.name}" for p in self.parameters)

    @property
    def passed(self) -> str:
        return ", ".join(p.name for p in self.parameters)


# The parts of a C++ file.


def names_of(kernel: LoweredKernel) -> KernelNames:
    split = [text.rsplit(" ", 1) for text in kernel_parameters(kernel)]
    parameters = [DeclaredParameter(*pair) for pair in split]
    if kernel.checks:
        parameters.append(DeclaredParameter("const char**", "failed"))
    return KernelNames(entry(kernel), f"{kernel.name}_of", tuple(parameters))


def assemble(launch: Launch, target: Target, math: str, pipeline: str) -> Source:
    """Returns the source of a launch's kernel, with the primitives that its math and pipeline mention."""
    kernel = launch.kernel
    return Source(
        name=kernel.name,
        entry=entry(kernel),
        language="cpp",
        banner=banner(launch, target),
        primitives=primitives_of(math + pipeline, "cpu", _uses(kernel)),
        math=section("Math", fitted(with_quotes(math))) if math else "",
        pipeline=section("Pipeline", fitted(pipeline)),
    )


def _uses(kernel: LoweredKernel) -> PrimitiveUses:
    types = frozenset(pointer.dtype for pointer in kernel.pointers)
    return replace(EVERYTHING, loaded=types, stored=types, widened=types, narrowed=types)


def math_text(functions: Sequence[MathFunction]) -> str:
    return "\n".join(function_text(f, CPP, "FG_INLINE") for f in functions)


# C++ spelling of operations on the CPU: vectorizable primitives, and compiler built-ins.


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


_AND, _OR = bitwise("&"), bitwise("|")  # on bools: a short circuit would be a branch in a vectorized loop

_FLOAT = {
    **{op: function(f"{name}_f32") for op, name in _NAMES.items()},
    Op.ABS: function("__builtin_fabsf"),
    Op.EXP2: function("__builtin_exp2f"),
    Op.POW: function("pow_f32", 2),
    Op.ATAN2: function("__builtin_atan2f", 2),
    Op.ERFC: function("__builtin_erfcf"),
    Op.LGAMMA: function("__builtin_lgammaf"),
    Op.SIGMOID: Spelling("1.0f / (1.0f + exp_f32(-{0}))", Precedence.PRODUCT, (Precedence.ATOM,)),
    Op.ONE_PLUS_ERF: Spelling("1.0f + erf_f32({0})", Precedence.SUM, (Precedence.CONDITIONAL,)),
    Op.EXP_BELOW: Spelling("{0} == {1} ? 1.0f : exp_f32({0} - {1})", Precedence.CONDITIONAL, (Precedence.PRODUCT,)),
}
_DOUBLE = {
    **{op: function(f"{name}_f64") for op, name in _NAMES.items()},
    Op.ABS: function("__builtin_fabs"),
    Op.EXP2: function("__builtin_exp2"),
    Op.POW: function("pow_f64", 2),
    Op.ATAN2: function("__builtin_atan2", 2),
    Op.ERFC: function("__builtin_erfc"),
    Op.LGAMMA: function("__builtin_lgamma"),
    Op.SIGMOID: Spelling("1.0 / (1.0 + exp_f64(-{0}))", Precedence.PRODUCT, (Precedence.ATOM,)),
    Op.ONE_PLUS_ERF: Spelling("1.0 + erf_f64({0})", Precedence.SUM, (Precedence.CONDITIONAL,)),
    Op.EXP_BELOW: Spelling("{0} == {1} ? 1.0 : exp_f64({0} - {1})", Precedence.CONDITIONAL, (Precedence.PRODUCT,)),
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
