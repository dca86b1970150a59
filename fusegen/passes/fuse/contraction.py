"""Matrix products: with an epilogue where tensor cores serve it, else a library call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, Shape
from fusegen.ir.index_map import Position
from fusegen.ir.ops import Family, Op
from fusegen.ir.strided import StridedView, strided_view
from fusegen.ir.symbolic import Axes, Dim, FloorDiv, Modulo, Stride, delinearize, linearize, literal, product, same, simplify_dim
from fusegen.passes.fuse.cone import Accepts, Cone, domain_axes, walk
from fusegen.passes.fuse.groups import Domain, Group, GroupKind, products_below
from fusegen.target import Target

LANES = 2
"""Neighbouring columns that a tensor core leaves in one thread: an epilogue may combine them."""

_COLUMN_MULTIPLE = 8  # the accumulator's fragments are eight columns wide
_TMA_ALIGNMENT = 16  # bytes; of addresses and of strides of outer dims


@dataclass(frozen=True)
class ProductOperands:
    """A product's operands as matrices in memory, contiguous along the last dim.

    Attributes:
        a: (rows, depth), or (depth, rows) where rows are contiguous.
        b: (columns, depth), or (depth, columns) where columns are.
        a_major, b_major: which of them is contiguous: ``k`` for depth, else ``m`` and ``n``.
    """

    a: StridedView
    b: StridedView
    a_major: str
    b_major: str


def library_group(graph: Graph, matmul: int, reason: str = "") -> Group:
    """A product by the library, of operands that lie in memory."""
    inputs = tuple(sorted({operand_base(graph, a) for a in graph.nodes[matmul].args}))
    return Group(GroupKind.LIBRARY, (matmul,), inputs, Domain(graph.nodes[matmul].shape), (matmul,), reason)


def operand_base(graph: Graph, position: int) -> int:
    """The node whose buffer a product reads: below the views where strides can say them."""
    return strided_view(graph, position).base


def epilogue_group(graph: Graph, root: int, target: Target, kept: Collection[int] = frozenset()) -> Group | None:
    """The group of a product and the pointwise work on its result, or None when tensor cores cannot serve it.

    Args:
        kept: values that lie in memory.
    """
    if graph.nodes[root].family not in (Family.POINTWISE, Family.VIEW) or not target.wgmma:
        return None
    for matmul in products_below(graph, root):
        domain = Domain(_epilogue_shape(graph, matmul, root))
        axes = domain_axes(domain)
        cone = Cone()
        at = rearranged(axes.symbols, domain.shape, graph.nodes[root].shape, axes)
        walk(graph, root, at, axes, _accepts_lanes_of(graph, matmul, axes), cone, kept)
        found = matmul in cone.anchors and matmul not in cone.inputs
        if found and is_computed_once(graph, matmul, root, cone.inputs) and unserved(graph, matmul, root) is None:
            operands = {operand_base(graph, a) for a in graph.nodes[matmul].args}
            inputs = tuple(sorted({*cone.inputs, *operands}))
            return Group(GroupKind.CONTRACTION, (root,), inputs, domain, (matmul,))
    return None


def _epilogue_shape(graph: Graph, matmul: int, root: int) -> Shape:
    """The shape over which an epilogue is computed: the result's own where its columns are those of the product."""
    product, result = graph.nodes[matmul].shape, graph.nodes[root].shape
    return result if result and same(product[-1], result[-1]) else product


def rearranged(index: Position, shape: Shape, other: Shape, axes: Axes) -> Position:
    """The index in another shape of as many elements, in the same order."""
    return index if shape == other else delinearize(linearize(index, shape), other, axes)


def is_computed_once(graph: Graph, matmul: int, root: int, inputs: Iterable[int]) -> bool:
    """Whether nobody but the root needs the product or what is made of it on the way: others would compute it again.

    Args:
        inputs: what the root reads from memory.
    """
    if matmul == root:
        return True
    between = {p for p in graph.ancestors[root] if p == matmul or matmul in graph.ancestors[p]}
    if between & set(inputs):
        return False
    return not any(p in graph.outputs or set(graph.users[p]) - between - {root} for p in between)


def _accepts_lanes_of(graph: Graph, matmul: int, axes: Axes) -> Accepts:
    return lambda position, at: position == matmul and _in_lanes(graph, position, at, axes)


def _in_lanes(graph: Graph, matmul: int, at: Position, axes: Axes) -> bool:
    """Whether a product is read at the epilogue's own row, and at a column of the same pair."""
    shape = graph.nodes[matmul].shape
    rows = same(shape[-1], axes.extents[-1]) and is_same_row(shape[:-1], at[:-1], axes.symbols[:-1], axes.extents[:-1])
    return rows and all(lane_of(at[-1], axes.symbols[-1], lane) is not None for lane in range(LANES))


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


def lane_of(index: object, column: sympy.Symbol, lane: int) -> int | None:
    """Which column of its pair an index names, for an even column plus ``lane``; None when it leaves the pair."""
    offset = sympy.expand(in_lane(index, column, lane) - column)
    return int(offset) if offset.is_Integer and 0 <= int(offset) < LANES else None


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


def unserved(graph: Graph, matmul: int, root: int) -> str | None:
    """Why the tensor-core skeleton cannot compute a product; None when it can."""
    a, b = (graph.nodes[p] for p in graph.nodes[matmul].args)
    if a.dtype not in (DType.BFLOAT16, DType.FLOAT16):
        return f"operands are {a.dtype}, not 16-bit floats"
    if graph.nodes[root].dtype not in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32):
        return f"the result is {graph.nodes[root].dtype}"
    if (literal(b.shape[-1]) or 1) % _COLUMN_MULTIPLE:
        return f"the number of columns is no multiple of {_COLUMN_MULTIPLE}"
    if len(b.shape) != 2:
        return "the second operand is batched"
    if product_operands(graph, matmul) is None:
        return "an operand is contiguous along neither dim, or its address or strides are not multiples of 16 bytes"
    return None


def product_operands(graph: Graph, matmul: int) -> ProductOperands | None:
    """The operands as the tensor memory accelerator reads them, or None when it cannot."""
    left, right = (strided_view(graph, p) for p in graph.nodes[matmul].args)
    itemsize = graph.nodes[matmul].dtype.itemsize
    rows = _as_matrix(left)
    if rows is None or len(right.shape) != 2:
        return None
    a, b = _contiguous(graph, rows, itemsize), _contiguous(graph, _transposed(right), itemsize)
    if a is None or b is None:
        return None
    return ProductOperands(a, b, "k" if a == rows else "m", "n" if b == right else "k")


def _contiguous(graph: Graph, view: StridedView, itemsize: int) -> StridedView | None:
    """A matrix or its transpose, whichever the tensor memory accelerator can read."""
    return next((v for v in (view, _transposed(view)) if is_tma_view(graph, v, itemsize)), None)


def _transposed(view: StridedView) -> StridedView:
    return StridedView(view.base, view.shape[::-1], view.strides[::-1], view.offset)


def _as_matrix(view: StridedView) -> StridedView | None:
    """Leading dims as one, where their strides allow it."""
    if len(view.shape) < 2:
        return None
    dims = [d for d in range(len(view.shape) - 1) if not same(view.shape[d], 1)] or [len(view.shape) - 2]
    for outer, inner in itertools.pairwise(dims):
        if not same(view.strides[outer], simplify_dim(view.shape[inner] * view.strides[inner])):
            return None
    rows = simplify_dim(product(view.shape[d] for d in dims))
    return StridedView(view.base, (rows, view.shape[-1]), (view.strides[dims[-1]], view.strides[-1]), view.offset)


def is_tma_view(graph: Graph, view: StridedView, itemsize: int) -> bool:
    """Whether the tensor memory accelerator can read a view: last dim contiguous, addresses and strides of 16 bytes."""
    unit = same(view.strides[-1], 1) and literal(view.shape[-1]) is not None and _is_multiple(view.offset, itemsize)
    return unit and _is_aligned(graph, view.base) and all(_is_multiple(s, itemsize) for s in (view.shape[-1], *view.strides[:-1]))


def _is_multiple(stride: Dim, itemsize: int) -> bool:
    """Whether a stride is of 16 bytes: by its literal factor; a symbol of its own by the buffer's alignment."""
    factor = math.prod(int(f) for f in sympy.Mul.make_args(sympy.sympify(stride)) if f.is_Integer)
    return isinstance(stride, Stride) or factor * itemsize % _TMA_ALIGNMENT == 0


def _is_aligned(graph: Graph, base: int) -> bool:
    node = graph.nodes[base]
    return node.op is not Op.INPUT or graph.input_spec(str(node.attr("name"))).alignment >= _TMA_ALIGNMENT
