"""Lowers matmuls with epilogues to launches, in the layout of their pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import gcd

import sympy

from fusegen.families.gemm.epilogue import has_element_per_head, result_index
from fusegen.families.gemm.first_operands import lower_rows
from fusegen.families.gemm.heuristics import ExpectedSizes, mma_plans, shape_of
from fusegen.families.gemm.pipelines import MMA_SYNC, WGMMA, MatmulOperands, StoredWeight, computes_rows
from fusegen.families.gemm.placement import Placement, place_output, tensor_map
from fusegen.families.gemm.plan import (
    AccumulatorPair,
    ComputedOperand,
    ContractionBody,
    ContractionPlan,
    FewRowsPlan,
    HeadStatistic,
    MatmulPart,
    MatmulPlan,
    MmaPlan,
    PartResult,
)
from fusegen.families.gemm.weights import lower_weight
from fusegen.families.rows.phases import statistic_name
from fusegen.fusion.accumulator import FRAGMENT, LANES, is_same_row, without_single
from fusegen.fusion.groups import EpiloguePart
from fusegen.ir.formula import ceil_div, formula
from fusegen.ir.index_map import Position, StridedView, contiguous_strides
from fusegen.ir.ops import Family
from fusegen.ir.symbolic import Axes, Dim, Index, axis_symbol, linearize, literal, product, same
from fusegen.program.call import Role, TensorMapSpec
from fusegen.program.formula import Formula, minimum
from fusegen.schedule.access import divisor, merge_axes
from fusegen.schedule.column_pairs import (
    PAIR,
    LaneMath,
    is_in_octets,
    lane_checks,
    lane_function,
    lane_kernel,
    lane_position,
    pair_axes,
)
from fusegen.schedule.context import Context, leaves_of
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.indices import IndexCheck
from fusegen.schedule.kernel import LoweredKernel
from fusegen.schedule.math import LaneFunction, Reduction
from fusegen.schedule.memory import Store
from fusegen.schedule.names import identifier
from fusegen.schedule.program import Launch, Step
from fusegen.schedule.reductions import element_type, lifted, reduction_of


@dataclass(frozen=True)
class _Lowered:
    """A lowered part, the rows of its results, and the launches that copy results to other layouts."""

    part: MatmulPart
    rows: Dim
    copies: tuple[Step, ...]


def lower_contraction(context: Context) -> Sequence[Step]:
    """Returns the launch of matmuls with their epilogues, followed by copies of results to other layouts."""
    lowered = [_lower_part(context, part, number) for number, part in enumerate(context.group.parts)]
    parts = tuple(result.part for result in lowered)
    operands = [[context.group.match[product] for product in part.products] for part in context.group.parts]
    products = LaunchMatmuls(context, parts, operands, lowered[0].rows)
    layout = _layout_of(context).lay_out(products)
    first = context.group.core_nodes[0]
    node, rows = context.graph.nodes[first], lower_rows(context, first) if computes_rows(context.graph, first) else None
    body = ContractionBody(node.dtype, parts, layout.plan, layout.matrices, rows, operands[0][0].depths)
    depth = body.begins[-1] if body.depths else context.graph.nodes[node.args[0]].shape[-1]
    launch = Launch(
        kernel=_kernel(context, body),
        group=context.group,
        tensor_maps=layout.maps,
        grid=layout.grid,
        block=layout.plan.threads,
        shared_bytes=layout.plan.shared_bytes,
        traffic=context.traffic(),
        mapped=context.mapped(layout.maps),
        extra=(formula(products.rows), formula(depth), *layout.extra),
        candidates=context.candidates,
    )
    return [launch, *(copy for result in lowered for copy in result.copies)]


def _kernel(context: Context, body: ContractionBody) -> LoweredKernel:
    stored = [result for part in body.parts for result in part.results if result.offset is not None]
    offsets = [result.offset for result in stored if result.offset is not None]
    return lane_kernel(context, body, body.functions, [result.buffer for result in stored], offsets, body.matrices)


def _lower_part(context: Context, part: EpiloguePart, number: int) -> _Lowered:
    domain = part.domain
    axes = pair_axes(domain.shape)
    placements = [_place_result(context, part, axes, output) for output in range(len(part.outputs))]
    columns = literal(product(domain.shape[d] for d in domain.columns))
    assert columns is not None  # checked by fusion
    whole_tiles = _layout_of(context).whole_tiles
    by_tile = [whole_tiles and context.dtype(p.buffer).itemsize > 1 and _is_matrix(part, axes, p.offset) for p in placements]
    offsets = [None if is_by_tile else p.offset for p, is_by_tile in zip(placements, by_tile, strict=True)]
    epilogue = lower_epilogue(context, part, axes, number, [o for o in offsets if o is not None])
    width = literal(domain.shape[-1])
    assert width is not None
    results = tuple(
        PartResult(
            buffer=p.buffer,
            dtype=context.dtype(p.buffer),
            offset=None if offset is None else substitute(offset, epilogue.axis_map),
            octets=columns % FRAGMENT == 0,
            head=width if has_element_per_head(context.graph.nodes[output].shape, domain) else 0,
        )
        for output, p, offset in zip(part.outputs, placements, offsets, strict=True)
    )
    head = width if len(epilogue.function.axes.symbols) > epilogue.rows + 1 else columns
    lowered = MatmulPart(
        columns,
        head,
        epilogue.rows,
        _second_names(context, part),
        epilogue.accumulated,
        epilogue.function,
        results,
        epilogue.statistics,
        _lower_weights(context, part, number),
    )
    return _Lowered(lowered, product(domain.shape[d] for d in domain.rows), tuple(c for p in placements for c in p.copies))


def _second_names(context: Context, part: EpiloguePart) -> tuple[str, ...]:
    """Returns the names of a part's second operands in the text: the user's for two inputs, else those of the template."""
    views = [context.group.match[product].b for product in part.products]
    specs = [context.memory.spec(context.reads[view.base]) for view in views if isinstance(view, StridedView)]
    names = tuple(identifier(spec.name) for spec in specs if spec.role is Role.INPUT and not _OF_TEMPLATES.fullmatch(spec.name))
    return names if len(views) == len(set(names)) > 1 else ("b", "second_b")[: len(views)]


def _lower_weights(context: Context, part: EpiloguePart, number: int) -> tuple[ComputedOperand, ...]:
    plan = context.plans.get(context.group.core_nodes)
    stored = [m for m in part.products if isinstance(context.group.match[m].b, StoredWeight)]
    if not stored or not isinstance(plan, FewRowsPlan):
        return ()
    ends = f"_{number}" if len(context.group.parts) > 1 else ""
    return tuple(lower_weight(context, m, plan.unit, f"{word}{ends}") for word, m in zip(_WEIGHTS, stored, strict=False))


def _place_result(context: Context, part: EpiloguePart, axes: Axes, number: int) -> Placement:
    """Returns the placement of a result: as a matrix, in groups of eight columns, or with one element per head."""
    output, order = part.outputs[number], part.orders[number]
    index = result_index(context.graph, output, order, part.domain, lane_position(axes, 0), axes)
    if has_element_per_head(context.graph.nodes[output].shape, part.domain):
        return place_output(context, output, index, axes, lambda store: not _is_input(context, store))
    plan = context.plans.get(context.group.core_nodes)
    has_one_warpgroup = isinstance(plan, ContractionPlan) and plan.consumers == 1

    def fits(store: Store) -> bool:
        if _is_input(context, store):
            # A single warpgroup is slow at this: 64 rows of q, k and v take 28 us on an H200, with TMA and a copy 23.
            return not has_one_warpgroup and is_in_octets(context, store)
        return _is_matrix(part, axes, store.offset) or is_in_octets(context, store)

    return place_output(context, output, index, axes, fits)


def _is_input(context: Context, store: Store) -> bool:
    """True if a result is written in place: the alignment of the memory must be checked."""
    return context.memory.spec(store.buffer).role is Role.INPUT


def _is_matrix(part: EpiloguePart, axes: Axes, offset: Index) -> bool:
    """True if a result is a contiguous row-major matrix, as TMA stores write it."""
    return same(offset, linearize(without_single(lane_position(axes, 0), part.domain.shape), part.domain.shape))


# Layouts of the pipelines: the plan, tensor maps or addresses of operands and results, and the number of blocks.


_LINE = 64  # elements of the depth in a line of 128 bytes
_WIDEST_COPY = 8  # elements


@dataclass(frozen=True)
class LaunchMatmuls:
    """The matmuls of a launch: its parts, their matmuls' operands, and the rows of every result."""

    context: Context
    parts: Sequence[MatmulPart]
    operands: Sequence[Sequence[MatmulOperands]]
    rows: Dim


@dataclass(frozen=True)
class MatmulLayout:
    """The properties of a launch that depend on the pipeline.

    Attributes:
        maps: tensor maps of operands, and of results that are stored by whole tiles.
        matrices: buffers of operands that are read by address.
        extra: size arguments after those of the matmul.
    """

    plan: MatmulPlan
    maps: tuple[TensorMapSpec, ...]
    matrices: tuple[int, ...]
    extra: tuple[Formula, ...]
    grid: Formula


@dataclass(frozen=True)
class PipelineLayout:
    """The launch layout of a pipeline. With `whole_tiles`, results that are matrices are stored by tensor maps."""

    whole_tiles: bool
    lay_out: Callable[[LaunchMatmuls], MatmulLayout]


# Warpgroups: TMA loads tiles and stores results.


def _tma_layout(products: LaunchMatmuls) -> MatmulLayout:
    context = products.context
    plan = context.plans[context.group.core_nodes]
    assert isinstance(plan, ContractionPlan)
    tiles = _tiles(products, plan)
    grid = tiles * plan.splits if plan.splits > 1 else minimum(tiles, context.target.sms * plan.blocks_per_sm)
    return MatmulLayout(plan, tuple(_maps(products, plan)), (), (), grid)


def _maps(products: LaunchMatmuls, plan: ContractionPlan) -> list[TensorMapSpec]:
    """Returns the maps of the first operand, of each part's second operands and results stored by whole tiles, and of further
    pairs. A stage loads whole tiles of an operand whose depth is contiguous, else 64 x 64 squares."""
    reads, square = products.context.reads, (_LINE, _LINE)
    a_box = (plan.loaded_rows or plan.tile_m, _LINE) if plan.a_major == "k" else square
    b_box = (plan.tile_n, _LINE) if plan.b_major == "k" else square
    a = products.operands[0][0].a
    maps = [tensor_map(reads[a.base], a, a_box)]
    for part, operands in zip(products.parts, products.operands, strict=True):
        maps += [tensor_map(reads[o.b.base], o.b, b_box) for o in operands if isinstance(o.b, StridedView)]
        maps += [_result_map(r, products.rows, part.columns) for r in part.results if r.offset is None]
    further = products.operands[0][0].further
    return [*maps, *(tensor_map(reads[v.base], v, box) for pair in further for v, box in zip(pair, (a_box, b_box), strict=True))]


def _result_map(result: PartResult, rows: Dim, columns: int) -> TensorMapSpec:
    """Returns the map of a result, which is stored in boxes of 64 rows of 128 bytes."""
    shape = (rows, columns)
    view = StridedView(result.buffer, shape, contiguous_strides(shape), 0)
    return tensor_map(result.buffer, view, (64, 128 // result.dtype.itemsize), writable=True)


# Warps: threads copy by address.


def _warp_layout(products: LaunchMatmuls) -> MatmulLayout:
    context = products.context
    a, b, *others = (_copy_width(context, view) for view in _matrices(products))
    if products.operands[0][0].further:
        a, others = min(a, *others[::2]), others[1::2]
    plans = mma_plans(shape_of(context.graph, context.group, ExpectedSizes({})), a, min((b, *others)), context.target)
    return _address_layout(products, context.choose(plans))


def _few_rows_layout(products: LaunchMatmuls) -> MatmulLayout:
    plan = products.context.plans[products.context.group.core_nodes]
    assert isinstance(plan, FewRowsPlan)
    return _address_layout(products, plan)


def _matrices(products: LaunchMatmuls) -> list[StridedView]:
    """Returns the first operand, the second ones that are in memory, and further pairs."""
    first, seconds = products.operands[0][0], (o.b for operands in products.operands for o in operands)
    return [first.a, *(b for b in seconds if isinstance(b, StridedView)), *(view for pair in first.further for view in pair)]


def _address_layout(products: LaunchMatmuls, plan: MmaPlan | FewRowsPlan) -> MatmulLayout:
    context, views = products.context, _matrices(products)
    in_memory = views[1:] if computes_rows(context.graph, context.group.core_nodes[0]) else views
    matrices = tuple(context.reads[view.base] for view in in_memory)
    extra = tuple(formula(size) for view in views for size in (view.offset, view.strides[0]))
    return MatmulLayout(plan, (), matrices, extra, _tiles(products, plan))


def _copy_width(context: Context, view: StridedView) -> int:
    """Returns the widest copy of a matrix: a power of two, in elements, that divides all offsets."""
    buffer = context.reads[view.base]
    aligned = max(1, context.alignment(buffer) // context.dtype(buffer).itemsize)
    terms = [t for size in (view.offset, view.strides[0]) for t in sympy.Add.make_args(sympy.expand(size))]
    return gcd(_WIDEST_COPY, aligned, *(divisor(t, context.multiples, aligned) for t in terms))


def _tiles(products: LaunchMatmuls, plan: MatmulPlan) -> Formula:
    return ceil_div(products.rows, plan.tile_m) * sum(-(-part.columns // plan.tile_n) for part in products.parts)


LAYOUTS = {
    WGMMA.name: PipelineLayout(whole_tiles=True, lay_out=_tma_layout),
    MMA_SYNC.name: PipelineLayout(whole_tiles=False, lay_out=_warp_layout),
}

_FEW_ROWS = PipelineLayout(whole_tiles=False, lay_out=_few_rows_layout)


def _layout_of(context: Context) -> PipelineLayout:
    has_few_rows = isinstance(context.plans.get(context.group.core_nodes), FewRowsPlan)
    return _FEW_ROWS if has_few_rows else LAYOUTS[context.group.pipeline]


# Epilogues: the math on two neighbouring columns, after the statistics of whole heads.


_OF_TEMPLATES = re.compile(r"[aby](_\d+)*")  # operands and results as templates name them
_WEIGHTS = ("weight", "second_weight")  # the math of second operands that are computed on load
ROW, COLUMN, HEAD, CHANNEL = "row", "col", "head", "channel"
"""Names of an epilogue's coordinates; a column is a channel of a head if the epilogue indexes heads."""


@dataclass(frozen=True)
class Epilogue:
    """The lowered math of a part.

    Attributes:
        function: the math on two neighbouring columns.
        rows: the number of leading axes of the function that index rows.
        axis_map: maps the part's axes to expressions in the merged axes.
    """

    function: LaneFunction
    accumulated: tuple[AccumulatorPair, ...]
    statistics: tuple[HeadStatistic, ...]
    rows: int
    axis_map: dict[object, Index]


@dataclass(frozen=True)
class _Head:
    reduction: Reduction
    at: Position


@dataclass(frozen=True)
class _PairMath:
    """Math that was evaluated for both columns of a pair; the roots are the terms of both columns of each result."""

    evaluator: Evaluator
    roots: tuple[int, ...]
    checks: tuple[IndexCheck, ...]
    accumulated: tuple[AccumulatorPair, ...]


def lower_epilogue(context: Context, part: EpiloguePart, axes: Axes, number: int, offsets: Sequence[Index]) -> Epilogue:
    """Lowers the math of a part of a launch.

    Args:
        axes: the axes of the part's domain, the last one over pairs of columns.
        offsets: the offsets of results that are not stored by whole tiles.
    """
    for reserved in (*_reserved_names(part), *(s.name for s in axes.symbols)):
        context.names.take(reserved)
    heads: dict[int, _Head] = {}
    final = _evaluate(context, part, axes, heads, _results(context, part, axes))
    lifts = _lifts(context, part, axes, heads)
    all_math = [final, *lifts.values()]
    for name in dict.fromkeys(a.name for math in all_math for a in math.accumulated):
        context.names.take(name)
    expressions = [e for math in all_math for e in leaves_of(math.evaluator.terms, math.roots, math.checks).expressions()]
    rows, columns, moves = _merged(axes, len(part.domain.rows), [*expressions, *offsets])
    merged = Axes((*rows.symbols, *columns.symbols), (*rows.extents, *columns.extents))
    word = CHANNEL if len(columns.symbols) > 1 else COLUMN
    words: dict[Index, str] = {s: s.name for s in merged.symbols[:-1]} | {LANES * PAIR: word}
    ends = f"_{number}" if len(context.group.parts) > 1 else ""

    def function(math: _PairMath, word: str) -> LaneFunction:
        vec = LaneMath(math.evaluator.terms, math.roots, merged, words, moves, _optional(part), math.checks)
        return lane_function(context, vec, f"{context.name}_{word}", fast=context.fast)

    width = literal(part.domain.shape[-1]) or 1
    statistics = tuple(
        HeadStatistic(heads[position].reduction, width, math.accumulated, function(math, f"element{ends}_{number}"))
        for number, (position, math) in enumerate(sorted(lifts.items()))  # a statistic reads earlier ones only
    )
    return Epilogue(function(final, f"epilogue{ends}"), final.accumulated, statistics, len(rows.symbols), dict(moves))


def _lifts(context: Context, part: EpiloguePart, axes: Axes, heads: dict[int, _Head]) -> dict[int, _PairMath]:
    """Evaluates the statistics of heads, keyed by reduction; adds reductions that these read to `heads`."""
    statistics: dict[int, _PairMath] = {}
    while missing := heads.keys() - statistics.keys():
        position = max(missing)
        (operand,) = context.graph.nodes[position].args
        elements = [(operand, (*heads[position].at[:-1], lane_position(axes, lane)[-1])) for lane in range(LANES)]
        statistics[position] = _evaluate(context, part, axes, heads, elements, position)
    return statistics


def _results(context: Context, part: EpiloguePart, axes: Axes) -> list[tuple[int, Position]]:
    """Returns the elements of results that a thread computes, both columns of a pair in turn."""
    return [
        (output, result_index(context.graph, output, order, part.domain, lane_position(axes, lane), axes))
        for output, order in zip(part.outputs, part.orders, strict=True)
        for lane in range(LANES)
    ]


def _evaluate(
    context: Context,
    part: EpiloguePart,
    axes: Axes,
    heads: dict[int, _Head],
    elements: Sequence[tuple[int, Position]],
    reduction: int | None = None,
) -> _PairMath:
    """Evaluates elements to terms, or to their states for a reduction."""
    inputs = _EpilogueInputs(context, part, axes, heads)
    evaluator = Evaluator(
        context.graph, axes, context.stored, inputs, context.rounded, context.contracted, context.reciprocal_divisions
    )
    roots = [evaluator.value(*element) for element in elements]
    if reduction is None:
        dtypes = [context.memory.dtype(position) for position, _ in elements]
        roots = [evaluator.without_final_cast(root, dtype) for root, dtype in zip(roots, dtypes, strict=True)]
    else:
        roots = [_state(context, evaluator, reduction, root) for root in roots]
    checks = lane_checks(evaluator, elements[::LANES], _optional(part))
    return _PairMath(evaluator, tuple(roots), checks, tuple(inputs.reads))


def _state(context: Context, evaluator: Evaluator, reduction: int, element: int) -> int:
    """Returns an element's state in a reduction with one component and without indices."""
    node, terms = context.graph.nodes[reduction], evaluator.terms
    value = terms.convert(element, element_type(context.graph, node))
    (state,) = lifted(terms, node.op, value, value)
    return state


def _optional(part: EpiloguePart) -> Dim | None:
    """Returns the extent of the last dim if it is odd: the second column may then be past its end."""
    last = part.domain.shape[-1]
    return last if (literal(last) or 0) % LANES else None


@dataclass
class _EpilogueInputs:
    """Names the accumulator elements and per-head statistics that the math of a part reads, for `Evaluator`.

    Attributes:
        heads: the statistics by node, shared by all math of the part.
        reads: the accumulators that the math reads, in order.
    """

    context: Context
    part: EpiloguePart
    axes: Axes
    heads: dict[int, _Head]
    reads: dict[AccumulatorPair, None] = field(default_factory=dict)

    def __call__(self, position: int, at: Position) -> object | None:
        if self.context.graph.nodes[position].family is Family.REDUCTION:
            return self._statistic(position, at)
        domain, symbols, extents = self.part.domain, self.axes.symbols, self.part.domain.shape
        if position not in self.part.products:
            return None
        count = len(domain.rows)
        if not is_same_row(self.context.graph.nodes[position].shape[:-1], at[:-1], symbols[:count], extents[:count]):
            return None
        column = linearize(without_single(lane_position(self.axes, 0)[count:], extents[count:]), extents[count:])
        offset = sympy.expand(at[-1] - column)
        if not offset.is_Integer or int(offset) % FRAGMENT >= LANES:
            return None
        lane = int(offset) % FRAGMENT
        return self._name(self.part.products.index(position), int(offset) - lane), lane

    def _statistic(self, position: int, at: Position) -> object:
        if position not in self.heads:
            graph, names = self.context.graph, self.context.names
            reduction = reduction_of(graph, position, names.take, fast=self.context.fast, name=statistic_name(graph, position))
            self.heads[position] = _Head(reduction, at)
        return self.heads[position].reduction.components[0].name

    def _name(self, product: int, shift: int) -> str:
        names = _second_names(self.context, self.part)
        name = f"{names[product]}_product" if len(names) > 1 else "product"
        name = name if shift == 0 else f"{name}_{'right' if shift > 0 else 'left'}_{abs(shift)}"
        accumulated = AccumulatorPair(name, product, shift)
        self.reads[accumulated] = None
        return accumulated.name


def _merged(axes: Axes, rows: int, expressions: Sequence[Index]) -> tuple[Axes, Axes, dict[sympy.Symbol, Index]]:
    """Merges axes of rows and of columns, and returns the substitutions. Heads merge into columns if nothing indexes heads."""
    row_axes, moves = merge_axes(Axes(axes.symbols[:rows], axes.extents[:rows]), expressions, ROW)
    columns, column_moves = merge_axes(Axes(axes.symbols[rows:], axes.extents[rows:]), expressions, PAIR.name)
    heads = Axes(columns.symbols[:-1], columns.extents[:-1])
    if len(heads.symbols) == 1:
        column_moves[heads.symbols[0]] = axis_symbol(HEAD)
        heads = Axes((axis_symbol(HEAD),), heads.extents)
    return row_axes, Axes((*heads.symbols, PAIR), (*heads.extents, columns.extents[-1])), moves | column_moves


def _reserved_names(part: EpiloguePart) -> list[str]:
    numbered = [f"{word}_{number}" for word in ("out", "result") for number in range(len(part.outputs))]
    return ["operands", "drawn", "product", "out", "result", *numbered, ROW, COLUMN, HEAD, CHANNEL]
