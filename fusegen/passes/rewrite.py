"""Graph rewriters: local rules, node replacement, and extraction of a subgraph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fusegen.errors import VerificationError
from fusegen.ir.graph import Graph, GraphBuilder, Location
from fusegen.ir.index_map import view_chain
from fusegen.ir.ops import Op
from fusegen.passes.algebra import Value

LocalRewrite: TypeAlias = Callable[[Value], Value]
"""Returns the replacement of a value, or the value itself."""

Replace: TypeAlias = Callable[[GraphBuilder, Sequence[int], int], int | None]
"""Adds a node's replacement to a new graph.

Arguments: the new graph's builder, the new indices of all earlier nodes, and the node. None keeps the node, on renumbered operands;
`OUT` drops it, in which case nothing may read it.
"""

OUT = -1


def rebuilt(graph: Graph, replaced: Replace, further: Sequence[int] = ()) -> Graph:
    """Rebuilds a graph with each node replaced by `replaced`.

    The nodes in `further` become additional results. They are nodes of the new graph, and `replaced` may append to the list.
    """
    builder = GraphBuilder.like(graph)
    indices: list[int] = []
    for position, node in graph:
        index = replaced(builder, indices, position)
        if index is None:
            index = builder.add_node(replace(node, args=tuple(indices[a] for a in node.args)), graph.locations[position])
        indices.append(index)
    return builder.build([*(indices[o] for o in graph.outputs), *further], [indices[w] for w in graph.writes])


def subgraph_of(graph: Graph, outputs: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """Returns the subgraph of some outputs, and the old index of each of its nodes."""
    needed = set(outputs)
    for position in range(len(graph.nodes) - 1, -1, -1):
        if position in needed:
            needed.update(graph.nodes[position].args)
    old_indices = sorted(needed.union(p for p, node in graph if node.op in (Op.INPUT, Op.SCALAR)))
    indices = {old: new for new, old in enumerate(old_indices)}
    nodes = tuple(replace(graph.nodes[p], args=tuple(indices[a] for a in graph.nodes[p].args)) for p in old_indices)
    locations = tuple(graph.locations[p] for p in old_indices)
    results = tuple(indices[o] for o in outputs)
    return replace(graph, nodes=nodes, outputs=results, locations=locations, approximate=(), result_names=()), tuple(old_indices)


def copy_after_operands(
    position: int, indices: dict[int, int], operands: Callable[[int], Sequence[int]], make: Callable[[int], int]
) -> int:
    """Adds a value and its missing operands to a new graph, and returns its index. `indices` records all added nodes."""
    stack = [position]
    while stack:
        last = stack[-1]
        missing = [] if last in indices else [a for a in operands(last) if a not in indices]
        if missing:
            stack += missing
        else:
            stack.pop()
            if last not in indices:
                indices[last] = make(last)
    return indices[position]


def rewritten(graph: Graph, rule: LocalRewrite) -> Graph:
    """Applies a rule to all nodes until none changes. A changed result type raises `VerificationError`."""
    settling = _Fixpoint(rule, GraphBuilder.like(graph))
    builder = settling.builder
    indices: list[int] = []
    write_targets = {p for put in graph.puts for p in view_chain(graph, graph.nodes[put].args[0]) if graph.nodes[p].op is Op.GATHER}
    for position, node in graph:
        location = graph.locations[position]
        first = len(builder.nodes)
        rebuilt = type(node)(node.op, tuple(indices[a] for a in node.args), node.attrs, node.shape, node.dtype, node.weak)
        new_index = builder.add_node(rebuilt, location)
        indices.append(
            new_index if position in write_targets else settling.settled(new_index, first, location)
        )  # write targets stay gathers
    outputs = [_result(builder, graph, o, indices[o]) for o in graph.outputs]
    result = builder.build(outputs, [indices[w] for w in graph.writes])
    _check(rule, graph, result)
    return result


def _result(builder: GraphBuilder, graph: Graph, output: int, index: int) -> int:
    """Returns the new index of a result. A result that was rewritten to a mutated tensor becomes a copy."""
    if builder.nodes[index].op is not Op.PUT or graph.nodes[output].op is Op.PUT:
        return index
    return builder.add(Op.COPY, [index], location=graph.locations[output], role="result", write=0)


@dataclass
class _Fixpoint:
    """Rewrites nodes as they are built. `known` maps nodes to their replacements, which later replacements may use."""

    rule: LocalRewrite
    builder: GraphBuilder
    known: dict[int, int] = field(default_factory=dict)

    def settled(self, position: int, first: int, location: Location | None) -> int:
        """Rewrites a node, then the nodes of its replacement from `first` on, to a fixed point."""
        if position in self.known:
            return self.known[position]
        replacement = self.rule(Value(self.builder, position, location))
        if replacement.position != position:
            self.known[position] = self._rewritten_replacement(
                replacement.position, position, first, replacement.location or location
            )
        return self.known.get(position, position)

    def _rewritten_replacement(self, root: int, replaced: int, first: int, location: Location | None) -> int:
        done: dict[int, int] = {}

        def visit(p: int) -> int:
            if p < first or p == replaced:
                return self.known.get(p, p)
            if p not in done:
                node = self.builder.nodes[p]
                args = tuple(visit(a) for a in node.args)
                rebuilt = self.builder.add_node(type(node)(node.op, args, node.attrs, node.shape, node.dtype, node.weak), location)
                done[p] = self.settled(rebuilt, len(self.builder.nodes), location)
            return done[p]

        return visit(root)


def _check(rule: LocalRewrite, before: Graph, after: Graph) -> None:
    for old, new in zip(before.outputs, after.outputs, strict=True):
        a, b = before.nodes[old], after.nodes[new]
        if a.dtype is not b.dtype or a.shape != b.shape:
            raise VerificationError(f"{rule.__name__} changed {a.op!r}: {a.dtype}{a.shape} to {b.dtype}{b.shape}")
