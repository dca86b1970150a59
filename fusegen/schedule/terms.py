"""The math of a kernel: what one point of the iteration space computes, as terms over what it reads.

Reads of buffers at affine offsets, coordinates, results of reductions, lanes of an accumulator, and pointwise operations on these.
"""

from __future__ import annotations

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
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Index
from fusegen.schedule.indices import Choice, Differs, Loaded, Scalar
from fusegen.schedule.names import scalar_identifier


class Leaf(Enum):
    """Where a term that is no operation comes from."""

    READ = "read"
    COORDINATE = "coordinate"
    CONDITION = "condition"
    SCALAR = "scalar"
    CONSTANT = "constant"
    STATISTIC = "statistic"
    ORDERED = "ordered"
    ACCUMULATOR = "accumulator"


class Fused(Enum):
    """Operations of kernels that are made of several nodes of a graph."""

    MULTIPLY_ADD = "multiply_add"  # a * b + c, rounded once


@dataclass(frozen=True)
class Read:
    """A read of a buffer at an offset in elements, under conditions on indices; what is drawn is computed there, of a key."""

    buffer: int
    offset: Index
    conditions: tuple[Bounds, ...] = ()
    drawn: bool = False


@dataclass(frozen=True)
class Term:
    """One value of a kernel.

    Attributes:
        op: the operation, or the kind of leaf.
        args: earlier terms.
        dtype: the type in which it is computed.
        payload: a leaf's source: a `Read`, an index, bounds, a name, a number, a node with the lane's index; for a cast, the
            type whose precision it is rounded to.
        location: the user's line; not part of equality.
    """

    op: Op | Fused | Leaf
    args: tuple[int, ...]
    dtype: DType
    payload: object = None


class Terms:
    """Hash-consed terms in topological order, with the user's lines beside them."""

    def __init__(self) -> None:
        self.items: list[Term] = []
        self.locations: list[Location | None] = []
        self._known: dict[Term, int] = {}

    def put(self, term: Term, location: Location | None = None) -> int:
        """The position of a term, a new one or the equal one that is there."""
        if term not in self._known:
            self._known[term] = len(self.items)
            self.items.append(term)
            self.locations.append(location)
        return self._known[term]

    def convert(self, position: int, dtype: DType) -> int:
        """The term in another computing type."""
        term = self.items[position]
        if term.dtype is dtype:
            return position
        if term.op is Leaf.CONSTANT:
            single = term.dtype is DType.FLOAT32 and dtype is DType.FLOAT64  # a tensor's value, which was rounded
            payload = repr(torch.tensor(float(str(term.payload)), dtype=torch.float32).item()) if single else term.payload
            return self.put(Term(Leaf.CONSTANT, (), dtype, as_number(payload, dtype)))
        return self.put(Term(Op.CAST, (position,), dtype, dtype), self.locations[position])

    def integer(self, position: int) -> Index:
        """An integer term as an expression: one that is read, or a coordinate, and numbers that are added to it, or that stand in
        the place of one.

        Raises:
            VerificationError: it is made of anything else.
        """
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
        if isinstance(term.payload, Read):
            return total + Loaded(term.payload.buffer, term.payload.offset)
        if term.op is Leaf.COORDINATE:
            return total + cast(sympy.Expr, term.payload)
        if term.op is Leaf.CONSTANT:
            return total + int(str(term.payload))
        raise VerificationError(f"an index is computed by {term.op!r} inside of a kernel")

    def _choice(self, term: Term) -> Index:
        """One of two integers, by what lies in memory, or by a comparison with a number."""
        condition, value, instead = term.args
        compared = self.items[condition]
        holds = Differs(*map(self.integer, compared.args)) if compared.op is Op.NE else self.integer(condition)
        return Choice(holds, self.integer(value), self.integer(instead))

    def below(self, roots: tuple[int, ...], stop: frozenset[int] = frozenset()) -> list[int]:
        """Everything that some terms are made of, in topological order; what is in ``stop`` is not looked into."""
        found: set[int] = set()
        stack = list(roots)
        while stack:
            position = stack.pop()
            if position not in found:
                found.add(position)
                if position not in stop:
                    stack += self.items[position].args
        return sorted(found)


def as_number(value: object, dtype: DType) -> str:
    """A number as a constant's payload, of a dtype."""
    number = float(str(value)) if str(value) not in ("True", "False") else float(str(value) == "True")
    if dtype is DType.BOOL:
        return repr(bool(number))
    return repr(number) if dtype.is_float else repr(int(number))
