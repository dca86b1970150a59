"""Rewrites of row statistics: moments in one reduction, normalizers as max and sum, float64 sums on the CPU.

With one reduction, warps and blocks that share a row synchronize once instead of twice, and each element is read once less. Short
rows keep two sums: memory latency dominates, and sums have fewer components. Rows of 32 bits keep two sums too: if the first
element is by far the greatest, a sum of squares about it loses some of the last bits. In 16 bits, the loss does not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import cast

from fusegen.dtypes import DType
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, literal, product, same
from fusegen.passes.algebra import Value
from fusegen.passes.rewrite import rebuilt

_LONG = 32768
"""Above this row length, in elements, the row does not fit the registers of one block: it is in shared memory, or split over a
cluster."""


@dataclass(frozen=True)
class _MomentsComponent:
    name: str
    rows: int
    dims: tuple[int, ...]


def combine_moments(graph: Graph) -> Graph:
    """Combines the mean and the squared deviations of long rows. Not for CPUs, where one thread computes a row."""
    components = dict(_components(graph))
    if not components:
        return graph

    def replaced(builder: GraphBuilder, indices: Sequence[int], position: int) -> int | None:
        if (component := components.get(position)) is None:
            return None
        rows = Value(builder, indices[component.rows], graph.locations[position])
        return rows.reduce(Op.MOMENTS, component.dims, part=component.name).position

    return rebuilt(graph, replaced)


def _components(graph: Graph) -> Iterator[tuple[int, _MomentsComponent]]:
    for position, _ in graph:
        deviation = deviations(graph, position)
        if deviation is not None and has_16_bits(graph, deviation.rows) and _is_long(graph, deviation):
            yield deviation.mean, _MomentsComponent("mean", deviation.rows, deviation.dims)
            yield position, _MomentsComponent("m2", deviation.rows, deviation.dims)


def has_16_bits(graph: Graph, rows: int) -> bool:
    """True if rows have 16 bits, or had before a cast."""
    node = graph.nodes[rows]
    return node.dtype.itemsize == 2 or (node.op is Op.CAST and graph.nodes[node.args[0]].dtype.itemsize == 2)


def _is_long(graph: Graph, deviation: Deviations) -> bool:
    shape = graph.nodes[deviation.rows].shape
    count = literal(product(shape[d] for d in deviation.dims))
    is_along_rows = deviation.dims == tuple(range(len(shape) - len(deviation.dims), len(shape)))
    return count is not None and count > _LONG and is_along_rows


@dataclass(frozen=True)
class Deviations:
    """A sum of squared deviations of `rows` from their `mean` along `dims`; `centered` and `square` are its intermediates."""

    rows: int
    dims: tuple[int, ...]
    mean: int
    centered: int
    square: int


def deviations(graph: Graph, position: int) -> Deviations | None:
    nodes, node = graph.nodes, graph.nodes[position]
    square = nodes[node.args[0]] if node.op is Op.SUM else None
    if square is None or square.op is not Op.MUL or len(set(square.args)) > 1 or nodes[square.args[0]].op is not Op.SUB:
        return None
    rows, mean = nodes[square.args[0]].args
    result = Deviations(rows, cast(tuple[int, ...], node.attr("dims")), mean, square.args[0], node.args[0])
    return result if _is_mean(graph, result) else None


def _is_mean(graph: Graph, deviation: Deviations) -> bool:
    """True if the subtracted value is the mean: a sum divided by the count, or times its reciprocal."""
    node = graph.nodes[deviation.mean]
    if node.op not in (Op.MUL, Op.DIV):
        return False
    total, factor = graph.operands(deviation.mean)
    if total.op is not Op.SUM or total.args != (deviation.rows,) or total.attr("dims") != deviation.dims:
        return False
    count = product(graph.nodes[deviation.rows].shape[d] for d in deviation.dims)
    if node.op is Op.DIV:
        return factor.op is Op.SIZE and same(cast(Dim, factor.attr("size")), count)
    literal_count = literal(count)
    return factor.op is Op.CONSTANT and bool(literal_count) and float(factor.number) == 1.0 / cast(int, literal_count)


_LONGEST_HELD = 20480
"""Longest row, in elements, that the registers of one block hold. On an H200, the normalizer of 8192 rows takes 94 µs in two steps
and 89 to 95 in one for 20000 columns, 115 and 100 for 24576, 197 and 128 for 32000; 68 and 75 for 16384 rows of 8192."""


def join_normalizers(graph: Graph) -> Graph:
    """Computes the max and the sum of exponentials of long rows in one pass over memory, if nothing else needs their elements.

    On an H200, the loss of 4096 rows of 128256 classes in bfloat16 takes 337 µs with its rows on chip and two reductions.
    """
    reduced = _reduced(graph)
    sums = {position: rows for position, _ in graph if (rows := _exponentiated(graph, position, reduced)) is not None}
    if not sums:
        return graph
    peaks = {graph.nodes[graph.nodes[graph.nodes[position].args[0]].args[0]].args[1]: rows for position, rows in sums.items()}

    def replaced(builder: GraphBuilder, indices: Sequence[int], position: int) -> int | None:
        if (row := sums.get(position, peaks.get(position))) is None:
            return None
        rows, dims = Value(builder, indices[row], graph.locations[position]), graph.nodes[position].attr("dims")
        assert isinstance(dims, tuple)
        peak = rows.reduce(Op.NORMALIZER, dims, part="peak")
        if position in peaks:
            return peak.position
        mass = rows.reduce(Op.NORMALIZER, dims, part="mass")
        return (mass + (peak - peak)).position  # NaN if the max is infinite, as is exp(inf - inf)

    return rebuilt(graph, replaced)


def _exponentiated(graph: Graph, position: int, reduced: Set[int]) -> int | None:
    """Matches the sum of exp(x - max x) over long rows whose elements only reduced values need; returns x."""
    total = graph.nodes[position]
    exponential = graph.nodes[total.args[0]] if total.op is Op.SUM else total
    distance = graph.nodes[exponential.args[0]] if exponential.op is Op.EXP else exponential
    if total.op is not Op.SUM or exponential.op is not Op.EXP or distance.op is not Op.SUB:
        return None
    rows, peak = distance.args
    greatest, dims = graph.nodes[peak], total.attr("dims")
    is_max = greatest.op is Op.AMAX and greatest.args == (rows,) and greatest.attr("dims") == dims
    if not is_max or _is_on_chip(graph, rows, dims):
        return None
    needed = {u for p in (rows, exponential.args[0], total.args[0]) for u in graph.users[p]} - {*total.args, *exponential.args}
    return rows if needed <= reduced else None


def _reduced(graph: Graph) -> set[int]:
    """Returns reductions, gathered values, and results of pointwise operations that only such values depend on."""
    reduced: set[int] = set()
    for position in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[position]
        is_pointwise = node.family is Family.POINTWISE and position not in graph.outputs
        if node.family is Family.REDUCTION or node.op is Op.GATHER or (is_pointwise and reduced.issuperset(graph.users[position])):
            reduced.add(position)
    return reduced


def split_normalizers(graph: Graph) -> Graph:
    """Computes normalizers of rows that fit on chip in two steps. Not for CPUs, where a thread reads a row once."""
    if not any(_is_held(graph, node) for node in graph.nodes):
        return graph

    def replaced(builder: GraphBuilder, indices: Sequence[int], position: int) -> int | None:
        node = graph.nodes[position]
        if not _is_held(graph, node):
            return None
        (rows,) = node.args
        is_widened = graph.nodes[rows].op is Op.CAST and has_16_bits(graph, rows)
        source = indices[graph.nodes[rows].args[0] if is_widened else rows]  # other nodes read the uncast row
        normalizer = _held_normalizer(Value(builder, source, graph.locations[position]), node)
        return (normalizer if normalizer.dtype is node.dtype else normalizer.apply(Op.CAST, dtype=node.dtype)).position

    return rebuilt(graph, replaced)


# Rows on chip compute the normalizer as row max and row sum: one exponential per element, no select, and a softmax of the same
# rows shares both. Other rows compute it in one pass over memory. The max of soft-capped rows, s tanh(x / s), is the cap of their
# max: one tanh per row instead of one per element.


def cap_row_max(graph: Graph) -> Graph:
    """Replaces the max of soft-capped input rows by the cap of their max, if only a softmax reads it.

    The cap increases with x for either sign of s, but its rounded value may not: an element may exceed the computed max by a few
    units in the last place. A softmax and its logarithm do not depend on the subtracted number; other readers rely on the exact
    max.
    """
    maxima = {
        p: capped for p, node in graph if node.op is Op.AMAX and (capped := _cap(graph, node.args[0])) and _is_of_softmax(graph, p)
    }
    if not maxima:
        return graph

    def replaced(builder: GraphBuilder, indices: Sequence[int], position: int) -> int | None:
        if position not in maxima:
            return None
        rows, scale = (Value(builder, indices[p], graph.locations[position]) for p in maxima[position])
        dims = graph.nodes[position].attr("dims")
        assert isinstance(dims, tuple)
        return (scale * (rows.reduce(Op.AMAX, dims) / scale).apply(Op.TANH)).position

    return rebuilt(graph, replaced)


def _cap(graph: Graph, position: int) -> tuple[int, int] | None:
    """Matches s tanh(x / s) with a number s and an input x: returns x and s, else None."""
    product = graph.nodes[position]
    for scale, factor in (product.args, product.args[::-1]) if product.op is Op.MUL else ():
        tangent = graph.nodes[factor]
        quotient = graph.nodes[tangent.args[0]] if tangent.op is Op.TANH else tangent
        is_cap = quotient.op is Op.DIV and quotient.args[1] == scale and graph.nodes[scale].op in (Op.SCALAR, Op.CONSTANT)
        if is_cap and _is_from_input(graph, quotient.args[0]):
            return quotient.args[0], scale
    return None


def _is_from_input(graph: Graph, position: int) -> bool:
    """True for a view or cast of an input. The attention family matches soft-capped scores itself."""
    node = graph.nodes[position]
    while node.op is Op.CAST or (node.family is Family.VIEW and len(node.args) == 1):
        node = graph.nodes[node.args[0]]
    return node.op is Op.INPUT


def _is_of_softmax(graph: Graph, peak: int) -> bool:
    """True if only a softmax or log-softmax of the same rows reads their max."""
    (rows,) = graph.nodes[peak].args
    users = [graph.nodes[user] for user in graph.users[peak]]
    is_subtracted = all(node.op in (Op.SUB, Op.EXP_BELOW) and node.args == (rows, peak) for node in users)
    distances = [user for user in graph.users[peak] if graph.nodes[user].op is Op.SUB]
    is_shared = all(_is_in_softmax(graph, distance, user) for distance in distances for user in graph.users[distance])
    return is_subtracted and is_shared and not {peak, *distances} & set(graph.outputs)


def _is_in_softmax(graph: Graph, distance: int, user: int) -> bool:
    """True if a user of x - max computes the exponential, a sum of these, or subtracts the logarithm of the row sum."""
    node = graph.nodes[user]
    if node.op is Op.SUB and node.args[0] == distance:
        logarithm = graph.nodes[node.args[1]]
        total = graph.nodes[logarithm.args[0]] if logarithm.op is Op.LOG else logarithm
        return total.op is Op.SUM and graph.nodes[total.args[0]].op is Op.EXP and graph.nodes[total.args[0]].args == (distance,)
    return node.op in (Op.EXP, Op.SUM)


def _is_held(graph: Graph, node: Node) -> bool:
    """True for the normalizer of rows short enough to stay on chip; columns never do."""
    return node.op is Op.NORMALIZER and _is_on_chip(graph, node.args[0], node.attr("dims"))


def _is_on_chip(graph: Graph, rows: int, dims: object) -> bool:
    shape = graph.nodes[rows].shape
    assert isinstance(dims, tuple)
    count = literal(product(shape[d] for d in dims))
    return count is not None and count <= _LONGEST_HELD and dims == tuple(range(len(shape) - len(dims), len(shape)))


def _held_normalizer(rows: Value, node: Node) -> Value:
    dims = node.attr("dims")
    assert isinstance(dims, tuple)
    row_max = rows.reduce(Op.AMAX, dims)
    return row_max if node.attr("part") == "peak" else rows.apply(Op.EXP_BELOW, row_max).reduce(Op.SUM, dims)


SPREADS = (Op.VAR, Op.STD)
RUNNING = (Op.CUMSUM, Op.CUMPROD, Op.LOGCUMSUMEXP)


def sum_in_float64(graph: Graph) -> Graph:
    """Computes variances of float32, the means of the same rows, and running sums and products in float64 on the CPU, like torch.

    Squares of numbers around 1e20 overflow float32, and rounding errors grow along a row. On GPUs, float32 is kept, as in torch.
    """
    narrow = [node for _, node in graph if node.args and graph.nodes[node.args[0]].dtype is DType.FLOAT32]
    variance_rows = {_rows(node) for node in narrow if node.op in SPREADS}
    if not variance_rows and not any(node.op in RUNNING for node in narrow):
        return graph

    def replaced(builder: GraphBuilder, indices: Sequence[int], position: int) -> int | None:
        node = graph.nodes[position]
        is_of_spread = node.op in (*SPREADS, Op.MEAN) and _rows(node) in variance_rows
        is_running = node.op in RUNNING and graph.nodes[node.args[0]].dtype is DType.FLOAT32
        if not is_of_spread and not is_running:
            return None
        wide = Value(builder, indices[node.args[0]], graph.locations[position]).apply(Op.CAST, dtype=DType.FLOAT64)
        return wide.apply(node.op, **dict(node.attrs)).apply(Op.CAST, dtype=node.dtype).position

    return rebuilt(graph, replaced)


def _rows(node: Node) -> tuple[int, object]:
    return node.args[0], dict(node.attrs).get("dims")
