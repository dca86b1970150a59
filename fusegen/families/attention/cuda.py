"""CUDA text of streaming attention for tensor cores of Hopper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusegen.emit.column_pairs import PairCoordinates, Wrapper, offset_text, operand_parts, operands_text, wrapper_text
from fusegen.emit.cuda import CUDA, assemble, math_text
from fusegen.emit.environment import c_text, mentions, render
from fusegen.emit.math import function, function_text
from fusegen.emit.views import cuda_offsets, entry, widened
from fusegen.families.attention.plan import AttentionBody, FewQueriesPlan, PagedKeys
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Axes, Index
from fusegen.program.call import COUNTERS
from fusegen.schedule.indices import LoadedIndex
from fusegen.schedule.kernel import LoweredKernel
from fusegen.schedule.math import Approximations, CallArgument, LaneFunction, LaneRead, MathFunction, Origin
from fusegen.schedule.program import Launch
from fusegen.schedule.reductions import combine_function, identity_function
from fusegen.source import Source
from fusegen.target import Target

_INLINE = "__device__ __forceinline__"
_COORDINATES = (("batch", 1), ("head", 1), ("query", 1))

_OFFSET = "The offset of a query's first channel in the output."
_SEEN = "An upper bound of the keys that a query attends to; later ones have no weight."
_FIRST = "A lower bound of the keys that a query attends to; earlier ones have no weight."
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
    if isinstance(body.plan, FewQueriesPlan):
        held = _values_of_batch(kernel, body)
        body = _with_fields(body, {read: each.name for read, each in held.items()})
        fields += [f"{each.type} {each.name}" for each in held.values()]
        values += [each.value for each in held.values()]
    math = _math(kernel, body)
    used = [(f, v) for f, v in zip(fields, values, strict=True) if mentions(math, f"operands.{f.split()[-1]}")]
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
        operand_arguments=[value for _, value in used],
        out=out,
        sums=next(iter(sums), ""),
        counters=COUNTERS,
        plan=body.plan,
        loads_ahead=_loads_ahead(body),
        is_bounded=body.visible_keys is not None,
        is_windowed=body.first_key is not None,
        is_partial=body.present_keys is not None,
        present_keys=_present_keys(body),
        heads_differ=any(sympy.sympify(i or 0).has(body.score.axes.symbols[1]) for i in (body.visible_keys, body.first_key)),
        has_sink=body.has_sink,
        box=0 if body.pages is None else body.pages.box,
        page_size=0 if body.pages is None else body.pages.size or 0,
    )
    return assemble(launch, target, f"{operands_text([field for field, _ in used])}\n{math}", pipeline)


def _math(kernel: LoweredKernel, body: AttentionBody) -> str:
    index = "i64" if kernel.index64 else "i32"
    keys, channels = PairCoordinates(_COORDINATES, "key", index), PairCoordinates(_COORDINATES, "channel", index)
    loaded = "Loaded" if _loads_ahead(body) else ""
    score = Wrapper("score", "Scores two neighbouring keys.", ("const float (&product)[2]",), keys, (("s", "float"),), loaded)
    finish = Wrapper(
        "finish",
        "Finishes two neighbouring channels of a query.",
        ("const float (&total)[2]", "float mass", *(["float peak"] if body.has_sink else [])),
        channels,
        (("out", body.output_dtype.spelling),),
    )
    parts = [
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
    return "\n".join(parts)


def _loads_ahead(body: AttentionBody) -> bool:
    """True if the pipeline loads the operands of scores while it computes those of the tile before."""
    return isinstance(body.plan, FewQueriesPlan) and bool(body.score.reads)


@dataclass(frozen=True)
class _Held:
    """A field of Operands that holds a value of the block's batch."""

    name: str
    type: str
    value: str


def _values_of_batch(kernel: LoweredKernel, body: AttentionBody) -> dict[LoadedIndex, _Held]:
    """Returns the values that scores and bounds of one batch share: a block loads them once, and not for each tile of keys."""
    pointers, batch = {p.buffer: p for p in kernel.pointers}, body.score.axes.symbols[0]
    names = {_element(read): read.name for read in body.score.reads if _is_one_value(read)}
    for bound in (integer for integer in _integers(body) if integer is not None and not isinstance(integer, int)):
        for call in sorted(bound.atoms(LoadedIndex), key=str):
            names.setdefault(call, f"{pointers[call.buffer].name.removesuffix('_ptr')}_at{len(names)}")
    held = {}
    for read, name in names.items():
        pointer = pointers[read.buffer]
        if pointer.stream is None and read.offset.free_symbols <= {batch}:
            offset = c_text(read.offset.subs(batch, sympy.Symbol("work.batch", integer=True)))
            value = widened(f"load({pointer.name}, {offset})", pointer.dtype)
            held[read] = _Held(name, pointer.dtype.compute.spelling, value)
    return held


def _element(read: LaneRead) -> LoadedIndex:
    return LoadedIndex(read.buffer, read.offsets[0])


def _is_one_value(read: LaneRead) -> bool:
    return len(read.offsets) == 1 and read.bits is None and not any(read.conditions)


def _integers(body: AttentionBody) -> tuple[Index | None, ...]:
    return body.visible_keys, body.first_key, body.present_keys, None if body.pages is None else body.pages.number


def _with_fields(body: AttentionBody, fields: Mapping[LoadedIndex, str]) -> AttentionBody:
    """Replaces reads by fields of Operands."""
    symbols = {read: sympy.Symbol(name, integer=True) for read, name in fields.items()}
    visible, first, present, number = (i if i is None else sympy.sympify(i).subs(symbols) for i in _integers(body))
    return replace(
        body,
        score=_function_with_fields(body.score, fields),
        finish=_function_with_fields(body.finish, fields),
        visible_keys=visible,
        first_key=first,
        present_keys=present,
        pages=None if body.pages is None else replace(body.pages, number=number),
    )


def _function_with_fields(function: LaneFunction, fields: Mapping[LoadedIndex, str]) -> LaneFunction:
    held = {r.name: fields[_element(r)] for r in function.reads if _is_one_value(r) and _element(r) in fields}
    arguments = [CallArgument(Origin.SCALAR, held[a.name]) if a.name in held else a for a in function.arguments]
    reads = tuple(read for read in function.reads if read.name not in held)
    return replace(function, arguments=tuple(arguments), reads=reads)


def _bounds(body: AttentionBody) -> list[tuple[str, str, Index]]:
    bounds = (
        ("seen_keys", _SEEN, body.visible_keys),
        ("first_key", _FIRST, body.first_key),
        ("present_keys", _PRESENT, body.present_keys if _present_keys(body) == "present_keys" else None),
    )
    return [(name, doc, bound) for name, doc, bound in bounds if bound is not None]


def _present_keys(body: AttentionBody) -> str:
    """Returns the name of the function that gives the number of keys with values."""
    return "seen_keys" if body.present_keys == body.visible_keys else "present_keys"


def _page_text(kernel: LoweredKernel, body: AttentionBody, pages: PagedKeys, index: str) -> str:
    coordinates = PairCoordinates((("batch", 1), ("block", 1)), "key", index)
    checked = cuda_offsets(kernel).checked if isinstance(body.plan, FewQueriesPlan) else _CHECKED_BY_TRAP
    return _integer_text(kernel, "page_number", _PAGE, pages.number, pages.axes, coordinates, checked)


def _integer_text(
    kernel: LoweredKernel, name: str, doc: str, integer: Index, axes: Axes, coordinates: PairCoordinates, checked: str = ""
) -> str:
    offsets = replace(cuda_offsets(kernel, "operands."), checked=checked)
    return offset_text(name, doc, integer, axes, coordinates, last=False, offsets=offsets)


def _reductions(body: AttentionBody) -> list[MathFunction]:
    return [
        identity_function("peak_identity", body.row_max.op, body.row_max.dtype),
        combine_function("peak_combine", body.row_max.op, body.row_max.dtype),
        combine_function("mass_combine", body.row_sum.op, body.row_sum.dtype),
    ]


def _weights_text(functions: Sequence[MathFunction]) -> str:
    return "\n".join(function_text(f, _WEIGHTS, _INLINE) for f in functions)
