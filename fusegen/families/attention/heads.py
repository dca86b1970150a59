"""Rewrites attention to the four dims of its kernel: batch, head, position, channel.

A function may also write attention without a batch or heads, with both merged for `torch.bmm`, or with heads in groups that share
keys. Merged operands need copies, since a row of a projection holds all heads. With separate dims, each operand is a view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from fusegen.families.attention.match import Recurrence, match_weighted_sum
from fusegen.families.attention.operands import operands_of
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.index_map import strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape, exact_quotient, product, same, simplify_dim
from fusegen.passes.rewrite import rebuilt
from fusegen.target import Target

_Leading: TypeAlias = tuple[Dim, Dim]


@dataclass(frozen=True)
class _Attention:
    """Attention with separate dims of batch and heads; `inside` holds the values from the scores to pointwise users of the
    result."""

    recurrence: Recurrence
    inside: frozenset[int] = field(repr=False)

    def operands(self, graph: Graph) -> list[tuple[int, Node]]:
        """Returns queries, keys and values, each with the matmul that reads it."""
        scores, values = graph.nodes[self.recurrence.score_product], graph.nodes[self.recurrence.values]
        return [*((a, scores) for a in scores.args), (values.args[1], values)]


def attention_in_four_dims(graph: Graph, target: Target) -> Graph:
    """Rewrites attention over other leading dims to (batch, head, query, key), if that helps the attention kernel to read its
    operands."""
    leading: dict[int, _Leading] = {}
    for position, _ in graph:
        attention = _attention_at(graph, position)
        chosen = None if attention is None else _best_leading(graph, attention, target)
        if attention is not None and chosen is not None:
            leading |= dict.fromkeys(attention.inside - leading.keys(), chosen)
    return rebuilt(graph, _InFourDims(graph, leading).replaced) if leading else graph


def _attention_at(graph: Graph, values: int) -> _Attention | None:
    """Returns the attention whose second matmul is a node; None if there is none or it has four dims already."""
    node = graph.nodes[values]
    recurrence = match_weighted_sum(graph, values, _same_matrices(graph, node.args[0])) if node.op is Op.MATMUL else None
    if recurrence is None:
        return None
    inside = _values_between(graph, recurrence.score_product, values) | _pointwise_users(graph, values)
    shapes = [graph.nodes[p].shape[:-2] for p in inside]
    total = product(graph.nodes[recurrence.score_product].shape[:-2])
    has_total = all(same(product(leading), total) for leading in shapes)
    if not has_total or not all(_keeps_matrices(graph, p, recurrence) for p in inside):
        return None
    is_known = all(len(leading) == 2 and all(map(same, leading, shapes[0])) for leading in shapes)
    return None if is_known else _Attention(recurrence, inside)


def _same_matrices(graph: Graph, position: int) -> int:
    """Skips views that keep the last two dims."""
    while graph.nodes[position].op is Op.RESHAPE and _keeps_matrix_dims(graph, position):
        (position,) = graph.nodes[position].args
    return position


def _keeps_matrix_dims(graph: Graph, reshape: int) -> bool:
    (operand,) = graph.operands(reshape)
    return len(operand.shape) >= 2 and all(map(same, graph.nodes[reshape].shape[-2:], operand.shape[-2:]))


def _values_between(graph: Graph, first: int, last: int) -> frozenset[int]:
    """Returns the values on all paths from one value to another, including both."""
    reached, stack = {last}, [last]
    while stack:
        operands = [a for a in graph.nodes[stack.pop()].args if a >= first and a not in reached]
        reached.update(operands)
        stack += operands
    inside = {first}
    for position in sorted(reached):
        if not inside.isdisjoint(graph.nodes[position].args):
            inside.add(position)
    return frozenset(inside)


def _pointwise_users(graph: Graph, values: int) -> frozenset[int]:
    """Returns the pointwise users of a matmul's elements, up to the first value with another use."""
    pointwise, stack, shape = set[int](), [values], graph.nodes[values].shape
    while stack:
        position = stack.pop()
        users = [(user, graph.nodes[user]) for user in graph.users[position]]
        if position not in graph.outputs and all(n.family is Family.POINTWISE and n.shape == shape for _, n in users):
            stack += [user for user, _ in users if user not in pointwise]
            pointwise.update(user for user, _ in users)
    return frozenset(pointwise)


def _keeps_matrices(graph: Graph, position: int, recurrence: Recurrence) -> bool:
    """True if a node computes each (query, key) matrix separately."""
    node = graph.nodes[position]
    if node.op is Op.MATMUL:
        return position in (recurrence.score_product, recurrence.values)
    if node.family is Family.REDUCTION:
        return node.attr("dims") == (len(node.shape) - 1,)
    if node.op is Op.RESHAPE:
        return _keeps_matrix_dims(graph, position)
    return node.family is Family.POINTWISE


def _best_leading(graph: Graph, attention: _Attention, target: Target) -> _Leading | None:
    """Returns the batch and heads that the attention kernel can read with the fewest copies of operands.

    If it can read none of them, returns those that need the fewest copies. None if that does not improve the graph.
    """
    current = (False, -_copies(graph, [p for p, _ in attention.operands(graph)]))
    ranked = {leading: _rating(graph, attention, leading, target) for leading in _candidates(graph, attention)}
    best = max(ranked, key=lambda leading: ranked[leading])  # the first of the best
    return best if ranked[best] > current else None


def _rating(graph: Graph, attention: _Attention, leading: _Leading, target: Target) -> tuple[bool, int]:
    """Returns whether the attention kernel can read q, k and v with this batch and heads, and the negative number of copies."""
    builder = GraphBuilder.like(graph)
    builder.nodes, builder.locations = list(graph.nodes), list(graph.locations)
    q, keys, values = (_lifted(builder, p, user, leading) for p, user in attention.operands(graph))
    trial = replace(graph, nodes=tuple(builder.nodes), locations=tuple(builder.locations))
    return operands_of(trial, q, keys, values, target) is not None, -_copies(trial, (q, keys, values))


def _copies(graph: Graph, operands: Sequence[int]) -> int:
    """Returns the number of operands that must be copied, because strides cannot describe them."""
    return sum(graph.nodes[strided_view(graph, p).base].family is Family.VIEW for p in operands)


def _candidates(graph: Graph, attention: _Attention) -> list[_Leading]:
    """Returns the batch and heads of all views of operands, and all ways to split the leading dims."""
    values, shapes = graph.nodes[attention.recurrence.values], [graph.nodes[p].shape for p in sorted(attention.inside)]
    total, channels = product(values.shape[:-2]), values.shape[-1]
    candidates: list[_Leading] = [(shape[0], shape[1]) for shape in shapes if len(shape) == 4]
    for operand, _ in attention.operands(graph):
        for dims in _dims_below(graph, operand):
            for first, second in pairwise(dims):
                heads = exact_quotient(second, channels)
                pairs = [(first, second), *([] if heads is None else [(first, heads)])]
                candidates += [pair for pair in pairs if same(product(pair), total)]
    for shape in shapes:
        splits = ((shape[:k], shape[k:-2]) for k in range(len(shape) - 2, -1, -1))
        candidates += [(simplify_dim(product(batch)), simplify_dim(product(heads))) for batch, heads in splits]
    return list(dict.fromkeys(candidates))


def _dims_below(graph: Graph, position: int) -> Iterator[Shape]:
    """Yields the shapes of a value before its reshapes and permutations."""
    while graph.nodes[position].op in (Op.RESHAPE, Op.PERMUTE):
        (position,) = graph.nodes[position].args
        yield graph.nodes[position].shape


def _lifted(builder: GraphBuilder, position: int, user: Node, leading: _Leading) -> int:
    """Reshapes an operand to the batch and heads of its reader in four dims."""
    shape, target = builder.nodes[position].shape, user.shape[:-2]
    if len(shape) < 2 or (len(shape) == 2 and target and user.op is not Op.MATMUL):
        return position  # shared by all batches and heads
    outer, matrix = (1,) * (len(target) + 2 - len(shape)) + shape[:-2], shape[-2:]
    if all(same(extent, 1) for extent in outer):
        return _reshaped(builder, position, (1, 1, *matrix))
    if len(target) == 2 and all(map(same, target, leading)):
        return _reshaped(builder, position, (*outer, *matrix))
    if not all(map(same, outer, target)):
        position = _reshaped(builder, position, (*outer, *matrix))
        position = builder.add(Op.EXPAND, (position,), location=builder.locations[position], shape=(*target, *matrix))
    return _reshaped(builder, position, (*leading, *matrix))


def _reshaped(builder: GraphBuilder, position: int, shape: Shape) -> int:
    if builder.nodes[position].shape == shape:
        return position
    return builder.add(Op.RESHAPE, (position,), location=builder.locations[position], shape=shape)


class _InFourDims:
    """Rebuilds a graph with some values in four dims, given their batch and heads."""

    def __init__(self, graph: Graph, leading: dict[int, _Leading]) -> None:
        self.graph = graph
        self.leading = leading

    def replaced(self, builder: GraphBuilder, renamed: Sequence[int], position: int) -> int | None:
        """Builds a value in four dims, reshaped to its old dims for other readers; views that cancel are removed later."""
        if position not in self.leading:
            return None
        self.builder, node = builder, self.graph.nodes[position]
        return _reshaped(builder, self._in_four_dims(position, node, [renamed[a] for a in node.args]), node.shape)

    def _in_four_dims(self, position: int, node: Node, arguments: Sequence[int]) -> int:
        leading, location = self.leading[position], self.graph.locations[position]
        shape = (*leading, *node.shape[-2:])
        if node.op is Op.RESHAPE:
            return _reshaped(self.builder, arguments[0], shape)
        args = tuple(_lifted(self.builder, a, node, leading) for a in arguments)
        if node.family is Family.POINTWISE:
            return self.builder.add_node(replace(node, args=args, shape=shape), location)
        attrs = dict(node.attrs) | ({"dims": (3,)} if node.family is Family.REDUCTION else {})
        return self.builder.add(node.op, args, location=location, **attrs)
