"""Splits reductions with few results into two steps: rows, then the rows' results.

One block or cluster computes one result. With few results, most SMs idle, memory bandwidth is mostly unused, and each block adds
many numbers serially.
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
_SHORT, _LONGEST = 64, 4096  # elements per row
_LONGEST_NORMALIZED = 16384  # elements per row that a kernel reduces anyway, e.g. in a norm

FEW = 1 << 17
"""Elements that one block reduces as fast as two launches do."""

_FEW_OF_SEVERAL = 1 << 15
"""The same limit per result if there are several; above it, the estimated times decide."""


@dataclass(frozen=True)
class RowSplit:
    """The rows that a reduction's operand is split into.

    Attributes:
        shape: the operand's shape, with its last dims split.
        first: the first dim of a row.
        outer: the dims along which the rows' results are reduced.
    """

    shape: Shape
    first: int
    outer: tuple[int, ...]

    @property
    def row(self) -> tuple[int, ...]:
        return tuple(range(self.first, len(self.shape)))

    @property
    def extents(self) -> tuple[Dim, ...]:
        return tuple(extent for extent in self.shape[self.first :] if literal(extent) is None)

    @property
    def length(self) -> Dim:
        return product(self.shape[self.first :])


RowSplits: TypeAlias = tuple[tuple[int, RowSplit], ...]
"""Split reductions, by node."""


def row_splits(graph: Graph, sizes: Mapping[str, int], sms: int) -> RowSplits:
    """Returns the rows of each reduction that has fewer results than the GPU has SMs and combines many elements."""
    reductions = (position for position, node in graph if node.op in _REDUCTIONS)
    cuts = ((position, _RowChooser(graph, position, sizes, sms).cut()) for position in reductions)
    return tuple((position, cut) for position, cut in cuts if cut is not None)


def reduce_in_two_steps(graph: Graph, cuts: RowSplits) -> Graph:
    cuts_by_node = dict(cuts)

    def replaced(builder: GraphBuilder, indices: Sequence[int], position: int) -> int | None:
        if (cut := cuts_by_node.get(position)) is None:
            return None
        steps = _TwoStepReduction(graph, builder, indices, position, cut)
        return steps.shaped(steps.sum_of_squares() or steps.same_operation(), graph.nodes[position].shape).position

    return rebuilt(graph, replaced) if cuts else graph


@dataclass(frozen=True)
class _TwoStepReduction:
    graph: Graph
    builder: GraphBuilder
    indices: Sequence[int]
    position: int
    cut: RowSplit

    def same_operation(self) -> Value:
        node = self.graph.nodes[self.position]
        return self._rows(node.args[0]).reduce(node.op, self.cut.row).reduce(node.op, self.cut.outer)

    def sum_of_squares(self) -> Value | None:
        """Splits a sum of squares about the mean (Chan, Golub and LeVeque, 1979, equation 2.1): reads rows once, and nothing
        cancels."""
        deviation = deviations(self.graph, self.position)
        if deviation is None:
            return None
        rows, mean = self._rows(deviation.rows), self._value(deviation.mean)
        length = Value(self.builder, self.builder.size(self.cut.length), rows.location)
        means = rows.mean(self.cut.row)
        centered = rows - means
        shape = tuple(1 if dim in self.cut.outer else extent for dim, extent in enumerate(means.node.shape))
        apart = means - self.shaped(mean, shape)
        return ((centered * centered).reduce(Op.SUM, self.cut.row) + apart * apart * length).reduce(Op.SUM, self.cut.outer)

    @staticmethod
    def shaped(value: Value, shape: Shape) -> Value:
        return value if value.node.shape == shape else value.apply(Op.RESHAPE, shape=shape)

    def _rows(self, position: int) -> Value:
        return self.shaped(self._value(position), self.cut.shape)

    def _value(self, position: int) -> Value:
        return Value(self.builder, self.indices[position], self.graph.locations[self.position])


class _RowChooser:
    """Chooses the row length for a reduction's operand at given sizes."""

    def __init__(self, graph: Graph, position: int, sizes: Mapping[str, int], sms: int) -> None:
        self._graph, self._sizes = graph, sizes
        node = graph.nodes[position]
        self._operand, self._dims = node.args[0], cast(tuple[int, ...], node.attr("dims"))
        self._shape = graph.nodes[self._operand].shape
        last = len(self._shape)
        self._last = next((dim + 1 for dim in range(last - 1, -1, -1) if dim not in self._dims), 0)  # the rest is reduced
        self._elements = self._at(self._shape[dim] for dim in self._dims)
        self._results = self._at(node.shape)
        self._processors = sms

    def cut(self) -> RowSplit | None:
        """The best rows; None if a result is little work, or if there are enough results."""
        if self._elements <= (FEW if self._results == 1 else _FEW_OF_SEVERAL) or 1 < self._results >= self._processors:
            return None
        existing_rows = filter(self._is_of_several, self._existing_rows())
        return next(existing_rows, None) or min(filter(self._is_of_several, self._candidates()), key=self._rank, default=None)

    def _rank(self, cut: RowSplit) -> tuple[int, int]:
        """Prefers rows of a good length, then long rows if there are enough for all SMs, then short rows."""
        length = self._length(cut)
        if length <= _LONGEST:
            return (0 if length >= _SHORT else 2), -length
        rows = self._elements * self._results // length
        return (1 if rows >= self._processors else 3), length

    def _is_of_several(self, cut: RowSplit) -> bool:
        return 1 < self._length(cut) < self._elements

    def _length(self, cut: RowSplit) -> int:
        return self._at(cut.shape[cut.first :])

    def _at(self, dims: Iterable[Dim]) -> int:
        return formula(product(dims))(self._sizes)

    def _candidates(self) -> Iterator[RowSplit]:
        """Rows that are trailing factors of the shape, or a divisor of its last literal dims."""
        shape = (*self._shape[: self._last], *(factor for dim in self._shape[self._last :] for factor in _factors(dim)))
        yield from (self._cut(shape, first) for first in range(self._last, len(shape)))
        start = next((dim + 1 for dim in range(len(shape) - 1, self._last - 1, -1) if literal(shape[dim]) is None), self._last)
        total = prod(cast(tuple[int, ...], shape[start:]))
        row = next((divisor for divisor in range(min(total, _LONGEST), 0, -1) if total % divisor == 0), 1)
        yield self._cut((*shape[:start], total // row, row), start + 1)

    def _cut(self, shape: Shape, first: int) -> RowSplit:
        outer = (*(dim for dim in self._dims if dim < self._last), *range(self._last, len(shape)))
        return RowSplit(shape, first, outer)

    def _existing_rows(self) -> Iterator[RowSplit]:
        """Rows that the operand is already reduced along, e.g. in a norm, so that one kernel computes both."""
        for position in sorted(self._graph.ancestors[self._operand]):
            node = self._graph.nodes[position]
            if node.family is Family.REDUCTION and self._graph.nodes[node.args[0]].shape == self._shape:
                first = _first_of_row(node, self._shape)
                if first is not None and first >= self._last:
                    yield self._cut(self._shape, first)


def _first_of_row(node: Node, shape: Shape) -> int | None:
    """The first dim of a reduction along trailing dims; None for other dims or long rows."""
    dims = cast(tuple[int, ...], node.attr("dims"))
    length = literal(product(shape[d] for d in dims))
    is_last = dims == tuple(range(len(shape) - len(dims), len(shape)))
    return dims[0] if is_last and length is not None and 1 < length <= _LONGEST_NORMALIZED else None


def _factors(dim: Dim) -> tuple[Dim, ...]:
    factors = (dim,) if isinstance(dim, int) else tuple(map(simplify_dim, sympy.Mul.make_args(dim)))
    return factors if all(isinstance(factor, int) or factor.is_integer for factor in factors) else (dim,)


def reduced_lengths(graph: Graph) -> tuple[Dim, ...]:
    """Symbolic extents that reductions run along."""
    reduced = ((node, graph.nodes[node.args[0]].shape) for node in graph.nodes if node.family is Family.REDUCTION)
    extents = (shape[dim] for node, shape in reduced for dim in cast(tuple[int, ...], node.attr("dims")))
    return tuple(sorted({extent for extent in extents if literal(extent) is None}, key=str))
