"""Formulas of sizes: small trees of integers, which launchers and bundles evaluate without computer algebra.

A tree is data: whoever reads one from a file can run nothing by it. ``//`` and ``%`` are the only divisions, of non-negative
integers; what is divided by 0 is 0, as in `ir.symbolic`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class FormulaKind(Enum):
    """The kind of a formula, as written in text and in files; a leaf by a word."""

    INTEGER = "integer"
    SIZE = "size"
    SUM = "+"
    NEGATION = "-"
    PRODUCT = "*"
    QUOTIENT = "//"
    REMAINDER = "%"
    MINIMUM = "min"


@dataclass(frozen=True)
class Formula:
    """An integer expression of sizes.

    Attributes:
        operator: what is done with the operands.
        operands: of an operation.
        value: of a leaf: the integer, or the name of the size.
    """

    operator: FormulaKind
    operands: tuple[Formula, ...] = ()
    value: int | str = 0

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """The value for some sizes."""
        if self.operator is FormulaKind.SIZE:
            return sizes[str(self.value)]
        if self.operator is FormulaKind.INTEGER:
            return int(self.value)
        return _COMPUTED[self.operator]([operand(sizes) for operand in self.operands])

    def __add__(self, other: Formula | int) -> Formula:
        return Formula(FormulaKind.SUM, (self, formula_of(other)))

    def __mul__(self, other: Formula | int) -> Formula:
        return Formula(FormulaKind.PRODUCT, (self, formula_of(other)))

    def __floordiv__(self, other: Formula | int) -> Formula:
        return Formula(FormulaKind.QUOTIENT, (self, formula_of(other)))

    @property
    def sizes(self) -> frozenset[str]:
        """Names of the sizes in it."""
        if self.operator is FormulaKind.SIZE:
            return frozenset((str(self.value),))
        return frozenset[str]().union(*(operand.sizes for operand in self.operands))

    def text(self, division: str = "//") -> str:
        """The formula in a language with C's precedence of ``+``, ``-`` and ``*``; quotients always in brackets.

        Args:
            division: how the language writes a quotient of integers.
        """
        if self.operator is not FormulaKind.SUM:
            return self._product(division)
        text = self.operands[0]._product(division)
        for term in self.operands[1:]:
            if term.operator is FormulaKind.NEGATION:
                text += f" - {term.operands[0]._product(division)}"
            else:
                text += f" + {term._product(division)}"
        return text

    def _product(self, division: str) -> str:
        """As a term of a sum."""
        factors = self.operands if self.operator is FormulaKind.PRODUCT else (self,)
        return " * ".join(factor._atom(division) for factor in factors)

    def _atom(self, division: str) -> str:
        """As a factor of a product."""
        if self.operator in (FormulaKind.INTEGER, FormulaKind.SIZE):
            return f"({self.value})" if isinstance(self.value, int) and self.value < 0 else str(self.value)
        if self.operator is FormulaKind.MINIMUM:
            return f"min({', '.join(operand.text(division) for operand in self.operands)})"
        if self.operator is FormulaKind.NEGATION:
            return f"(-{self.operands[0]._atom(division)})"
        if self.operator in (FormulaKind.QUOTIENT, FormulaKind.REMAINDER):
            sign = division if self.operator is FormulaKind.QUOTIENT else self.operator.value
            return f"({self.operands[0]._atom(division)} {sign} {self.operands[1]._atom(division)})"
        return f"({self.text(division)})"

    def __str__(self) -> str:
        return self.text()


def _quotient(values: Sequence[int]) -> int:
    return values[0] // values[1] if values[1] else 0


def _remainder(values: Sequence[int]) -> int:
    return values[0] % values[1] if values[1] else 0


_COMPUTED: dict[FormulaKind, Callable[[Sequence[int]], int]] = {
    FormulaKind.SUM: sum,
    FormulaKind.NEGATION: lambda values: -values[0],
    FormulaKind.PRODUCT: math.prod,
    FormulaKind.QUOTIENT: _quotient,
    FormulaKind.REMAINDER: _remainder,
    FormulaKind.MINIMUM: min,
}


def formula_of(value: Formula | int) -> Formula:
    """A number as a formula."""
    return value if isinstance(value, Formula) else Formula(FormulaKind.INTEGER, value=value)


def size(name: str) -> Formula:
    """A size, by its name."""
    return Formula(FormulaKind.SIZE, value=name)


def remainder(value: Formula, divisor: int) -> Formula:
    """The remainder of a value."""
    return Formula(FormulaKind.REMAINDER, (value, formula_of(divisor)))


def minimum(*values: Formula | int) -> Formula:
    """The least of some values."""
    return Formula(FormulaKind.MINIMUM, tuple(map(formula_of, values)))


_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
SIGNS = tuple(_COMPARED)
"""The signs of relations."""


@dataclass(frozen=True)
class Relation:
    """A condition on sizes: ``left sign right``.

    Attributes:
        sign: one of `SIGNS`.
    """

    left: Formula
    sign: str
    right: Formula

    def __call__(self, sizes: Mapping[str, int]) -> bool:
        """Tells if it holds for some sizes."""
        return _COMPARED[self.sign](self.left(sizes), self.right(sizes))

    @property
    def sizes(self) -> frozenset[str]:
        """Names of the sizes in it."""
        return self.left.sizes | self.right.sizes

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"


def limits(multiples: Iterable[tuple[str, int]], bounds: Iterable[tuple[str, int]]) -> tuple[Relation, ...]:
    """Known multiples and bounds of sizes, as relations."""
    found = [Relation(remainder(size(name), divisor), "==", formula_of(0)) for name, divisor in multiples]
    return tuple(found + [Relation(size(name), "<=", formula_of(bound)) for name, bound in bounds])
