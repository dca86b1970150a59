"""CUDA text of streaming attention for tensor cores of Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusegen.emit.column_pairs import PairCoordinates, Wrapper, offset_text, operand_parts, operands_text, wrapper_text
from fusegen.emit.cuda import CUDA, assemble, math_text
from fusegen.emit.environment import render
from fusegen.emit.math import function, function_text
from fusegen.emit.views import cuda_offsets, entry
from fusegen.families.attention.plan import AttentionBody, FewQueriesPlan, PagedKeys
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Axes, Index
from fusegen.program.call import COUNTERS
from fusegen.schedule.kernel import LoweredKernel
from fusegen.schedule.math import Approximations, MathFunction
from fusegen.schedule.program import Launch
from fusegen.schedule.reductions import combine_function, identity_function
from fusegen.source import Source
from fusegen.target import Target

_INLINE = "__device__ __forceinline__"
_COORDINATES = (("batch", 1), ("head", 1), ("query", 1))

_OFFSET = "The offset of a query's first channel in the output."
_SEEN = "An upper bound of the keys that a query attends to; later ones have no weight."
_FIRST = "A lower bound of the keys that a query attends to; earlier ones have no weight."
_WIDE_LOAD = "i64(widen(load({}, {})))"  # a length in 32 bits could overflow in a sum
_PRESENT = "The number of keys with values; those of later ones are 0."
_PAGE = "The page of the cache with a block of keys."
_CHECKED_BY_TRAP = '{}_by_trap({}, {}, "{}")'

# The largest weight is about 1, so weights below the smallest normal number may be flushed to 0.
_WEIGHTS = replace(CUDA, fast={Approximations.ROUNDED: {**CUDA.fast[Approximations.ROUNDED], Op.EXP2: function("fast_exp2")}})


def emit_cuda(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, AttentionBody)
    read = {r.buffer for f in (body.score, body.finish) for r in f.reads}
    by_address = [p for p in kernel.pointers if p.buffer in set(body.matrices) - read and not p.writable]
    operands = replace(kernel, pointers=tuple(p for p in kernel.pointers if p not in by_address))
    fields, parameters, values = operand_parts(operands, "i64" if kernel.index64 else "i32")
    names = {p.buffer: p.name for p in kernel.pointers if not p.writable}
    out, *sums = (p.name for p in kernel.pointers if p.writable)
    template = "few_queries" if isinstance(body.plan, FewQueriesPlan) else "attention"
    pipeline = render(
        f"cuda/{template}.cu.jinja",
        entry=entry(kernel),
        overlaps=launch.overlaps,
        triggers=launch.triggers,
        input_type=body.input_dtype.spelling,
        cache=body.cache_dtype if body.cache_dtype.itemsize == 1 else None,
        output_type=body.output_dtype.spelling,
        operand_parameters=[*(f"const {p.dtype.spelling}* {p.name}" for p in by_address), *parameters],
        matrices=[names[buffer] for buffer in body.matrices],
        operand_arguments=values,
        out=out,
        sums=next(iter(sums), ""),
        counters=COUNTERS,
        plan=body.plan,
        is_bounded=body.visible_keys is not None,
        is_windowed=body.first_key is not None,
        is_partial=body.present_keys is not None,
        has_sink=body.has_sink,
        box=0 if body.pages is None else body.pages.box,
    )
    return assemble(launch, target, "\n".join(_math(kernel, body, fields)), pipeline)


def _math(kernel: LoweredKernel, body: AttentionBody, fields: Sequence[str]) -> list[str]:
    index = "i64" if kernel.index64 else "i32"
    keys, channels = PairCoordinates(_COORDINATES, "key", index), PairCoordinates(_COORDINATES, "channel", index)
    loaded = "Loaded" if isinstance(body.plan, FewQueriesPlan) else ""
    score = Wrapper("score", "Scores two neighbouring keys.", ("const float (&product)[2]",), keys, (("s", "float"),), loaded)
    finish = Wrapper(
        "finish",
        "Finishes two neighbouring channels of a query.",
        ("const float (&total)[2]", "float mass", *(["float peak"] if body.has_sink else [])),
        channels,
        (("out", body.output_dtype.spelling),),
    )
    return [
        operands_text(fields),
        math_text([body.score.function]),
        wrapper_text(kernel, body.score, score),
        math_text(_reductions(body)),
        _weights_text(body.weights),
        math_text([body.finish.function]),
        wrapper_text(kernel, body.finish, finish),
        offset_text("out_offset", _OFFSET, body.out_offset, body.finish.axes, channels, last=False),
        *(_integer_text(kernel, name, doc, bound, body.score.axes, keys) for name, doc, bound in _bounds(body)),
        *([] if body.pages is None else [_page_text(kernel, body, body.pages, index)]),
    ]


def _bounds(body: AttentionBody) -> list[tuple[str, str, Index]]:
    bounds = (
        ("seen_keys", _SEEN, body.visible_keys),
        ("first_key", _FIRST, body.first_key),
        ("present_keys", _PRESENT, body.present_keys),
    )
    return [(name, doc, bound) for name, doc, bound in bounds if bound is not None]


def _page_text(kernel: LoweredKernel, body: AttentionBody, pages: PagedKeys, index: str) -> str:
    coordinates = PairCoordinates((("batch", 1), ("block", 1)), "key", index)
    checked = cuda_offsets(kernel).checked if isinstance(body.plan, FewQueriesPlan) else _CHECKED_BY_TRAP
    return _integer_text(kernel, "page_number", _PAGE, pages.number, pages.axes, coordinates, checked)


def _integer_text(
    kernel: LoweredKernel, name: str, doc: str, integer: Index, axes: Axes, coordinates: PairCoordinates, checked: str = ""
) -> str:
    offsets = replace(cuda_offsets(kernel, "operands."), load=_WIDE_LOAD, checked=checked)
    return offset_text(name, doc, integer, axes, coordinates, last=False, offsets=offsets)


def _reductions(body: AttentionBody) -> list[MathFunction]:
    return [
        identity_function("peak_identity", body.row_max.op, body.row_max.dtype),
        combine_function("peak_combine", body.row_max.op, body.row_max.dtype),
        combine_function("mass_combine", body.row_sum.op, body.row_sum.dtype),
    ]


def _weights_text(functions: Sequence[MathFunction]) -> str:
    return "\n".join(function_text(f, _WEIGHTS, _INLINE) for f in functions)
