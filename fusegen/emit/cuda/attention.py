"""Streaming attention in CUDA, for tensor cores of Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusegen.emit.cuda.assemble import assemble, math_text
from fusegen.emit.cuda.lanes import Place, Wrapper, coordinate_text, index_type, operand_parts, operands_text, wrapper_text
from fusegen.emit.cuda.spelling import CUDA
from fusegen.emit.environment import render
from fusegen.emit.math import function_text
from fusegen.emit.reductions import combine_function, identity_function
from fusegen.emit.spelling import function
from fusegen.emit.views import entry
from fusegen.ir.ops import Op
from fusegen.schedule.kernel import AttentionBody, Function, Kernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target

_COORDINATES = ("batch", "head", "query")
_KEYS, _CHANNELS = Place(_COORDINATES, "key"), Place(_COORDINATES, "channel")
_SCORE = Wrapper("score", "Scores two neighbouring keys.", ("const float (&product)[2]",), _KEYS, ("s", "float"))

# Weights stand beside one that is about 1, the peak's own: what is below the smallest normal number may be nothing.
_WEIGHTS = replace(CUDA, fast={**CUDA.fast, Op.EXP2: function("fast_exp2")})


def emit_attention(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of streaming attention."""
    body = kernel.body
    assert isinstance(body, AttentionBody)
    fields, parameters, values = operand_parts(kernel)
    (out,) = (p for p in kernel.pointers if p.writable)
    pipeline = render(
        "cuda/attention.cu.jinja",
        entry=entry(kernel),
        input_type=body.input_dtype.spelling,
        output_type=body.output_dtype.spelling,
        operand_parameters=parameters,
        operand_arguments=values,
        out=out.name,
        plan=body.plan,
    )
    return assemble(kernel, target, launch.group.kind.value, "\n".join(_math(kernel, body, fields)), pipeline)


def _math(kernel: Kernel, body: AttentionBody, fields: Sequence[str]) -> list[str]:
    finish = Wrapper(
        "finish",
        "Finishes two neighbouring channels of a query.",
        ("const float (&total)[2]", "float mass"),
        _CHANNELS,
        ("out", body.output_dtype.spelling),
    )
    return [
        operands_text(fields),
        math_text([body.score.function]),
        wrapper_text(kernel, body.score, _SCORE),
        math_text(_reductions(body)),
        _weights_text(body.weights),
        math_text([body.finish.function]),
        wrapper_text(kernel, body.finish, finish),
        _out_offset(kernel, body),
    ]


def _reductions(body: AttentionBody) -> list[Function]:
    return [
        identity_function("peak_identity", body.peak.op, body.peak.dtype),
        combine_function("peak_combine", body.peak.op, body.peak.dtype),
        combine_function("mass_combine", body.mass.op, body.mass.dtype),
    ]


def _weights_text(functions: Sequence[Function]) -> str:
    return "\n".join(function_text(f, _WEIGHTS, "__device__ __forceinline__") for f in functions)


def _out_offset(kernel: Kernel, body: AttentionBody) -> str:
    """Where the pipeline stores a query's channels."""
    index = index_type(kernel)
    coordinates = ", ".join(f"{index} {c}" for c in _COORDINATES)
    offset = coordinate_text(body.out_offset, body.finish.axes, _CHANNELS)
    return (
        "// Of a query's first channel in the output.\n"
        f"__device__ __forceinline__ i64 out_offset(const Operands& operands, {coordinates}) {{ return {offset}; }}\n"
    )
