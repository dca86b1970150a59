"""Formulas of sizes: integer expression trees that launchers and bundles evaluate without sympy.

``//`` and ``%`` take non-negative integers; division by 0 yields 0, as in `ir.symbolic`. Formulas from files cannot run code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from fusegen.lazy import dataclass


class FormulaKind(Enum):
    """The operator of a formula, as written in text and files, or the kind of a leaf."""

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
    """An integer expression of sizes. The value of a leaf is an integer or the name of a size."""

    operator: FormulaKind
    operands: tuple[Formula, ...] = ()
    value: int | str = 0

    def __call__(self, sizes: Mapping[str, int]) -> int:
        if self.operator is FormulaKind.SIZE:
            return sizes[str(self.value)]
        if self.operator is FormulaKind.INTEGER:
            return int(self.value)
        return _EVALUATORS[self.operator]([operand(sizes) for operand in self.operands])

    def __add__(self, other: Formula | int) -> Formula:
        return _folded(FormulaKind.SUM, (self, formula_of(other)), neutral=0)

    def __mul__(self, other: Formula | int) -> Formula:
        return _folded(FormulaKind.PRODUCT, (self, formula_of(other)), neutral=1)

    def __floordiv__(self, other: Formula | int) -> Formula:
        divisor = formula_of(other)
        if self.is_integer and divisor.is_integer:
            return formula_of(_quotient((int(self.value), int(divisor.value))))
        return self if divisor == formula_of(1) else Formula(FormulaKind.QUOTIENT, (self, divisor))

    @property
    def is_integer(self) -> bool:
        return self.operator is FormulaKind.INTEGER

    @property
    def sizes(self) -> frozenset[str]:
        if self.operator is FormulaKind.SIZE:
            return frozenset((str(self.value),))
        return frozenset[str]().union(*(operand.sizes for operand in self.operands))

    def text(self, division: str = "//") -> str:
        """Returns the formula as text for languages with C's precedence of ``+``, ``-`` and ``*``. Quotients are parenthesized and
        use the operator `division`."""
        if self.operator is not FormulaKind.SUM:
            return self._term(division)
        text = self.operands[0]._term(division)
        for term in self.operands[1:]:
            if term.operator is FormulaKind.NEGATION:
                text += f" - {term.operands[0]._term(division)}"
            else:
                text += f" + {term._term(division)}"
        return text

    def _term(self, division: str) -> str:
        factors = self.operands if self.operator is FormulaKind.PRODUCT else (self,)
        return " * ".join(factor._factor(division) for factor in factors)

    def _factor(self, division: str) -> str:
        if self.operator in (FormulaKind.INTEGER, FormulaKind.SIZE):
            return f"({self.value})" if isinstance(self.value, int) and self.value < 0 else str(self.value)
        if self.operator is FormulaKind.MINIMUM:
            return f"min({', '.join(operand.text(division) for operand in self.operands)})"
        if self.operator is FormulaKind.NEGATION:
            return f"(-{self.operands[0]._factor(division)})"
        if self.operator in (FormulaKind.QUOTIENT, FormulaKind.REMAINDER):
            sign = division if self.operator is FormulaKind.QUOTIENT else self.operator.value
            return f"({self.operands[0]._factor(division)} {sign} {self.operands[1]._factor(division)})"
        return f"({self.text(division)})"

    def __str__(self) -> str:
        return self.text()


def _quotient(values: Sequence[int]) -> int:
    return values[0] // values[1] if values[1] else 0


def _remainder(values: Sequence[int]) -> int:
    return values[0] % values[1] if values[1] else 0


_EVALUATORS: dict[FormulaKind, Callable[[Sequence[int]], int]] = {
    FormulaKind.SUM: sum,
    FormulaKind.NEGATION: lambda values: -values[0],
    FormulaKind.PRODUCT: math.prod,
    FormulaKind.QUOTIENT: _quotient,
    FormulaKind.REMAINDER: _remainder,
    FormulaKind.MINIMUM: min,
}


def formula_of(value: Formula | int) -> Formula:
    return value if isinstance(value, Formula) else Formula(FormulaKind.INTEGER, value=value)


def size(name: str) -> Formula:
    return Formula(FormulaKind.SIZE, value=name)


def remainder(value: Formula, divisor: int) -> Formula:
    return Formula(FormulaKind.REMAINDER, (value, formula_of(divisor)))


def minimum(*values: Formula | int) -> Formula:
    return _folded(FormulaKind.MINIMUM, tuple(dict.fromkeys(map(formula_of, values))))


def _folded(kind: FormulaKind, operands: Sequence[Formula], neutral: int | None = None) -> Formula:
    """Returns an operation on at least one operand without nesting, with its integers joined into one that is not neutral."""
    flat = [each for operand in operands for each in (operand.operands if operand.operator is kind else (operand,))]
    folded = [each for each in flat if not each.is_integer]
    if len(folded) < len(flat):
        number = _EVALUATORS[kind]([int(each.value) for each in flat if each.is_integer])
        folded += [formula_of(number)] if number != neutral or not folded else []
    return folded[0] if len(folded) == 1 else Formula(kind, tuple(folded))


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
SIGNS = tuple(_COMPARISONS)


@dataclass(frozen=True)
class Relation:
    """A condition on sizes: ``left sign right``. The sign is one of `SIGNS`."""

    left: Formula
    sign: str
    right: Formula

    def __call__(self, sizes: Mapping[str, int]) -> bool:
        return _COMPARISONS[self.sign](self.left(sizes), self.right(sizes))

    @property
    def sizes(self) -> frozenset[str]:
        return self.left.sizes | self.right.sizes

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"


def limits(multiples: Iterable[tuple[str, int]], bounds: Iterable[tuple[str, int]]) -> tuple[Relation, ...]:
    """Returns relations for known multiples and upper bounds of sizes."""
    relations = [Relation(remainder(size(name), divisor), "==", formula_of(0)) for name, divisor in multiples]
    return tuple(relations + [Relation(size(name), "<=", formula_of(bound)) for name, bound in bounds])
