"""Formulas of sizes as text: what launchers, bundles and emitted C++ evaluate without sympy.

The text is valid Python; ``//`` and ``%`` are the only divisions, of non-negative integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

import sympy

from fusegen.ir.symbolic import Dim, FloorDiv, Index, Modulo


@dataclass(frozen=True)
class Formula:
    """An integer expression of sizes."""

    text: str

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """The value for some sizes."""
        return int(eval(_compiled(self.text), {"__builtins__": {}, "min": min, "max": max}, dict(sizes)))

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<formula>", "eval")


def formula(expr: Index) -> Formula:
    """The formula of an expression."""
    return Formula(integer_text(expr))


def ceil_div(expr: Dim, divisor: int) -> Formula:
    """expr / divisor, rounded up."""
    if isinstance(expr, int):
        return Formula(str(-(-expr // divisor)))
    if divisor == 1:
        return formula(expr)
    return Formula(f"({integer_text(expr)} + {divisor - 1}) // {divisor}")


def relation_text(relation: sympy.Basic) -> str:
    """A relation of sizes as Python text."""
    if isinstance(relation, sympy.Not):
        return f"not ({relation_text(relation.args[0])})"
    symbols = {sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">="}
    left, right = relation.args
    return f"{integer_text(left)} {symbols[type(relation)]} {integer_text(right)}"


def integer_text(expr: Index, division: str = "//") -> str:
    """An integer expression as text; sums in the order of their terms' text, so that it is the same everywhere."""
    return _sum(sympy.sympify(expr), division)


def _sum(expr: sympy.Expr, division: str) -> str:
    if not isinstance(expr, sympy.Add):
        return _product(expr, division)
    terms = sorted(expr.args, key=lambda t: (t.is_Integer, str(t)))
    text = _product(terms[0], division)
    for term in terms[1:]:
        negative = term.could_extract_minus_sign()
        text += f" - {_product(-term, division)}" if negative else f" + {_product(term, division)}"
    return text


def _product(expr: sympy.Expr, division: str) -> str:
    if not isinstance(expr, sympy.Mul):
        return _atom(expr, division)
    factors = sorted(expr.args, key=lambda f: (f.is_Integer, str(f)))
    return " * ".join(_atom(f, division) for f in factors)


def _atom(expr: sympy.Expr, division: str) -> str:
    if expr.is_Integer:
        return str(int(expr)) if int(expr) >= 0 else f"({int(expr)})"
    if isinstance(expr, sympy.Symbol):
        return str(expr.name)
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and int(expr.exp) > 0:
        return " * ".join([_atom(expr.base, division)] * int(expr.exp))
    if isinstance(expr, (FloorDiv, Modulo)):
        sign = division if isinstance(expr, FloorDiv) else "%"
        return f"({_operand(expr.args[0], division)} {sign} {_operand(expr.args[1], division)})"
    return f"({_sum(expr, division)})"


def _operand(expr: sympy.Expr, division: str) -> str:
    """What a division or a remainder binds as a whole, powers too, which are written as products."""
    text = _atom(expr, division)
    return f"({text})" if isinstance(expr, sympy.Pow) else text
