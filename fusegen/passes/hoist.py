"""Arithmetic of numbers leaves the kernel: the host does it once a call, in Python's precision, and passes the result.

What is hoisted are the greatest expressions of run-time scalars, sizes and constants. Each becomes a run-time scalar of the kernel,
in the type in which it meets a tensor, and a line of the program that the host runs (`Graph.derived`). A size alone stays a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusegen.dtypes import DType
from fusegen.ir.formula import evaluate, extract
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.infer import Operand, operand_types
from fusegen.ir.ops import Op
from fusegen.passes.rewrite import OUT, rebuilt
from fusegen.program.numbers import ERRORS

_STAY = (Op.CONSTANT, Op.SIZE)


def hoist(graph: Graph) -> Graph:
    """The graph with no arithmetic of numbers in it."""
    hoisting = _Hoist(graph)
    return hoisting.finished(rebuilt(graph, hoisting.replaced))


class _Hoist:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.hoisted: dict[tuple[int, DType], str] = {}
        self.taken = {_folded(name) for name, _ in graph.scalars} | {_folded(spec.name) for spec in graph.inputs}

    def replaced(self, builder: GraphBuilder, moved: Sequence[int], position: int) -> int:
        """A node on its operands; nothing in place of arithmetic."""
        self.builder, self.moved, node = builder, moved, self.graph.nodes[position]
        if node.weak and node.op not in _STAY:
            return OUT
        args = tuple(self._operand(node, number) for number in range(len(node.args)))
        return builder.put(replace(node, args=args), self.graph.locations[position])

    def finished(self, graph: Graph) -> Graph:
        """The new graph, with what its scalars are made of."""
        wanted = [(name, position) for (position, _), name in self.hoisted.items()]
        dtypes = tuple((name, dtype) for (_, dtype), name in self.hoisted.items())
        return replace(graph, scalars=dtypes, derived=extract(self.graph.nodes, wanted))

    def _operand(self, node: Node, number: int) -> int:
        position = node.args[number]
        operand = self.graph.nodes[position]
        if not operand.weak or operand.op in _STAY:
            return self.moved[position]
        if not any(self.graph.nodes[p].op in (Op.SCALAR, Op.SIZE) for p in (position, *self.graph.ancestors[position])):
            return self._folded_constant(position)
        return self._scalar(position, self._type(node, number))

    def _folded_constant(self, position: int) -> int:
        """An expression of constants alone, which is one itself; what Python refuses to compute stays for the kernel."""
        try:
            return self.builder.constant(evaluate(self.graph.nodes, position, {}, {}))
        except ERRORS:
            return self._kept(position)

    def _kept(self, position: int) -> int:
        node = self.graph.nodes[position]
        args = tuple(self._kept(a) for a in node.args)
        return self.builder.put(Node(node.op, args, node.attrs, node.shape, node.dtype, node.weak), self.graph.locations[position])

    def _type(self, node: Node, number: int) -> DType:
        """In which type a number reaches the kernel: single where the node computes in single, as an integer where the node makes
        it one, else as Python has it."""
        operand = self.graph.nodes[node.args[number]]
        if not operand.dtype.is_float:
            return operand.dtype
        if node.op is Op.CAST and node.dtype is DType.INT64:
            return DType.INT64
        operands = [Operand(o.shape, o.dtype, o.weak) for o in (self.graph.nodes[a] for a in node.args)]
        meets = node.dtype.compute if node.op is Op.CAST else operand_types(node.op, operands, node.dtype)[number]
        return DType.FLOAT32 if meets is DType.FLOAT32 else DType.FLOAT64

    def _scalar(self, position: int, dtype: DType) -> int:
        key = (position, dtype)
        if key not in self.hoisted:
            self.hoisted[key] = self._name(position)
        node = Node(Op.SCALAR, (), (("name", self.hoisted[key]),), (), dtype, weak=True)
        return self.builder.put(node, None)

    def _name(self, position: int) -> str:
        """The user's name for a scalar alone, where it is passed in one type; a new name for everything else."""
        node = self.graph.nodes[position]
        own = str(node.attr("name")) if node.op is Op.SCALAR else ""
        if own.isidentifier() and own not in self.hoisted.values():
            return own
        number = 1
        while _folded(f"scalar_{number}") in self.taken:
            number += 1
        self.taken.add(_folded(f"scalar_{number}"))
        return f"scalar_{number}"


def _folded(name: str) -> str:
    """A name as emitted text may write it: names must differ in this form."""
    return name.replace("_", "").lower()
