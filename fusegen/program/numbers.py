"""Host arithmetic on run-time scalars before a launch, as data and as generated Python functions.

Python's semantics apply: 64-bit floats, unbounded ints, Python's errors. Only the operations of two tables exist, so that a plan
from a file can run nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from fusegen.errors import ArgumentError
from fusegen.lazy import dataclass
from fusegen.program.formula import Formula

Number: TypeAlias = int | float | bool

PYTHON_EXPRESSIONS: dict[str, str] = {
    "copy": "{0}",
    "neg": "-{0}",
    "abs": "abs({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "floor_divide": "{0} // {1}",
    "remainder": "{0} % {1}",
    "pow": "{0} ** {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_not": "not {0}",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "bitwise_left_shift": "{0} << {1}",
    "bitwise_right_shift": "{0} >> {1}",
    "where": "{1} if {0} else {2}",
    "exp": "math.exp({0})",
    "expm1": "math.expm1({0})",
    "log": "math.log({0})",
    "log1p": "math.log1p({0})",
    "log2": "math.log2({0})",
    "sqrt": "math.sqrt({0})",
    "sin": "math.sin({0})",
    "cos": "math.cos({0})",
    "tanh": "math.tanh({0})",
    "erf": "math.erf({0})",
    "erfc": "math.erfc({0})",
    "atan2": "math.atan2({0}, {1})",
    "one_plus_erf": "math.erfc(-{0})",
    "exp_below": "1.0 if {0} == {1} else math.exp({0} - {1})",
}
"""Operations as Python expressions."""

TORCH_OPERATIONS: dict[str, int] = {
    **dict.fromkeys(("sign", "floor", "ceil", "trunc", "round", "exp2", "rsqrt", "sigmoid", "lgamma"), 1),
    **dict.fromkeys(("maximum", "minimum", "logical_and", "logical_or", "logical_xor"), 2),
}
"""Operations that torch computes, with their numbers of operands."""

ERRORS = (ArithmeticError, ValueError, TypeError)
"""Errors of arithmetic: division by zero, overflow, complex numbers."""


def arity(operation: str) -> int | None:
    """Returns the number of operands, or None for an unknown operation."""
    if operation in PYTHON_EXPRESSIONS:
        return 1 + max(operand for operand in range(3) if f"{{{operand}}}" in PYTHON_EXPRESSIONS[operation])
    return TORCH_OPERATIONS.get(operation)


@dataclass(frozen=True)
class Scalar:
    """A run-time number of the caller, by its parameter's name."""

    name: str


NumberLeaf: TypeAlias = Scalar | Formula | int | float | bool


@dataclass(frozen=True)
class Operation:
    """A number computed from earlier lines. The name is a key of `PYTHON_EXPRESSIONS` or `TORCH_OPERATIONS`."""

    name: str
    operands: tuple[int, ...]
    is_float: bool


@dataclass(frozen=True)
class Numbers:
    """A program of host arithmetic: leaves and operations in topological order, and positions of the results by name."""

    lines: tuple[NumberLeaf | Operation, ...] = ()
    results: tuple[tuple[str, int], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.name for line in self.lines if isinstance(line, Scalar)))

    @property
    def sizes(self) -> frozenset[str]:
        return frozenset[str]().union(*(line.sizes for line in self.lines if isinstance(line, Formula)))

    def text(self, position: int, most: int = 200) -> str:
        """Returns a line as an expression for messages. Subexpressions longer than ``most`` characters are elided."""
        texts: list[str] = []
        for line in self.lines[: position + 1]:
            text = _expression(self._simplified(line), texts)
            texts.append(text if len(text) <= most else "…")
        is_bracketed = isinstance(self.lines[position], Operation) and texts[position].startswith("(")
        return texts[position][1:-1] if is_bracketed else texts[position]

    def _simplified(self, line: NumberLeaf | Operation) -> NumberLeaf | Operation:
        """Rewrites ``not a != b`` to ``a == b``."""
        negated = self.lines[line.operands[0]] if isinstance(line, Operation) and line.name == "logical_not" else None
        return replace(negated, name="eq") if isinstance(negated, Operation) and negated.name == "ne" else line


def _expression(line: NumberLeaf | Operation, texts: Sequence[str]) -> str:
    if isinstance(line, Scalar):
        return line.name
    if not isinstance(line, Operation):
        return str(line)
    operands = [texts[operand] for operand in line.operands]
    return (
        f"({PYTHON_EXPRESSIONS[line.name].format(*operands)})"
        if line.name in PYTHON_EXPRESSIONS
        else f"({line.name}({', '.join(operands)}))"
    )


@lru_cache(maxsize=len(PYTHON_EXPRESSIONS) + len(TORCH_OPERATIONS))
def operation(name: str) -> Callable[..., Any]:
    if name not in PYTHON_EXPRESSIONS:
        return _torch_function(name)
    names = "abc"[: arity(name)]
    function: Callable[..., Any] = eval(
        f"lambda {', '.join(names)}: {PYTHON_EXPRESSIONS[name].format(*names)}", {"math": math, "abs": abs}
    )
    return function


def _torch_function(name: str) -> Callable[..., Any]:
    function = getattr(torch, name)

    def apply(*numbers: Any) -> Any:
        return function(*(torch.tensor(n, dtype=torch.float64 if isinstance(n, float) else None) for n in numbers)).item()

    return apply


def python_function(
    program: Numbers, positions: Mapping[str, int], sizes: Mapping[str, int], constants: Mapping[str, int | float]
) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Compiles a function from a call's values to the program's results, by name.

    Args:
        positions: positions of the scalars among the values.
        sizes: values of symbolic sizes.
        constants: scalars that are not among the values.
    """
    text = _Text(program, positions, sizes, constants)
    lines = [line for _, position in program.results for line in text.lines_of(position)]
    body = ", ".join(f"{name!r}: {text.result(position)}" for name, position in program.results)
    return text.function([*lines, f"return {{{body}}}"])


def python_condition(program: Numbers, positions: Mapping[str, int], sizes: Mapping[str, int]) -> Callable[[Sequence[Any]], bool]:
    """Compiles a predicate: True if all results of a program are true. It stops at the first false one, since later ones may assume
    it."""
    text = _Text(program, positions, sizes, {})
    lines = [line for _, position in program.results for line in text.test(position)]
    return text.function(["try:", *(f"    {line}" for line in lines), "    return True", "except errors:", "    return False"])


class _Text:
    """Generates Python code for a program, one line per operation."""

    def __init__(
        self, program: Numbers, positions: Mapping[str, int], sizes: Mapping[str, int], constants: Mapping[str, int | float]
    ) -> None:
        self.program = program
        self.names: dict[int, str] = {}
        self.globals: dict[str, Any] = {"math": math, "inf": math.inf, "nan": math.nan, "errors": ERRORS, "checked": _checked}
        self._scalar_expressions = {name: f"v[{position}]" for name, position in positions.items()}
        self._scalar_expressions |= {name: f"({value!r})" for name, value in constants.items()}
        self._sizes = sizes

    def function(self, lines: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
        text = "\n    ".join(["def computed(v):", *lines])
        exec(compile(text, "<scalars>", "exec"), self.globals)
        function: Callable[[Sequence[Any]], Any] = self.globals["computed"]
        return function

    def lines_of(self, position: int) -> Iterator[str]:
        """Yields the statements that a line needs and that were not generated yet."""
        needed, stack = set[int](), [position]
        while stack:
            current = stack.pop()
            if current not in needed and current not in self.names:
                needed.add(current)
                line = self.program.lines[current]
                stack += line.operands if isinstance(line, Operation) else ()
        for current in sorted(needed):
            line = self.program.lines[current]
            self.names[current] = f"t{current}" if isinstance(line, Operation) else self._leaf(line)
            if isinstance(line, Operation):
                yield f"t{current} = {self._statement_value(line)}"

    def _leaf(self, line: NumberLeaf) -> str:
        if isinstance(line, Scalar):
            return self._scalar_expressions[line.name]
        return str(line(self._sizes)) if isinstance(line, Formula) else f"({line!r})"

    def _statement_value(self, line: Operation) -> str:
        operands = [self.names[operand] for operand in line.operands]
        if line.name in PYTHON_EXPRESSIONS:
            return PYTHON_EXPRESSIONS[line.name].format(*operands)
        self.globals[f"torch_{line.name}"] = operation(line.name)
        return f"torch_{line.name}({', '.join(operands)})"

    def test(self, position: int) -> list[str]:
        """Returns statements that return False if a condition fails."""
        lines = list(self.lines_of(position))
        return [*lines, f"if not {self.names[position]}: return False"]

    def result(self, position: int) -> str:
        """Returns a result as an expression: a float, or a checked 64-bit int."""
        line = self.program.lines[position]
        if not isinstance(line, Operation):
            return self.names[position]
        return f"float({self.names[position]})" if line.is_float else f"checked({self.names[position]})"


def _checked(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise ArgumentError(
            f"the number {number}, computed from the kernel's scalar arguments, does not fit 64 bits", hint="pass floats"
        )
    return number
