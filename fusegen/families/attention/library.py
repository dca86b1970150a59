"""Replaces attention by torch's own kernels (cuDNN, flash, efficient; flash on CPUs), which do not materialize the scores.

They support scores that are a scaled matmul, plus a bias, possibly causal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from fusegen.dtypes import DType
from fusegen.families.attention.match import is_supported
from fusegen.families.attention.operands import operands_of
from fusegen.ir.graph import Graph, GraphBuilder, Node, dependent
from fusegen.ir.index_map import strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import literal, nominal, product, same, simplify_dim
from fusegen.passes.algebra import Value
from fusegen.passes.rewrite import rebuilt
from fusegen.target import Target

_HEADS_LAST = (0, 2, 1, 3)
_CHANNELS, _MOST_CHANNELS = 8, 256  # head dims on GPUs: multiples of the first up to the second
_MOST_DROPPED = 128  # the largest head dim with dropout: flash kernels of all GPUs support it
_MOST_STEPS = 8  # operations between the matmul and its softmax: scale, bias, mask, and further factors
_MASKS = (Op.WHERE, Op.ADD)


@dataclass(frozen=True)
class _Attention:
    """The parts of one attention.

    Attributes:
        q, keys, values: (…, position, channel), (…, channel, position), (…, position, channel).
        bias: added to the scores, of a shape that broadcasts to theirs.
        shown, hidden: conditions on scores; scores are masked where `shown` is False or `hidden` is True.
        dropout: the dropout probability of the weights, with random bits without a seed.
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
        """The values that the bias is computed from."""
        return tuple(p for p in (self.bias, self.shown, self.hidden) if p is not None)


def with_library_attention(graph: Graph, target: Target, wrt: Collection[str] = (), *, only_dropout: bool = False) -> Graph:
    """Replaces attention by single nodes where torch's kernels support it on a target; `wrt` are the inputs with gradients. With
    `only_dropout`, attention without dropout stays as it is."""
    inputs = {p for p, node in graph if node.op is Op.INPUT and node.attr("name") in wrt}
    differentiated = frozenset(dependent(graph, inputs))
    matches = {p: a for p, node in graph if node.op is Op.MATMUL and (a := _attention(graph, p, target, differentiated))}
    matches = {p: a for p, a in matches.items() if a.dropout or not only_dropout}
    if not matches:
        return graph

    def replaced(builder: GraphBuilder, renamed: Sequence[int], position: int) -> int | None:
        return _Builder(graph, target, builder, renamed, position).built(matches[position]) if position in matches else None

    return rebuilt(graph, replaced)


# Matching.


def _attention(graph: Graph, product_: int, target: Target, differentiated: frozenset[int]) -> _Attention | None:
    """Returns the attention that a matmul of weights with values is, or None."""
    weights, values = graph.nodes[product_].args
    undropped, dropout = _without_dropout(graph, weights)
    softmax = _without_cast(graph, undropped)
    node = graph.nodes[softmax]
    if node.op not in (Op.SOFTMAX, Op.SAFE_SOFTMAX) or node.attr("dim") != len(node.shape) - 1:
        return None
    attention = _match_scores(graph, _without_cast(graph, node.args[0]), values)
    if attention is None or (node.op is Op.SOFTMAX and attention.masks):  # softmax is NaN for fully masked rows
        return None
    attention = replace(attention, dropout=dropout)
    is_alone = all(_has_one_reader(graph, p) for p in (weights, undropped, softmax))
    if not is_alone or not _is_supported(graph, attention, target, differentiated):
        return None
    is_constant = differentiated.isdisjoint((attention.q, attention.keys, attention.values))
    return None if is_constant and _reads_cache(graph, attention, target) else attention


def _reads_cache(graph: Graph, attention: _Attention, target: Target) -> bool:
    """True if a generated kernel reads keys and values where torch needs copies: in pages, or up to lengths in memory. Where a cost
    model compares both, this is left to it."""
    if target.wgmma:
        return False
    operands = operands_of(graph, attention.q, attention.keys, attention.values, target)
    if operands is None or (operands.table is None and operands.present_keys is None):
        return False
    return is_supported(operands, target)


def _without_dropout(graph: Graph, weights: int) -> tuple[int, float]:
    """Returns the weights before unseeded dropout, and the dropout probability."""
    node = graph.nodes[weights]
    if node.op is not Op.MUL:
        return weights, 0.0
    noise = graph.nodes[node.args[1]]
    if noise.op is not Op.WHERE or not _has_one_reader(graph, node.args[1]):
        return weights, 0.0
    test, scale, zero = (graph.nodes[p] for p in noise.args)
    bits = graph.nodes[test.args[0]] if test.op is Op.GE else test
    is_drawn = bits.op is Op.RANDOM and not bits.args and _has_one_reader(graph, test.args[0]) and bits.shape == node.shape
    if not is_drawn or scale.op is not Op.CONSTANT or zero.op is not Op.CONSTANT or zero.number:
        return weights, 0.0
    return node.args[0], 1.0 - 1.0 / float(scale.number)


def _has_one_reader(graph: Graph, position: int) -> bool:
    """True if a value has exactly one reader and is not an output."""
    return len(set(graph.users[position])) == 1 and position not in graph.outputs


def _match_scores(graph: Graph, scores: int, values: int, steps: int = _MOST_STEPS) -> _Attention | None:
    """Matches scores: a matmul, scaled or masked by at most `steps` operations. Returns their attention, or None."""
    node = graph.nodes[scores]
    if not steps:
        return None
    if node.op is Op.MATMUL:
        return _Attention(node.args[0], node.args[1], values, scale=1.0)
    if node.op in (Op.MUL, Op.DIV):
        return _scaled(graph, scores, values, steps - 1)
    for index, operand in enumerate(node.args if node.op in _MASKS else ()):
        attention = (
            _match_scores(graph, _without_cast(graph, operand), values, steps - 1) if _is_score(graph, scores, index) else None
        )
        if attention is not None:
            return _masked(graph, scores, index, attention)
    return None


def _is_score(graph: Graph, scores: int, index: int) -> bool:
    node = graph.nodes[scores]
    shape = graph.nodes[node.args[index]].shape
    return (node.op is Op.ADD or index > 0) and len(shape) == len(node.shape) and all(map(same, shape, node.shape))


def _scaled(graph: Graph, scores: int, values: int, steps: int) -> _Attention | None:
    node = graph.nodes[scores]
    first, second = node.args
    if node.op is Op.MUL and graph.nodes[first].op is Op.CONSTANT:
        first, second = second, first
    factor = graph.nodes[second]
    if factor.op is not Op.CONSTANT or not math.isfinite(factor.number) or not factor.number:
        return None
    attention = _match_scores(graph, _without_cast(graph, first), values, steps)
    if attention is None or attention.masks or attention.is_causal:
        return None
    number = float(factor.number)
    return replace(attention, scale=attention.scale * number if node.op is Op.MUL else attention.scale / number)


def _masked(graph: Graph, scores: int, index: int, attention: _Attention) -> _Attention | None:
    """Adds a mask or a bias to an attention; None if it already has one."""
    node = graph.nodes[scores]
    if node.op is Op.ADD:
        return replace(attention, bias=node.args[1 - index]) if not attention.masks and not attention.is_causal else None
    condition, alternative = node.args[0], graph.nodes[node.args[3 - index]]
    if alternative.op is not Op.CONSTANT or alternative.number != -math.inf or attention.masks or attention.is_causal:
        return None
    if _is_causal(graph, condition, hides=index == 2):
        return replace(attention, is_causal=True)
    return replace(attention, shown=condition) if index == 1 else replace(attention, hidden=condition)


def _is_causal(graph: Graph, condition: int, *, hides: bool) -> bool:
    """True if a condition selects the keys up to the query; with `hides`, if it selects the keys after the query."""
    node = graph.nodes[_without_views(graph, condition)]
    if node.op not in (Op.LE, Op.GE, Op.LT, Op.GT) or (node.op in (Op.LE, Op.GE)) is hides:
        return False
    query, key = node.args if node.op in (Op.GE, Op.LT) else node.args[::-1]
    return _is_iota_along(graph, query, -2) and _is_iota_along(graph, key, -1)


def _is_iota_along(graph: Graph, position: int, dim: int) -> bool:
    """True if a value is 0, 1, … along a dim, and constant along all others."""
    shape = graph.nodes[position].shape
    is_count = graph.nodes[_without_views(graph, position)].op is Op.IOTA
    extents = [extent for number, extent in enumerate(shape, -len(shape)) if number != dim]
    return is_count and len(shape) >= -dim and all(same(extent, 1) for extent in extents)


def _without_views(graph: Graph, position: int) -> int:
    while graph.nodes[position].op in (Op.RESHAPE, Op.EXPAND):
        (position,) = graph.nodes[position].args
    return position


def _without_cast(graph: Graph, position: int) -> int:
    """Skips casts between float types."""
    while graph.nodes[position].op is Op.CAST and graph.nodes[graph.nodes[position].args[0]].dtype.is_float:
        (position,) = graph.nodes[position].args
    return position


# Capabilities.


def _is_supported(graph: Graph, attention: _Attention, target: Target, differentiated: Collection[int]) -> bool:
    """True if torch's kernels support an attention on a target, with the gradients that are needed."""
    q, keys, values = (graph.nodes[p] for p in (attention.q, attention.keys, attention.values))
    rank = len(q.shape)
    leading = all(len(n.shape) == rank and all(map(same, n.shape[:-2], q.shape[:-2])) for n in (keys, values))
    channels = literal(q.shape[-1])
    if rank < 2 or not leading or channels is None or not same(values.shape[-1], channels):
        return False
    if attention.scale <= 0:  # torch's kernels subtract the greatest unscaled score before they scale the difference
        return False
    if {q.dtype, keys.dtype, values.dtype} != {q.dtype} or not q.dtype.is_float or _is_widened(graph, attention):
        return False
    if attention.bias is not None and graph.nodes[attention.bias].dtype is not q.dtype:
        return False
    is_learned = attention.bias in differentiated
    if target.device == "cpu":
        return not is_learned and not attention.dropout
    if attention.dropout and not _is_dropped_by_flash(graph, attention):
        return False
    if q.dtype is DType.FLOAT64 or (q.dtype is DType.FLOAT32 and not differentiated):  # float32 matmuls are more accurate
        return False
    fits = channels % _CHANNELS == 0 and channels <= _MOST_CHANNELS
    return fits and (not is_learned or _has_element_per_score(graph, attention))


def _is_dropped_by_flash(graph: Graph, attention: _Attention) -> bool:
    """True if the flash kernel supports an attention with dropout. Its backward pass draws the same random bits again."""
    q, keys = graph.nodes[attention.q], graph.nodes[attention.keys]
    is_square = not attention.is_causal or same(q.shape[-2], keys.shape[-1])
    return not attention.masks and is_square and q.dtype.is_half and (literal(q.shape[-1]) or _MOST_CHANNELS) <= _MOST_DROPPED


def _is_widened(graph: Graph, attention: _Attention) -> bool:
    """True if operands are converted to float32 from 16-bit values in memory: generated kernels read the values directly."""
    operands = (graph.nodes[p] for p in (attention.q, attention.keys, attention.values))
    return any(n.op is Op.CAST and n.dtype is DType.FLOAT32 and graph.nodes[n.args[0]].dtype.is_half for n in operands)


def _has_element_per_score(graph: Graph, attention: _Attention) -> bool:
    """True if a bias has one element per score, so that its gradient is not larger than itself."""
    assert attention.bias is not None
    shape = (*graph.nodes[attention.q].shape[:-1], graph.nodes[attention.keys].shape[-1])
    return same(product(graph.nodes[_without_views(graph, attention.bias)].shape), product(shape))


# Replacement.


@dataclass(frozen=True)
class _Builder:
    """Builds attention nodes at the position of the second matmul; `renamed` maps positions to the new graph."""

    graph: Graph
    target: Target
    builder: GraphBuilder
    renamed: Sequence[int]
    position: int

    def built(self, attention: _Attention) -> int:
        q, keys, values = (self._value(p) for p in (attention.q, attention.keys, attention.values))
        computed = self._with_heads_last(attention)
        q = q if computed is None else computed
        rank = len(keys.node.shape)
        k = keys.apply(Op.PERMUTE, dims=(*range(rank - 2), rank - 1, rank - 2))
        operands = [self._in_four_dims(x) for x in (q, k, values)]
        operands[1:] = _without_repetition(operands)
        bias = self._bias(attention, operands[0].dtype)
        pairs = zip(operands, (attention.q, attention.keys, attention.values), strict=True)
        orders = tuple(self._order(operand, attention, position) for operand, position in pairs)
        orders = orders if computed is None else (_HEADS_LAST, *orders[1:])
        result = operands[0].apply(
            Op.ATTENTION,
            *operands[1:],
            *([] if bias is None else [bias]),
            scale=attention.scale,
            causal=attention.is_causal,
            dropout=attention.dropout,
            result=0,
            order=orders[0],
            orders=orders,
            dtype=operands[0].dtype,
        )
        return result.unpermuted(orders[0]).apply(Op.RESHAPE, shape=self.graph.nodes[self.position].shape).position

    def _with_heads_last(self, attention: _Attention) -> Value | None:
        """Recomputes the queries with positions before heads in memory, because torch's result has the memory order of the queries.

        None if readers of the result need another order, or if no value that the queries are computed from has this order.
        """
        graph, node = self.graph, self.graph.nodes[attention.q]
        is_permuted = self.position not in graph.outputs and all(
            graph.nodes[user].op is Op.PERMUTE and graph.nodes[user].attr("dims") == _HEADS_LAST
            for user in graph.users[self.position]
        )
        if not is_permuted or self._is_fixed(node.dtype, attention) or len(node.shape) != len(_HEADS_LAST):
            return None
        permuted = PermutedValues(graph, _HEADS_LAST, self._value)
        leaves = [p for p in permuted.leaves(attention.q) or () if len(graph.nodes[p].shape) == len(_HEADS_LAST)]
        full = [p for p in leaves if all(map(same, graph.nodes[p].shape, node.shape))]
        if not any(_order_in_memory(graph, p, is_transposed=False) == _HEADS_LAST for p in full):
            return None
        return permuted.value(attention.q).unpermuted(_HEADS_LAST)

    def _value(self, position: int) -> Value:
        return Value(self.builder, self.renamed[position], self.graph.locations[self.position])

    def _in_four_dims(self, x: Value) -> Value:
        """Reshapes an operand to (batch, head, …); all dims before the last three are the batch."""
        shape = x.node.shape
        leading, heads = shape[:-3], shape[-3] if len(shape) > 2 else 1
        return x.apply(Op.RESHAPE, shape=(simplify_dim(product(leading)), heads, *shape[-2:]))

    def _bias(self, attention: _Attention, dtype: DType) -> Value | None:
        """Returns the value that is added to the scores: minus infinity where they are masked."""
        if not attention.masks:
            return None
        (mask,) = attention.masks
        value = self._value(mask)
        if attention.bias is None:
            numbers = (0.0, -math.inf) if attention.shown is not None else (-math.inf, 0.0)
            value = value.where(*numbers).apply(Op.CAST, dtype=dtype)
        rank, scores = len(self.graph.nodes[attention.q].shape), self.graph.nodes[attention.q].shape[:-2]
        shape = (1,) * (rank - len(value.node.shape)) + value.node.shape
        if rank > 4:  # several batch dims
            shape = (*scores[:-1], *shape[-3:])
            value = value.apply(Op.EXPAND, shape=shape)
        heads = shape[-3] if rank > 2 else 1
        return value.apply(Op.RESHAPE, shape=(simplify_dim(product(shape[:-3])), heads, *shape[-2:]))

    def _order(self, operand: Value, attention: _Attention, position: int) -> tuple[int, ...]:
        """Returns the order of dims in memory of a result: the operand's, unless the kernel has a fixed one."""
        if self._is_fixed(operand.dtype, attention):
            return _HEADS_LAST
        return _order_in_memory(self.graph, position, is_transposed=position == attention.keys)

    def _is_fixed(self, dtype: DType, attention: _Attention) -> bool:
        """True if the kernel returns its result in a fixed order of dims."""
        return self.target.device == "cpu" or bool(attention.masks) or dtype is DType.FLOAT32


def _order_in_memory(graph: Graph, position: int, *, is_transposed: bool) -> tuple[int, ...]:
    """Returns batch, heads and positions in memory order, the outermost first, and then channels."""
    strides = strided_view(graph, position).strides
    rows = strides[-1] if is_transposed else strides[-2]
    outer = [nominal(stride) for stride in (*strides[-4:-2], rows)]
    missing = 3 - len(outer)  # dims of extent 1, in any order
    return (*range(missing), *sorted(range(missing, 3), key=lambda dim: -outer[dim - missing]), 3)


def _without_repetition(operands: list[Value]) -> list[Value]:
    """Returns keys and values with each head once, if views repeat both equally often."""
    once = [_without_repeated_heads(x) for x in operands[1:]]
    heads = [x.node.shape[1] for x in once]
    return once if same(*heads) else operands[1:]


def _without_repeated_heads(x: Value) -> Value:
    """Returns (batch, head, …) without the view that repeats heads."""
    view, swapped = x, False
    while view.node.family is Family.VIEW:
        operand = view.arg(0)
        if view.node.op is Op.PERMUTE and view.node.attr("dims") == (0, 1, 3, 2):
            swapped = not swapped
        elif view.node.op is Op.RESHAPE and all(map(same, operand.node.shape, view.node.shape)):
            pass
        elif view.node.op is Op.RESHAPE and operand.node.op is Op.EXPAND:
            return _before_repetition(x, view, operand, swapped=swapped)
        else:
            return x
        view = operand
    return x


def _before_repetition(x: Value, repeated: Value, expanded: Value, *, swapped: bool) -> Value:
    once, shape = expanded.arg(0), repeated.node.shape
    batch, heads, count = expanded.node.shape[:3] if len(expanded.node.shape) == 5 else (0, 0, 0)
    fits = len(once.node.shape) == 5 and same(once.node.shape[2], 1) and all(map(same, once.node.shape[:2], (batch, heads)))
    if not fits or literal(heads) is None or literal(count) is None or not all(map(same, expanded.node.shape[3:], shape[2:])):
        return x
    if not all(map(same, once.node.shape[3:], shape[2:])) or not same(shape[1], cast(int, heads) * cast(int, count)):
        return x
    result = once.apply(Op.RESHAPE, shape=(batch, heads, *shape[2:]))
    return result.apply(Op.PERMUTE, dims=(0, 1, 3, 2)) if swapped else result


# To compute a pointwise value in another order of dims, its operands are permuted, down to views. Eager torch does the same: if
# all operands are permuted in the same way, the result has their order in memory.


_MOST = 64  # nodes that may be computed again
_ALONG_A_DIM = (Op.SLICE, Op.CONCAT)


@dataclass
class PermutedValues:
    """Values of a graph, mapped to a new graph by `at`, with their dims in another order."""

    graph: Graph
    order: tuple[int, ...]
    at: Callable[[int], Value]
    _memo: dict[int, Value] = field(default_factory=dict)

    def leaves(self, position: int) -> frozenset[int] | None:
        """Returns the leaves (see `_is_leaf`) that a value is computed from by pointwise operations, slices and concatenations.

        None if the value is not computed in this way, or from too many values.
        """
        operands: set[int] = set()
        seen = {position}
        stack = [position]
        while stack:
            node = self.graph.nodes[stack.pop()]
            if not self._is_computed(node):
                return None
            for arg in node.args:
                if arg not in seen:
                    seen.add(arg)
                    (operands.add if self._is_leaf(arg) else stack.append)(arg)
            if len(seen) > _MOST:
                return None
        return frozenset(operands)

    def value(self, position: int) -> Value:
        """Builds a value with known `leaves` in the new order."""
        if position not in self._memo:
            self._memo[position] = self._leaf(position) if self._is_leaf(position) else self._computed(position)
        return self._memo[position]

    def _is_computed(self, node: Node) -> bool:
        is_ours = node.op in _ALONG_A_DIM or node.family is Family.POINTWISE
        return is_ours and not node.numbers and len(node.shape) == len(self.order)

    def _is_leaf(self, position: int) -> bool:
        """True if a value is a view, a number, or materialized."""
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
        first = self.at(node.args[0])
        changed = replace(node, args=args, shape=shape, attrs=tuple(attrs.items()))
        return Value(first.builder, first.builder.add_node(changed, first.location), first.location)
