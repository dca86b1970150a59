"""Defers RMS norms behind the matmuls of their rows: (h * scale * weight) @ w = ((h * weight) @ w) * scale.

The epilogue that computes h also writes h * weight, and sums of squares of tiles of columns; the matmuls' epilogues scale their
rows. So no kernel reads h for its norm. The product is scaled before it is rounded. Norms that subtract a mean are not deferred:
a correction of the product by the mean would cancel. Neither are norms of float16, where h * weight could overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fusegen.dtypes import DType
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.gemm.partials import TILES, Tiles, products_of
from fusegen.families.gemm.pipelines import is_scaled, is_summed, supporting_pipeline, weight_on_load, with_sums
from fusegen.fusion.accumulator import WIDEST
from fusegen.fusion.groups import Group, computed, matmuls_of, strip_views
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Shape, literal, product, same
from fusegen.passes.algebra import Value
from fusegen.passes.rewrite import rebuilt
from fusegen.target import Target


@dataclass(frozen=True)
class DeferrableNorm:
    """A norm of rows that only matmuls read.

    Attributes:
        rows: the values that are normalized, in bfloat16.
        weights: factors of the columns.
        scales: factors of the rows, computed from the sums.
        sums: the sums of squares of a row that the scales are computed from.
        statistics: the sums, and all values from them to the scales.
        producers: the matmuls that the rows are computed from.
        consumers: the matmuls that read the normalized rows.
        tile: the columns of a tile.
    """

    rows: int
    weights: tuple[int, ...]
    scales: tuple[int, ...]
    sums: frozenset[int]
    statistics: frozenset[int]
    producers: frozenset[int]
    consumers: tuple[int, ...]
    tile: int


def deferrable_norms(graph: Graph, target: Target) -> Iterator[DeferrableNorm]:
    """Yields the norms that could be deferred."""
    sums = {position: rows for position, _ in graph if (rows := _squared_rows(graph, position)) is not None}
    for normed in dict.fromkeys(_before_reshapes(graph, graph.nodes[m].args[0]) for m in matmuls_of(graph)) if sums else ():
        norm = _norm_at(graph, normed, sums, target)
        if norm is not None:
            yield norm


def defer_norms(graph: Graph, target: Target) -> Graph:
    """Defers the norms whose consumers are marked, and marks their producers. Norms of the same rows share sums."""
    if not any(is_scaled(graph, matmul) for matmul in matmuls_of(graph)):
        return graph
    norms = [norm for norm in deferrable_norms(graph, target) if all(is_scaled(graph, m) for m in norm.consumers)]
    graph = with_sums(graph, {matmul for norm in norms for matmul in norm.producers})
    return rebuilt(graph, _Deferral(graph, norms).replaced)


def is_fused(graph: Graph, groups: Sequence[Group]) -> bool:
    """True if the kernels of deferred norms' matmuls compute all of these norms but the sums of tiles."""
    launches = [group for group in groups if group.kind is CONTRACTION]
    scaled = {matmul for matmul in matmuls_of(graph) if is_scaled(graph, matmul)}
    unrounded = {matmul for group in launches for matmul in group.core_nodes if matmul not in group.outputs}
    operands = {strip_views(graph, graph.nodes[matmul].args[0]) for matmul in scaled}
    writers = [group for group in launches if any(is_summed(graph, matmul) for matmul in group.core_nodes)]
    summing = [group for group in writers if any(graph.nodes[p].family is Family.REDUCTION for p in computed(graph, group))]
    return scaled <= unrounded and operands <= {output for group in summing for output in group.outputs}


def _squared_rows(graph: Graph, position: int) -> int | None:
    """Returns the values whose squares are summed along the last dim, before casts to float32."""
    node = graph.nodes[position]
    square = graph.nodes[node.args[0]] if node.op is Op.SUM else None
    is_square = square is not None and square.op is Op.MUL and len({*square.args}) == 1
    if square is None or not is_square or node.attr("dims") != (len(square.shape) - 1,):
        return None
    return _before_casts(graph, square.args[0])


def _before_casts(graph: Graph, position: int) -> int:
    while graph.nodes[position].op is Op.CAST and graph.nodes[position].dtype is DType.FLOAT32:
        (position,) = graph.nodes[position].args
    return position


def _norm_at(graph: Graph, normed: int, sums: dict[int, int], target: Target) -> DeferrableNorm | None:
    node, consumers = graph.nodes[normed], _consumers(graph, normed)
    if node.dtype is not DType.BFLOAT16 or not consumers or not all(_is_supported(graph, m, target) for m in consumers):
        return None
    factors = list(_factors(graph, normed, {*sums.values()}))
    rows = [p for p in factors if p in sums.values()]
    if len(rows) != 1 or graph.nodes[rows[0]].dtype is not DType.BFLOAT16 or graph.nodes[rows[0]].shape != node.shape:
        return None
    own = frozenset(p for p, of in sums.items() if of == rows[0])
    others = [p for p in factors if p != rows[0]]
    scales = tuple(p for p in others if not own.isdisjoint(graph.ancestors[p]))
    weights = tuple(p for p in others if p not in scales)
    statistics = frozenset(p for scale in scales for p in {scale, *graph.ancestors[scale]} if own & {p, *graph.ancestors[p]})
    columns, producers = literal(node.shape[-1]) or 0, products_of(graph, rows[0], target)
    tile = next((width for width in TILES if columns % width == 0), None)
    are_scales = all(_is_of_sums(graph, p, own) for p in scales) and all(_may_be_wider(graph, p) for p in statistics)
    are_factors = bool(scales) and are_scales and all(_is_of_columns(graph, p, columns) for p in weights)
    if not are_factors or not producers or tile is None or columns <= WIDEST:
        return None
    return DeferrableNorm(rows[0], weights, scales, own & statistics, statistics, producers, consumers, tile)


def _may_be_wider(graph: Graph, statistic: int) -> bool:
    """True if a statistic is in float32, or in bfloat16 and only arithmetic reads it, so that its type changes no result's."""
    dtype, users = graph.nodes[statistic].dtype, graph.users[statistic]
    is_inner = statistic not in graph.outputs and all(graph.nodes[user].family is Family.POINTWISE for user in users)
    return dtype is DType.FLOAT32 or (dtype is DType.BFLOAT16 and is_inner)


def _before_reshapes(graph: Graph, position: int) -> int:
    """Returns a value before reshapes of its rows."""
    while graph.nodes[position].op is Op.RESHAPE and _keeps_columns(graph, position):
        (position,) = graph.nodes[position].args
    return position


def _keeps_columns(graph: Graph, position: int) -> bool:
    return same(graph.nodes[position].shape[-1], graph.operands(position)[0].shape[-1])


def _consumers(graph: Graph, normed: int) -> tuple[int, ...]:
    """Returns the matmuls whose first operand a value is; none if anything else reads it."""
    consumers: list[int] = []
    stack = [normed]
    while stack:
        position = stack.pop()
        if position in graph.outputs:
            return ()
        for user in graph.users[position]:
            node = graph.nodes[user]
            if node.op is Op.RESHAPE and _keeps_columns(graph, user):
                stack.append(user)
            elif node.op is Op.MATMUL and node.args[0] == position and node.args[1] != position:
                consumers.append(user)
            else:
                return ()
    return tuple(consumers)


def _is_supported(graph: Graph, matmul: int, target: Target) -> bool:
    """True if a generated kernel can compute a matmul from operands in memory."""
    return weight_on_load(graph, matmul) is None and supporting_pipeline(graph, matmul, matmul, target) is not None


def _factors(graph: Graph, normed: int, rows: Iterable[int]) -> Iterator[int]:
    """Yields the factors of a product. Rounding between two factors of its size is left out."""
    stack = [normed]
    while stack:
        position = stack.pop()
        node = graph.nodes[position]
        is_cast = node.op is Op.CAST and node.dtype in (DType.BFLOAT16, DType.FLOAT32)
        if position not in rows and node.shape == graph.nodes[normed].shape and (node.op is Op.MUL or is_cast):
            stack += node.args
        else:
            yield position


def _is_of_sums(graph: Graph, scale: int, sums: Iterable[int]) -> bool:
    """True if a factor of rows is computed from sums and numbers alone."""
    stack = [scale]
    while stack:
        position = stack.pop()
        node = graph.nodes[position]
        if node.family is Family.POINTWISE and not (node.op is Op.CAST and node.dtype.is_narrow):
            stack += node.args
        elif position not in sums and node.op not in (Op.CONSTANT, Op.SCALAR, Op.SIZE):
            return False
    return same(graph.nodes[scale].shape[-1], 1)


def _is_of_columns(graph: Graph, weight: int, columns: int) -> bool:
    shape = graph.nodes[weight].shape
    return same(product(shape), columns) and same(shape[-1], columns)


class _Deferral:
    """Builds the graph in which norms are deferred."""

    def __init__(self, graph: Graph, norms: Iterable[DeferrableNorm]) -> None:
        self._graph = graph
        self._by_sum = {position: norm for norm in norms for position in norm.sums}
        self._by_consumer = {matmul: norm for norm in norms for matmul in norm.consumers}
        self._statistics = {position for norm in norms for position in norm.statistics}

    def replaced(self, builder: GraphBuilder, renamed: Sequence[int], position: int) -> int | None:
        if (norm := self._by_sum.get(position)) is not None:
            return self._sum(norm, Value(builder, renamed[norm.rows], self._graph.locations[position]))
        if position in self._statistics:  # matmuls read them in this type
            node = self._graph.nodes[position]
            arguments = tuple(renamed[a] for a in node.args)
            return builder.add_node(replace(node, args=arguments, dtype=DType.FLOAT32), self._graph.locations[position])
        norm = self._by_consumer.get(position)
        return None if norm is None else self._scaled(norm, builder, renamed, position)

    def _sum(self, norm: DeferrableNorm, rows: Value) -> int:
        """Sums the squares of the stored rows by tiles of columns."""
        stored = _stored(rows).apply(Op.CAST, dtype=DType.FLOAT32)
        return Tiles(stored * stored, norm.tile).sum().position

    def _scaled(self, norm: DeferrableNorm, builder: GraphBuilder, renamed: Sequence[int], matmul: int) -> int:
        """Multiplies the weighted rows, and scales the result in its own type."""
        node, location = self._graph.nodes[matmul], self._graph.locations[matmul]
        rows = Value(builder, renamed[norm.rows], location)
        operand = _stored(rows) if norm.weights else rows
        for weight in norm.weights:
            operand = operand * Value(builder, renamed[weight], location)
        if operand.dtype is not DType.BFLOAT16:
            operand = operand.apply(Op.CAST, dtype=DType.BFLOAT16)
        operand = _reshaped(operand, self._graph.nodes[node.args[0]].shape)
        result = builder.add_node(replace(node, args=(operand.position, renamed[node.args[1]])), location)
        for position in norm.scales:
            scale = _reshaped(Value(builder, renamed[position], location), (*node.shape[:-1], 1))
            result = builder.add_node(Node(Op.MUL, (result, scale.position), (), node.shape, node.dtype), location)
        return result


def _reshaped(value: Value, shape: Shape) -> Value:
    return value if value.node.shape == shape else value.apply(Op.RESHAPE, shape=shape)


def _stored(rows: Value) -> Value:
    """Returns rows as they are stored: rounded."""
    return rows.apply(Op.CAST, dtype=rows.dtype)
