"""How each skeleton of products is laid out: its plan, how operands reach it and results leave it, and how many blocks it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy

from fusegen.ir.formula import ceil_div, formula
from fusegen.ir.strided import StridedView, contiguous_strides
from fusegen.ir.symbolic import Dim
from fusegen.passes.fuse.contraction import ProductOperands
from fusegen.passes.fuse.skeletons import MMA_SYNC, WGMMA
from fusegen.program.call import TensorMapSpec
from fusegen.program.formula import Formula, minimum
from fusegen.schedule.access import divisor
from fusegen.schedule.bodies import PartResult, ProductPart
from fusegen.schedule.expected import Expected
from fusegen.schedule.heuristics.contraction import shape_of
from fusegen.schedule.heuristics.mma import mma_plan
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.maps import tensor_map
from fusegen.schedule.plan import ContractionPlan, MmaPlan

_LINE = 64  # elements of the depth in a line of 128 bytes
_WIDEST_COPY = 8  # elements


@dataclass(frozen=True)
class Products:
    """What is laid out.

    Attributes:
        context: of the kernel.
        parts: with their epilogues.
        operands: of each part, those of its products.
        rows: of all results.
    """

    context: Context
    parts: Sequence[ProductPart]
    operands: Sequence[Sequence[ProductOperands]]
    rows: Dim


@dataclass(frozen=True)
class Layout:
    """Of a launch, what depends on the skeleton.

    Attributes:
        maps: tensor maps of operands, and of results that leave by whole tiles.
        matrices: buffers of operands that are read by address.
        extra: sizes that come after those of the product.
        grid: number of blocks.
    """

    plan: ContractionPlan | MmaPlan
    maps: tuple[TensorMapSpec, ...]
    matrices: tuple[int, ...]
    extra: tuple[Formula, ...]
    grid: Formula


@dataclass(frozen=True)
class SkeletonLayout:
    """How a skeleton lays products out.

    Attributes:
        whole_tiles: whether a result that is a matrix leaves by a tensor map.
        lay_out: the rest.
    """

    whole_tiles: bool
    lay_out: Callable[[Products], Layout]


# Warpgroups: the copy engine brings tiles and takes results.


def _by_maps(products: Products) -> Layout:
    context = products.context
    plan = context.plans[context.group.anchors]
    grid = minimum(_tiles(products, plan), context.target.processors * plan.blocks_per_sm)  # blocks stay and stride over the tiles
    return Layout(plan, tuple(_maps(products, plan)), (), (), grid)


def _maps(products: Products, plan: ContractionPlan) -> list[TensorMapSpec]:
    """The first operand, and of each part the matrices that meet it and the results that leave by whole tiles.

    A stage brings whole tiles of an operand whose depth is contiguous, else squares.
    """
    reads, square = products.context.reads, (_LINE, _LINE)
    a_box = (plan.tile_m, _LINE) if plan.a_major == "k" else square
    b_box = (plan.tile_n, _LINE) if plan.b_major == "k" else square
    a = products.operands[0][0].a
    found = [tensor_map(reads[a.base], a, a_box)]
    for part, operands in zip(products.parts, products.operands, strict=True):
        found += [tensor_map(reads[o.b.base], o.b, b_box) for o in operands]
        found += [_result_map(r, products.rows, part.columns) for r in part.results if r.offset is None]
    return found


def _result_map(result: PartResult, rows: Dim, columns: int) -> TensorMapSpec:
    """Results leave 64 rows of 128 bytes at a time."""
    shape = (rows, columns)
    view = StridedView(result.buffer, shape, contiguous_strides(shape), 0)
    return tensor_map(result.buffer, view, (64, 128 // result.dtype.itemsize), writable=True)


# Warps: threads copy by address.


def _by_addresses(products: Products) -> Layout:
    context = products.context
    views = [products.operands[0][0].a, *(o.b for operands in products.operands for o in operands)]
    a_width, *b_widths = (_copied_at_once(context, view) for view in views)
    plan = mma_plan(shape_of(context.graph, context.group, Expected({})), a_width, min(b_widths), context.target)
    matrices = tuple(context.reads[view.base] for view in views)
    extra = tuple(formula(size) for view in views for size in (view.offset, view.strides[0]))
    return Layout(plan, (), matrices, extra, _tiles(products, plan))


def _copied_at_once(context: Context, view: StridedView) -> int:
    """Elements at multiples of which a matrix may be read all at once: a power of two."""
    buffer = context.reads[view.base]
    own = max(1, context.alignment(buffer) // context.dtype(buffer).itemsize)
    terms = [t for size in (view.offset, view.strides[0]) for t in sympy.Add.make_args(sympy.expand(size))]
    return math.gcd(_WIDEST_COPY, own, *(divisor(t, context.multiples, own) for t in terms))


def _tiles(products: Products, plan: ContractionPlan | MmaPlan) -> Formula:
    """How many tiles the results have."""
    return ceil_div(products.rows, plan.tile_m) * sum(-(-part.columns // plan.tile_n) for part in products.parts)


LAYOUTS = {
    WGMMA.name: SkeletonLayout(whole_tiles=True, lay_out=_by_maps),
    MMA_SYNC.name: SkeletonLayout(whole_tiles=False, lay_out=_by_addresses),
}
"""The layout of each skeleton."""
