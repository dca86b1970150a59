"""Products with epilogues: each epilogue as math on two neighbouring columns, laid out as the skeleton wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy

from fusegen.errors import VerificationError
from fusegen.ir.formula import formula
from fusegen.ir.index_map import Position
from fusegen.ir.symbolic import Axes, Dim, Index, axis_symbol, linearize, literal, product, same
from fusegen.passes.fuse.contraction import ProductOperands
from fusegen.passes.fuse.epilogue import position_of
from fusegen.passes.fuse.groups import Part
from fusegen.passes.fuse.pairs import LANES, OCTET, is_same_row
from fusegen.passes.fuse.skeletons import skeleton_named
from fusegen.schedule.access import merge_axes
from fusegen.schedule.indices import has_checks
from fusegen.schedule.kernel import Accumulated, ContractionBody, Kernel, LaneFunction, PartResult, ProductPart
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.lanes import (
    PAIR,
    LaneMath,
    is_in_octets,
    lane_checks,
    lane_expressions,
    lane_function,
    lane_pointers,
    lane_position,
    lane_scalars,
    lane_sizes,
    pair_axes,
)
from fusegen.schedule.lower.leaves import leaves_of
from fusegen.schedule.lower.placement import Placement, place
from fusegen.schedule.lower.products import LAYOUTS, Products
from fusegen.schedule.program import Launch, Step
from fusegen.schedule.terms import Evaluator, substitute

ROW, COLUMN, HEAD, CHANNEL = "row", "col", "head", "channel"
"""What an epilogue calls its place in the result: a column is a channel of a head, where it tells heads apart."""


@dataclass(frozen=True)
class _Lowered:
    """A part in the kernel, the shape of its results, and copies of these that are wanted elsewhere."""

    part: ProductPart
    rows: Dim
    copies: tuple[Step, ...]


def lower_contraction(context: Context) -> Sequence[Step]:
    """The launch of products with their epilogues, and copies where a result is wanted as another view."""
    lowered = [_lower_part(context, part, number) for number, part in enumerate(context.group.parts)]
    parts = tuple(found.part for found in lowered)
    operands = [[_operands(context, product) for product in part.products] for part in context.group.parts]
    products = Products(context, parts, operands, lowered[0].rows)
    layout = LAYOUTS[context.group.skeleton].lay_out(products)
    node = context.graph.nodes[context.group.anchors[0]]
    launch = Launch(
        kernel=_kernel(context, ContractionBody(node.dtype, parts, layout.plan, layout.matrices)),
        group=context.group,
        tensor_maps=layout.maps,
        grid=layout.grid,
        block=layout.plan.threads,
        shared_bytes=layout.plan.shared_bytes,
        traffic=context.traffic(),
        extra=(formula(products.rows), formula(context.graph.nodes[node.args[0]].shape[-1]), *layout.extra),
    )
    return [launch, *(copy for found in lowered for copy in found.copies)]


def _operands(context: Context, matmul: int) -> ProductOperands:
    operands = skeleton_named(context.group.skeleton).operands(context.graph, matmul)
    if operands is None:
        raise VerificationError("a product's operands are not what fusion saw")
    return operands


def _kernel(context: Context, body: ContractionBody) -> Kernel:
    written = [result.buffer for part in body.parts for result in part.results if result.offset is not None]
    functions = [part.epilogue for part in body.parts]
    offsets = [result.offset for part in body.parts for result in part.results if result.offset is not None]
    return Kernel(
        name=context.name,
        pointers=lane_pointers(context, functions, written, body.matrices),
        sizes=lane_sizes(functions, offsets),
        scalars=lane_scalars(context, functions),
        body=body,
        wide=context.wide,
        checks=has_checks(lane_expressions(functions)),
    )


def _lower_part(context: Context, part: Part, number: int) -> _Lowered:
    domain = part.domain
    axes = pair_axes(domain.shape)
    placements = [_place(context, part, axes, output) for output in range(len(part.outputs))]
    columns = literal(product(domain.shape[d] for d in domain.columns))
    assert columns is not None  # which fusion saw
    whole_tiles = LAYOUTS[context.group.skeleton].whole_tiles
    offsets = [None if whole_tiles and _is_matrix(part, axes, p.offset) else p.offset for p in placements]
    epilogue, accumulated, rows, moved = _epilogue(context, part, axes, number, [o for o in offsets if o is not None])
    results = tuple(
        PartResult(p.buffer, context.dtype(p.buffer), None if o is None else substitute(o, moved), columns % OCTET == 0)
        for p, o in zip(placements, offsets, strict=True)
    )
    heads = len(epilogue.axes.symbols) - rows - 1
    head = literal(domain.shape[-1]) if heads else columns
    assert head is not None
    found = ProductPart(columns, head, rows, len(part.products), accumulated, epilogue, results)
    return _Lowered(found, product(domain.shape[d] for d in domain.rows), tuple(c for p in placements for c in p.copies))


def _place(context: Context, part: Part, axes: Axes, number: int) -> Placement:
    """Where a result goes: as a matrix, or eight columns at a time."""
    output, order = part.outputs[number], part.orders[number]
    at = position_of(context.graph, output, order, part.domain, lane_position(axes, 0), axes)
    return place(context, output, at, axes, lambda offset: _is_matrix(part, axes, offset) or is_in_octets(context, axes, offset))


def _is_matrix(part: Part, axes: Axes, offset: Index) -> bool:
    """Whether results lie as the copy engine writes them: row by row, without gaps."""
    return same(offset, linearize(lane_position(axes, 0), part.domain.shape))


# The epilogue.


@dataclass
class _Accumulators:
    """The pairs of columns that an epilogue takes: finds for an element of a product the lane that holds it, for `Evaluator`."""

    context: Context
    part: Part
    axes: Axes
    found: dict[Accumulated, None] = field(default_factory=dict)

    def __call__(self, position: int, at: Position) -> object | None:
        domain, symbols, extents = self.part.domain, self.axes.symbols, self.part.domain.shape
        if position not in self.part.products:
            return None
        count = len(domain.rows)
        if not is_same_row(self.context.graph.nodes[position].shape[:-1], at[:-1], symbols[:count], extents[:count]):
            return None
        own = linearize(lane_position(self.axes, 0)[count:], extents[count:])
        offset = sympy.expand(at[-1] - own)
        if not offset.is_Integer or int(offset) % OCTET >= LANES:
            return None
        lane = int(offset) % OCTET
        return self._name(self.part.products.index(position), int(offset) - lane), lane

    def _name(self, product: int, shift: int) -> str:
        taken = Accumulated(_accumulated_name(product, shift), product, shift)
        self.found[taken] = None
        return taken.name


def _accumulated_name(product: int, shift: int) -> str:
    name = ("product", "second")[product]
    return name if shift == 0 else f"{name}_{'right' if shift > 0 else 'left'}_{abs(shift)}"


def _epilogue(
    context: Context, part: Part, axes: Axes, number: int, offsets: Sequence[Index]
) -> tuple[LaneFunction, tuple[Accumulated, ...], int, dict[object, Index]]:
    """The epilogue, its axes of rows and of heads merged; what it takes; how many axes number rows; what became of the axes."""
    accumulators = _Accumulators(context, part, axes)
    evaluator = Evaluator(context.graph, axes, context.stored, accumulators, context.rounded)
    elements = [
        (output, position_of(context.graph, output, order, part.domain, lane_position(axes, lane), axes))
        for output, order in zip(part.outputs, part.orders, strict=True)
        for lane in range(LANES)
    ]
    roots = [evaluator.value(*element) for element in elements]
    last = part.domain.shape[-1]
    optional = last if (literal(last) or 0) % LANES else None
    checks = lane_checks(evaluator, elements[::LANES], optional)
    for taken in (*_taken(part), *(a.name for a in accumulators.found), *(s.name for s in axes.symbols)):
        context.names.take(taken)
    expressions = [*leaves_of(evaluator.terms, roots, checks).expressions(), *offsets]
    rows, columns, moves = _merged(axes, len(part.domain.rows), expressions)
    merged = Axes((*rows.symbols, *columns.symbols), (*rows.extents, *columns.extents))
    word = CHANNEL if len(columns.symbols) > 1 else COLUMN
    words: dict[Index, str] = {s: s.name for s in merged.symbols[:-1]} | {LANES * PAIR: word}
    math_ = LaneMath(evaluator.terms, tuple(roots), merged, words, moves, optional, checks)
    several = len(context.group.parts) > 1
    name = f"{context.name}_epilogue_{number}" if several else f"{context.name}_epilogue"
    function = lane_function(context, math_, name, fast=context.fast)
    return function, tuple(accumulators.found), len(rows.symbols), dict(moves)


def _merged(axes: Axes, rows: int, expressions: Sequence[Index]) -> tuple[Axes, Axes, dict[sympy.Symbol, Index]]:
    """The axes that number rows, those that number heads, and what became of the others: an axis of heads disappears where nothing
    tells heads apart."""
    row_axes, moves = merge_axes(Axes(axes.symbols[:rows], axes.extents[:rows]), expressions, ROW)
    columns, moved = merge_axes(Axes(axes.symbols[rows:], axes.extents[rows:]), expressions, PAIR.name)
    heads = Axes(columns.symbols[:-1], columns.extents[:-1])
    if len(heads.symbols) == 1:
        moved[heads.symbols[0]] = axis_symbol(HEAD)
        heads = Axes((axis_symbol(HEAD),), heads.extents)
    return row_axes, Axes((*heads.symbols, PAIR), (*heads.extents, columns.extents[-1])), moves | moved


def _taken(part: Part) -> list[str]:
    """What the epilogue's call names by itself."""
    numbered = [f"{word}_{number}" for word in ("out", "result") for number in range(len(part.outputs))]
    return ["operands", "product", "out", "result", *numbered, ROW, COLUMN, HEAD, CHANNEL]
