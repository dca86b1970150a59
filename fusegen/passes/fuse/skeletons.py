"""Skeletons of products on tensor cores as values: what each asks of a machine and of operands.

A machine's target says which it prefers (`Target.products`). The layout of each is in `schedule.lower.contraction`, by its name;
what it emits goes by its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, Shape
from fusegen.ir.index_map import Position, StridedView
from fusegen.ir.ops import Family
from fusegen.ir.reductions import REDUCTIONS
from fusegen.ir.symbolic import Axes, FloorDiv, Modulo, linearize, literal, product, same, simplify_dim
from fusegen.passes.fuse.contraction import ProductOperands, is_left_to_library, is_tma_view, product_operands
from fusegen.target import Backend, Target

# Rows and pairs of columns: where an index lies as an accumulator holds it.


LANES = 2
"""Neighbouring columns that a tensor core leaves in one thread: an epilogue may combine them."""

OCTET = 8
"""Columns of an accumulator's fragment: those of one thread lie so many apart, in pairs."""

WIDEST = 256
"""Columns of the widest accumulator."""


def is_of_heads(graph: Graph, position: int) -> bool:
    """Whether a node is a reduction along a last dim that an accumulator may hold, of whole octets: of heads, or of narrow rows."""
    node = graph.nodes[position]
    if node.family is not Family.REDUCTION or len(REDUCTIONS[node.op].components) > 1:
        return False
    shape = graph.nodes[node.args[0]].shape
    extent = literal(shape[-1])
    fits = extent is not None and 0 < extent <= WIDEST and extent % OCTET == 0
    return fits and node.attr("dims") == (len(shape) - 1,) and node.dtype.compute is DType.FLOAT32


def is_same_row(shape: Shape, at: Position, symbols: Sequence[sympy.Symbol], extents: Shape) -> bool:
    """Whether a row of a product is the one that an epilogue computes, though its dims may be arranged in another way.

    Args:
        shape: the dims that number the product's rows.
        at: the row.
        symbols, extents: of the epilogue's rows.
    """
    single = {s: 0 for s, e in zip(symbols, extents, strict=True) if same(e, 1)}
    rows = [sympy.sympify(row).subs(single) for row in (linearize(at, shape), linearize(symbols, extents))]
    return same(product(shape), product(extents)) and same(*rows)


def in_lane(index: object, column: sympy.Symbol, lane: int) -> sympy.Expr:
    """An index at column + lane, where column is known to be even."""
    half = sympy.Symbol(f"{column.name}_pair", integer=True, nonnegative=True)
    moved = sympy.sympify(index).subs(column, LANES * half + lane)
    moved = moved.replace(FloorDiv, _halved).replace(Modulo, _remainder)
    return sympy.expand(moved.subs(half, column / LANES))


def _halved(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    quotient = simplify_dim(Axes((), ()).floor_div(sympy.expand(a), int(b))) if b == LANES else FloorDiv(a, b)
    return sympy.sympify(quotient)


def _remainder(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return sympy.sympify(Axes((), ()).modulo(sympy.expand(a), int(b)) if b == LANES else Modulo(a, b))


_RESULTS = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8)


@dataclass(frozen=True)
class Skeleton:
    """A way to compute products with epilogues.

    Attributes:
        name: of the instruction that multiplies, which `explain` calls it by.
        requires: whether a machine has what it takes.
        reads: whether it can bring a matrix of some element size, contiguous along the last dim, from memory.
        operand: what such a matrix must be, for a refusal.
        column_multiple: what divides the number of columns.
        widths: columns that an accumulator may hold, the most first.
    """

    name: str
    requires: Callable[[Target], bool]
    reads: Callable[[Graph, StridedView, int], bool]
    operand: str
    column_multiple: int
    widths: tuple[int, ...]

    def operands(self, graph: Graph, matmul: int) -> ProductOperands | None:
        """A product's operands as matrices that the skeleton reads, or None when it cannot."""
        itemsize = graph.nodes[matmul].dtype.itemsize
        return product_operands(graph, matmul, lambda view: self.reads(graph, view, itemsize))

    def unserved(self, graph: Graph, matmul: int, root: int) -> str | None:
        """Why the skeleton cannot compute a product that ends in ``root``; None when it can."""
        if is_left_to_library(graph, matmul):
            return "the library is expected to be faster"
        a, b = (graph.nodes[p] for p in graph.nodes[matmul].args)
        if a.dtype not in (DType.BFLOAT16, DType.FLOAT16):
            return f"operands are {a.dtype}, not 16-bit floats"
        if graph.nodes[root].dtype not in _RESULTS:
            return f"the result is {graph.nodes[root].dtype}"
        if len(b.shape) != 2:
            return "the second operand is batched"
        columns = literal(b.shape[-1])
        if columns is None:
            return "the number of columns is known in a call only"
        if columns % self.column_multiple:
            return f"the number of columns is no multiple of {self.column_multiple}"
        if columns == 1:
            return "the result has a single column"
        return None if self.operands(graph, matmul) is not None else f"an operand is {self.operand}"

    def tile_of(self, head: int, *, whole: bool) -> int:
        """Columns that one accumulator must hold for a head: all those of a tile, where the head is all columns that there are."""
        return min((width for width in self.widths if width >= head > 1), default=head) if whole else head

    def tile_widths(self, head: int, products: int) -> tuple[int, ...]:
        """Columns of each product that an accumulator may hold.

        Args:
            head: columns that must lie in one.
            products: that share it.
        """
        return tuple(w for w in self.widths if w % head == 0 and w * products <= max(self.widths))


def _is_unit(_graph: Graph, view: StridedView, _itemsize: int) -> bool:
    return same(view.strides[-1], 1)


WGMMA = Skeleton(
    name="wgmma",
    requires=lambda target: target.wgmma,
    reads=is_tma_view,
    operand="contiguous along neither dim, or its address or strides are not multiples of 16 bytes",
    column_multiple=8,
    widths=(256, 192, 128, 64),
)
"""Warpgroups that multiply what the copy engine brings: NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions"."""

MMA_SYNC = Skeleton(
    name="mma.sync",
    requires=lambda target: target.backend is Backend.CUDA,
    reads=_is_unit,
    operand="contiguous along neither dim",
    column_multiple=1,
    widths=(128, 96, 64, 32),
)
"""Warps that multiply what threads copy asynchronously: NVIDIA, PTX ISA, "Warp level matrix instructions"."""

SKELETONS = (WGMMA, MMA_SYNC)


def skeleton_named(name: str) -> Skeleton:
    """The skeleton of a name."""
    return next(skeleton for skeleton in SKELETONS if skeleton.name == name)


def skeletons_of(target: Target) -> tuple[Skeleton, ...]:
    """The skeletons that products may have on a machine, the preferred one first."""
    return tuple(s for s in map(skeleton_named, target.products) if s.requires(target))


def serving(graph: Graph, matmul: int, root: int, target: Target) -> Skeleton | None:
    """The skeleton that computes a product, if any can."""
    return next((s for s in skeletons_of(target) if s.unserved(graph, matmul, root) is None), None)


def refusals(graph: Graph, matmul: int, root: int, target: Target) -> str:
    """Why none of the skeletons that come before the serving one can, one after the other; empty when the first one can."""
    found: list[str] = []
    for skeleton in skeletons_of(target):
        why = skeleton.unserved(graph, matmul, root)
        if why is None:
            break
        found.append(f"no {skeleton.name}: {why}")
    return "; ".join(found)
