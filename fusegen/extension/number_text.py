"""Arithmetic of numbers as C++: the operations of `calls.numbers`, with Python's rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusegen.extension.spelling import number_name, spelled
from fusegen.program.formula import Formula
from fusegen.program.numbers import BY_TORCH, Numbers, Operation, Scalar

_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_OWN = (
    "bitwise_and", "bitwise_or", "bitwise_xor",
    "copy", "neg", "abs", "add", "sub", "mul", "div", "floor_divide", "remainder", "pow",
    "bitwise_left_shift", "bitwise_right_shift", "exp_below",
)  # fmt: skip
_OF_MATH = ("exp", "expm1", "log", "log1p", "log2", "sqrt", "sin", "cos", "tanh", "erf", "erfc")


class NumberText:
    """Numbers in the making.

    Args:
        program: the arithmetic.
        numbers: the run-time numbers that there are, with whether each is a float.
        constants: values of the others.
        stem: of the variables.
    """

    def __init__(self, program: Numbers, numbers: Mapping[str, bool], constants: Mapping[str, int | float], stem: str) -> None:
        self._program, self._numbers, self._constants, self._stem = program, numbers, constants, stem
        self._lines: dict[int, str] = {}

    @property
    def lines(self) -> list[str]:
        """Statements that define what was asked for, in order."""
        return [line for _, line in sorted(self._lines.items())]

    def value(self, position: int) -> str:
        """A line's value, as an expression."""
        line = self._program.lines[position]
        if isinstance(line, Scalar):
            return number_name(line.name) if line.name in self._numbers else literal_of(self._constants[line.name])
        if isinstance(line, Formula):
            return spelled(line)
        if not isinstance(line, Operation):
            return literal_of(line)
        if position not in self._lines:
            operands = [self.value(operand) for operand in line.operands]
            self._lines[position] = f"const auto {self._stem}{position} = {_operation(line.name, operands)};"
        return f"{self._stem}{position}"


def literal_of(value: float) -> str:
    """A number as a literal of 64 bits."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"int64_t({value})"
    if math.isnan(value):
        return 'std::nan("")'
    return value.hex() if math.isfinite(value) else f"{'-' if value < 0 else ''}HUGE_VAL"


def _operation(name: str, operands: Sequence[str]) -> str:
    if name in _SIGNS:
        return f"({operands[0]} {_SIGNS[name]} {operands[1]})"
    if name in _OWN:
        return f"py::{name}({', '.join(operands)})"
    if name in _OF_MATH:
        return f"py::applied(std::{name}, {operands[0]})"
    if name == "atan2":
        return f"std::atan2(double({operands[0]}), double({operands[1]}))"
    if name == "one_plus_erf":
        return f"std::erfc(-double({operands[0]}))"
    if name == "logical_not":
        return f"(!{operands[0]})"
    if name == "where":
        return f"({operands[0]} ? {operands[1]} : {operands[2]})"
    assert name in BY_TORCH
    return f"py::by_torch([](const auto&... given) {{ return at::{name}(given...); }}, {', '.join(operands)})"
