"""Products with an epilogue: operands as tensor maps, the epilogue as math on two neighbouring columns."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.errors import VerificationError
from fusegen.ir.formula import Formula, ceil_div, formula
from fusegen.ir.strided import StridedView, contiguous_strides
from fusegen.ir.symbolic import Axes, Dim, Index, linearize, literal, product, same
from fusegen.passes.fuse.contraction import LANES, ProductOperands, product_operands, rearranged
from fusegen.schedule.access import merge_axes
from fusegen.schedule.heuristics.contraction import contraction_plan
from fusegen.schedule.kernel import ContractionBody, Kernel, LaneFunction
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.lanes import (
    PAIR,
    LaneMath,
    accumulator_of,
    lane_function,
    lane_position,
    lane_scalars,
    lane_sizes,
    pair_axes,
)
from fusegen.schedule.lower.leaves import leaves_of
from fusegen.schedule.lower.maps import tensor_map
from fusegen.schedule.lower.placement import place
from fusegen.schedule.plan import ContractionPlan
from fusegen.schedule.program import Launch, Step, TensorMapSpec
from fusegen.schedule.terms import Evaluator

ROW, COLUMN = "row", "col"
"""What the epilogue calls its place in the result."""

_TAKEN = ("operands", "product", "out", "result", ROW, COLUMN)
_TILE_K = 64  # of the depth: a line of 128 bytes


def lower_contraction(context: Context) -> Sequence[Step]:
    """The launch of a product with its epilogue, and a copy where its result is wanted as another view."""
    (root,), (matmul,) = context.group.outputs, context.group.anchors
    operands = product_operands(context.graph, matmul)
    if operands is None:
        raise VerificationError("a product's operands are not what fusion saw")
    shape = context.group.domain.shape
    axes = pair_axes(shape)
    first = lane_position(axes, 0)
    at = rearranged(first, shape, context.graph.nodes[root].shape, axes)
    placement = place(context, root, at, axes, lambda offset: same(offset, linearize(first, shape)))
    epilogue = _epilogue(context, root, matmul, axes)
    rows, columns = product(shape[:-1]), literal(shape[-1])
    assert columns is not None  # a multiple of eight, which fusion saw
    plan = contraction_plan(rows, columns, operands.a_major, operands.b_major, context.target)
    kernel = Kernel(
        name=context.name,
        pointers=context.pointers((r.buffer for r in epilogue.reads), ()),
        sizes=lane_sizes((epilogue,)),
        scalars=lane_scalars(context, (epilogue,)),
        body=ContractionBody(context.graph.nodes[matmul].dtype, context.dtype(placement.buffer), epilogue, plan),
        wide=context.wide,
    )
    depth = context.graph.nodes[context.graph.nodes[matmul].args[0]].shape[-1]
    launch = Launch(
        kernel=kernel,
        group=context.group,
        tensor_maps=(*_operand_maps(context, operands, plan), _result_map(context, placement.buffer, rows, columns)),
        grid=_grid(rows, columns, plan, context.target.processors),
        block=plan.threads,
        shared_bytes=plan.shared_bytes,
        traffic=context.traffic(),
        extra=(formula(rows), formula(columns), formula(depth)),
    )
    return [launch, *placement.copies]


def _epilogue(context: Context, root: int, matmul: int, axes: Axes) -> LaneFunction:
    """The epilogue, its row axes merged."""
    evaluator = Evaluator(context.graph, axes, context.stored, accumulator_of(context.graph, matmul, axes))
    shapes = context.group.domain.shape, context.graph.nodes[root].shape
    roots = tuple(evaluator.value(root, rearranged(lane_position(axes, lane), *shapes, axes)) for lane in range(LANES))
    for word in (*_TAKEN, *(s.name for s in axes.symbols)):
        context.names.take(word)
    expressions = leaves_of(evaluator.terms, roots).expressions()
    row_axes, moves = merge_axes(Axes(axes.symbols[:-1], axes.extents[:-1]), expressions, ROW)
    words: dict[Index, str] = {s: s.name for s in row_axes.symbols} | {LANES * PAIR: COLUMN}
    merged = Axes((*row_axes.symbols, PAIR), (*row_axes.extents, axes.extents[-1]))
    math = LaneMath(evaluator.terms, roots, merged, words, moves)
    return lane_function(context, math, f"{context.name}_epilogue", "product", fast=context.fast)


def _operand_maps(context: Context, operands: ProductOperands, plan: ContractionPlan) -> tuple[TensorMapSpec, TensorMapSpec]:
    """A stage brings whole tiles of an operand whose depth is contiguous, else squares."""
    square = (_TILE_K, _TILE_K)
    a_box = (plan.tile_m, _TILE_K) if plan.a_major == "k" else square
    b_box = (plan.tile_n, _TILE_K) if plan.b_major == "k" else square
    a, b = operands.a, operands.b
    return tensor_map(context.reads[a.base], a, a_box), tensor_map(context.reads[b.base], b, b_box)


def _result_map(context: Context, buffer: int, rows: Dim, columns: int) -> TensorMapSpec:
    """Results leave 64 rows of 128 bytes at a time."""
    shape = (rows, columns)
    view = StridedView(buffer, shape, contiguous_strides(shape), 0)
    return tensor_map(buffer, view, (64, 128 // context.dtype(buffer).itemsize), writable=True)


def _grid(rows: Dim, columns: int, plan: ContractionPlan, processors: int) -> Formula:
    """Blocks stay and stride over the tiles."""
    tiles = f"({ceil_div(rows, plan.tile_m)}) * {-(-columns // plan.tile_n)}"
    return Formula(f"min({tiles}, {processors * plan.blocks_per_sm})")
