"""Rewriters of graphs: a rule for single nodes, a replacement of some, and the part that computes some values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fusegen.errors import VerificationError
from fusegen.ir.graph import Graph, GraphBuilder, Location
from fusegen.ir.index_map import chain
from fusegen.ir.ops import Op
from fusegen.passes.algebra import Value

LocalRewrite: TypeAlias = Callable[[Value], Value]
"""Gives the value that stands in place of another one, or that one."""

Replace: TypeAlias = Callable[[GraphBuilder, Sequence[int], int], int | None]
"""Puts a node's replacement into a new graph.

Given are the new graph's builder, the places of all earlier nodes in it, and the node. None keeps the node, on the replacements of
its operands; `OUT` leaves it out: nothing may read it then.
"""

OUT = -1


def rebuilt(graph: Graph, replaced: Replace, further: Sequence[int] = ()) -> Graph:
    """The graph with replacements.

    Args:
        further: places in the new graph, which `replaced` may add: they become results behind the graph's own.
    """
    builder = GraphBuilder.like(graph)
    moved: list[int] = []
    for position, node in graph:
        place = replaced(builder, moved, position)
        if place is None:
            place = builder.put(replace(node, args=tuple(moved[a] for a in node.args)), graph.locations[position])
        moved.append(place)
    return builder.build([*(moved[o] for o in graph.outputs), *further], [moved[w] for w in graph.writes])


def part_of(graph: Graph, outputs: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """The graph of some of its values alone, and for each of its nodes which one it was."""
    wanted = set(outputs)
    for position in range(len(graph.nodes) - 1, -1, -1):
        if position in wanted:
            wanted.update(graph.nodes[position].args)
    before = sorted(wanted.union(p for p, node in graph if node.op in (Op.INPUT, Op.SCALAR)))
    moved = {old: new for new, old in enumerate(before)}
    nodes = tuple(replace(graph.nodes[p], args=tuple(moved[a] for a in graph.nodes[p].args)) for p in before)
    locations = tuple(graph.locations[p] for p in before)
    return replace(graph, nodes=nodes, outputs=tuple(moved[o] for o in outputs), locations=locations), tuple(before)


def moved_after_operands(
    position: int, moved: dict[int, int], operands: Callable[[int], Sequence[int]], make: Callable[[int], int]
) -> int:
    """The place of a value in a new graph, made if need be, after all that it is made of.

    Args:
        position: the value.
        moved: places that are known already; grows.
        operands: of a value, in the old graph.
        make: puts a value into the new graph, whose operands are there.
    """
    stack = [position]
    while stack:
        last = stack[-1]
        missing = [] if last in moved else [a for a in operands(last) if a not in moved]
        if missing:
            stack += missing
        else:
            stack.pop()
            if last not in moved:
                moved[last] = make(last)
    return moved[position]


def rewritten(graph: Graph, rule: LocalRewrite) -> Graph:
    """The graph with a rule applied to all nodes: each is rebuilt on rewritten operands, and rewritten until it stays as it is.

    Raises:
        VerificationError: the rule changed the type of a result.
    """
    settling = _Settling(rule, GraphBuilder.like(graph))
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
    _check(rule, graph, result)
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

    rule: LocalRewrite
    builder: GraphBuilder
    known: dict[int, int] = field(default_factory=dict)

    def settled(self, position: int, first: int, location: Location | None) -> int:
        """The replacement of a node: it is rewritten, then the new nodes of its replacement, to a fixed point.

        Args:
            first: the first of the nodes that are new.
        """
        if position in self.known:
            return self.known[position]
        better = self.rule(Value(self.builder, position, location))
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


def _check(rule: LocalRewrite, before: Graph, after: Graph) -> None:
    for old, new in zip(before.outputs, after.outputs, strict=True):
        a, b = before.nodes[old], after.nodes[new]
        if a.dtype is not b.dtype or a.shape != b.shape:
            raise VerificationError(f"{rule.__name__} changed {a.op!r}: {a.dtype}{a.shape} to {b.dtype}{b.shape}")
