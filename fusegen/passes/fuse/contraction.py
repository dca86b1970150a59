"""Matrix products: with an epilogue where tensor cores serve it, else a library call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position
from fusegen.ir.ops import Family, Op
from fusegen.ir.strided import StridedView, buffer_strides, strided_view
from fusegen.ir.symbolic import Axes, Dim, FloorDiv, Modulo, Stride, literal, product, same, simplify_dim
from fusegen.passes.fuse.cone import Accepts, Cone, domain_axes, walk
from fusegen.passes.fuse.groups import Domain, Group, GroupKind
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
    """The node whose buffer a product reads: below the views where strides can say them, else the view itself."""
    view = _memory_view(graph, position)
    return position if view is None else view.base


def operand_view(graph: Graph, position: int) -> StridedView:
    """How a product reads an operand's buffer."""
    view = _memory_view(graph, position)
    return view or StridedView(position, graph.nodes[position].shape, buffer_strides(graph, position), 0)


def _memory_view(graph: Graph, position: int) -> StridedView | None:
    view = strided_view(graph, position)
    if view is None or graph.nodes[view.base].op in (Op.CONSTANT, Op.SCALAR, Op.IOTA, Op.SIZE):
        return None
    return view


def epilogue_group(graph: Graph, root: int, target: Target) -> Group | None:
    """The group of a product and the pointwise work on its result, or None when tensor cores cannot serve it."""
    if graph.nodes[root].family not in (Family.POINTWISE, Family.VIEW) or not target.wgmma:
        return None
    domain = Domain(graph.nodes[root].shape)
    axes = domain_axes(domain)
    for matmul in products_below(graph, root):
        cone = Cone()
        walk(graph, root, axes.symbols, axes, _accepts_lanes_of(graph, matmul, axes), cone)
        found = matmul in cone.anchors and matmul not in cone.inputs
        if found and is_computed_once(graph, matmul, root, cone.inputs) and unserved(graph, matmul, root) is None:
            operands = {operand_base(graph, a) for a in graph.nodes[matmul].args}
            inputs = tuple(sorted({*cone.inputs, *operands}))
            return Group(GroupKind.CONTRACTION, (root,), inputs, domain, (matmul,))
    return None


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


def products_below(graph: Graph, root: int) -> list[int]:
    """Products that the root reaches through pointwise nodes and views, the latest first."""
    found: set[int] = set()
    stack = list(graph.nodes[root].args)
    seen: set[int] = set()
    while stack:
        position = stack.pop()
        if position in seen:
            continue
        seen.add(position)
        node = graph.nodes[position]
        if node.family is Family.CONTRACTION:
            found.add(position)
        elif node.family in (Family.POINTWISE, Family.VIEW):
            stack += node.args
    return sorted(found, reverse=True)


def _in_lanes(graph: Graph, matmul: int, at: Position, axes: Axes) -> bool:
    """Whether a product is read at the epilogue's own row, and at a column of the same pair."""
    if not all(map(same, graph.nodes[matmul].shape, axes.extents)) or len(at) != len(axes.symbols):
        return False
    rows_match = all(i == (0 if same(e, 1) else s) for i, s, e in zip(at[:-1], axes.symbols[:-1], axes.extents[:-1], strict=True))
    return rows_match and all(lane_of(at[-1], axes.symbols[-1], lane) is not None for lane in range(LANES))


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
    left, right = (operand_view(graph, p) for p in graph.nodes[matmul].args)
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
