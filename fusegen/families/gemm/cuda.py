"""CUDA text of matmuls with epilogues: one template per pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from fusegen.dtypes import DType
from fusegen.emit.column_pairs import (
    PairCoordinates,
    Wrapper,
    argument_text,
    index_text,
    offset_text,
    operand_parts,
    operands_text,
    wrapper_text,
)
from fusegen.emit.cuda import assemble, head, math_text
from fusegen.emit.environment import render
from fusegen.emit.views import Offsets, ReductionView, cuda_offsets, kinds, reduction_functions, view
from fusegen.families.gemm.plan import (
    AccumulatorPair,
    ComputedOperand,
    ContractionBody,
    ContractionPlan,
    FewRowsPlan,
    HeadStatistic,
    MatmulPart,
    MmaPlan,
    PackedMath,
    PackedNumbers,
    PartResult,
    StoredRead,
    Window,
)
from fusegen.families.gemm.weights import COORDINATES, ENDS
from fusegen.ir.symbolic import Axes, Index
from fusegen.schedule.kernel import LoweredKernel, Pointer
from fusegen.schedule.math import LaneFunction, Origin
from fusegen.schedule.program import Launch
from fusegen.schedule.terms import ByteBits
from fusegen.source import Source
from fusegen.target import Target

_DOC = "Finishes two neighbouring columns of a row."
_ELEMENT = "The values of two neighbouring columns of a head that are reduced."
_OFFSET = "The offset of eight columns of a row in the result."
_OFFSET_OF_ONE = "The offset of a column of a row in the result."
_OFFSET_OF_HEAD = "The offset of a head of a row in the result."
_B_NAMES = ("b", "second_b")


@dataclass(frozen=True)
class ResultView:
    """A result as the template sees it.

    Attributes:
        name: the registers that hold it.
        registers: registers of a pair of columns.
        map: the tensor map that stores it; if empty, `pointer` and `offset` name the parameter and the offset function.
        octets: True if eight columns are contiguous.
        head: columns of a head, if the result has one element per head; else 0.
        bytes: True for one-byte elements; a pair of these takes half a register.
    """

    name: str
    type: str
    registers: int
    map: str
    pointer: str
    offset: str
    octets: bool = True
    head: int = 0
    bytes: bool = False

    @property
    def place(self) -> str:
        """The parameter of its storage."""
        return self.map or self.pointer

    @property
    def declaration(self) -> str:
        return f"const TensorMap& {self.map}" if self.map else f"{self.type}* {self.pointer}"

    @property
    def finished(self) -> str:
        """The variable that a thread holds after a tile; the pointer, if the result is stored immediately."""
        return self.pointer if self.head else self.name


@dataclass(frozen=True)
class MatrixView:
    """An operand that is read by address, as the template sees it: the parameter, and the prefix of its size names."""

    pointer: str
    name: str


@dataclass(frozen=True)
class StatisticView:
    """A statistic of heads as the template sees it.

    Attributes:
        accumulated: the accumulators that the math reads, as in `PartView`.
        element: the function that computes the reduced value of two columns.
        before: the earlier statistics that it reads.
    """

    reduction: ReductionView
    columns: int
    accumulated: tuple[tuple[str, int, int], ...]
    element: str
    before: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.reduction.components[0][0]

    @property
    def type(self) -> str:
        return self.reduction.components[0][1]


@dataclass(frozen=True)
class WindowView:
    """Stored elements of a unit as the template sees them.

    Attributes:
        chunks: 16-byte accesses that stream them; 0 for accesses that the cache serves.
        width: elements of one access.
        elements: True if the math reads elements of an array; else it reads their words, or the only element.
    """

    name: str
    type: str
    count: int
    words: int
    chunks: int
    width: int
    pointer: str
    offset: str
    elements: bool


@dataclass(frozen=True)
class WeightView:
    """The math of a second operand that is computed on load, as the template sees it.

    Attributes:
        windows: its windows.
        shared: statements that convert the elements that all pairs read.
        lines: statements that compute a pair.
        word: both elements of the pair in a word.
    """

    windows: tuple[WindowView, ...]
    shared: tuple[str, ...]
    lines: tuple[str, ...]
    word: str


@dataclass(frozen=True)
class PartView:
    """A part as the template sees it.

    Attributes:
        first: the first column of tiles.
        head: columns of a head, if the epilogue indexes heads; else 0.
        maps, matrices: its second operands: tensor maps, or matrices read by address.
        accumulated: the accumulators that the epilogue reads: name, matrix, and distance in a thread's registers.
        taken: the statistics that the epilogue reads.
        weights: the second operands that are computed on load.
    """

    suffix: str
    first: int
    columns: int
    head: int
    maps: tuple[str, ...]
    accumulated: tuple[tuple[str, int, int], ...]
    results: tuple[ResultView, ...]
    statistics: tuple[StatisticView, ...] = ()
    taken: tuple[str, ...] = ()
    matrices: tuple[MatrixView, ...] = ()
    weights: tuple[WeightView, ...] = ()


def emit_cuda(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, ContractionBody)
    views = _views(kernel, body)
    by_address = [p for p in kernel.pointers if p.buffer in set(body.matrices) - _read(body)]
    fields, parameters, values = operand_parts(replace(kernel, pointers=_without(kernel, by_address)), _index(kernel))
    reductions = [s.reduction for part in body.parts for s in part.statistics]
    text = [operands_text(fields), *([math_text(reduction_functions(reductions))] if reductions else [])]
    for part, part_view in zip(body.parts, views, strict=True):
        text += _part_math(kernel, part, part_view)
    template, extra = _PIPELINES[type(body.plan)]
    pipeline = render(
        template,
        **{**head(launch), "overlaps": launch.overlaps},
        input_type=body.input_dtype.spelling,
        parts=views,
        combined=kinds(reductions),
        width=views[-1].first + -(-body.parts[-1].columns // body.plan.tile_n),
        outputs=[f"{p.dtype.spelling}* {p.name}" for p in kernel.pointers if p.writable],
        operand_parameters=[*(f"const {p.dtype.spelling}* {p.name}" for p in by_address), *parameters],
        operand_arguments=values,
        plan=body.plan,
        index_type=_index(kernel),
        **extra(launch, body, views),
    )
    return assemble(launch, target, "\n".join(text), pipeline)


def _read(body: ContractionBody) -> set[int]:
    return {read.buffer for part in body.parts for function in part.functions for read in function.reads}


def _without(kernel: LoweredKernel, pointers: Sequence[Pointer]) -> tuple[Pointer, ...]:
    return tuple(p for p in kernel.pointers if p not in pointers)


def _map_variables(launch: Launch, body: ContractionBody, views: Sequence[PartView]) -> dict[str, Any]:
    """Returns the additional template variables of warpgroups: the names of all tensor maps."""
    return {"all_maps": ["a_map", *(m for v in views for m in (*v.maps, *(r.map for r in v.results if r.map)))]}


def _address_variables(launch: Launch, body: ContractionBody, views: Sequence[PartView]) -> dict[str, Any]:
    """Returns the additional template variables of warps: the first operand."""
    return {"a": _matrix(launch.kernel, body.matrices[0], "a")}


_WIDE_UNIT = 8  # of wide types, or of many rows; their registers leave no room for more


def _few_rows_variables(launch: Launch, body: ContractionBody, views: Sequence[PartView]) -> dict[str, Any]:
    """Returns the additional template variables of few rows: also if all second operands can be read before the wait for the
    previous launch, and if blocks wait for others of the launch."""
    weights = [weight for part in body.parts for weight in part.weights]
    read = {*body.matrices[1:], *(window.buffer for weight in weights for window in weight.windows)}
    return {
        **_address_variables(launch, body, views),
        "early": launch.overlaps and launch.early_reads >= read,
        "waits": launch.waits,
        "computes": bool(weights),
        "keeps_columns": isinstance(body.plan, FewRowsPlan) and body.plan.unit > _WIDE_UNIT,
    }


_PIPELINES: dict[type, tuple[str, Callable[[Launch, ContractionBody, Sequence[PartView]], dict[str, Any]]]] = {
    ContractionPlan: ("cuda/contraction.cu.jinja", _map_variables),
    MmaPlan: ("cuda/mma.cu.jinja", _address_variables),
    FewRowsPlan: ("cuda/few_rows.cu.jinja", _few_rows_variables),
}
"""The template of each plan type, and its additional variables."""


def _views(kernel: LoweredKernel, body: ContractionBody) -> list[PartView]:
    views: list[PartView] = []
    first = 0
    matrices = iter(body.matrices[1:])
    for number, part in enumerate(body.parts):
        suffix = f"_{number}" if len(body.parts) > 1 else ""
        names = _B_NAMES[: part.products]
        head = part.head if _indexes_heads(part) else 0
        maps = tuple(f"{name}_map{suffix}" for name in names)
        # Empty for operands that are loaded by tensor maps.
        matrices_read = tuple(_matrix(kernel, buffer, f"{name}{suffix}") for name, buffer in zip(names, matrices, strict=False))
        part_view = PartView(
            suffix, first, part.columns, head, maps, _accumulator_views(part.accumulated), _results(kernel, part, suffix)
        )
        views.append(
            replace(
                part_view,
                statistics=_statistics(part, suffix),
                taken=_statistics_read(part, part.epilogue),
                matrices=matrices_read,
                weights=tuple(_weight(kernel, weight) for weight in part.weights),
            )
        )
        first += -(-part.columns // body.plan.tile_n)
    return views


_BYTE_MASK = 255
_END_OF_BYTES = 1 << 23  # the float that ends in a byte
_BOTH = 0x00010001  # repeats 16 bits
_STREAMED = 16  # bytes of an access that displaces nothing from the cache


def _weight(kernel: LoweredKernel, weight: ComputedOperand) -> WeightView:
    coordinates, axes, function = _unit_coordinates(kernel), weight.function.axes, weight.function
    offsets = cuda_offsets(kernel, prefix="operands.")
    whole = {stored.window for read, stored in zip(function.reads, weight.reads, strict=True) if read.bits is None}
    windows = tuple(_window(w, offsets, axes, coordinates, number in whole) for number, w in enumerate(weight.windows))
    if weight.packed is not None:
        return _packed_weight(weight.dtype, weight.packed, windows, lambda index: index_text(index, offsets, axes, coordinates))
    shared: list[str] = []
    reads: list[str] = []
    types = {p.name: p.dtype.spelling for p in function.function.parameters}
    for read, stored in zip(function.reads, weight.reads, strict=True):
        window = windows[stored.window]
        indices = [index_text(index, offsets, axes, coordinates) for index in stored.indices]
        values = ", ".join(_element(window, read.bits, index) for index in indices)
        name, value = (read.name, values) if len(indices) == 1 else (f"{read.name}[2]", f"{{{values}}}")
        (shared if window.count == 1 else reads).append(f"const {types[read.name]} {name} = {value};")
    arguments = [argument_text(a, function, offsets, coordinates) for a in function.arguments]
    name = function.function.name
    each = f"for (i32 v = 0; v < 2; ++v) b[v] = {name}({', '.join(arguments)});"
    call = each if function.lanewise else f"{name}({', '.join([*arguments, 'b[0]', 'b[1]'])});"
    return WeightView(windows, tuple(shared), (*reads, "float b[2];", call), f"cvt_{weight.dtype.spelling}x2(b[0], b[1])")


def _element(window: WindowView, bits: ByteBits | None, index: str) -> str:
    """Prints an element of a window in its computing type."""
    if bits is None:
        return f"widen({_whole(window, index)})"
    word = _masked(_word(window, bits, index, flips=bits.signed), bits)
    return f"byte_to_float({word}, {_byte(window, index)}, {_END_OF_BYTES + bits.less}.0f)"


def _word(window: WindowView, bits: ByteBits, index: str, *, flips: bool) -> str:
    """Prints the word of a byte whose last bits are the ones that are read; `flips` inverts the sign bit first."""
    word = f"stored.{window.name}[({index}) / 4]" if window.count > 1 else f"u32(u8(stored.{window.name}))"
    word = f"({word} ^ 0x80808080u)" if flips else word
    return f"{word} >> {bits.shift}" if bits.shift else word


def _masked(word: str, bits: ByteBits) -> str:
    return f"{word} & {bits.mask * 0x01010101:#010x}u" if bits.mask < _BYTE_MASK else word


def _byte(window: WindowView, index: str) -> str:
    """Prints the number of a byte within its word."""
    return f"({index}) % 4" if window.count > 1 else "0"


def _packed_weight(dtype: DType, packed: PackedMath, windows: tuple[WindowView, ...], text: Callable[[Index], str]) -> WeightView:
    """Prints the math on a pair as operations on words of two 16-bit floats."""
    pair = f"{dtype.spelling}x2"
    shared, reads = list[str](), list[str]()

    def named(name: str, read: StoredRead, value: str) -> str:
        (shared if windows[read.window].count == 1 else reads).append(f"const u32 {name} = {value};")
        return name

    numbers = {"number": packed.number} | ({"zero": packed.zero} if packed.zero else {})
    words = [named(name, each.read, _integers_text(each, windows[each.read.window], dtype, text)) for name, each in numbers.items()]
    word = f"sub_{pair}({', '.join(words)})" if packed.zero else words[0]
    if packed.scale is not None:
        low, high = (f"u32({_whole(windows[packed.scale.window], text(index))}.bits)" for index in packed.scale.indices)
        word = f"mul_{pair}({word}, {named('scale', packed.scale, f'{low} | {high} << 16')})"
    return WeightView(windows, tuple(shared), tuple(reads), word)


def _whole(window: WindowView, index: str) -> str:
    return f"{window.name}[{index}]" if window.count > 1 else f"stored.{window.name}"


def _integers_text(numbers: PackedNumbers, window: WindowView, dtype: DType, text: Callable[[Index], str]) -> str:
    """Prints two integers as a word: the ends of two 16-bit floats, from which a number is subtracted."""
    pair, first = f"{dtype.spelling}x2", _half_bits(ENDS[dtype], dtype)
    indices = [text(index) for index in numbers.read.indices]
    flips = numbers.bits[0].signed != numbers.is_byte
    words = [_word(window, bits, index, flips=flips) for bits, index in zip(numbers.bits, indices, strict=True)]
    low, high = (_byte(window, index) for index in indices)
    if numbers.in_word:
        ends = f"permute_bytes({_masked(words[0], numbers.bits[0])}, {first >> 8:#x}u, 0x4040u | {low} | {high} << 8)"
    else:
        mask, start = numbers.bits[0].mask * _BOTH, first * _BOTH
        ends = f"and_or(permute_bytes({', '.join(words)}, 0x0400u | {low} | {high} << 8), {mask:#010x}u, {start:#010x}u)"
    ends = f"bytes_to_{pair}({ends})" if numbers.is_byte else ends
    return f"sub_{pair}({ends}, {_half_bits(numbers.less, dtype) * _BOTH:#010x}u)" if numbers.less else ends


def _half_bits(number: int, dtype: DType) -> int:
    return int(torch.tensor(number, dtype=dtype.torch).view(torch.uint16).item())


def _unit_coordinates(kernel: LoweredKernel) -> PairCoordinates:
    column, unit, lane = COORDINATES
    return PairCoordinates(((column, 1), (unit, 1)), lane, _index(kernel))


def _window(window: Window, offsets: Offsets, axes: Axes, coordinates: PairCoordinates, whole: bool) -> WindowView:
    size = window.count * window.dtype.itemsize
    streamed = math.gcd(size, window.aligned) % _STREAMED == 0 and sympy.sympify(window.offset).has(axes.symbols[0])
    return WindowView(
        window.name,
        window.dtype.spelling,
        window.count,
        -(-size // 4),
        size // _STREAMED if streamed else 0,
        window.count if window.aligned >= min(size & -size, _STREAMED) else 1,
        f"operands.{offsets.pointers[window.buffer].name}",
        index_text(window.offset, offsets, axes, coordinates),
        whole and window.count > 1,
    )


def _accumulator_views(accumulated: Sequence[AccumulatorPair]) -> tuple[tuple[str, int, int], ...]:
    return tuple((a.name, a.product, a.shift // 2) for a in accumulated)


def _statistics(part: MatmulPart, suffix: str) -> tuple[StatisticView, ...]:
    return tuple(
        StatisticView(
            view(s.reduction),
            s.columns,
            _accumulator_views(s.accumulated),
            f"element_{number}{suffix}",
            _statistics_read(part, s.lift),
        )
        for number, s in enumerate(part.statistics)
    )


def _statistics_read(part: MatmulPart, function: LaneFunction) -> tuple[str, ...]:
    named = {a.name for a in function.arguments if a.origin is Origin.VALUE}
    return tuple(s.name for s in part.statistics if s.name in named)


def _matrix(kernel: LoweredKernel, buffer: int, name: str) -> MatrixView:
    return MatrixView(next(p.name for p in kernel.pointers if p.buffer == buffer and not p.writable), name)


def _results(kernel: LoweredKernel, part: MatmulPart, suffix: str) -> tuple[ResultView, ...]:
    several = len(part.results) > 1
    ends = [f"{suffix}_{number}" if several else suffix for number in range(len(part.results))]
    return tuple(_result(kernel, result, end) for result, end in zip(part.results, ends, strict=True))


def _result(kernel: LoweredKernel, result: PartResult, end: str) -> ResultView:
    words = max(1, result.dtype.itemsize // 2)
    if result.offset is None:
        return ResultView(f"y{end}", result.dtype.spelling, words, f"y_map{end}", "", "")
    pointer = next(p.name for p in kernel.pointers if p.writable and p.buffer == result.buffer)
    return ResultView(
        f"y{end}", result.dtype.spelling, words, "", pointer, f"offset{end}", result.octets, result.head, result.dtype.itemsize == 1
    )


def _indexes_heads(part: MatmulPart) -> bool:
    return len(part.epilogue.axes.symbols) > part.rows + 1


def _part_math(kernel: LoweredKernel, part: MatmulPart, part_view: PartView) -> list[str]:
    coordinates = _coordinates(kernel, part)
    several = len(part.results) > 1
    outs = tuple((f"out_{n}" if several else "out", r.dtype.spelling) for n, r in enumerate(part.results))
    wrapper = Wrapper(f"epilogue{part_view.suffix}", _DOC, _inputs(part, part.accumulated, part_view.taken), coordinates, outs)
    addresses = cuda_offsets(kernel, prefix="operands.")
    offsets = [
        offset_text(r.offset, _offset_doc(r), result.offset, part.epilogue.axes, coordinates, last=True, offsets=addresses)
        for result, r in zip(part.results, part_view.results, strict=True)
        if result.offset is not None
    ]
    elements = [
        text
        for statistic, element in zip(part.statistics, part_view.statistics, strict=True)
        for text in _element_math(kernel, part, statistic, element)
    ]
    weights = [math_text([weight.function.function]) for weight in part.weights if weight.packed is None]
    return [*weights, *elements, math_text([part.epilogue.function]), wrapper_text(kernel, part.epilogue, wrapper), *offsets]


def _offset_doc(result: ResultView) -> str:
    if result.head:
        return _OFFSET_OF_HEAD
    return _OFFSET if result.octets else _OFFSET_OF_ONE


def _element_math(kernel: LoweredKernel, part: MatmulPart, statistic: HeadStatistic, statistic_view: StatisticView) -> list[str]:
    inputs = _inputs(part, statistic.accumulated, statistic_view.before)
    wrapper = Wrapper(statistic_view.element, _ELEMENT, inputs, _coordinates(kernel, part), (("out", statistic_view.type),))
    return [math_text([statistic.lift.function]), wrapper_text(kernel, statistic.lift, wrapper)]


def _inputs(part: MatmulPart, accumulated: Sequence[AccumulatorPair], statistics: Sequence[str]) -> tuple[str, ...]:
    types = {s.name: s.reduction.components[0].dtype.spelling for s in part.statistics}
    return (*(f"const float (&{a.name})[2]" for a in accumulated), *(f"{types[name]} {name}" for name in statistics))


def _coordinates(kernel: LoweredKernel, part: MatmulPart) -> PairCoordinates:
    heads = len(part.epilogue.axes.symbols) - part.rows - 1
    if heads:
        return PairCoordinates((("row", part.rows), ("head", heads)), "channel", _index(kernel))
    return PairCoordinates((("row", part.rows),), "col", _index(kernel))


def _index(kernel: LoweredKernel) -> str:
    """Returns the type of rows, columns and offsets."""
    return "i64" if kernel.index64 else "i32"
