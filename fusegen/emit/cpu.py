"""The CPU: C++ with SIMD and OpenMP; kernels of points, rows, columns and scans, and the spelling of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusegen.dtypes import DType
from fusegen.emit.environment import EVERYTHING, Uses, banner, c_text, primitives_of, render
from fusegen.emit.math import Form, Language, Precedence, bitwise, function, function_text
from fusegen.emit.reductions import (
    column_sum,
    kinds,
    phase_views,
    placed_accesses,
    reduction_functions,
    row_accesses,
    row_functions,
    view,
)
from fusegen.emit.views import call_view, checks_view, cpu_offsets, decode, entry, fragment, kernel_parameters
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Axes, literal, product
from fusegen.schedule.bodies import Body, ColumnBody, PointwiseBody, RowBody, ScanBody
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.math import Function
from fusegen.schedule.names import identifier
from fusegen.schedule.plan import RowPlan
from fusegen.schedule.program import Launch
from fusegen.source import Source, section
from fusegen.target import Target

# Row kernels and the combination of column sums in C++.


_CHUNKS = 32  # one after the other: so few that sums are as near as torch's, so many that pairs cost nothing


def emit_rows(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of a row kernel."""
    body = kernel.body
    assert isinstance(body, RowBody)
    offsets = cpu_offsets(kernel).found_first([*row_accesses(body), *placed_accesses(body)], body.column_axes.symbols)
    checks = checks_view(body.checks, offsets, body.column_axes)
    lane_axis = body.column_axes.symbols[-1]
    partials = {a.name: fragment(a, offsets, lane_axis) for a in body.partials}
    columns = [view(r) for p in body.phases for r in p.column_sums]
    extent = product(body.column_axes.extents)
    pipeline = render(
        f"cpu/rows/{_pipeline(body.plan)}.cpp.jinja",
        names=names_of(kernel),
        rows=c_text(product(body.row_axes.extents)),
        columns=c_text(extent),
        columns_known=literal(extent) is not None,
        row_decode=[*decode(body.row_axes, "row", "Index"), *offsets.lines.values(), *checks.once],
        checks=checks.lanes,
        nest=NestView.of(body.column_axes, "column_outer"),
        phases=phase_views(body, offsets),
        kinds=kinds(r for p in body.phases for r in (*(s.reduction for s in p.segments), *p.reductions)),
        sum_arrays=[component for r in columns for component in r.components],
        sums=[(r, [partials[name] for name, _ in r.components]) for r in columns],
        plan=body.plan,
        pairwise=_pairwise(body),
    )
    reductions = [r for p in body.phases for r in (*(s.reduction for s in p.segments), *p.reductions, *p.column_sums)]
    math = math_text([*reduction_functions(reductions), *row_functions(body)])
    return assemble(launch, target, math, pipeline)


def _pairwise(body: RowBody) -> int:
    """Chunks after which what lanes have gathered is put aside, to be combined by pairs; 0 where rows are known to be no longer."""
    *outer, last = (literal(extent) for extent in body.column_axes.extents)
    if last is None or any(extent is None for extent in outer):
        return _CHUNKS
    chunks = -(-last // body.plan.lanes) * math.prod(extent for extent in outer if extent is not None)
    return _CHUNKS if chunks > _CHUNKS else 0


def _pipeline(plan: RowPlan) -> str:
    """The template of a plan."""
    return "tiles" if plan.tiled else "parts" if plan.resident else "rows"


def emit_columns(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of the kernel that combines column sums."""
    body = kernel.body
    assert isinstance(body, ColumnBody)
    offsets = cpu_offsets(kernel)
    lane_axis = body.column_axes.symbols[-1]
    pipeline = render(
        "cpu/columns.cpp.jinja",
        names=names_of(kernel),
        nest=NestView.of(body.column_axes, "row"),
        sums=[column_sum(s, offsets, lane_axis) for s in body.sums],
        parts=body.parts,
        plan=body.plan,
    )
    math = math_text(reduction_functions(s.reduction for s in body.sums))
    return assemble(launch, target, math, pipeline)


def emit_pointwise(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of a pointwise kernel."""
    body = kernel.body
    assert isinstance(body, PointwiseBody)
    lane_axis = body.axes.symbols[-1]
    offsets = cpu_offsets(kernel).found_first(body.reads, [lane_axis])
    placed = cpu_offsets(kernel).found_first(body.writes, [lane_axis])
    checks = checks_view(body.checks, offsets, Axes((lane_axis,), body.axes.extents[-1:]))
    reads = [fragment(a, offsets, lane_axis) for a in body.reads]
    pipeline = render(
        "cpu/pointwise.cpp.jinja",
        names=names_of(kernel),
        nest=NestView.of(body.axes, "row"),
        indices=[*offsets.lines.values(), *checks.once],
        checks=checks.lanes,
        reads=reads,
        places=[*placed.lines.values()],
        writes=[replace(fragment(a, placed, lane_axis), checked=kernel.checks) for a in body.writes],
        call=call_view(body.call, offsets, lane_axis),
        plan=body.plan,
    )
    return assemble(launch, target, math_text([body.call.function]), pipeline)


# Loop nests over axes: chunks run along the last axis, all others are one loop.


# Pointwise kernels in C++.


@dataclass(frozen=True)
class NestView:
    """Axes as a template loops over them.

    Attributes:
        lane: the last axis.
        extent: its length.
        outer: the variable that numbers all points of the axes before; empty where there are none.
        outer_count: the number of these points.
        decode: statements that find the axes before from their number.
    """

    lane: str
    extent: str
    outer: str
    outer_count: str
    decode: list[str]

    @classmethod
    def of(cls, axes: Axes, outer: str) -> NestView:
        """The view of axes; ``outer`` names the number of a point of several axes before the last."""
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
        """Whether there is only one axis."""
        return not self.outer


def emit_scan(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of a scan's kernel."""
    body = kernel.body
    assert isinstance(body, ScanBody)
    offsets = cpu_offsets(kernel).found_first(body.reads, body.column_axes.symbols)
    checks = checks_view(body.checks, offsets, body.column_axes)
    lane_axis = body.column_axes.symbols[-1]
    reads = [fragment(a, offsets, lane_axis) for a in body.reads]
    pipeline = render(
        "cpu/scan.cpp.jinja",
        names=names_of(kernel),
        rows=c_text(product(body.row_axes.extents)),
        columns=c_text(product(body.column_axes.extents)),
        row_decode=[*decode(body.row_axes, "row", "Index"), *offsets.lines.values(), *checks.once],
        checks=checks.lanes,
        reads=reads,
        writes=[fragment(a, offsets, lane_axis) for a in body.writes],
        scans=[view(r) for r in body.scans],
        lift=call_view(body.lift, offsets, lane_axis),
        finish=call_view(body.finish, offsets, lane_axis),
        plan=body.plan,
    )
    math = math_text([*reduction_functions(body.scans), body.lift.function, body.finish.function])
    return assemble(launch, target, math, pipeline)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel as templates declare and pass it."""

    type: str
    name: str


@dataclass(frozen=True)
class Names:
    """What a kernel's functions are called, and what all of them take.

    Attributes:
        entry: the exported symbol.
        stem: begins the names of the pipeline's own functions.
        parameters: buffers, sizes, scalars; where indices are checked, the place for what is said of one that is out of range.
    """

    entry: str
    stem: str
    parameters: tuple[Parameter, ...]

    @property
    def declared(self) -> str:
        """The parameters as a function declares them."""
        return ", ".join(f"{p.type} {p.name}" for p in self.parameters)

    @property
    def passed(self) -> str:
        """The parameters as a caller passes them on."""
        return ", ".join(p.name for p in self.parameters)


# Puts the three parts of a C++ file together.


def names_of(kernel: Kernel) -> Names:
    """The names of a kernel's pipeline."""
    split = [text.rsplit(" ", 1) for text in kernel_parameters(kernel)]
    parameters = [Parameter(*pair) for pair in split]
    if kernel.checks:
        parameters.append(Parameter("const char**", "failed"))
    return Names(entry(kernel), f"{identifier(kernel.name)}_of", tuple(parameters))


def assemble(launch: Launch, target: Target, math: str, pipeline: str) -> Source:
    """The source of a launch's kernel; primitives are those that math and pipeline mention."""
    kernel = launch.kernel
    return Source(
        name=kernel.name,
        entry=entry(kernel),
        language="cpp",
        banner=banner(launch, target),
        primitives=primitives_of(math + pipeline, "cpu", _uses(kernel)),
        math=section("Math", math),
        pipeline=section("Pipeline", pipeline),
    )


def _uses(kernel: Kernel) -> Uses:
    """Lists what the text uses of primitives: the types of elements in memory, and everything else."""
    return replace(EVERYTHING, stored=frozenset(pointer.dtype for pointer in kernel.pointers))


def math_text(functions: Sequence[Function]) -> str:
    """Math functions in C++."""
    return "\n".join(function_text(f, CPP, "FG_INLINE") for f in functions)


# C++ spelling of the primitive operations for the CPU: primitives of ours that vectorise, and the compiler's built-ins.


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


EMITTERS: dict[type[Body], Callable[[Kernel, Launch, Target], Source]] = {
    PointwiseBody: emit_pointwise,
    RowBody: emit_rows,
    ColumnBody: emit_columns,
    ScanBody: emit_scan,
}
"""The emitter of each kind of kernel."""
