"""Sums of matmuls as one matmul: a @ b + c @ d = [a c] @ [b d], e.g. the gradient of a value that several weights multiply.

A kernel reads one pair of operands after the other where they are, and accumulates all products in the same float32 registers, so
that the sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.gemm.pipelines import has_pairs, last_term, supporting_pipeline, weight_on_load, with_pairs
from fusegen.fusion.groups import Group, matmuls_of
from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal
from fusegen.passes.rewrite import OUT, rebuilt
from fusegen.target import Target

_MOST_TERMS = 8  # each adds tensor maps to the kernel's parameters


@dataclass(frozen=True)
class _Sum:
    """Additions of values that nothing else reads.

    Attributes:
        root: the result.
        inner: the additions before the last one.
        values: the values that are added, without additions.
    """

    root: int
    inner: frozenset[int]
    values: tuple[int, ...]


def summable_matmuls(graph: Graph, target: Target) -> Iterator[frozenset[int]]:
    """Yields the terms of each sum that one matmul could compute. Their operands have the same layout."""
    for each in () if graph.writes else _sums(graph):
        layouts: dict[tuple[str, str, str], list[int]] = {}
        for term in each.values:
            layout = _layout(graph, each, term, target)
            if layout is not None:
                layouts.setdefault(layout, []).append(term)
        terms = max(layouts.values(), key=len, default=[])[:_MOST_TERMS]
        if len(terms) > 1:
            yield frozenset(terms)


def join_sums(graph: Graph) -> Graph:
    """Replaces marked terms of sums by matmuls of concatenated operands, each in the place of the last term."""
    sums = [each for each in _sums(graph) if any(_is_term(graph, p) for p in each.values)]
    return rebuilt(graph, _Joining(graph, sums).replaced) if sums else graph


def are_joined(graph: Graph, groups: Sequence[Group]) -> bool:
    """True if generated kernels compute all matmuls with several pairs of operands."""
    generated = {matmul for group in groups if group.kind is CONTRACTION for matmul in group.core_nodes}
    return all(matmul in generated for matmul in matmuls_of(graph) if has_pairs(graph, matmul))


def depth_of_term(graph: Graph, matmul: int) -> int:
    depth = literal(graph.operands(matmul)[0].shape[-1])
    assert depth is not None  # checked by `_layout`
    return depth


def _sums(graph: Graph) -> Iterator[_Sum]:
    for position, node in graph:
        if node.op is Op.ADD and node.dtype.is_half and not _is_inner(graph, position):
            yield _sum_at(graph, position)


def _is_inner(graph: Graph, position: int) -> bool:
    """True if only another addition of the same shape and type reads a value."""
    node, users = graph.nodes[position], graph.users[position]
    if position in graph.outputs or len(users) != 1:
        return False
    reader = graph.nodes[users[0]]
    is_alike = reader.op is Op.ADD and reader.shape == node.shape and reader.dtype is node.dtype
    return is_alike and reader.args.count(position) == 1


def _sum_at(graph: Graph, root: int) -> _Sum:
    inner, values, stack = set[int](), list[int](), [*graph.nodes[root].args]
    while stack:
        position = stack.pop()
        if graph.nodes[position].op is Op.ADD and _is_inner(graph, position):
            inner.add(position)
            stack += graph.nodes[position].args
        else:
            values.append(position)
    return _Sum(root, frozenset(inner), tuple(sorted(values)))


def _layout(graph: Graph, of: _Sum, term: int, target: Target) -> tuple[str, str, str] | None:
    """Returns the pipeline and the layout of a matmul that can be a term; None for other values."""
    node = graph.nodes[term]
    is_matmul = node.op is Op.MATMUL and node.shape == graph.nodes[of.root].shape and _is_inner(graph, term)
    if not is_matmul or weight_on_load(graph, term) is not None or literal(graph.operands(term)[0].shape[-1]) is None:
        return None
    pipeline = supporting_pipeline(graph, term, term, target)
    operands = None if pipeline is None else pipeline.operands(graph, term)
    return None if pipeline is None or operands is None else (pipeline.name, operands.a_major, operands.b_major)


def _is_term(graph: Graph, position: int) -> bool:
    return graph.nodes[position].op is Op.MATMUL and last_term(graph, position) is not None


class _Joining:
    """Builds the graph in which one matmul has the operands of all marked terms of a sum."""

    def __init__(self, graph: Graph, sums: Sequence[_Sum]) -> None:
        self._graph = graph
        self._by_root = {each.root: each for each in sums}
        self._terms = {max(terms): terms for each in sums if (terms := [p for p in each.values if _is_term(graph, p)])}
        left_out = {p for terms in self._terms.values() for p in terms if p not in self._terms}
        self._left_out = left_out.union(*(each.inner for each in sums))

    def replaced(self, builder: GraphBuilder, renamed: Sequence[int], position: int) -> int | None:
        if position in self._left_out:
            return OUT
        if position in self._terms:
            return self._matmul(builder, renamed, position)
        return self._sum(builder, renamed, self._by_root[position]) if position in self._by_root else None

    def _matmul(self, builder: GraphBuilder, renamed: Sequence[int], last: int) -> int:
        node, location = self._graph.nodes[last], self._graph.locations[last]
        pairs = [[renamed[a] for a in self._graph.nodes[term].args] for term in self._terms[last]]
        first, second = zip(*pairs, strict=True)
        a = builder.add(Op.CONCAT, first, location=location, dim=len(node.shape) - 1)
        b = builder.add(Op.CONCAT, second, location=location, dim=0)
        return builder.add_node(with_pairs(node, (a, b)), location)

    def _sum(self, builder: GraphBuilder, renamed: Sequence[int], of: _Sum) -> int:
        node = self._graph.nodes[of.root]
        total, *others = sorted((p for p in of.values if p not in self._left_out), key=lambda p: p not in self._terms)
        result = renamed[total]
        for other in others:
            result = builder.add_node(replace(node, args=(result, renamed[other])), self._graph.locations[of.root])
        return result
