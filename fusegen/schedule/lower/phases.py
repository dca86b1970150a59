"""Splits the terms of a row kernel into phases that end in reductions, and decides what is kept between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import sympy

from fusegen.ir.index_map import Bounds
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Index
from fusegen.schedule.terms import Fused, Leaf, Read, Term, Terms

_SIMPLE = (Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.ABS, Op.MAXIMUM, Op.MINIMUM, Fused.MULTIPLY_ADD)
_CHEAP = 3
"""Simple operations up to which a value is computed again instead of held."""


class Keep(Enum):
    """Which element values live on from phase to phase."""

    ALL = "all"
    ROW = "row"  # what is read of the row itself; what all rows share is read again
    NOTHING = "nothing"


@dataclass(frozen=True)
class Root:
    """A value that some phase must produce.

    Attributes:
        kind: ``reduce``, ``order``, ``column``, ``write``, ``segment_write`` or ``row_write``.
        key: the node of the order, or the reduction's (the first of those that share a state), or the store's number.
        terms: positions: one a component of the reduction's state, or the value that is stored.
        last: whether it must come in the last phase: it changes what phases before read.
    """

    kind: str
    key: int
    terms: tuple[int, ...]
    last: bool = False


@dataclass
class PhaseTerms:
    """The terms of one phase.

    Attributes:
        roots: what it produces.
        segments: reductions of segments that its math on elements uses, in the order in which they are found.
        segment_terms: terms of a segment, computed once of what was reduced over it, that its math on elements takes.
        row_terms: terms of the row that are computed at its start.
        reads: element reads that are loaded in it.
        given: element terms that come from an earlier phase.
        held: element terms that are computed (or loaded) here and used later.
        row_given: terms of the row that the phase's element math uses.
    """

    roots: list[Root] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    segment_terms: list[int] = field(default_factory=list)
    row_terms: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    row_given: list[int] = field(default_factory=list)


class PhaseSplitter:
    """Assigns terms to phases.

    Args:
        terms: the kernel's terms.
        row_axes: symbols that number the rows.
        column_axes: symbols along which a row runs.
        statistics: for each reduction's node, the terms that it reduces, one a component of its state.
        segments: for each of those nodes that is reduced over segments of a row, the first that is a part of the same state. Its
            result is an element's value: it is found in each phase that uses it.
        keep: which element values live on from phase to phase; each phase has the others for itself.
    """

    def __init__(
        self,
        terms: Terms,
        row_axes: Collection[sympy.Symbol],
        column_axes: Collection[sympy.Symbol],
        statistics: Mapping[int, tuple[int, ...]],
        segments: Mapping[int, int],
        keep: Keep,
    ) -> None:
        self.terms = terms
        self.row_axes, self.column_axes = frozenset(row_axes), frozenset(column_axes)
        self.statistics, self.segments = statistics, segments
        self.keep = keep
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
        """The phases, in order; a root is produced as early as what it depends on allows."""
        count = 1 + max((self.depth(*r.terms) for r in roots), default=0)
        phases = [PhaseTerms() for _ in range(count)]
        for root in roots:
            phases[-1 if root.last else self.depth(*root.terms)].roots.append(root)
        first: dict[int, int] = {}
        for number, phase in enumerate(phases):
            for root in phase.roots:
                self._place(root.terms, number, phases, first)
                if root.kind == "row_write" and self.terms.items[root.terms[0]].op is Leaf.CONSTANT:
                    phase.row_terms.append(root.terms[0])  # which has no name otherwise
        for phase in phases:
            for name in ("segments", "segment_terms", "row_terms", "reads", "given", "held", "row_given"):
                setattr(phase, name, sorted(set(getattr(phase, name))))
        return phases

    def depth(self, *positions: int) -> int:
        """The first phase in which some terms can be computed."""
        return max(self._depths[p] for p in positions)

    def _depth(self, term: Term) -> int:
        if term.op in (Leaf.STATISTIC, Leaf.ORDERED):
            return self.depth(*self.statistics[_node(term)]) + (_node(term) not in self.segments)
        return max((self._depths[a] for a in term.args), default=0)

    def is_element(self, position: int) -> bool:
        """Whether a term differs along the row."""
        return self._elements[position]

    def _is_of_segments(self, term: Term) -> bool:
        return term.op is Leaf.STATISTIC and _node(term) in self.segments

    def _computed_by_segment(self, positions: Sequence[int]) -> list[int]:
        """The terms among some that are computed of numbers of a segment alone."""
        items = self.terms.items
        return [p for p in positions if self._elements[p] and not self._varying[p] and not isinstance(items[p].op, Leaf)]

    def _varies(self, term: Term) -> bool:
        if isinstance(term.payload, Read):
            indices = [term.payload.offset, *(b.index for b in term.payload.conditions)]
        elif isinstance(term.payload, Bounds):
            indices = [term.payload.index]
        elif term.op is Leaf.COORDINATE:
            indices = [term.payload]
        else:
            return term.op is Leaf.ORDERED
        return _mention(indices, self.column_axes)

    def _place(self, positions: Sequence[int], number: int, phases: list[PhaseTerms], first: dict[int, int]) -> None:
        """Puts terms and what they need into a phase, unless an earlier phase holds it."""
        phases[number].segment_terms += self._computed_by_segment(positions)
        stack = list(positions)
        while stack:
            position = stack.pop()
            if self.is_element(position):
                stack += self._place_element(position, number, phases, first)
            else:
                self._place_row(position, number, phases)

    def _place_element(self, position: int, number: int, phases: list[PhaseTerms], first: dict[int, int]) -> tuple[int, ...]:
        """Puts a term into a phase; gives what it needs there as well."""
        phase, known, term = phases[number], first.get(position), self.terms.items[position]
        if known == number:
            return ()
        if term.op is Leaf.ORDERED:  # which the phase before leaves in the registers of the row
            first[position] = number
            phases[self.depth(position) - 1].held.append(position)
            phase.given.append(position)
            return ()
        if known is not None and self._is_kept(position):
            phases[known].held.append(position)
            phase.given.append(position)
            return ()
        if known is None or self.keep is Keep.NOTHING:
            first[position] = number
        if isinstance(term.payload, Read):
            phase.reads.append(position)
        if term.op is Leaf.STATISTIC:
            phase.segments.append(self.segments[_node(term)])
            phase.segment_terms += self._computed_by_segment(self.statistics[_node(term)])
            return self.statistics[_node(term)]
        if self._varying[position]:
            phase.segment_terms += self._computed_by_segment(term.args)
        return term.args

    def _is_kept(self, position: int) -> bool:
        """Whether a value is worth a register: coordinates and a few additions cost less to have again."""
        term = self.terms.items[position]
        if self.keep is Keep.NOTHING or term.op in (Leaf.COORDINATE, Leaf.CONDITION, Leaf.ORDERED) or not self._varying[position]:
            return False
        if self.keep is Keep.ROW:
            return isinstance(term.payload, Read) and not term.payload.drawn and _mention([term.payload.offset], self.row_axes)
        return isinstance(term.payload, Read) or self._costs[position] > _CHEAP

    def _cost(self, term: Term) -> int:
        """Additions and multiplications that a value takes along the row, as far as it matters; costly functions count for many."""
        if isinstance(term.op, Leaf):
            return 0
        own = 1 if term.op in _SIMPLE else _CHEAP + 1
        return min(_CHEAP + 1, own + sum(self._costs[a] for a in term.args if self._elements[a]))

    def _place_row(self, position: int, number: int, phases: list[PhaseTerms]) -> None:
        """A term of the row: computed at the start of the phase where it first can be."""
        if self.terms.items[position].op is Leaf.CONSTANT:
            return
        phases[number].row_given.append(position)
        phases[self.depth(position)].row_terms.append(position)
        reads = (t for t in self.terms.below((position,)) if isinstance(self.terms.items[t].payload, Read))
        phases[0].row_terms += reads


def _mention(indices: Sequence[Index], axes: frozenset[sympy.Symbol]) -> bool:
    return any(not isinstance(i, int) and bool(i.free_symbols & axes) for i in indices)


def _node(term: Term) -> int:
    assert isinstance(term.payload, int)
    return term.payload
