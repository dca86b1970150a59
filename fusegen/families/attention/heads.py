"""Attention in the four dims that its kernel knows: batch, head, position, channel.

It is written in others too: of one matrix, of a batch without heads, of batch and heads merged for `torch.bmm`, of groups of heads
that share keys. Merged, each operand is a copy, since heads lie within a row of a projection; apart, each is a view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from fusegen.families.attention.match import Recurrence, operands_of, weighted
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.index_map import strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape, exact_quotient, product, same, simplify_dim
from fusegen.passes.rewrite import rebuilt

_Leading: TypeAlias = tuple[Dim, Dim]
"""Batch and heads."""


@dataclass(frozen=True)
class _Attention:
    """Attention whose batch and heads are dims of their own.

    Attributes:
        recurrence: q, keys and values are operands of its products.
        inside: from the scores to what is computed point by point of the result.
    """

    recurrence: Recurrence
    inside: frozenset[int] = field(repr=False)

    def operands(self, graph: Graph) -> list[tuple[int, Node]]:
        """Queries, keys and values, each with the product that reads it."""
        scores, values = graph.nodes[self.recurrence.score_product], graph.nodes[self.recurrence.values]
        return [*((a, scores) for a in scores.args), (values.args[1], values)]


def attention_in_four_dims(graph: Graph) -> Graph:
    """The graph with attention over (batch, head, query, key), wherever it can be read so."""
    leading: dict[int, _Leading] = {}
    for position, _ in graph:
        found = _attention_at(graph, position)
        chosen = None if found is None else _chosen(graph, found)
        if found is not None and chosen is not None:
            leading |= dict.fromkeys(found.inside - leading.keys(), chosen)
    return rebuilt(graph, _InFourDims(graph, leading).replaced) if leading else graph


def _attention_at(graph: Graph, values: int) -> _Attention | None:
    """Attention whose second product is a node, where some of it is in other dims; None where there is none."""
    node = graph.nodes[values]
    recurrence = weighted(graph, values, _same_matrices(graph, node.args[0])) if node.op is Op.MATMUL else None
    if recurrence is None:
        return None
    inside = _between(graph, recurrence.score_product, values) | _point_by_point(graph, values)
    shapes = [graph.nodes[p].shape[:-2] for p in inside]
    whole = product(graph.nodes[recurrence.score_product].shape[:-2])
    is_whole = all(same(product(leading), whole) for leading in shapes)
    if not is_whole or not all(_keeps_matrices(graph, p, recurrence) for p in inside):
        return None
    is_known = all(len(leading) == 2 and all(map(same, leading, shapes[0])) for leading in shapes)
    return None if is_known else _Attention(recurrence, inside)


def _same_matrices(graph: Graph, position: int) -> int:
    """The value below views that keep the last two dims."""
    while graph.nodes[position].op is Op.RESHAPE and _is_of_same_matrices(graph, position):
        (position,) = graph.nodes[position].args
    return position


def _is_of_same_matrices(graph: Graph, reshape: int) -> bool:
    (operand,) = graph.operands(reshape)
    return len(operand.shape) >= 2 and all(map(same, graph.nodes[reshape].shape[-2:], operand.shape[-2:]))


def _between(graph: Graph, first: int, last: int) -> frozenset[int]:
    """The producers of a value that are computed from another one; both of them too."""
    reached, stack = {last}, [last]
    while stack:
        news = [a for a in graph.nodes[stack.pop()].args if a >= first and a not in reached]
        reached.update(news)
        stack += news
    inside = {first}
    for position in sorted(reached):
        if not inside.isdisjoint(graph.nodes[position].args):
            inside.add(position)
    return frozenset(inside)


def _point_by_point(graph: Graph, values: int) -> frozenset[int]:
    """Values that are computed point by point of all elements of a product, up to the first with another use."""
    found, stack, shape = set[int](), [values], graph.nodes[values].shape
    while stack:
        position = stack.pop()
        users = [(user, graph.nodes[user]) for user in graph.users[position]]
        if position not in graph.outputs and all(n.family is Family.POINTWISE and n.shape == shape for _, n in users):
            stack += [user for user, _ in users if user not in found]
            found.update(user for user, _ in users)
    return frozenset(found)


def _keeps_matrices(graph: Graph, position: int, recurrence: Recurrence) -> bool:
    """True if a node is computed of each matrix of (query, key) by itself."""
    node = graph.nodes[position]
    if node.op is Op.MATMUL:
        return position in (recurrence.score_product, recurrence.values)
    if node.family is Family.REDUCTION:
        return node.attr("dims") == (len(node.shape) - 1,)
    if node.op is Op.RESHAPE:
        return _is_of_same_matrices(graph, position)
    return node.family is Family.POINTWISE


def _chosen(graph: Graph, attention: _Attention) -> _Leading | None:
    """Batch and heads as the attention kernel reads them, with the fewest copies of operands. Where it cannot, those for which
    products have fewer copies than as it is written; None where there are none such."""
    written = (False, -_copies(graph, [p for p, _ in attention.operands(graph)]))
    ranked = {leading: _merit(graph, attention, leading) for leading in _candidates(graph, attention)}
    best = max(ranked, key=lambda leading: ranked[leading])  # the first of equals
    return best if ranked[best] > written else None


def _merit(graph: Graph, attention: _Attention, leading: _Leading) -> tuple[bool, int]:
    """True if the attention kernel reads q, keys and values with some batch and heads; fewer copies are more."""
    builder = GraphBuilder.like(graph)
    builder.nodes, builder.locations = list(graph.nodes), list(graph.locations)
    q, keys, values = (_lifted(builder, p, user, leading) for p, user in attention.operands(graph))
    trial = replace(graph, nodes=tuple(builder.nodes), locations=tuple(builder.locations))
    return operands_of(trial, q, keys, values) is not None, -_copies(trial, (q, keys, values))


def _copies(graph: Graph, operands: Sequence[int]) -> int:
    """The number of operands that no strides can describe."""
    return sum(graph.nodes[strided_view(graph, p).base].family is Family.VIEW for p in operands)


def _candidates(graph: Graph, attention: _Attention) -> list[_Leading]:
    """Batch and heads as some view of an operand has them, and the ways to divide the dims that there are."""
    values, shapes = graph.nodes[attention.recurrence.values], [graph.nodes[p].shape for p in sorted(attention.inside)]
    whole, channels = product(values.shape[:-2]), values.shape[-1]
    found: list[_Leading] = [(shape[0], shape[1]) for shape in shapes if len(shape) == 4]
    for operand, _ in attention.operands(graph):
        for dims in _dims_below(graph, operand):
            for first, second in pairwise(dims):
                heads = exact_quotient(second, channels)
                pairs = [(first, second), *([] if heads is None else [(first, heads)])]
                found += [pair for pair in pairs if same(product(pair), whole)]
    for shape in shapes:
        parts = ((shape[:k], shape[k:-2]) for k in range(len(shape) - 2, -1, -1))
        found += [(simplify_dim(product(batch)), simplify_dim(product(heads))) for batch, heads in parts]
    return list(dict.fromkeys(found))


def _dims_below(graph: Graph, position: int) -> Iterator[Shape]:
    """The shapes that views have made a value of."""
    while graph.nodes[position].op in (Op.RESHAPE, Op.PERMUTE):
        (position,) = graph.nodes[position].args
        yield graph.nodes[position].shape


def _lifted(builder: GraphBuilder, position: int, user: Node, leading: _Leading) -> int:
    """An operand of a node, with batch and heads as the node has them in four dims."""
    shape, wanted = builder.nodes[position].shape, user.shape[:-2]
    if len(shape) < 2 or (len(shape) == 2 and wanted and user.op is not Op.MATMUL):
        return position  # read alike for each batch and head
    own, matrix = (1,) * (len(wanted) + 2 - len(shape)) + shape[:-2], shape[-2:]
    if all(same(extent, 1) for extent in own):
        return _reshaped(builder, position, (1, 1, *matrix))
    if len(wanted) == 2 and all(map(same, wanted, leading)):
        return _reshaped(builder, position, (*own, *matrix))
    if not all(map(same, own, wanted)):
        position = _reshaped(builder, position, (*own, *matrix))
        position = builder.add(Op.EXPAND, (position,), location=builder.locations[position], shape=(*wanted, *matrix))
    return _reshaped(builder, position, (*leading, *matrix))


def _reshaped(builder: GraphBuilder, position: int, shape: Shape) -> int:
    if builder.nodes[position].shape == shape:
        return position
    return builder.add(Op.RESHAPE, (position,), location=builder.locations[position], shape=shape)


class _InFourDims:
    """Rebuilds a graph with some values in four dims.

    Args:
        leading: those values, with their batch and heads.
    """

    def __init__(self, graph: Graph, leading: dict[int, _Leading]) -> None:
        self.graph = graph
        self.leading = leading

    def replaced(self, builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        """A value in four dims. It has its old dims again, for those that read it so; views back and forth vanish afterwards."""
        if position not in self.leading:
            return None
        self.builder, node = builder, self.graph.nodes[position]
        return _reshaped(builder, self._apart(position, node, [moved[a] for a in node.args]), node.shape)

    def _apart(self, position: int, node: Node, given: Sequence[int]) -> int:
        leading, location = self.leading[position], self.graph.locations[position]
        shape = (*leading, *node.shape[-2:])
        if node.op is Op.RESHAPE:
            return _reshaped(self.builder, given[0], shape)
        args = tuple(_lifted(self.builder, a, node, leading) for a in given)
        if node.family is Family.POINTWISE:
            return self.builder.put(replace(node, args=args, shape=shape), location)
        attrs = dict(node.attrs) | ({"dims": (3,)} if node.family is Family.REDUCTION else {})
        return self.builder.add(node.op, args, location=location, **attrs)
