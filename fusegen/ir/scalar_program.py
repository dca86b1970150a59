"""Arithmetic of numbers alone, which the host does before a launch: as data, and as a Python function made of it.

Python's rules hold, whatever a kernel computes in: floats of 64 bits, ints without bounds, errors where Python raises them. A
program is nodes of the graph (scalars, sizes, constants and pointwise operations on these) and what is wanted of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch

from fusegen.errors import ArgumentError
from fusegen.ir.formula import formula
from fusegen.ir.graph import Node, ScalarProgram
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim

Values: TypeAlias = Sequence[Any]

SPELLED: dict[Op, str] = {
    Op.NEG: "-{0}",
    Op.ABS: "abs({0})",
    Op.ADD: "{0} + {1}",
    Op.SUB: "{0} - {1}",
    Op.MUL: "{0} * {1}",
    Op.DIV: "{0} / {1}",
    Op.FLOOR_DIVIDE: "{0} // {1}",
    Op.REMAINDER: "{0} % {1}",
    Op.POW: "{0} ** {1}",
    Op.EQ: "{0} == {1}",
    Op.NE: "{0} != {1}",
    Op.LT: "{0} < {1}",
    Op.LE: "{0} <= {1}",
    Op.GT: "{0} > {1}",
    Op.GE: "{0} >= {1}",
    Op.LOGICAL_NOT: "not {0}",
    Op.BITWISE_AND: "{0} & {1}",
    Op.BITWISE_OR: "{0} | {1}",
    Op.BITWISE_XOR: "{0} ^ {1}",
    Op.LEFT_SHIFT: "{0} << {1}",
    Op.RIGHT_SHIFT: "{0} >> {1}",
    Op.WHERE: "{1} if {0} else {2}",
    Op.EXP: "math.exp({0})",
    Op.EXPM1: "math.expm1({0})",
    Op.LOG: "math.log({0})",
    Op.LOG1P: "math.log1p({0})",
    Op.LOG2: "math.log2({0})",
    Op.SQRT: "math.sqrt({0})",
    Op.SIN: "math.sin({0})",
    Op.COS: "math.cos({0})",
    Op.TANH: "math.tanh({0})",
    Op.ERF: "math.erf({0})",
}
"""Operations as Python writes them; torch computes the others."""

ERRORS = (ArithmeticError, ValueError, TypeError)
"""What arithmetic of numbers raises: a division by zero, an overflow, a complex number where none is known."""


def extract(nodes: Sequence[Node], wanted: Iterable[tuple[str, int]]) -> ScalarProgram:
    """The program of some nodes of a graph, with what they are made of and nothing else."""
    results = tuple(wanted)
    needed: set[int] = set()
    stack = [position for _, position in results]
    while stack:
        position = stack.pop()
        if position not in needed:
            needed.add(position)
            stack += nodes[position].args
    place = {old: new for new, old in enumerate(sorted(needed))}
    kept = tuple(_moved(nodes[old], place) for old in place)
    return ScalarProgram(kept, tuple((name, place[position]) for name, position in results))


def _moved(node: Node, place: Mapping[int, int]) -> Node:
    return Node(node.op, tuple(place[a] for a in node.args), node.attrs, node.shape, node.dtype, node.weak)


def evaluate(nodes: Sequence[Node], position: int, scalars: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """The value of one node.

    Raises:
        ArithmeticError, ValueError, TypeError: as Python's operators do.
    """
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


@lru_cache(maxsize=len(Op))
def operation(op: Op) -> Callable[..., Any]:
    """An operation as a function of Python numbers."""
    if op not in SPELLED:
        return by_torch(op)
    names = "abc"[: op.row.arity]
    function: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {SPELLED[op].format(*names)}", {"math": math, "abs": abs})
    return function


def by_torch(op: Op) -> Callable[..., Any]:
    """A function of torch's on numbers: what Python has no operator for."""
    function = getattr(torch, op.row.name)

    def apply(*numbers: Any) -> Any:
        return function(*(torch.tensor(n, dtype=torch.float64 if isinstance(n, float) else None) for n in numbers)).item()

    return apply


def python_function(
    program: ScalarProgram, places: Mapping[str, int], sizes: Mapping[str, int], constants: Mapping[str, int | float]
) -> Callable[[Values], dict[str, Any]]:
    """A function from a call's values to the program's results, by name.

    Args:
        places: where in the values each scalar is.
        sizes: values of symbolic sizes.
        constants: values of scalars that are in no place.
    """
    text = _Text(program, places, sizes, constants)
    lines = [line for _, position in program.results for line in text.lines_of(position)]
    body = ", ".join(f"{name!r}: {text.result(position)}" for name, position in program.results)
    return text.function([*lines, f"return {{{body}}}"])


def python_condition(program: ScalarProgram, places: Mapping[str, int], sizes: Mapping[str, int]) -> Callable[[Values], bool]:
    """Whether the results of a program are true, one after the other: a later one may make sense only where the earlier hold.

    Arguments as of `python_function`.
    """
    text = _Text(program, places, sizes, {})
    lines = [line for _, position in program.results for line in text.test(position)]
    return text.function(["try:", *(f"    {line}" for line in lines), "    return True", "except errors:", "    return False"])


class _Text:
    """A program as lines of Python, one a node."""

    def __init__(
        self, program: ScalarProgram, places: Mapping[str, int], sizes: Mapping[str, int], constants: Mapping[str, int | float]
    ) -> None:
        self.program = program
        self.names: dict[int, str] = {}
        self.globals: dict[str, Any] = {"math": math, "inf": math.inf, "nan": math.nan, "errors": ERRORS, "checked": _checked}
        self._spelled_scalars = {name: f"v[{place}]" for name, place in places.items()}
        self._spelled_scalars |= {name: f"({value!r})" for name, value in constants.items()}
        self._sizes = sizes

    def function(self, lines: Sequence[str]) -> Callable[[Values], Any]:
        """The function of a body."""
        text = "\n    ".join(["def computed(v):", *lines])
        exec(compile(text, "<scalars>", "exec"), self.globals)
        function: Callable[[Values], Any] = self.globals["computed"]
        return function

    def lines_of(self, position: int) -> list[str]:
        """What has to be computed for a node, and is not yet."""
        node = self.program.nodes[position]
        if position in self.names:
            return []
        if not node.args:
            self.names[position] = self._leaf(node)
            return []
        lines = [line for a in node.args for line in self.lines_of(a)]
        operands = [self.names[a] for a in node.args]
        self.names[position] = f"t{position}"
        return [*lines, f"t{position} = {self._spelled(node.op, operands)}"]

    def _leaf(self, node: Node) -> str:
        if node.op is Op.SCALAR:
            return self._spelled_scalars[str(node.attr("name"))]
        if node.op is Op.SIZE:
            return str(formula(cast(Dim, node.attr("size")))(self._sizes))
        return f"({node.attr('value')})"

    def _spelled(self, op: Op, operands: Sequence[str]) -> str:
        if op in SPELLED:
            return SPELLED[op].format(*operands)
        self.globals[f"torch_{op.row.name}"] = by_torch(op)
        return f"torch_{op.row.name}({', '.join(operands)})"

    def test(self, position: int) -> list[str]:
        """Lines that leave where a condition does not hold."""
        lines = self.lines_of(position)
        return [*lines, f"if not {self.names[position]}: return False"]

    def result(self, position: int) -> str:
        """A result as kernels take it: a float, or an int of 64 bits."""
        node = self.program.nodes[position]
        if not node.args:
            return self.names[position]
        return f"float({self.names[position]})" if node.dtype.is_float else f"checked({self.names[position]})"


def _checked(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise ArgumentError(f"a number that the kernel computes of its scalars, {number}, does not fit 64 bits", mend="pass floats")
    return number
