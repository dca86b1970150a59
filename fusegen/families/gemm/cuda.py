"""CUDA text of matmuls with epilogues: one template per pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fusegen.emit.column_pairs import (
    PairCoordinates,
    Wrapper,
    offset_text,
    operand_parts,
    operands_text,
    parameters_of,
    wrapper_text,
)
from fusegen.emit.cuda import assemble, head, math_text
from fusegen.emit.environment import render
from fusegen.emit.views import ReductionView, cuda_offsets, kinds, reduction_functions, view
from fusegen.families.gemm.first_operands import ROW_COORDINATES
from fusegen.families.gemm.operands_cuda import OperandView, operand_view
from fusegen.families.gemm.plan import (
    AccumulatorPair,
    ComputedOperand,
    ComputedRows,
    ContractionBody,
    ContractionPlan,
    FewRowsPlan,
    HeadStatistic,
    MatmulPart,
    MmaPlan,
    PartResult,
)
from fusegen.families.gemm.weights import COORDINATES
from fusegen.schedule.kernel import LoweredKernel, Pointer
from fusegen.schedule.math import LaneFunction, LaneRead, Origin
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target

_DOC = "Finishes two neighbouring columns of a row."
_ELEMENT = "The values of two neighbouring columns of a head that are reduced."
_OFFSET = "The offset of eight columns of a row in the result."
_OFFSET_OF_ONE = "The offset of a column of a row in the result."
_OFFSET_OF_HEAD = "The offset of a head of a row in the result."
_OFFSET_OF_BITS = "The offset of eight columns of a row in the random bits."


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
    def pair(self) -> str:
        """The variable of a pair of columns."""
        return f"{self.name}_pair"

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
class PairView:
    """A pair of operands of a sum as the template sees it.

    Attributes:
        begin, end: its range of the depth; the next pair begins at the end.
        depth: elements that are read.
        maps: its tensor maps; or `matrices` that are read by address.
    """

    begin: int
    end: int
    depth: int
    maps: tuple[str, str]
    matrices: tuple[MatrixView, ...] = ()


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
class DrawView:
    """Random bits that the lanes of a quad draw together as the template sees them.

    Attributes:
        key: the arguments that name the key and the stream.
        offset: the function that returns the offset of eight columns.
    """

    key: str
    offset: str


@dataclass(frozen=True)
class RowValueView:
    """Values of a first operand's rows as the template sees them: the operand itself, or those that are reduced to a statistic.

    Attributes:
        name: the statistic; empty for the operand.
        before: the statistics that the math reads.
    """

    name: str
    math: OperandView
    before: tuple[str, ...]


@dataclass(frozen=True)
class RowsView:
    """A first operand that is computed on load as the template sees it, with the statistics of its rows."""

    operand: RowValueView
    statistics: tuple[tuple[ReductionView, RowValueView], ...]


@dataclass(frozen=True)
class PartView:
    """A part as the template sees it.

    Attributes:
        first: the first column of tiles.
        head: columns of a head, if the epilogue indexes heads; else 0.
        names: its second operands.
        maps, matrices: these as tensor maps, or matrices read by address.
        accumulated: the accumulators that the epilogue reads: name, matrix, and distance in a thread's registers.
        taken: the statistics that the epilogue reads.
        weights: the second operands that are computed on load.
        draws: the random bits that the epilogue is given.
        takes: the parameters of each function of the math.
    """

    suffix: str
    first: int
    columns: int
    head: int
    names: tuple[str, ...]
    maps: tuple[str, ...]
    accumulated: tuple[tuple[str, int, int], ...]
    results: tuple[ResultView, ...]
    statistics: tuple[StatisticView, ...] = ()
    taken: tuple[str, ...] = ()
    matrices: tuple[MatrixView, ...] = ()
    weights: tuple[OperandView, ...] = ()
    draws: tuple[DrawView, ...] = ()
    takes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def epilogue(self) -> str:
        return f"epilogue{self.suffix}"

    def call(self, function: str, width: int, given: Sequence[str] = (), results: Sequence[str] = ()) -> str:
        """Prints a call of a function of the math in a tile of `width` columns, with the operands and coordinates that it takes.

        In tiles of whole heads, the channel does not depend on the tile.
        """
        column = "tile.col + col"
        channel = "col" if self.head and width % self.head == 0 else f"({column})"
        values = {"row": "row", "head": f"({column}) / {self.head}", "channel": f"{channel} % {self.head}", "col": column}
        taken = self.takes[function]
        operands = ["operands"] if "operands" in taken else []
        return f"{function}({', '.join([*operands, *given, *(values[name] for name in taken if name in values), *results])})"

    @property
    def has_maps(self) -> bool:
        """True if a result is stored through shared memory."""
        return any(result.map for result in self.results)


def emit_cuda(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, ContractionBody)
    views = _views(kernel, body)
    by_address = [p for p in kernel.pointers if p.buffer in set(body.matrices) - _read(body)]
    fields, parameters, values = operand_parts(replace(kernel, pointers=_without(kernel, by_address)), _index(kernel))
    reductions = [s.reduction for s in (body.rows.statistics if body.rows else ())]
    reductions += [s.reduction for part in body.parts for s in part.statistics]
    text = [*([operands_text(fields)] if fields else []), *([math_text(reduction_functions(reductions))] if reductions else [])]
    text += [math_text([function.function]) for function in (body.rows.functions if body.rows else ())]
    for number, part in enumerate(body.parts):
        math = _part_math(kernel, part, views[number], _drawn(body, part))
        views[number] = replace(views[number], takes=parameters_of("\n".join(math)))
        text += math
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
        pairs=_pairs(kernel, body),
        index_type=_index(kernel),
        **extra(launch, body, views),
    )
    return assemble(launch, target, "\n".join(text), pipeline)


def _read(body: ContractionBody) -> set[int]:
    return {read.buffer for function in body.functions for read in function.reads}


def _without(kernel: LoweredKernel, pointers: Sequence[Pointer]) -> tuple[Pointer, ...]:
    return tuple(p for p in kernel.pointers if p not in pointers)


def _map_variables(launch: Launch, body: ContractionBody, views: Sequence[PartView]) -> dict[str, Any]:
    """Returns the additional template variables of warpgroups: the names of all tensor maps, and of their tensors; True if the
    buffers of chunks take turns across the slabs of a tile, as a result has an odd number of chunks of 128 bytes a row."""
    maps = [m for v in views for m in (*v.maps, *(r.map for r in v.results if r.map))]
    maps = ["a_map", *maps, *(m for pair in _pairs(launch.kernel, body)[1:] for m in pair.maps)]
    chunks = [-(-body.plan.tile_n * r.registers // 64) for v in views for r in v.results if r.map]
    tensors = [p.name.removesuffix("_ptr") for p in launch.mapped]
    return {"all_maps": list(zip(maps, tensors, strict=True)), "carries_buffer": any(count % 2 for count in chunks)}


def _address_variables(launch: Launch, body: ContractionBody, views: Sequence[PartView]) -> dict[str, Any]:
    """Returns the additional template variables of warps: the first operand."""
    return {"a": None if body.rows else _matrix(launch.kernel, body.matrices[0], "a")}


_WIDE_UNIT = 8  # of wide types, or of many rows; their registers leave no room for more


def _few_rows_variables(launch: Launch, body: ContractionBody, views: Sequence[PartView]) -> dict[str, Any]:
    """Returns the additional template variables of few rows: also if all second operands can be read before the wait for the
    previous launch, and if blocks wait for others of the launch."""
    weights = [weight for part in body.parts for weight in part.weights]
    read = {*body.second_matrices, *(window.buffer for weight in weights for window in weight.windows)}
    return {
        **_address_variables(launch, body, views),
        "early": launch.overlaps and launch.early_reads >= read,
        "waits": launch.waits,
        "computes": bool(weights),
        "rows": _rows_view(launch.kernel, body.rows),
        "keeps_columns": isinstance(body.plan, FewRowsPlan) and body.plan.unit > _WIDE_UNIT,
    }


def _rows_view(kernel: LoweredKernel, rows: ComputedRows | None) -> RowsView | None:
    """Returns the view of a first operand that is computed on load; None for one in memory."""
    if rows is None:
        return None
    names = [s.name for s in rows.statistics]

    def named(operand: ComputedOperand, name: str) -> RowValueView:
        read = {a.name for a in operand.function.arguments if a.origin is Origin.VALUE}
        return RowValueView(name, operand_view(kernel, operand, ROW_COORDINATES), tuple(n for n in names if n in read))

    statistics = tuple((view(s.reduction), named(s.element, s.name)) for s in rows.statistics)
    return RowsView(named(rows.operand, ""), statistics)


_PIPELINES: dict[type, tuple[str, Callable[[Launch, ContractionBody, Sequence[PartView]], dict[str, Any]]]] = {
    ContractionPlan: ("cuda/contraction.cu.jinja", _map_variables),
    MmaPlan: ("cuda/mma.cu.jinja", _address_variables),
    FewRowsPlan: ("cuda/few_rows.cu.jinja", _few_rows_variables),
}
"""The template of each plan type, and its additional variables."""


def _views(kernel: LoweredKernel, body: ContractionBody) -> list[PartView]:
    views: list[PartView] = []
    first = 0
    matrices = iter(body.second_matrices)
    for number, part in enumerate(body.parts):
        suffix = f"_{number}" if len(body.parts) > 1 else ""
        head = part.head if _indexes_heads(part) else 0
        names = part.names
        maps = tuple(f"{name}_map{suffix}" for name in names)
        # Empty for operands that are loaded by tensor maps.
        matrices_read = tuple(_matrix(kernel, buffer, f"{name}{suffix}") for name, buffer in zip(names, matrices, strict=False))
        part_view = PartView(
            suffix, first, part.columns, head, names, maps, _accumulator_views(part.accumulated), _results(kernel, part, suffix)
        )
        views.append(
            replace(
                part_view,
                statistics=_statistics(part, suffix),
                taken=_statistics_read(part, part.epilogue),
                matrices=matrices_read,
                weights=tuple(operand_view(kernel, weight, COORDINATES) for weight in part.weights),
                draws=_draws(kernel, _drawn(body, part), suffix),
            )
        )
        first += -(-part.columns // body.plan.tile_n)
    return views


def _pairs(kernel: LoweredKernel, body: ContractionBody) -> tuple[PairView, ...]:
    """Returns the views of several pairs of operands."""
    pairs: list[PairView] = []
    for number, depth in enumerate(body.depths):
        names = [f"{word}_{number}" if number else word for word in ("a", "b")]
        buffers = body.matrices[2 * number : 2 * number + 2]
        matrices = tuple(_matrix(kernel, buffer, name) for name, buffer in zip(names, buffers, strict=False))
        begin, end = body.begins[number : number + 2]
        pairs.append(PairView(begin, end, depth, (f"{names[0]}_map", f"{names[1]}_map"), matrices))
    return tuple(pairs)


def _accumulator_views(accumulated: Sequence[AccumulatorPair]) -> tuple[tuple[str, int, int], ...]:
    return tuple((a.name, a.product, a.shift // 2) for a in accumulated)


def _drawn(body: ContractionBody, part: MatmulPart) -> tuple[LaneRead, ...]:
    """Returns the random bits that the lanes of a quad draw together. Threads of few rows hold any pairs of columns."""
    return () if isinstance(body.plan, FewRowsPlan) else tuple(read for read in part.epilogue.reads if read.is_one_call)


def _draws(kernel: LoweredKernel, drawn: Sequence[LaneRead], suffix: str) -> tuple[DrawView, ...]:
    pointers = {p.buffer: p for p in kernel.pointers}
    keys = [(pointers[read.buffer].name, pointers[read.buffer].stream) for read in drawn]
    return tuple(DrawView(f"operands.{key}, {stream}", f"draw_offset_{n}{suffix}") for n, (key, stream) in enumerate(keys))


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


def _part_math(kernel: LoweredKernel, part: MatmulPart, part_view: PartView, drawn: tuple[LaneRead, ...]) -> list[str]:
    coordinates = _coordinates(kernel, part)
    several = len(part.results) > 1
    outs = tuple((f"out_{n}" if several else "out", r.dtype.spelling) for n, r in enumerate(part.results))
    inputs = _inputs(part, part.accumulated, part_view.taken)
    wrapper = Wrapper(f"epilogue{part_view.suffix}", _DOC, inputs, coordinates, outs, drawn=drawn)
    addresses = cuda_offsets(kernel, prefix="operands.")
    offsets = [
        offset_text(r.offset, _offset_doc(r), result.offset, part.epilogue.axes, coordinates, last=True, offsets=addresses)
        for result, r in zip(part.results, part_view.results, strict=True)
        if result.offset is not None
    ]
    offsets += [
        offset_text(draw.offset, _OFFSET_OF_BITS, read.offsets[0], part.epilogue.axes, coordinates, last=True)
        for read, draw in zip(drawn, part_view.draws, strict=True)
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
        return PairCoordinates((("row", part.rows), ("head", heads)), "channel", _index(kernel), fixed=False)
    return PairCoordinates((("row", part.rows),), "col", _index(kernel), fixed=False)


def _index(kernel: LoweredKernel) -> str:
    """Returns the type of rows, columns and offsets."""
    return "i64" if kernel.index64 else "i32"
