"""Hoists arithmetic on numbers out of kernels: the host evaluates it once per call, in Python's precision.

The largest expressions of run-time scalars, sizes and constants are hoisted. Each becomes a scalar parameter of the kernel, in the
type of its use, and an instruction of the host program (`Graph.derived`). A size alone stays a size. The attribute ``name`` of an
expression's last node names the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count

from fusegen.dtypes import DType
from fusegen.ir.formula import evaluate, extract
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.infer import Operand, operand_types
from fusegen.ir.ops import Op
from fusegen.passes.rewrite import OUT, rebuilt
from fusegen.program.numbers import ERRORS

_NOT_HOISTED = (Op.CONSTANT, Op.SIZE)


def hoist(graph: Graph) -> Graph:
    hoisting = _Hoist(graph)
    return hoisting.finished(rebuilt(graph, hoisting.replaced))


class _Hoist:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.hoisted: dict[tuple[int, DType], str] = {}
        self.used_names = {_folded(name) for name, _ in graph.scalars} | {_folded(spec.name) for spec in graph.inputs}

    def replaced(self, builder: GraphBuilder, indices: Sequence[int], position: int) -> int:
        self.builder, self.indices, node = builder, indices, self.graph.nodes[position]
        if node.weak and node.op not in _NOT_HOISTED:
            return OUT
        args = tuple(self._operand(node, number) for number in range(len(node.args)))
        return builder.add_node(replace(node, args=args), self.graph.locations[position])

    def finished(self, graph: Graph) -> Graph:
        requested = [(name, position) for (position, _), name in self.hoisted.items()]
        dtypes = tuple((name, dtype) for (_, dtype), name in self.hoisted.items())
        return replace(graph, scalars=dtypes, derived=extract(self.graph.nodes, requested))

    def _operand(self, node: Node, number: int) -> int:
        position = node.args[number]
        operand = self.graph.nodes[position]
        if not operand.weak or operand.op in _NOT_HOISTED:
            return self.indices[position]
        if not any(self.graph.nodes[p].op in (Op.SCALAR, Op.SIZE) for p in (position, *self.graph.ancestors[position])):
            return self._folded_constant(position)
        return self._scalar(position, self._type(node, number))

    def _folded_constant(self, position: int) -> int:
        """Evaluates an expression of constants; one that Python cannot compute stays in the kernel."""
        try:
            return self.builder.constant(evaluate(self.graph.nodes, position, {}, {}))
        except ERRORS:
            return self._copied_expression(position)

    def _copied_expression(self, position: int) -> int:
        node = self.graph.nodes[position]
        args = tuple(self._copied_expression(a) for a in node.args)
        return self.builder.add_node(
            Node(node.op, args, node.attrs, node.shape, node.dtype, node.weak), self.graph.locations[position]
        )

    def _type(self, node: Node, number: int) -> DType:
        """The parameter's type: float32 if the node computes in it, int64 if the node casts to it, else Python's type."""
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
        return self.builder.add_node(node, None)

    def _name(self, position: int) -> str:
        node = self.graph.nodes[position]
        user_name = str(node.attr("name")) if node.op is Op.SCALAR else ""
        if user_name.isidentifier() and user_name not in self.hoisted.values():
            return user_name
        name = dict(node.attrs).get("name") if node.op is not Op.SCALAR else None
        operand = self.graph.nodes[node.args[0]] if node.op is Op.NEG else node
        if node.op is Op.NEG and operand.op is Op.SCALAR and str(operand.attr("name")).isidentifier():
            name = f"minus_{operand.attr('name')}"
        numbered = (f"{name or 'scalar'}_{number}" for number in count(1))
        free = next(n for n in chain([str(name)] if name else [], numbered) if _folded(n) not in self.used_names)
        self.used_names.add(_folded(free))
        return free


def _folded(name: str) -> str:
    """Drops underscores and case, which emitted text may change: parameter names must differ in the remaining form."""
    return name.replace("_", "").lower()
