"""The math of a kernel at one point of the iteration space, as terms over reads, coordinates, reductions and accumulators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

import sympy
import torch
from sympy.core.symbol import Str

from fusegen.dtypes import DType
from fusegen.errors import VerificationError
from fusegen.ir.graph import Location
from fusegen.ir.index_map import Bounds
from fusegen.ir.ops import NOUNS, Op
from fusegen.ir.symbolic import Index
from fusegen.schedule.indices import Choice, Differs, LoadedIndex, Scalar
from fusegen.schedule.names import scalar_identifier


class Leaf(Enum):
    READ = "read"
    COORDINATE = "coordinate"
    CONDITION = "condition"
    SCALAR = "scalar"
    CONSTANT = "constant"
    STATISTIC = "statistic"
    ORDERED = "ordered"
    ACCUMULATOR = "accumulator"


class FusedOp(Enum):
    """Operations that combine several nodes of a graph."""

    MULTIPLY_ADD = "multiply_add"  # a * b + c, rounded once
    SMALL_TO_FLOAT = "small_to_float"  # an integer below 2^23, plus 2^23, less a number


@dataclass(frozen=True)
class ByteBits:
    """Bits of a byte that are read as a float: (byte >> shift & mask) - less; the sign bit is inverted first if `signed`."""

    signed: bool = False
    shift: int = 0
    mask: int = 255
    less: int = 0


@dataclass(frozen=True)
class BufferRead:
    """A read of a buffer at an offset in elements, under conditions on indices; `drawn` elements are computed from a random key.
    With `bits`, the value is a float."""

    buffer: int
    offset: Index
    conditions: tuple[Bounds, ...] = ()
    drawn: bool = False
    bits: ByteBits | None = None

    @property
    def is_stored(self) -> bool:
        """True if the value is the element itself."""
        return not self.drawn and self.bits is None


@dataclass(frozen=True)
class Term:
    """One value of a kernel: an operation on earlier terms in a computing type, or a leaf.

    The payload is a leaf's source: a `BufferRead`, an index, bounds, a name, a number, a node with the lane's index; for a cast,
    the type to whose precision it rounds.
    """

    op: Op | FusedOp | Leaf
    args: tuple[int, ...]
    dtype: DType
    payload: object = None


def noun(terms: Sequence[Term], position: int) -> str:
    """Returns a name for a term that no variable of the user holds."""
    term = terms[position]
    if isinstance(term.op, FusedOp):
        return "sum" if term.op is FusedOp.MULTIPLY_ADD else term.op.value
    if isinstance(term.op, Leaf):
        return str(term.payload) if term.op is Leaf.SCALAR and term.payload else term.op.value
    operand = terms[term.args[0]]
    if term.op is Op.COPY or (term.op is Op.CAST and operand.dtype is DType.BOOL):
        return noun(terms, term.args[0])
    if term.op is Op.CAST and isinstance(term.payload, DType) and not term.payload.is_float:
        while operand.op is Op.CAST:
            operand = terms[operand.args[0]]
        source = str(operand.payload) if operand.op is Leaf.SCALAR and operand.payload else "as"
        return "is_nonzero" if term.payload is DType.BOOL else f"{source}_{term.payload.short}"
    if term.op in (Op.MAXIMUM, Op.MINIMUM) and any(terms[a].op in (Leaf.CONSTANT, Leaf.SCALAR) for a in term.args):
        return "clamped"
    return NOUNS.get(term.op) or f"{term.op.row.name}_value"  # functions have the names of operations


_STRICT = {Op.LE: Op.LT, Op.GE: Op.GT}


class Terms:
    """Hash-consed terms in topological order, with the user's source lines and variables."""

    def __init__(self) -> None:
        self.items: list[Term] = []
        self.locations: list[Location | None] = []
        self.variables: dict[int, str] = {}
        self._known: dict[Term, int] = {}

    def add(self, term: Term, location: Location | None = None, variable: str | None = None) -> int:
        """Returns the position of a term; an equal term is reused."""
        if term not in self._known:
            self._known[term] = len(self.items)
            self.items.append(term)
            self.locations.append(location)
        if variable is not None:
            self.variables.setdefault(self._known[term], variable)
        return self._known[term]

    def simplified(self, term: Term) -> Term:
        """Returns an equal term of integers: x for x + 0, and x < y for x <= y - 1 if y - 1 cannot wrap."""
        if term.op is Op.ADD and term.dtype is DType.INT64:
            others = [a for a in term.args if not self._is_integer(a, 0)]
            return self.items[others[0]] if len(others) == 1 else term
        if term.op not in _STRICT:
            return term
        lower, upper = term.args if term.op is Op.LE else term.args[::-1]
        less = self.items[upper]
        if less.op is not Op.SUB or less.dtype is not DType.INT64 or not self._is_integer(less.args[1], 1):
            return term
        args = (lower, less.args[0]) if term.op is Op.LE else (less.args[0], lower)
        return Term(_STRICT[term.op], args, term.dtype) if self._is_above_least(less.args[0]) else term

    def _is_integer(self, position: int, number: int) -> bool:
        return self.items[position] == Term(Leaf.CONSTANT, (), DType.INT64, str(number))

    def _is_above_least(self, position: int) -> bool:
        """True if an integer is known to be no -2^63: a coordinate, a clamped one, or a minimum of these."""
        stack = [position]
        while stack:
            term = self.items[stack.pop()]
            if term.op is Op.MINIMUM:
                stack += term.args
            elif term.op is Op.MAXIMUM:
                if not any(self._is_integer(a, 0) for a in term.args):
                    return False
            elif term.op is not Leaf.COORDINATE and (term.op is not Leaf.CONSTANT or int(str(term.payload)) < 0):
                return False
        return True

    def name(self, position: int) -> str:
        """Returns a name for a term: the user's variable, else a noun."""
        return self.variables.get(position) or noun(self.items, position)

    def convert(self, position: int, dtype: DType) -> int:
        """Converts a term to another computing type."""
        term = self.items[position]
        if term.dtype is dtype:
            return position
        if term.op is Leaf.CONSTANT:
            single = term.dtype is DType.FLOAT32 and dtype is DType.FLOAT64  # a tensor's value, rounded to float32
            payload = repr(torch.tensor(float(str(term.payload)), dtype=torch.float32).item()) if single else term.payload
            return self.add(Term(Leaf.CONSTANT, (), dtype, as_number(payload, dtype)))
        return self.add(Term(Op.CAST, (position,), dtype, dtype), self.locations[position])

    def integer(self, position: int) -> Index:
        """Returns an integer term as an expression: a read, a coordinate, a choice or a number, plus numbers. Raises
        VerificationError for other terms."""
        total: Index = 0
        while (term := self.items[position]).op in (Op.CAST, Op.ADD):
            numbers = [a for a in term.args if self.items[a].op is Leaf.CONSTANT]
            total = total + sum(int(str(self.items[a].payload)) for a in numbers)
            if len(numbers) == len(term.args):
                return total
            (position,) = (a for a in term.args if a not in numbers)
        if term.op is Op.WHERE:
            return total + self._choice(term)
        if term.op is Leaf.SCALAR:
            return total + Scalar(Str(scalar_identifier(str(term.payload))))
        if isinstance(term.payload, BufferRead):
            return total + LoadedIndex(term.payload.buffer, term.payload.offset)
        if term.op is Leaf.COORDINATE:
            return total + cast(sympy.Expr, term.payload)
        if term.op is Leaf.CONSTANT:
            return total + int(str(term.payload))
        raise VerificationError(f"an index is computed by {term.op!r} inside of a kernel")

    def _choice(self, term: Term) -> Index:
        """Returns one of two integers, selected by a value in memory or by a comparison with a number."""
        condition, value, instead = term.args
        compared = self.items[condition]
        holds = Differs(*map(self.integer, compared.args)) if compared.op is Op.NE else self.integer(condition)
        return Choice(holds, self.integer(value), self.integer(instead))

    def producers(self, roots: tuple[int, ...], stop: frozenset[int] = frozenset()) -> list[int]:
        """Returns the producers of some terms in topological order; terms in ``stop`` are included, but not their operands."""
        producers: set[int] = set()
        stack = list(roots)
        while stack:
            position = stack.pop()
            if position not in producers:
                producers.add(position)
                if position not in stop:
                    stack += self.items[position].args
        return sorted(producers)


def as_number(value: object, dtype: DType) -> str:
    number = float(str(value)) if str(value) not in ("True", "False") else float(str(value) == "True")
    if dtype is DType.BOOL:
        return repr(bool(number))
    return repr(number) if dtype.is_float else repr(int(number))


# Integer arithmetic on coordinates in 32 bits, if it cannot overflow. torch's integers have 64 bits, which a GPU adds, compares and
# converts in several instructions. Positions in tensors with fewer than 2^31 elements, and their differences, need 31 bits and a
# sign.


SMALL = (1 << 31) - (1 << 22)
"""The bound of sizes and coordinates in kernels with 32-bit indexing."""

_COMPARISONS = (Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE)


@dataclass(frozen=True)
class _Narrow:
    """A term in 32 bits, with the range of its values."""

    position: int
    low: int
    high: int


def narrowed(terms: Terms, roots: Sequence[int], axes: frozenset[sympy.Symbol], limit: int = SMALL) -> list[int]:
    """Rewrites integer arithmetic on coordinates below the roots to 32 bits; coordinates over the axes are below the limit."""
    narrower = _Narrower(terms, axes, limit)
    return [narrower.value(root) for root in roots]


class _Narrower:
    def __init__(self, terms: Terms, axes: frozenset[sympy.Symbol], limit: int) -> None:
        self.terms, self.axes, self.limit = terms, axes, limit
        self._values: dict[int, int] = {}
        self._narrow: dict[int, _Narrow | None] = {}

    def value(self, position: int) -> int:
        """Returns the same value in the same type, computed in 32 bits where possible."""
        for p in self.terms.producers((position,)):  # operands come before their users
            if p not in self._values:
                self._values[p] = self._rebuilt(p)
        return self._values[position]

    def _rebuilt(self, position: int) -> int:
        term = self.terms.items[position]
        if not term.args:
            return position
        args = tuple(self._values[a] for a in term.args)
        if term.op in _COMPARISONS or (term.op is Op.CAST and term.dtype.is_float):
            narrow = [self.narrow(a) for a in term.args]
            if all(n is not None for n in narrow):
                args = tuple(n.position for n in narrow if n is not None)
        rebuilt = Term(term.op, args, term.dtype, term.payload)
        return self.terms.add(rebuilt, self.terms.locations[position], self.terms.variables.get(position))

    def narrow(self, position: int) -> _Narrow | None:
        """Returns an integer term in 32 bits; None if it may not fit."""
        stack = [position]
        while stack:
            p = stack[-1]
            term = self.terms.items[p]
            pending = [a for a in term.args if a not in self._narrow] if term.dtype is DType.INT64 else []
            if p not in self._narrow and not pending:
                self._narrow[p] = self._narrowed(p)
            stack += pending
            if not pending:
                stack.pop()
        return self._narrow[position]

    def _narrowed(self, position: int) -> _Narrow | None:
        term = self.terms.items[position]
        if term.dtype is not DType.INT64:
            return None
        bounds = self._range(term)
        if bounds is None or bounds[0] < -SMALL or bounds[1] > SMALL:
            return None
        args = tuple(n.position for n in map(self._narrow.get, term.args) if n is not None)
        return _Narrow(self.terms.add(Term(term.op, args, DType.INT32, term.payload), self.terms.locations[position]), *bounds)

    def _range(self, term: Term) -> tuple[int, int] | None:
        """Returns the least and the greatest value, or None if they are unknown."""
        if term.op is Leaf.CONSTANT:
            value = int(float(str(term.payload)))
            return value, value
        if term.op is Leaf.COORDINATE:
            return self._coordinate_range(term.payload)
        ranges = [self._narrow[a] for a in term.args]
        if term.op not in (Op.ADD, Op.SUB, Op.MUL) or any(n is None for n in ranges):
            return None
        a, b = (n for n in ranges if n is not None)
        if term.op is Op.ADD:
            return a.low + b.low, a.high + b.high
        if term.op is Op.SUB:
            return a.low - b.high, a.high - b.low
        corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return min(corners), max(corners)

    def _coordinate_range(self, index: object) -> tuple[int, int] | None:
        symbols = sympy.sympify(index).free_symbols
        if symbols and symbols <= self.axes:
            return 0, self.limit
        return (0, SMALL) if isinstance(index, sympy.Symbol) else None
