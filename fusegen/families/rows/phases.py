"""Splits the terms of a row kernel into phases that end in reductions, decides which values are kept, and names them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import sympy

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds
from fusegen.ir.ops import NOUNS, Op
from fusegen.ir.reductions import TRUTH
from fusegen.ir.symbolic import Index, same
from fusegen.schedule.terms import BufferRead, FusedOp, Leaf, Term, Terms

_SIMPLE = (Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.ABS, Op.MAXIMUM, Op.MINIMUM, FusedOp.MULTIPLY_ADD)
_CHEAP = 3
"""Most simple operations for which a value is recomputed instead of held."""


class HeldValues(Enum):
    """Selects the element values that stay in registers from phase to phase."""

    ALL = "all"
    ROW = "row"  # data of the row; values shared by all rows are read again
    NOTHING = "nothing"


@dataclass(frozen=True)
class Root:
    """A value that some phase must produce.

    Attributes:
        kind: ``reduce``, ``order``, ``column``, ``write``, ``segment_write`` or ``row_write``.
        key: the node of a sort, the first node of a reduction's state, or the number of a store.
        terms: one per component of the reduction's state, or the stored value.
        last: whether it must be produced in the last phase, since it overwrites an input.
    """

    kind: str
    key: int
    terms: tuple[int, ...]
    last: bool = False


@dataclass
class PhaseTerms:
    """The terms of one phase.

    Attributes:
        roots: values that it produces.
        segments: segment reductions that its element math uses, in dependency order.
        segment_terms: terms computed once per segment from segment reductions.
        row_terms: terms of the row computed at its start.
        reads: element reads loaded in it.
        earlier: element terms from an earlier phase.
        held: element terms computed or loaded here and used later.
        row_earlier: terms of the row that its element math uses.
    """

    roots: list[Root] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    segment_terms: list[int] = field(default_factory=list)
    row_terms: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    row_earlier: list[int] = field(default_factory=list)


class PhaseSplitter:
    """Assigns terms to phases.

    Args:
        terms: the kernel's terms.
        row_axes: symbols that number the rows.
        column_axes: symbols along which a row runs.
        statistics: maps each reduction's node to the terms that it reduces, one per component.
        segments: maps each node reduced over segments to the first node of its state. Its result differs along the row, so each
            phase that uses it computes it.
        held_values: element values that live across phases; others are recomputed in each phase.
    """

    def __init__(
        self,
        terms: Terms,
        row_axes: Collection[sympy.Symbol],
        column_axes: Collection[sympy.Symbol],
        statistics: Mapping[int, tuple[int, ...]],
        segments: Mapping[int, int],
        held_values: HeldValues,
    ) -> None:
        self.terms = terms
        self.row_axes, self.column_axes = frozenset(row_axes), frozenset(column_axes)
        self.statistics, self.segments = statistics, segments
        self.held_values = held_values
        self._depths: list[int] = []
        self._elements: list[bool] = []
        self._varying: list[bool] = []
        self._costs: list[int] = []
        for term in terms.items:  # operands come before their users
            self._depths.append(self._depth(term))
            self._varying.append(self._varies(term) or any(self._varying[a] for a in term.args))
            of_segment = self._is_of_segments(term) or any(self._elements[a] for a in term.args)
            self._elements.append(self._varying[-1] or of_segment)
            self._costs.append(self._cost(term))

    def split(self, roots: Sequence[Root]) -> list[PhaseTerms]:
        """Returns the phases in order. Each root is produced in the first phase that its operands allow."""
        count = 1 + max((self.depth(*r.terms) for r in roots), default=0)
        phases = [PhaseTerms() for _ in range(count)]
        for root in roots:
            phases[-1 if root.last else self.depth(*root.terms)].roots.append(root)
        first: dict[int, int] = {}
        for number, phase in enumerate(phases):
            for root in phase.roots:
                self._add(root.terms, number, phases, first)
                if root.kind == "row_write" and self.terms.items[root.terms[0]].op is Leaf.CONSTANT:
                    phase.row_terms.append(root.terms[0])  # gives the constant a name
        for phase in phases:
            for name in ("segments", "segment_terms", "row_terms", "reads", "earlier", "held", "row_earlier"):
                setattr(phase, name, sorted(set(getattr(phase, name))))
        return phases

    def depth(self, *positions: int) -> int:
        return max(self._depths[p] for p in positions)

    def _depth(self, term: Term) -> int:
        if term.op in (Leaf.STATISTIC, Leaf.ORDERED):
            return self.depth(*self.statistics[_node(term)]) + (_node(term) not in self.segments)
        return max((self._depths[a] for a in term.args), default=0)

    def is_element(self, position: int) -> bool:
        return self._elements[position]

    def _is_of_segments(self, term: Term) -> bool:
        return term.op is Leaf.STATISTIC and _node(term) in self.segments

    def _computed_by_segment(self, positions: Sequence[int]) -> list[int]:
        """Returns the terms that are computed from values of a segment alone."""
        items = self.terms.items
        return [p for p in positions if self._elements[p] and not self._varying[p] and not isinstance(items[p].op, Leaf)]

    def _varies(self, term: Term) -> bool:
        if isinstance(term.payload, BufferRead):
            indices = [term.payload.offset, *(b.index for b in term.payload.conditions)]
        elif isinstance(term.payload, Bounds):
            indices = [term.payload.index]
        elif term.op is Leaf.COORDINATE:
            indices = [term.payload]
        else:
            return term.op is Leaf.ORDERED
        return _mention(indices, self.column_axes)

    def _add(self, positions: Sequence[int], number: int, phases: list[PhaseTerms], first: dict[int, int]) -> None:
        phases[number].segment_terms += self._computed_by_segment(positions)
        stack = list(positions)
        while stack:
            position = stack.pop()
            if self.is_element(position):
                stack += self._add_element(position, number, phases, first)
            else:
                self._add_row(position, number, phases)

    def _add_element(self, position: int, number: int, phases: list[PhaseTerms], first: dict[int, int]) -> tuple[int, ...]:
        phase, known, term = phases[number], first.get(position), self.terms.items[position]
        if known == number:
            return ()
        if term.op is Leaf.ORDERED:  # the previous phase leaves it in registers
            first[position] = number
            phases[self.depth(position) - 1].held.append(position)
            phase.earlier.append(position)
            return ()
        if known is not None and self._is_kept(position):
            phases[known].held.append(position)
            phase.earlier.append(position)
            return ()
        if known is None or self.held_values is HeldValues.NOTHING:
            first[position] = number
        if isinstance(term.payload, BufferRead):
            phase.reads.append(position)
        if term.op is Leaf.STATISTIC:
            phase.segments.append(self.segments[_node(term)])
            phase.segment_terms += self._computed_by_segment(self.statistics[_node(term)])
            return self.statistics[_node(term)]
        if self._varying[position]:
            phase.segment_terms += self._computed_by_segment(term.args)
        return term.args

    def _is_kept(self, position: int) -> bool:
        """True if a value is worth a register: coordinates and a few additions are cheaper to recompute."""
        term = self.terms.items[position]
        if (
            self.held_values is HeldValues.NOTHING
            or term.op in (Leaf.COORDINATE, Leaf.CONDITION, Leaf.ORDERED)
            or not self._varying[position]
        ):
            return False
        if self.held_values is HeldValues.ROW:
            return (
                isinstance(term.payload, BufferRead) and not term.payload.drawn and _mention([term.payload.offset], self.row_axes)
            )
        return isinstance(term.payload, BufferRead) or self._costs[position] > _CHEAP

    def _cost(self, term: Term) -> int:
        """Returns the operations per element that recompute a value, capped above `_CHEAP`; other functions count as expensive."""
        if isinstance(term.op, Leaf):
            return 0
        own = 1 if term.op in _SIMPLE else _CHEAP + 1
        return min(_CHEAP + 1, own + sum(self._costs[a] for a in term.args if self._elements[a]))

    def _add_row(self, position: int, number: int, phases: list[PhaseTerms]) -> None:
        if self.terms.items[position].op is Leaf.CONSTANT:
            return
        phases[number].row_earlier.append(position)
        phases[self.depth(position)].row_terms.append(position)
        reads = (t for t in self.terms.producers((position,)) if isinstance(self.terms.items[t].payload, BufferRead))
        phases[0].row_terms += reads


def _mention(indices: Sequence[Index], axes: frozenset[sympy.Symbol]) -> bool:
    return any(not isinstance(i, int) and bool(i.free_symbols & axes) for i in indices)


def _node(term: Term) -> int:
    assert isinstance(term.payload, int)
    return term.payload


# Names of a row's values: the user's variable if the source line assigns one, else the field's term.


def statistic_name(graph: Graph, node: int, *, over_rows: bool = False) -> str:
    """Returns the name of a reduction; ``over_rows`` for a column reduction."""
    reduced = graph.nodes[graph.nodes[node].args[0]]
    is_of_squares = reduced.op is Op.MUL and len(set(reduced.args)) == 1
    word = (TRUTH if reduced.dtype is DType.BOOL else NOUNS).get(graph.nodes[node].op, graph.nodes[node].op.row.name)
    source = graph.nodes[reduced.args[1]] if reduced.op is Op.WHERE else reduced
    if word == "largest" and reduced.op is Op.ABS:
        word = "amax"
    if source.op in (Op.SORT_KEY, Op.DESCENDING_KEY):
        word = f"{word}_key"
    if word == "total":
        word = "squares" if is_of_squares else "true_count" if _is_truth(graph, graph.nodes[node].args[0]) else word
    return graph.variables.get(node) or (f"column_{word}" if over_rows else word)


def _is_truth(graph: Graph, position: int) -> bool:
    """True for a truth value as a number."""
    node = graph.nodes[position]
    if node.op is Op.CAST and node.dtype is not DType.BOOL:
        return _is_truth(graph, node.args[0])
    return node.dtype is DType.BOOL or (node.op is Op.WHERE and [_number(graph, arg) for arg in node.args[1:]] == [1, 0])


def _number(graph: Graph, position: int) -> float | None:
    node = graph.nodes[position]
    if node.op is Op.CAST:
        return _number(graph, node.args[0])
    return float(node.number) if node.op is Op.CONSTANT else None


@dataclass(frozen=True)
class ValueNames:
    """Names the values that a kernel computes; ``totals`` are payloads of statistics that are row sums of ``columns`` elements."""

    terms: Terms
    totals: Collection[object]
    columns: Index

    def of_row(self, position: int) -> str:
        if self._is_mean(position):
            word = "mean"
        else:
            is_root = self.terms.items[position].op is Op.RSQRT
            is_rstd = is_root and any(map(self._has_mean, self.terms.producers((position,))))
            word = "rstd" if is_rstd else self.terms.name(position)
        return self.terms.variables.get(position) or word

    def of_summand(self, position: int) -> str:
        """Returns the name of a value that a reduction combines."""
        term = self.terms.items[position]
        if term.op is Op.MUL and len(set(term.args)) == 1:
            return "squared_deviation" if self.terms.items[term.args[0]].op is Op.SUB else "square"
        return self.terms.name(position)

    def _is_mean(self, position: int) -> bool:
        """True for a row sum divided by the number of its elements."""
        return self.terms.items[position].op in (Op.MUL, Op.DIV) and self._has_mean(position)

    def _has_mean(self, position: int) -> bool:
        """True for a mean, or a fused multiply-add that contains one."""
        term = self.terms.items[position]
        if term.op not in (Op.MUL, Op.DIV, FusedOp.MULTIPLY_ADD):
            return False
        total, count = (self.terms.items[a] for a in term.args[:2])
        return total.op is Leaf.STATISTIC and total.payload in self.totals and self._is_count(count, is_divided=term.op is Op.DIV)

    def _is_count(self, count: Term, *, is_divided: bool) -> bool:
        while count.op is Op.CAST:
            count = self.terms.items[count.args[0]]
        if count.op is Leaf.COORDINATE:
            return is_divided and same(count.payload, self.columns)
        if count.op is not Leaf.CONSTANT or not isinstance(self.columns, int):
            return False
        number = float(str(count.payload))
        return abs((number / self.columns if is_divided else number * self.columns) - 1) < 1e-6
