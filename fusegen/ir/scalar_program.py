"""Arithmetic of numbers alone, taken out of graphs: what the host computes before a launch, as data (`program.numbers`).

A program is nodes of the graph (scalars, sizes, constants and pointwise operations on these) and what is wanted of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from fusegen.ir.formula import formula
from fusegen.ir.graph import Node, ScalarProgram
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim
from fusegen.program import numbers
from fusegen.program.numbers import Leaf, Numbers, Operation, Scalar


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


def numbers_of(program: ScalarProgram) -> Numbers:
    """A program as data."""
    return Numbers(tuple(map(_line, program.nodes)), program.results)


def _line(node: Node) -> Leaf | Operation:
    if node.op is Op.SCALAR:
        return Scalar(str(node.attr("name")))
    if node.op is Op.SIZE:
        return formula(cast(Dim, node.attr("size")))
    if node.op is Op.CONSTANT:
        return node.number
    return Operation(node.op.row.name, node.args, node.dtype.is_float)


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


def operation(op: Op) -> Callable[..., Any]:
    """An operation as a function of Python numbers."""
    return numbers.operation(op.row.name)
