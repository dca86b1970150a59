"""The weights of a streaming recurrence, relative to an anchor, as functions of scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusegen.dtypes import DType
from fusegen.errors import VerificationError
from fusegen.ir.graph import Location
from fusegen.ir.ops import Op
from fusegen.ir.reductions import REDUCTIONS
from fusegen.passes.fuse.recurrence import Separation
from fusegen.schedule.functions import cut
from fusegen.schedule.math import Fast, Function, Parameter
from fusegen.schedule.terms import Leaf, Term, Terms

_BASE_2 = {Op.EXP: (Op.EXP2, math.log2(math.e))}
"""f(x) = g(c x): the form that hardware has, and its factor."""


def common_factor(terms: Terms, roots: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """A positive constant that all roots have as a factor, and the roots without it.

    The largest of scores is the same one in any positive unit, so that the factor can wait until a weight is taken, where
    it is part of a constant.
    """
    found = [_factored(terms, root) for root in roots]
    factors = {factor for factor, _ in found}
    if len(factors) != 1:
        return 1.0, tuple(roots)
    return factors.pop(), tuple(rest for _, rest in found)


def _factored(terms: Terms, root: int) -> tuple[float, int]:
    """A positive constant that a term has as a factor, and the term without it."""
    parts: dict[int, tuple[int, ...]] = {}
    stack = [root]
    while stack:
        position = stack.pop()
        if position not in parts:
            parts[position] = _with_its_factor(terms, position)
            stack += parts[position]
    found: dict[int, tuple[float, int]] = {}
    for position in sorted(parts):  # operands come first
        found[position] = _taken_out(terms, position, parts[position], found)
    return found[root]


def _with_its_factor(terms: Terms, position: int) -> tuple[int, ...]:
    """The operands whose common factor a term has too: none where it is no product, quotient or choice."""
    term = terms.items[position]
    if term.op is Op.MUL:
        return next(((other,) for constant, other in (term.args, term.args[::-1]) if _positive(terms, constant) is not None), ())
    if term.op is Op.DIV:
        return term.args[:1] if _positive(terms, term.args[1]) is not None else ()
    return tuple(c for c in term.args[1:] if not _is_infinite(terms, c)) if term.op is Op.WHERE else ()


def _taken_out(terms: Terms, position: int, parts: tuple[int, ...], found: Mapping[int, tuple[float, int]]) -> tuple[float, int]:
    """A term's factor and the rest, of those of its operands."""
    term = terms.items[position]
    factors = {found[p][0] for p in parts}
    if len(factors) != 1:
        return 1.0, position
    factor = factors.pop()
    if term.op is Op.WHERE:  # an infinity has any factor
        rest = tuple(found[c][1] if c in parts else c for c in term.args[1:])
        return factor, terms.put(Term(Op.WHERE, (term.args[0], *rest), term.dtype), terms.locations[position])
    if term.op is Op.DIV:
        return factor / (_positive(terms, term.args[1]) or 1.0), found[parts[0]][1]
    constant = term.args[0] if term.args[1] == parts[0] else term.args[1]
    return factor * (_positive(terms, constant) or 1.0), found[parts[0]][1]


def _constant(terms: Terms, position: int) -> float | None:
    term = terms.items[position]
    return float(str(term.payload)) if term.op is Leaf.CONSTANT and term.dtype.is_float else None


def _positive(terms: Terms, position: int) -> float | None:
    value = _constant(terms, position)
    return value if value is not None and 0 < value < math.inf else None


def _is_infinite(terms: Terms, position: int) -> bool:
    value = _constant(terms, position)
    return value is not None and math.isinf(value)


def weight_functions(separation: Separation, unit: float, location: Location | None) -> tuple[Function, ...]:
    """The functions ``anchor``, ``weight`` and ``carry``.

    Args:
        separation: says what a weight is: outer(inner(score, peak)).
        unit: what scores must be multiplied by.
        location: where the user wrote it.
    """
    if separation.inner is not Op.SUB:
        raise VerificationError(f"weights by {separation.name} have no streaming form")
    outer, factor = _BASE_2.get(separation.outer, (separation.outer, 1.0))
    builder = _Weights(outer, unit * factor, location)
    return (
        builder.anchor(REDUCTIONS[separation.reduction].components[0].identity[0]),
        builder.weight("weight", "s", "anchor", "Relative to the anchor, at most 1."),
        builder.weight("carry", "old_peak", "new_anchor", "What takes weights from an old peak to a new anchor."),
    )


class _Weights:
    """f(s, peak) = outer(scale * (s - peak)).

    The difference comes first, and is exact near the peak. scale * s - scale * peak would be one instruction, and off by the
    rounding of scale * peak, which overflows where scores pass 2^31.
    """

    def __init__(self, outer: Op, scale: float, location: Location | None) -> None:
        self.outer, self.scale, self.location = outer, scale, location

    def anchor(self, identity: str) -> Function:
        """The peak; 0 while there is none, since infinity less infinity is no number."""
        terms = Terms()
        peak = terms.put(Term(Leaf.SCALAR, (), DType.FLOAT32, "peak"))
        zero, none = (terms.put(Term(Leaf.CONSTANT, (), DType.FLOAT32, value)) for value in ("0.0", identity))
        is_none = terms.put(Term(Op.EQ, (peak, none), DType.BOOL))
        root = terms.put(Term(Op.WHERE, (is_none, zero, peak), DType.FLOAT32), self.location)
        return self._function(terms, "anchor", root, (peak,), "The peak; 0 while there is none.")

    def weight(self, name: str, score: str, anchor: str, doc: str) -> Function:
        """The weight of a score."""
        terms = Terms()
        s, a = (terms.put(Term(Leaf.SCALAR, (), DType.FLOAT32, leaf)) for leaf in (score, anchor))
        difference = terms.put(Term(Op.SUB, (s, a), DType.FLOAT32), self.location)
        root = terms.put(Term(self.outer, (self._scaled(terms, difference),), DType.FLOAT32), self.location)
        return self._function(terms, name, root, (s, a), doc)

    def _scaled(self, terms: Terms, position: int) -> int:
        if self.scale == 1.0:
            return position
        scale = terms.put(Term(Leaf.CONSTANT, (), DType.FLOAT32, repr(self.scale)))
        return terms.put(Term(Op.MUL, (position, scale), DType.FLOAT32), self.location)

    def _function(self, terms: Terms, name: str, root: int, leaves: Sequence[int], doc: str) -> Function:
        given = {leaf: Parameter(str(terms.items[leaf].payload), DType.FLOAT32) for leaf in leaves}
        return cut(terms, name, [("result", root)], given, fast=Fast.ROUNDED, doc=doc)[0]
