"""Converts symbolic sizes to formulas without computer algebra (`program.formula`), and scalar programs to plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import sympy

from fusegen.errors import VerificationError
from fusegen.ir.graph import Node, ScalarProgram
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, FloorDiv, Index, Modulo, NamedNumber, exact_quotient
from fusegen.program import numbers
from fusegen.program.formula import Formula, FormulaKind, Relation, formula_of, size
from fusegen.program.numbers import NumberLeaf, Numbers, Operation, Scalar

_SIGNS = {sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">="}
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def formula(expr: Index) -> Formula:
    """Returns the formula of an expression; terms are sorted by text, so that the order is reproducible."""
    return _formula(sympy.sympify(expr))


@lru_cache(maxsize=1 << 14)
def _formula(expr: sympy.Expr) -> Formula:
    if not isinstance(expr, sympy.Add):
        return _term(expr)
    first, *terms = sorted(expr.args, key=_order)
    return Formula(FormulaKind.SUM, (_term(first), *map(_signed, terms)))


def ceil_div(expr: Dim, divisor: int) -> Formula:
    exact = exact_quotient(expr, divisor)
    return formula(expr + (divisor - 1)) // divisor if exact is None else formula(exact)


def relation(relation: sympy.Basic) -> Relation:
    if isinstance(relation, sympy.Not):
        (inner,) = relation.args
        return Relation(formula(inner.args[0]), _OPPOSITE[_SIGNS[type(inner)]], formula(inner.args[1]))
    left, right = relation.args
    return Relation(formula(left), _SIGNS[type(relation)], formula(right))


def integer_text(expr: Index, division: str = "//") -> str:
    return formula(expr).text(division)


def _order(expr: sympy.Expr) -> tuple[bool, str]:
    return expr.is_Integer or isinstance(expr, NamedNumber), str(expr)


def _signed(term: sympy.Expr) -> Formula:
    """A later term of a sum; a negative one becomes a negation."""
    return Formula(FormulaKind.NEGATION, (_term(-term),)) if term.could_extract_minus_sign() else _term(term)


def _term(expr: sympy.Expr) -> Formula:
    factors = [f for arg in sorted(sympy.Mul.make_args(expr), key=_order) for f in _factors(arg)]
    return factors[0] if len(factors) == 1 else Formula(FormulaKind.PRODUCT, tuple(factors))


def _factors(expr: sympy.Expr) -> list[Formula]:
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and int(expr.exp) > 0:
        return _factors(expr.base) * int(expr.exp)
    return [_atom(expr)]


def _atom(expr: sympy.Expr) -> Formula:
    if expr.is_Integer:
        return formula_of(int(expr))
    if isinstance(expr, sympy.Symbol):
        return size(str(expr.name))
    if isinstance(expr, (FloorDiv, Modulo)):
        operator = FormulaKind.QUOTIENT if isinstance(expr, FloorDiv) else FormulaKind.REMAINDER
        return Formula(operator, tuple(map(formula, expr.args)))
    if isinstance(expr, sympy.Add):
        return formula(expr)
    raise VerificationError(f"{expr} is not an integer expression of sizes", hint="please report the declaration and its shapes")


# Scalar programs: arithmetic that the host evaluates before a launch, as data (`program.numbers`).
#
# A program contains graph nodes (scalars, sizes, constants and pointwise operations on these) and the indices of its results.


def extract(nodes: Sequence[Node], requested: Iterable[tuple[str, int]]) -> ScalarProgram:
    """Returns the program of some nodes: the nodes and their transitive operands."""
    results = tuple(requested)
    needed: set[int] = set()
    stack = [position for _, position in results]
    while stack:
        position = stack.pop()
        if position not in needed:
            needed.add(position)
            stack += nodes[position].args
    indices = {old: new for new, old in enumerate(sorted(needed))}
    selected = tuple(_renumbered(nodes[old], indices) for old in indices)
    return ScalarProgram(selected, tuple((name, indices[position]) for name, position in results))


def _renumbered(node: Node, indices: Mapping[int, int]) -> Node:
    return Node(node.op, tuple(indices[a] for a in node.args), node.attrs, node.shape, node.dtype, node.weak)


def numbers_of(program: ScalarProgram) -> Numbers:
    return Numbers(tuple(map(_instruction, program.nodes)), program.results)


def _instruction(node: Node) -> NumberLeaf | Operation:
    if node.op is Op.SCALAR:
        return Scalar(str(node.attr("name")))
    if node.op is Op.SIZE:
        return formula(cast(Dim, node.attr("size")))
    if node.op is Op.CONSTANT:
        return node.number
    return Operation(node.op.row.name, node.args, node.dtype.is_float)


def evaluate(nodes: Sequence[Node], position: int, scalars: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """Evaluates one node; raises the errors of Python's operators."""
    program = extract(nodes, [("value", position)])
    values: list[Any] = []
    for node in program.nodes:
        if node.op is Op.SCALAR:
            values.append(scalars[str(node.attr("name"))])
        elif node.op is Op.SIZE:
            values.append(formula(cast(Dim, node.attr("size")))(sizes))
        elif node.op is Op.CONSTANT:
            values.append(node.number)
        else:
            values.append(operation(node.op)(*(values[a] for a in node.args)))
    return values[-1]


def operation(op: Op) -> Callable[..., Any]:
    """Returns an operation as a function of Python numbers."""
    return numbers.operation(op.row.name)
