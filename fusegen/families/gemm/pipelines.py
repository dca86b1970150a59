"""Pipelines of products on tensor cores as values: what each asks of a machine and of operands.

A machine's target says which it prefers (`Target.products`). The layout of each is in `families.gemm.lower`, by its name;
what it emits goes by its plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import StridedView, owner, strided_view
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, Stride, literal, nominal, product, same, simplify_dim
from fusegen.target import Target

_LIBRARY = "library"  # the attribute of a product that the library computes by choice
_TMA_ALIGNMENT = 16  # bytes; of addresses and of strides of outer dims
_HEAVY = 1 << 33  # floating-point operations; a second call takes up to 25 µs, which smaller products don't save by padded rows


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


def leave_to_library(graph: Graph, products: Collection[int]) -> Graph:
    """The graph, in which some products say that the library computes them, whatever a kernel of ours could."""
    nodes = list(graph.nodes)
    for matmul in products:
        nodes[matmul] = replace(nodes[matmul], attrs=(*nodes[matmul].attrs, (_LIBRARY, True)))
    return replace(graph, nodes=tuple(nodes))


def is_left_to_library(graph: Graph, matmul: int) -> bool:
    """True if the library computes a product by choice."""
    return bool(dict(graph.nodes[matmul].attrs).get(_LIBRARY))


def product_operands(graph: Graph, matmul: int, reads: Callable[[StridedView], bool]) -> ProductOperands | None:
    """The operands as matrices in memory, or None when one cannot be read as such.

    Args:
        reads: whether a matrix can be read that is contiguous along its last dim.
    """
    left, right = (strided_view(graph, p) for p in graph.nodes[matmul].args)
    rows = _as_matrix(left)
    if rows is None or len(right.shape) != 2:
        return None
    a, b = _contiguous(rows, reads), _contiguous(_transposed(right), reads)
    if a is None or b is None:
        return None
    return ProductOperands(a, b, "k" if a == rows else "m", "n" if b == right else "k")


def _contiguous(view: StridedView, reads: Callable[[StridedView], bool]) -> StridedView | None:
    """A matrix or its transpose, whichever can be read."""
    return next((v for v in (view, _transposed(view)) if reads(v)), None)


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
    """True if the tensor memory accelerator can read a view: last dim contiguous, addresses and strides of 16 bytes."""
    unit = same(view.strides[-1], 1) and literal(view.shape[-1]) is not None and _is_multiple(view.offset, itemsize)
    return unit and _is_aligned(graph, view.base) and all(_is_multiple(s, itemsize) for s in (view.shape[-1], *view.strides[:-1]))


def is_heavy(graph: Graph, matmul: int) -> bool:
    """True if a product of 16-bit floats takes so long that padded rows, which need a second call, pay; symbolic sizes as 1024."""
    a, b = graph.operands(matmul)
    work = 2 * nominal(product(graph.nodes[matmul].shape)) * nominal(a.shape[-1])
    return a.dtype.is_half and len(b.shape) == 2 and work >= _HEAVY


def rows_are_aligned(graph: Graph, view: StridedView) -> bool:
    """True if a matrix of 16-bit elements is contiguous along one dim, and starts along the others at multiples of 16 bytes."""
    others = [d for d in range(len(view.shape)) if not same(view.strides[d], 1)]
    is_aligned = _is_multiple(view.offset, 2) and _is_aligned(graph, view.base)
    return len(others) < len(view.shape) and is_aligned and all(_is_multiple(view.strides[d], 2) for d in others)


def _is_multiple(stride: Dim, itemsize: int) -> bool:
    """True if a stride is of 16 bytes: by its literal factor; a symbol of its own by the buffer's alignment."""
    factor = math.prod(int(f) for f in sympy.Mul.make_args(sympy.sympify(stride)) if f.is_Integer)
    return isinstance(stride, Stride) or factor * itemsize % _TMA_ALIGNMENT == 0


def _is_aligned(graph: Graph, base: int) -> bool:
    node = graph.nodes[owner(graph, base)]
    return node.op is not Op.INPUT or graph.input_spec(str(node.attr("name"))).alignment >= _TMA_ALIGNMENT


_RESULTS = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8)


@dataclass(frozen=True)
class Pipeline:
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
        """A product's operands as matrices that the pipeline reads, or None when it cannot."""
        itemsize = graph.nodes[matmul].dtype.itemsize
        return product_operands(graph, matmul, lambda view: self.reads(graph, view, itemsize))

    def unserved(self, graph: Graph, matmul: int, root: int) -> str | None:
        """The reason why the pipeline cannot compute a matmul that ends in ``root``; None when it can."""
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


WGMMA = Pipeline(
    name="wgmma",
    requires=lambda target: target.wgmma,
    reads=is_tma_view,
    operand="contiguous along neither dim, or its address or strides are not multiples of 16 bytes",
    column_multiple=8,
    widths=(256, 192, 128, 64),
)
"""Warpgroups that multiply what the copy engine brings: NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions"."""

MMA_SYNC = Pipeline(
    name="mma.sync",
    requires=lambda target: target.warp > 0,
    reads=_is_unit,
    operand="contiguous along neither dim",
    column_multiple=1,
    widths=(128, 96, 64, 32),
)
"""Warps that multiply what threads copy asynchronously: NVIDIA, PTX ISA, "Warp level matrix instructions"."""

PIPELINES = (WGMMA, MMA_SYNC)


def pipeline_named(name: str) -> Pipeline:
    """The pipeline of a name."""
    return next(pipeline for pipeline in PIPELINES if pipeline.name == name)


def pipelines_of(target: Target) -> tuple[Pipeline, ...]:
    """The pipelines that products may have on a machine, the preferred one first."""
    return tuple(s for s in map(pipeline_named, target.products) if s.requires(target))


def serving(graph: Graph, matmul: int, root: int, target: Target) -> Pipeline | None:
    """The pipeline that computes a product, if any can."""
    return next((s for s in pipelines_of(target) if s.unserved(graph, matmul, root) is None), None)


def refusals(graph: Graph, matmul: int, root: int, target: Target) -> str:
    """The reasons why the pipelines before the serving one cannot compute it, in order; empty when the first one can."""
    found: list[str] = []
    for pipeline in pipelines_of(target):
        why = pipeline.unserved(graph, matmul, root)
        if why is None:
            break
        found.append(f"no {pipeline.name}: {why}")
    return "; ".join(found)
