"""Reductions to few results: row by row, and then of the rows' results.

One result is the work of one block of threads, or of one cluster. Few of them leave most of a GPU idle: it reads at a small part of
its memory's speed, and each block adds many numbers one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias, cast

import sympy

from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape, literal, product, simplify_dim
from fusegen.passes.algebra import Value
from fusegen.passes.moments import deviations
from fusegen.passes.rewrite import rebuilt

_REDUCTIONS = (Op.SUM, Op.PROD, Op.AMAX, Op.AMIN)
_SHORT, _LONGEST = 64, 4096  # elements of a row
_LONGEST_NORMALIZED = 16384  # of one whose kernel reduces it anyway

FEW = 1 << 17
"""Elements that one block reduces as fast as two launches do."""

_FEW_OF_SEVERAL = 1 << 15
"""The same for each of several results; of more, the expected times decide."""


@dataclass(frozen=True)
class Cut:
    """The rows of a reduction's operand.

    Attributes:
        shape: the operand's, with its last dims in parts.
        first: the dim of it from which on the dims are a row.
        outer: the dims along which rows' results are reduced.
    """

    shape: Shape
    first: int
    outer: tuple[int, ...]

    @property
    def row(self) -> tuple[int, ...]:
        """The dims of a row."""
        return tuple(range(self.first, len(self.shape)))

    @property
    def extents(self) -> tuple[Dim, ...]:
        """The extents of a row's dims that are known at the call only."""
        return tuple(extent for extent in self.shape[self.first :] if literal(extent) is None)

    @property
    def length(self) -> Dim:
        """The elements of a row."""
        return product(self.shape[self.first :])


Cuts: TypeAlias = tuple[tuple[int, Cut], ...]
"""Reductions, by their positions, with their rows."""


def cuts_of(graph: Graph, sizes: Mapping[str, int], processors: int) -> Cuts:
    """The reductions whose results are fewer than a machine's multiprocessors and combine many elements, with their rows.

    Args:
        sizes: values of all sizes.
        processors: multiprocessors of the machine.
    """
    reductions = (position for position, node in graph if node.op in _REDUCTIONS)
    found = ((position, _Cutting(graph, position, sizes, processors).cut()) for position in reductions)
    return tuple((position, cut) for position, cut in found if cut is not None)


def by_rows(graph: Graph, cuts: Cuts) -> Graph:
    """The graph in which some reductions go row by row first."""

    chosen = dict(cuts)

    def replaced(builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        if (cut := chosen.get(position)) is None:
            return None
        made = _InTwoSteps(graph, builder, moved, position, cut)
        return made.shaped(made.spread() or made.alike(), graph.nodes[position].shape).position

    return rebuilt(graph, replaced) if cuts else graph


@dataclass(frozen=True)
class _InTwoSteps:
    """The reduction of rows, and of their results, in a graph in the making."""

    graph: Graph
    builder: GraphBuilder
    moved: Sequence[int]
    position: int
    cut: Cut

    def alike(self) -> Value:
        """Both by the same operation."""
        node = self.graph.nodes[self.position]
        return self._rows(node.args[0]).reduce(node.op, self.cut.row).reduce(node.op, self.cut.outer)

    def spread(self) -> Value | None:
        """A sum of squares about the mean, of those about rows' means (Chan, Golub and LeVeque, 1979, equation 2.1): rows are read
        once, and nothing cancels. None of other reductions."""
        found = deviations(self.graph, self.position)
        if found is None:
            return None
        rows, mean = self._rows(found.rows), self._value(found.mean)
        length = Value(self.builder, self.builder.size(self.cut.length), rows.location)
        means = rows.mean(self.cut.row)
        centered = rows - means
        kept = tuple(1 if dim in self.cut.outer else extent for dim, extent in enumerate(means.node.shape))
        apart = means - self.shaped(mean, kept)
        return ((centered * centered).reduce(Op.SUM, self.cut.row) + apart * apart * length).reduce(Op.SUM, self.cut.outer)

    @staticmethod
    def shaped(value: Value, shape: Shape) -> Value:
        """A value in a shape of as many elements."""
        return value if value.node.shape == shape else value.apply(Op.RESHAPE, shape=shape)

    def _rows(self, position: int) -> Value:
        return self.shaped(self._value(position), self.cut.shape)

    def _value(self, position: int) -> Value:
        return Value(self.builder, self.moved[position], self.graph.locations[self.position])


class _Cutting:
    """Rows of a reduction's operand, as long as they should be at some sizes."""

    def __init__(self, graph: Graph, position: int, sizes: Mapping[str, int], processors: int) -> None:
        self._graph, self._sizes = graph, sizes
        node = graph.nodes[position]
        self._operand, self._dims = node.args[0], cast(tuple[int, ...], node.attr("dims"))
        self._shape = graph.nodes[self._operand].shape
        last = len(self._shape)
        self._last = next((dim + 1 for dim in range(last - 1, -1, -1) if dim not in self._dims), 0)  # dims from here on are reduced
        self._elements = self._at(self._shape[dim] for dim in self._dims)
        self._results = self._at(node.shape)
        self._processors = processors

    def cut(self) -> Cut | None:
        """The rows; None where a result is little work, and where there are results enough."""
        if self._elements <= (FEW if self._results == 1 else _FEW_OF_SEVERAL) or 1 < self._results >= self._processors:
            return None
        own = filter(self._is_of_several, self._own_rows())
        return next(own, None) or min(filter(self._is_of_several, self._candidates()), key=self._rank, default=None)

    def _rank(self, cut: Cut) -> tuple[int, int]:
        """Rows of a good length come before long ones that are enough blocks, and these before short ones."""
        length = self._length(cut)
        if length <= _LONGEST:
            return (0 if length >= _SHORT else 2), -length
        rows = self._elements * self._results // length
        return (1 if rows >= self._processors else 3), length

    def _is_of_several(self, cut: Cut) -> bool:
        """True if a result is made of several rows."""
        return 1 < self._length(cut) < self._elements

    def _length(self, cut: Cut) -> int:
        return self._at(cut.shape[cut.first :])

    def _at(self, dims: Iterable[Dim]) -> int:
        return formula(product(dims))(self._sizes)

    def _candidates(self) -> Iterator[Cut]:
        """Rows that are some of the last factors of the shape, or a part of its last literal ones."""
        shape = (*self._shape[: self._last], *(factor for dim in self._shape[self._last :] for factor in _factors(dim)))
        yield from (self._cut(shape, first) for first in range(self._last, len(shape)))
        known = next((dim + 1 for dim in range(len(shape) - 1, self._last - 1, -1) if literal(shape[dim]) is None), self._last)
        total = prod(cast(tuple[int, ...], shape[known:]))
        row = next((divisor for divisor in range(min(total, _LONGEST), 0, -1) if total % divisor == 0), 1)
        yield self._cut((*shape[:known], total // row, row), known + 1)

    def _cut(self, shape: Shape, first: int) -> Cut:
        outer = (*(dim for dim in self._dims if dim < self._last), *range(self._last, len(shape)))
        return Cut(shape, first, outer)

    def _own_rows(self) -> Iterator[Cut]:
        """Rows that the operand is reduced along on its way, as in a norm, so that one kernel reduces them for both."""
        for position in sorted(self._graph.ancestors[self._operand]):
            node = self._graph.nodes[position]
            if node.family is Family.REDUCTION and self._graph.nodes[node.args[0]].shape == self._shape:
                first = _first_of_row(node, self._shape)
                if first is not None and first >= self._last:
                    yield self._cut(self._shape, first)


def _first_of_row(node: Node, shape: Shape) -> int | None:
    """The first of the last dims that a reduction is along; None where it is along others, or of too many elements."""
    dims = cast(tuple[int, ...], node.attr("dims"))
    length = literal(product(shape[d] for d in dims))
    is_last = dims == tuple(range(len(shape) - len(dims), len(shape)))
    return dims[0] if is_last and length is not None and 1 < length <= _LONGEST_NORMALIZED else None


def _factors(dim: Dim) -> tuple[Dim, ...]:
    """A size in its factors."""
    factors = (dim,) if isinstance(dim, int) else tuple(map(simplify_dim, sympy.Mul.make_args(dim)))
    return factors if all(isinstance(factor, int) or factor.is_integer for factor in factors) else (dim,)
