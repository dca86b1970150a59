"""The passes in their order, and what runs a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from fusegen.errors import VerificationError
from fusegen.ir.graph import Graph, GraphBuilder, Location
from fusegen.ir.index_map import chain
from fusegen.ir.ops import Op
from fusegen.passes.algebra import Value
from fusegen.passes.expand import expand
from fusegen.passes.heads import attention_in_four_dims
from fusegen.passes.hoist import hoist
from fusegen.passes.simplify import simplify

Rewrite: TypeAlias = Callable[[Value], Value]


@dataclass(frozen=True)
class Pass:
    """A named rewrite of single nodes, applied to all of them until none changes."""

    name: str
    rewrite: Rewrite


EXPAND, SIMPLIFY = Pass("expand-compositions", expand), Pass("simplify", simplify)


def run_passes(graph: Graph) -> Graph:
    """The graph in primitives, simplified, attention in four dims, without arithmetic of numbers alone."""
    graph = apply(SIMPLIFY, apply(EXPAND, graph))
    apart = attention_in_four_dims(graph)
    return hoist(graph if apart is graph else apply(SIMPLIFY, apart))


def apply(step: Pass, graph: Graph) -> Graph:
    """Runs one pass: each node is rebuilt on rewritten operands and rewritten until it stays as it is.

    Raises:
        VerificationError: when the pass changed the type of a result.
    """
    settling = _Settling(step, GraphBuilder.like(graph))
    builder = settling.builder
    moved: list[int] = []
    places = {p for put in graph.puts for p in chain(graph, graph.nodes[put].args[0]) if graph.nodes[p].op is Op.GATHER}
    for position, node in graph:
        location = graph.locations[position]
        first = len(builder.nodes)
        rebuilt = type(node)(node.op, tuple(moved[a] for a in node.args), node.attrs, node.shape, node.dtype, node.weak)
        made = builder.put(rebuilt, location)
        moved.append(made if position in places else settling.settled(made, first, location))  # which stays a place
    outputs = [_result(builder, graph, o, moved[o]) for o in graph.outputs]
    result = builder.build(outputs, [moved[w] for w in graph.writes])
    _check(step, graph, result)
    return result


def _result(builder: GraphBuilder, graph: Graph, output: int, moved: int) -> int:
    """A result: one that turned out to equal a tensor that is written to is a copy all the same."""
    if builder.nodes[moved].op is not Op.PUT or graph.nodes[output].op is Op.PUT:
        return moved
    return builder.add(Op.COPY, [moved], location=graph.locations[output], role="result", write=0)


@dataclass
class _Settling:
    """Rewrites nodes as they are built.

    Attributes:
        known: what became of nodes that were rewritten: a replacement may be made of one that came long before.
    """

    step: Pass
    builder: GraphBuilder
    known: dict[int, int] = field(default_factory=dict)

    def settled(self, position: int, first: int, location: Location | None) -> int:
        """What a node becomes: it is rewritten, and then the new nodes that its replacement is made of, to a fixed point.

        Args:
            first: the first of the nodes that are new.
        """
        if position in self.known:
            return self.known[position]
        better = self.step.rewrite(Value(self.builder, position, location))
        if better.position != position:
            self.known[position] = self._of_new(better.position, position, first, location)
        return self.known.get(position, position)

    def _of_new(self, root: int, replaced: int, first: int, location: Location | None) -> int:
        """A replacement, rewritten in turn."""
        done: dict[int, int] = {}

        def visit(p: int) -> int:
            if p < first or p == replaced:
                return self.known.get(p, p)
            if p not in done:
                node = self.builder.nodes[p]
                args = tuple(visit(a) for a in node.args)
                rebuilt = self.builder.put(type(node)(node.op, args, node.attrs, node.shape, node.dtype, node.weak), location)
                done[p] = self.settled(rebuilt, len(self.builder.nodes), location)
            return done[p]

        return visit(root)


def _check(step: Pass, before: Graph, after: Graph) -> None:
    for old, new in zip(before.outputs, after.outputs, strict=True):
        a, b = before.nodes[old], after.nodes[new]
        if a.dtype is not b.dtype or a.shape != b.shape:
            raise VerificationError(f"pass {step.name} changed {a.op!r}: {a.dtype}{a.shape} to {b.dtype}{b.shape}")
