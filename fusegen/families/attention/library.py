"""Attention that torch computes in one step, forward and backward, without its scores in memory.

A product of softmax weights with values becomes one node where torch's own kernels (cuDNN, flash, efficient; flash on CPUs) know
its scores: a scaled product, plus a bias, with later keys hidden from earlier queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, GraphBuilder, Node, dependent
from fusegen.ir.index_map import strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import literal, nominal, product, same, simplify_dim
from fusegen.passes.algebra import Value
from fusegen.passes.rewrite import rebuilt
from fusegen.target import Target

_HEADS_LAST = (0, 2, 1, 3)
_CHANNELS, _MOST_CHANNELS = 8, 256  # of a head, on GPUs: multiples of the first up to the second
_MOST_DROPPED = 128  # channels of a head, with dropout: all GPUs' flash kernels take them
_MOST_STEPS = 8  # between a product of queries and keys and its softmax: a scale, a bias, a mask, and numbers apart
_MASKS = (Op.WHERE, Op.ADD)


@dataclass(frozen=True)
class _Attention:
    """The parts of one attention.

    Attributes:
        q: queries (…, position, channel).
        keys: (…, channel, position).
        values: (…, position, channel).
        scale: of the scores.
        is_causal: whether a query meets the keys up to its own position alone.
        bias: added to the scores, of their shape or one that broadcasts to it.
        shown: a condition that hides scores where it is False.
        hidden: one that hides them where it is True.
        dropout: the share of the weights that are dropped, by bits of no seed.
    """

    q: int
    keys: int
    values: int
    scale: float
    is_causal: bool = False
    bias: int | None = None
    shown: int | None = None
    hidden: int | None = None
    dropout: float = 0.0

    @property
    def masks(self) -> tuple[int, ...]:
        """The masks that a bias is made of."""
        return tuple(p for p in (self.bias, self.shown, self.hidden) if p is not None)


def with_library_attention(graph: Graph, target: Target, wrt: Collection[str] = (), *, only_dropout: bool = False) -> Graph:
    """The graph with attention as single nodes, where torch computes it on a target.

    Args:
        graph: as traced.
        target: the machine.
        wrt: inputs by which it will be differentiated.
        only_dropout: whether attention without dropout stays as it is.
    """
    wanted = {p for p, node in graph if node.op is Op.INPUT and node.attr("name") in wrt}
    differentiated = dependent(graph, wanted)
    found = {p: a for p, node in graph if node.op is Op.MATMUL and (a := _attention(graph, p, target, differentiated))}
    found = {p: a for p, a in found.items() if a.dropout or not only_dropout}
    if not found:
        return graph

    def replaced(builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
        return _Maker(graph, target, builder, moved, position).made(found[position]) if position in found else None

    return rebuilt(graph, replaced)


# Recognition.


def _attention(graph: Graph, product_: int, target: Target, differentiated: Collection[int]) -> _Attention | None:
    """The attention that a product of weights with values is, or None."""
    weights, values = graph.nodes[product_].args
    kept, dropout = _undropped(graph, weights)
    softmax = _without_cast(graph, kept)
    node = graph.nodes[softmax]
    if node.op not in (Op.SOFTMAX, Op.SAFE_SOFTMAX) or node.attr("dim") != len(node.shape) - 1:
        return None
    found = _scored(graph, _without_cast(graph, node.args[0]), values)
    if found is None or (node.op is Op.SOFTMAX and found.masks):  # whose rows without a score are NaN
        return None
    found = replace(found, dropout=dropout)
    is_alone = all(_is_alone(graph, p) for p in (weights, kept, softmax))
    return found if is_alone and _is_served(graph, found, target, differentiated) else None


def _undropped(graph: Graph, weights: int) -> tuple[int, float]:
    """Weights before dropout by bits of no seed, and the share of them that are dropped."""
    node = graph.nodes[weights]
    if node.op is not Op.MUL:
        return weights, 0.0
    noise = graph.nodes[node.args[1]]
    if noise.op is not Op.WHERE or not _is_alone(graph, node.args[1]):
        return weights, 0.0
    test, scale, zero = (graph.nodes[p] for p in noise.args)
    bits = graph.nodes[test.args[0]] if test.op is Op.GE else test
    is_drawn = bits.op is Op.RANDOM and not bits.args and _is_alone(graph, test.args[0]) and bits.shape == node.shape
    if not is_drawn or scale.op is not Op.CONSTANT or zero.op is not Op.CONSTANT or zero.number:
        return weights, 0.0
    return node.args[0], 1.0 - 1.0 / float(scale.number)


def _is_alone(graph: Graph, position: int) -> bool:
    """True if nothing else needs a value, which would have to be computed anyway."""
    return len(set(graph.users[position])) == 1 and position not in graph.outputs


def _scored(graph: Graph, scores: int, values: int, left: int = _MOST_STEPS) -> _Attention | None:
    """The attention of some scores, down to their product by so many steps at most."""
    node = graph.nodes[scores]
    if not left:
        return None
    if node.op is Op.MATMUL:
        return _Attention(node.args[0], node.args[1], values, scale=1.0)
    if node.op in (Op.MUL, Op.DIV):
        return _scaled(graph, scores, values, left - 1)
    for number, operand in enumerate(node.args if node.op in _MASKS else ()):
        below = _scored(graph, _without_cast(graph, operand), values, left - 1) if _is_score(graph, scores, number) else None
        if below is not None:
            return _masked(graph, scores, number, below)
    return None


def _is_score(graph: Graph, scores: int, number: int) -> bool:
    """True if an operand of a mask or of a sum is of the shape of all scores."""
    node = graph.nodes[scores]
    shape = graph.nodes[node.args[number]].shape
    return (node.op is Op.ADD or number > 0) and len(shape) == len(node.shape) and all(map(same, shape, node.shape))


def _scaled(graph: Graph, scores: int, values: int, left: int) -> _Attention | None:
    node = graph.nodes[scores]
    first, second = node.args
    if node.op is Op.MUL and graph.nodes[first].op is Op.CONSTANT:
        first, second = second, first
    factor = graph.nodes[second]
    if factor.op is not Op.CONSTANT or not math.isfinite(factor.number) or not factor.number:
        return None
    below = _scored(graph, _without_cast(graph, first), values, left)
    if below is None or below.masks or below.is_causal:
        return None
    number = float(factor.number)
    return replace(below, scale=below.scale * number if node.op is Op.MUL else below.scale / number)


def _masked(graph: Graph, scores: int, number: int, below: _Attention) -> _Attention | None:
    """The attention behind a mask, or a sum with a bias; one of each kind at most."""
    node = graph.nodes[scores]
    if node.op is Op.ADD:
        return replace(below, bias=node.args[1 - number]) if not below.masks and not below.is_causal else None
    condition, other = node.args[0], graph.nodes[node.args[3 - number]]
    if other.op is not Op.CONSTANT or other.number != -math.inf or below.masks or below.is_causal:
        return None
    if _is_causal(graph, condition, hides=number == 2):
        return replace(below, is_causal=True)
    return replace(below, shown=condition) if number == 1 else replace(below, hidden=condition)


def _is_causal(graph: Graph, condition: int, *, hides: bool) -> bool:
    """True if a condition is that of a key at or before its query; where it hides, of one behind it."""
    node = graph.nodes[_without_views(graph, condition)]
    if node.op not in (Op.LE, Op.GE, Op.LT, Op.GT) or (node.op in (Op.LE, Op.GE)) is hides:
        return False
    query, key = node.args if node.op in (Op.GE, Op.LT) else node.args[::-1]
    return _counts_along(graph, query, -2) and _counts_along(graph, key, -1)


def _counts_along(graph: Graph, position: int, dim: int) -> bool:
    """True if a value is 0, 1, … along a dim, and alike along all others."""
    shape = graph.nodes[position].shape
    is_count = graph.nodes[_without_views(graph, position)].op is Op.IOTA
    others = [extent for number, extent in enumerate(shape, -len(shape)) if number != dim]
    return is_count and len(shape) >= -dim and all(same(extent, 1) for extent in others)


def _without_views(graph: Graph, position: int) -> int:
    while graph.nodes[position].op in (Op.RESHAPE, Op.EXPAND):
        (position,) = graph.nodes[position].args
    return position


def _without_cast(graph: Graph, position: int) -> int:
    """Below casts between floats that nothing else reads."""
    while graph.nodes[position].op is Op.CAST and graph.nodes[graph.nodes[position].args[0]].dtype.is_float:
        (position,) = graph.nodes[position].args
    return position


# Capabilities.


def _is_served(graph: Graph, found: _Attention, target: Target, differentiated: Collection[int]) -> bool:
    """True if torch's kernels take an attention on a target, and give the gradients that are wanted."""
    q, keys, values = (graph.nodes[p] for p in (found.q, found.keys, found.values))
    rank = len(q.shape)
    leading = all(len(n.shape) == rank and all(map(same, n.shape[:-2], q.shape[:-2])) for n in (keys, values))
    channels = literal(q.shape[-1])
    if rank < 2 or not leading or channels is None or not same(values.shape[-1], channels):
        return False
    if found.scale <= 0:  # torch's kernels subtract the greatest product, and scale the difference
        return False
    if {q.dtype, keys.dtype, values.dtype} != {q.dtype} or not q.dtype.is_float or _is_widened(graph, found):
        return False
    if found.bias is not None and graph.nodes[found.bias].dtype is not q.dtype:
        return False
    is_learned = found.bias in differentiated
    if target.device == "cpu":
        return not is_learned and not found.dropout
    if found.dropout and not _is_dropped_by_flash(graph, found):
        return False
    if q.dtype is DType.FLOAT64 or (q.dtype is DType.FLOAT32 and not differentiated):  # matmuls are more accurate in it
        return False
    fits = channels % _CHANNELS == 0 and channels <= _MOST_CHANNELS
    return fits and (not is_learned or _is_of_all_scores(graph, found))


def _is_dropped_by_flash(graph: Graph, found: _Attention) -> bool:
    """True if the flash kernel takes an attention, whose random bits can be drawn again on the GPU."""
    q, keys = graph.nodes[found.q], graph.nodes[found.keys]
    is_square = not found.is_causal or same(q.shape[-2], keys.shape[-1])
    return not found.masks and is_square and q.dtype.is_half and (literal(q.shape[-1]) or _MOST_CHANNELS) <= _MOST_DROPPED


def _is_widened(graph: Graph, found: _Attention) -> bool:
    """True if operands are of 16 bits as they lie in memory, which kernels of ours read so."""
    given = (graph.nodes[p] for p in (found.q, found.keys, found.values))
    return any(n.op is Op.CAST and n.dtype is DType.FLOAT32 and graph.nodes[n.args[0]].dtype.is_half for n in given)


def _is_of_all_scores(graph: Graph, found: _Attention) -> bool:
    """True if a bias has an element of its own for each score, so that its gradient is no larger than itself."""
    assert found.bias is not None
    shape = (*graph.nodes[found.q].shape[:-1], graph.nodes[found.keys].shape[-1])
    return same(product(graph.nodes[_without_views(graph, found.bias)].shape), product(shape))


# Replacement.


@dataclass(frozen=True)
class _Maker:
    """Puts attention into a graph in the making.

    Attributes:
        graph: as traced.
        target: the machine.
        builder: of the new graph.
        moved: where the nodes before are.
        position: the product of weights with values.
    """

    graph: Graph
    target: Target
    builder: GraphBuilder
    moved: Sequence[int]
    position: int

    def made(self, found: _Attention) -> int:
        """The node that takes the product's place."""
        q, keys, values = (self._value(p) for p in (found.q, found.keys, found.values))
        computed = self._with_heads_last(found)
        q = q if computed is None else computed
        rank = len(keys.node.shape)
        k = keys.apply(Op.PERMUTE, dims=(*range(rank - 2), rank - 1, rank - 2))
        operands = [self._in_four_dims(x) for x in (q, k, values)]
        operands[1:] = _unrepeated(operands)
        bias = self._bias(found, operands[0].dtype)
        given = zip(operands, (found.q, found.keys, found.values), strict=True)
        orders = tuple(self._order(operand, found, position) for operand, position in given)
        orders = orders if computed is None else (_HEADS_LAST, *orders[1:])
        result = operands[0].apply(
            Op.ATTENTION,
            *operands[1:],
            *([] if bias is None else [bias]),
            scale=found.scale,
            causal=found.is_causal,
            dropout=found.dropout,
            result=0,
            order=orders[0],
            orders=orders,
            dtype=operands[0].dtype,
        )
        return result.unpermuted(orders[0]).apply(Op.RESHAPE, shape=self.graph.nodes[self.position].shape).position

    def _with_heads_last(self, found: _Attention) -> Value | None:
        """Queries that are computed of values with heads behind positions, computed so as well: torch leaves the result in their
        order, in which it goes on. None where it does not, or where they lie as they lie."""
        graph, node = self.graph, self.graph.nodes[found.q]
        is_wanted = self.position not in graph.outputs and all(
            graph.nodes[user].op is Op.PERMUTE and graph.nodes[user].attr("dims") == _HEADS_LAST
            for user in graph.users[self.position]
        )
        if not is_wanted or self._is_fixed(node.dtype, found) or len(node.shape) != len(_HEADS_LAST):
            return None
        permuted = Permuted(graph, _HEADS_LAST, self._value)
        leaves = [p for p in permuted.leaves(found.q) or () if len(graph.nodes[p].shape) == len(_HEADS_LAST)]
        whole = [p for p in leaves if all(map(same, graph.nodes[p].shape, node.shape))]
        if not any(_order_in_memory(graph, p, is_transposed=False) == _HEADS_LAST for p in whole):
            return None
        return permuted.value(found.q).unpermuted(_HEADS_LAST)

    def _value(self, position: int) -> Value:
        return Value(self.builder, self.moved[position], self.graph.locations[self.position])

    def _in_four_dims(self, x: Value) -> Value:
        """An operand as (batch, head, …): what is before the last three dims is the batch."""
        shape = x.node.shape
        leading, heads = shape[:-3], shape[-3] if len(shape) > 2 else 1
        return x.apply(Op.RESHAPE, shape=(simplify_dim(product(leading)), heads, *shape[-2:]))

    def _bias(self, found: _Attention, dtype: DType) -> Value | None:
        """The value that is added to the scores: minus infinity where they are hidden."""
        if not found.masks:
            return None
        (mask,) = found.masks
        value = self._value(mask)
        if found.bias is None:
            numbers = (0.0, -math.inf) if found.shown is not None else (-math.inf, 0.0)
            value = value.where(*numbers).apply(Op.CAST, dtype=dtype)
        rank, scores = len(self.graph.nodes[found.q].shape), self.graph.nodes[found.q].shape[:-2]
        shape = (1,) * (rank - len(value.node.shape)) + value.node.shape
        if rank > 4:  # the batch is several dims
            shape = (*scores[:-1], *shape[-3:])
            value = value.apply(Op.EXPAND, shape=shape)
        heads = shape[-3] if rank > 2 else 1
        return value.apply(Op.RESHAPE, shape=(simplify_dim(product(shape[:-3])), heads, *shape[-2:]))

    def _order(self, operand: Value, found: _Attention, position: int) -> tuple[int, ...]:
        """The order of dims in which torch leaves a result that is like an operand: its own, for kernels that take any."""
        if self._is_fixed(operand.dtype, found):
            return _HEADS_LAST
        return _order_in_memory(self.graph, position, is_transposed=position == found.keys)

    def _is_fixed(self, dtype: DType, found: _Attention) -> bool:
        """True if the kernel leaves its result in one order."""
        return self.target.device == "cpu" or bool(found.masks) or dtype is DType.FLOAT32


def _order_in_memory(graph: Graph, position: int, *, is_transposed: bool) -> tuple[int, ...]:
    """Batch, heads and positions as they lie in memory, the outermost first, and then channels."""
    strides = strided_view(graph, position).strides
    rows = strides[-1] if is_transposed else strides[-2]
    outer = [nominal(stride) for stride in (*strides[-4:-2], rows)]
    missing = 3 - len(outer)  # dims of extent 1, which lie anywhere
    return (*range(missing), *sorted(range(missing, 3), key=lambda dim: -outer[dim - missing]), 3)


def _unrepeated(operands: list[Value]) -> list[Value]:
    """Keys and values with each head once, where views repeat both alike."""
    once = [_once(x) for x in operands[1:]]
    heads = [x.node.shape[1] for x in once]
    return once if same(*heads) else operands[1:]


def _once(x: Value) -> Value:
    """(batch, head, …) without what a view repeats each head by."""
    found, swapped = x, False
    while found.node.family is Family.VIEW:
        below = found.arg(0)
        if found.node.op is Op.PERMUTE and found.node.attr("dims") == (0, 1, 3, 2):
            swapped = not swapped
        elif found.node.op is Op.RESHAPE and all(map(same, below.node.shape, found.node.shape)):
            pass
        elif found.node.op is Op.RESHAPE and below.node.op is Op.EXPAND:
            return _before_repetition(x, found, below, swapped=swapped)
        else:
            return x
        found = below
    return x


def _before_repetition(x: Value, repeated: Value, expanded: Value, *, swapped: bool) -> Value:
    once, shape = expanded.arg(0), repeated.node.shape
    batch, heads, count = expanded.node.shape[:3] if len(expanded.node.shape) == 5 else (0, 0, 0)
    fits = len(once.node.shape) == 5 and same(once.node.shape[2], 1) and all(map(same, once.node.shape[:2], (batch, heads)))
    if not fits or literal(heads) is None or literal(count) is None or not all(map(same, expanded.node.shape[3:], shape[2:])):
        return x
    if not all(map(same, once.node.shape[3:], shape[2:])) or not same(shape[1], cast(int, heads) * cast(int, count)):
        return x
    found = once.apply(Op.RESHAPE, shape=(batch, heads, *shape[2:]))
    return found.apply(Op.PERMUTE, dims=(0, 1, 3, 2)) if swapped else found


# A value that is computed point by point, in another order of its dims: the permutation goes down to the views that it is made
# of. Eager torch computes so as well: a result of views that are permuted alike has their order in memory.


_MOST = 64  # nodes that are computed again
_ALONG_A_DIM = (Op.SLICE, Op.CONCAT)


@dataclass
class Permuted:
    """Values in an order of dims, as they come to be in a new graph.

    Args:
        graph: the old graph.
        order: the old dims in their new order.
        at: a value of the old graph in the new one.
    """

    graph: Graph
    order: tuple[int, ...]
    at: Callable[[int], Value]
    _made: dict[int, Value] = field(default_factory=dict)

    def leaves(self, position: int) -> frozenset[int] | None:
        """The values that a value is computed of, which lie in memory or are views; None where it is one of these, or is computed
        in another way than point by point."""
        found: set[int] = set()
        seen = {position}
        stack = [position]
        while stack:
            node = self.graph.nodes[stack.pop()]
            if not self._is_computed(node):
                return None
            for arg in node.args:
                if arg not in seen:
                    seen.add(arg)
                    (found.add if self._is_leaf(arg) else stack.append)(arg)
            if len(seen) > _MOST:
                return None
        return frozenset(found)

    def value(self, position: int) -> Value:
        """A value of which `leaves` are known, in the new order."""
        if position not in self._made:
            self._made[position] = self._leaf(position) if self._is_leaf(position) else self._computed(position)
        return self._made[position]

    def _is_computed(self, node: Node) -> bool:
        is_ours = node.op in _ALONG_A_DIM or node.family is Family.POINTWISE
        return is_ours and not node.numbers and len(node.shape) == len(self.order)

    def _is_leaf(self, position: int) -> bool:
        """True if a value is a view, a number, or lies in memory."""
        node = self.graph.nodes[position]
        if node.op is Op.SLICE:
            return self._is_leaf(node.args[0])
        return node.op is not Op.CONCAT and node.family in (Family.VIEW, Family.LEAF, Family.CONTRACTION)

    def _leaf(self, position: int) -> Value:
        value, missing = self.at(position), len(self.order) - len(self.graph.nodes[position].shape)
        if missing == len(self.order):
            return value  # a number
        if missing:
            value = value.apply(Op.RESHAPE, shape=(1,) * missing + value.node.shape)
        return value.apply(Op.PERMUTE, dims=self.order)

    def _computed(self, position: int) -> Value:
        node = self.graph.nodes[position]
        args = tuple(self.value(arg).position for arg in node.args)
        shape = tuple(node.shape[dim] for dim in self.order)
        attrs = dict(node.attrs)
        if node.op in _ALONG_A_DIM:
            attrs["dim"] = self.order.index(cast(int, attrs["dim"]))
        here = self.at(node.args[0])
        changed = replace(node, args=args, shape=shape, attrs=tuple(attrs.items()))
        return Value(here.builder, here.builder.put(changed, here.location), here.location)
