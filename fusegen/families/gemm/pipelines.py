"""Matmul pipelines: the requirements of each on the machine and on operands.

A target lists its pipelines by preference (`Target.products`). `families.gemm.lower` holds the launch layout of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import StridedView, first_version, strided_view
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, Stride, literal, nominal, product, same, simplify_dim
from fusegen.target import Target

_LIBRARY = "library"  # the attribute of a matmul that is left to the library by choice
_STORED = "stored"  # the attribute of a matmul that computes its second operand on load
_APART = "apart"  # the attribute of a matmul whose heads another kernel reduces
_SCALED = "scaled"  # the attribute of a matmul whose rows are scaled by a deferred norm
_SUMMED = "summed"  # the attribute of a matmul whose epilogue sums the squares for a deferred norm
_ROWS = "rows"  # the attribute of a matmul that computes its first operand on load
_TERM_OF = "term_of"  # the attribute of a matmul that is a term of a sum: the last term
_PAIRS = "pairs"  # the attribute of a matmul of concatenated operands that a kernel reads where they are
_TMA_ALIGNMENT = 16  # bytes, for addresses and for strides of outer dims
_HEAVY = 1 << 33  # floating-point operations; a second call takes up to 25 µs, more than smaller matmuls save by padded rows


@dataclass(frozen=True)
class StoredWeight:
    """The storage of a second operand that a kernel of few rows computes on load.

    Attributes:
        units: the numbers of neighbouring elements of the depth that a thread can compute at once, the largest first.
        width: bytes per element of the widest read.
        bytes: bytes per element of all reads.
        values: the number of tensors that are read.
    """

    units: tuple[int, ...]
    width: float
    bytes: float
    values: int


@dataclass(frozen=True)
class MatmulOperands:
    """The operands of a matmul as matrices that are contiguous along the last dim.

    Attributes:
        a: (rows, depth), or (depth, rows) if the rows are contiguous.
        b: (columns, depth), or (depth, columns) if the columns are contiguous; or an operand that is computed on load.
        a_major, b_major: the contiguous index: ``k`` for depth, else ``m`` and ``n``.
        further: further pairs of operands in the same layout, whose products are added.
    """

    a: StridedView
    b: StridedView | StoredWeight
    a_major: str
    b_major: str
    further: tuple[tuple[StridedView, StridedView], ...] = ()

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths of several pairs, which are numbers; empty for one pair."""
        views = (self.a, *(a for a, _ in self.further)) if self.further else ()
        return tuple(literal(view.shape[-1 if self.a_major == "k" else 0]) or 0 for view in views)

    @property
    def layout(self) -> tuple[object, ...]:
        """The first operand and the layout of the second one, which are equal for all matmuls of a launch. Several pairs of
        operands make a launch of one matmul."""
        stored = (self.b.units, self.b.width) if isinstance(self.b, StoredWeight) else None
        return self.a, self.a_major, self.b_major, stored, (self.b, *self.further) if self.further else ()


@dataclass(frozen=True)
class MatmulMarks:
    """The matmuls that are computed in another way by choice.

    Attributes:
        library: left to the library, although a generated kernel could compute them.
        on_load: compute their second operand on load.
        apart: leave the reductions over their heads to another kernel.
        scaled: scale their rows by the norm of their first operand (`families.gemm.deferred`).
        rows: compute their first operand on load.
        sums: the terms of sums that are each computed as one matmul (`families.gemm.sums`).
    """

    library: frozenset[int] = frozenset()
    on_load: frozenset[int] = frozenset()
    apart: frozenset[int] = frozenset()
    scaled: frozenset[int] = frozenset()
    rows: frozenset[int] = frozenset()
    sums: frozenset[frozenset[int]] = frozenset()

    @property
    def joined(self) -> frozenset[int]:
        """The terms that are computed with the last one of their sum."""
        return frozenset(term for terms in self.sums for term in terms if term != max(terms))

    def marked(self, graph: Graph) -> Graph:
        """Returns the graph with these matmuls marked, except those that compute their second operand on load."""
        graph = _with_attribute(graph, _TERM_OF, {term: max(terms) for terms in self.sums for term in terms})
        for name, matmuls in ((_LIBRARY, self.library), (_APART, self.apart), (_SCALED, self.scaled), (_ROWS, self.rows)):
            graph = _with_attribute(graph, name, dict.fromkeys(matmuls, True))
        return graph


def compute_on_load(graph: Graph, weights: Mapping[int, StoredWeight]) -> Graph:
    """Marks matmuls that compute their second operand on load."""
    return _with_attribute(graph, _STORED, weights)


def _with_attribute(graph: Graph, name: str, values: Mapping[int, object]) -> Graph:
    nodes = list(graph.nodes)
    for matmul, value in values.items():
        nodes[matmul] = replace(nodes[matmul], attrs=(*nodes[matmul].attrs, (name, value)))
    return replace(graph, nodes=tuple(nodes))


def weight_on_load(graph: Graph, matmul: int) -> StoredWeight | None:
    """Returns the storage of a second operand that the matmul computes on load, or None."""
    weight = dict(graph.nodes[matmul].attrs).get(_STORED)
    return weight if isinstance(weight, StoredWeight) else None


def _is_marked(graph: Graph, matmul: int, name: str) -> bool:
    return dict(graph.nodes[matmul].attrs).get(name) is True


def is_left_to_library(graph: Graph, matmul: int) -> bool:
    """True if a matmul is marked for the library."""
    return _is_marked(graph, matmul, _LIBRARY)


def leaves_heads_apart(graph: Graph, matmul: int) -> bool:
    """True if a matmul is marked for another kernel to reduce its heads."""
    return _is_marked(graph, matmul, _APART)


def is_scaled(graph: Graph, matmul: int) -> bool:
    """True if a matmul is marked to scale its rows by a deferred norm."""
    return _is_marked(graph, matmul, _SCALED)


def is_summed(graph: Graph, matmul: int) -> bool:
    """True if a matmul is marked to sum the squares for a deferred norm."""
    return _is_marked(graph, matmul, _SUMMED)


def with_sums(graph: Graph, matmuls: Iterable[int]) -> Graph:
    """Marks matmuls whose epilogue sums the squares for a deferred norm."""
    return _with_attribute(graph, _SUMMED, dict.fromkeys(matmuls, True))


def computes_rows(graph: Graph, matmul: int) -> bool:
    """True if a matmul computes its first operand on load."""
    return _is_marked(graph, matmul, _ROWS)


def last_term(graph: Graph, matmul: int) -> int | None:
    """Returns the last term of the sum that a matmul is marked to be computed with; None if it is not marked."""
    term = dict(graph.nodes[matmul].attrs).get(_TERM_OF)
    return term if isinstance(term, int) else None


def with_pairs(matmul: Node, operands: tuple[int, int]) -> Node:
    """Returns a matmul of operands that are concatenated along the depth, in place of a term."""
    attrs = (*((name, value) for name, value in matmul.attrs if name != _TERM_OF), (_PAIRS, True))
    return replace(matmul, args=operands, attrs=attrs)


def has_pairs(graph: Graph, matmul: int) -> bool:
    """True if a matmul has several pairs of operands, whose products are added."""
    return _is_marked(graph, matmul, _PAIRS)


def operand_pairs(graph: Graph, matmul: int) -> tuple[tuple[int, int], ...]:
    """Returns the pairs of operands of a matmul."""
    a, b = graph.nodes[matmul].args
    return tuple(zip(graph.nodes[a].args, graph.nodes[b].args, strict=True)) if has_pairs(graph, matmul) else ((a, b),)


def computes_on_load(graph: Graph, matmul: int) -> bool:
    """True if a matmul computes one of its operands on load."""
    return weight_on_load(graph, matmul) is not None or computes_rows(graph, matmul)


def matmul_operands(graph: Graph, matmul: int, reads: Callable[[StridedView], bool]) -> MatmulOperands | None:
    """Returns the operands as matrices in memory, or None if `reads` accepts neither a matrix nor its transpose."""
    pairs = [_pair_operands(graph, pair, weight_on_load(graph, matmul), reads) for pair in operand_pairs(graph, matmul)]
    known = [pair for pair in pairs if pair is not None]
    if len(known) < len(pairs) or len({(pair.a_major, pair.b_major) for pair in known}) > 1:
        return None
    further = tuple((pair.a, pair.b) for pair in known[1:] if isinstance(pair.b, StridedView))
    return replace(known[0], further=further) if further else known[0]


def _pair_operands(
    graph: Graph, pair: tuple[int, int], weight: StoredWeight | None, reads: Callable[[StridedView], bool]
) -> MatmulOperands | None:
    left, right = (strided_view(graph, p) for p in pair)
    rows = _as_matrix(left)
    if rows is None or len(right.shape) != 2:
        return None
    a, b = _contiguous(rows, reads), _contiguous(_transposed(right), reads)
    if weight is not None and a == rows:
        return MatmulOperands(a, weight, "k", "k")
    if a is None or b is None:
        return None
    return MatmulOperands(a, b, "k" if a == rows else "m", "n" if b == right else "k")


def _contiguous(view: StridedView, reads: Callable[[StridedView], bool]) -> StridedView | None:
    return next((v for v in (view, _transposed(view)) if reads(v)), None)


def _transposed(view: StridedView) -> StridedView:
    return StridedView(view.base, view.shape[::-1], view.strides[::-1], view.offset)


def _as_matrix(view: StridedView) -> StridedView | None:
    """Merges the leading dims into one, if their strides allow it. The stride of a single row is 0."""
    if len(view.shape) < 2:
        return None
    dims = [d for d in range(len(view.shape) - 1) if not same(view.shape[d], 1)] or [len(view.shape) - 2]
    for outer, inner in itertools.pairwise(dims):
        if not same(view.strides[outer], simplify_dim(view.shape[inner] * view.strides[inner])):
            return None
    rows = simplify_dim(product(view.shape[d] for d in dims))
    stride = 0 if same(rows, 1) else view.strides[dims[-1]]
    return StridedView(view.base, (rows, view.shape[-1]), (stride, view.strides[-1]), view.offset)


def is_tma_view(graph: Graph, view: StridedView, itemsize: int) -> bool:
    """True if TMA can read a view: last dim contiguous, addresses and strides multiples of 16 bytes."""
    unit = same(view.strides[-1], 1) and literal(view.shape[-1]) is not None and _is_multiple(view.offset, itemsize)
    return unit and _is_aligned(graph, view.base) and all(_is_multiple(s, itemsize) for s in (view.shape[-1], *view.strides[:-1]))


def is_heavy(graph: Graph, matmul: int) -> bool:
    """True if a 16-bit matmul is so large that padded rows pay for a second call; symbolic sizes count as 1024."""
    a, b = graph.operands(matmul)
    work = 2 * nominal(product(graph.nodes[matmul].shape)) * nominal(a.shape[-1])
    return a.dtype.is_half and len(b.shape) == 2 and work >= _HEAVY


def rows_are_aligned(graph: Graph, view: StridedView) -> bool:
    """True if a 16-bit matrix is contiguous along one dim and its lines start at multiples of 16 bytes."""
    dims = [d for d in range(len(view.shape)) if not same(view.strides[d], 1)]
    is_aligned = _is_multiple(view.offset, 2) and _is_aligned(graph, view.base)
    return len(dims) < len(view.shape) and is_aligned and all(_is_multiple(view.strides[d], 2) for d in dims)


def _is_multiple(stride: Dim, itemsize: int) -> bool:
    """True if a stride's literal factor is a multiple of 16 bytes, or a `Stride` symbol with an aligned buffer is a factor."""
    factor = math.prod(int(f) for f in sympy.Mul.make_args(sympy.sympify(stride)) if f.is_Integer)
    return isinstance(stride, Stride) or factor * itemsize % _TMA_ALIGNMENT == 0


def _is_aligned(graph: Graph, base: int) -> bool:
    node = graph.nodes[first_version(graph, base)]
    return node.op is not Op.INPUT or graph.input_spec(str(node.attr("name"))).alignment >= _TMA_ALIGNMENT


_RESULTS = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8)


@dataclass(frozen=True)
class Pipeline:
    """A way to compute matmuls with epilogues.

    Attributes:
        name: the instruction that multiplies; `explain` prints it.
        requires: True for a machine that supports the pipeline.
        reads: True for a matrix, contiguous along the last dim, that the pipeline can load; gets the element size.
        operand: the property of an unsupported matrix, for rejection reasons.
        column_multiple: a divisor of the number of columns.
        widths: columns that an accumulator may hold, in descending order.
    """

    name: str
    requires: Callable[[Target], bool]
    reads: Callable[[Graph, StridedView, int], bool]
    operand: str
    column_multiple: int
    widths: tuple[int, ...]

    def operands(self, graph: Graph, matmul: int) -> MatmulOperands | None:
        itemsize = graph.nodes[matmul].dtype.itemsize
        return matmul_operands(graph, matmul, lambda view: self.reads(graph, view, itemsize))

    def rejection_reason(self, graph: Graph, matmul: int, root: int) -> str | None:
        """Returns the reason why the pipeline cannot compute a matmul that ends in ``root``; None if it can."""
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
            return "the number of columns is a run-time size"
        if columns % self.column_multiple:
            return f"the number of columns is not a multiple of {self.column_multiple}"
        if columns == 1:
            return "the result has a single column"
        return None if self.operands(graph, matmul) is not None else f"an operand is {self.operand}"

    def tile_of(self, head: int, *, is_full_row: bool) -> int:
        """Returns the columns that a tile must hold for a head. If a head spans all columns, the tile has a full width."""
        return min((width for width in self.widths if width >= head > 1), default=head) if is_full_row else head

    def tile_widths(self, head: int, products: int) -> tuple[int, ...]:
        """Returns the possible tile widths of `products` matmuls that share an accumulator. A tile holds whole heads."""
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
"""Warpgroups that multiply tiles loaded by TMA: NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions"."""

MMA_SYNC = Pipeline(
    name="mma.sync",
    requires=lambda target: target.warp > 0,
    reads=_is_unit,
    operand="contiguous along neither dim",
    column_multiple=1,
    widths=(128, 96, 64, 32),
)
"""Warps that multiply tiles loaded by asynchronous copies: NVIDIA, PTX ISA, "Warp level matrix instructions"."""

PIPELINES = (WGMMA, MMA_SYNC)


def pipeline_named(name: str) -> Pipeline:
    return next(pipeline for pipeline in PIPELINES if pipeline.name == name)


def pipelines_of(target: Target) -> tuple[Pipeline, ...]:
    """Returns the pipelines that the machine supports, the preferred one first."""
    return tuple(p for p in map(pipeline_named, target.products) if p.requires(target))


def supporting_pipeline(graph: Graph, matmul: int, root: int, target: Target) -> Pipeline | None:
    """Returns the first pipeline that can compute a matmul, or None."""
    return next((p for p in pipelines_of(target) if p.rejection_reason(graph, matmul, root) is None), None)


def rejection_reasons(graph: Graph, matmul: int, root: int, target: Target) -> str:
    """Returns the reasons why the preferred pipelines cannot compute a matmul, in order; empty if the first one can."""
    reasons: list[str] = []
    for pipeline in pipelines_of(target):
        reason = pipeline.rejection_reason(graph, matmul, root)
        if reason is None:
            break
        reasons.append(f"no {pipeline.name}: {reason}")
    return "; ".join(reasons)
