"""Splits packed matmuls: if users read disjoint ranges of columns, each range becomes a matmul with its own epilogue.

These matmuls share their first operand, so one launch computes them. Another pass copies operands to padded rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusegen.families.gemm.cost import COSTS, MatmulSize, library_time, unaligned_time
from fusegen.families.gemm.epilogue import sorted_dims
from fusegen.families.gemm.pipelines import is_heavy, rows_are_aligned, supporting_pipeline
from fusegen.fusion.accumulator import FRAGMENT, without_single
from fusegen.fusion.groups import matmuls_of, strip_views
from fusegen.ir.graph import Graph, GraphBuilder, Node
from fusegen.ir.index_map import ROW_MULTIPLE, identity_axes, may_pad, sources, strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Shape, linearize, literal, nominal, product, same
from fusegen.passes.rewrite import OUT, rebuilt
from fusegen.target import Target


@dataclass(frozen=True)
class _Range:
    """A view of a range of columns of a packed value. `order` lists the view's dims, the outermost in memory first."""

    packed: int
    columns: range
    order: tuple[int, ...]


def split_matmuls(graph: Graph, target: Target) -> Graph:
    """Splits the matmuls whose results are only read in ranges of columns, if a pipeline supports them."""
    while (split := _next_split(graph, target)) is not None:
        graph = rebuilt(graph, _Split(graph, *split).replaced)
    return graph


def _next_split(graph: Graph, target: Target) -> tuple[int, Mapping[int, _Range]] | None:
    for position, node in graph:
        ranges = _ranges(graph, position) if node.op is Op.MATMUL else None
        if ranges is not None and supporting_pipeline(graph, position, position, target) is not None:
            return position, ranges
    return None


def _ranges(graph: Graph, matmul: int) -> dict[int, _Range] | None:
    """Maps each slice of a matmul's result to its range of columns.

    None if anything else reads the result, or if ranges overlap or are concatenated again.
    """
    ranges: dict[int, _Range] = {}
    stack = [(matmul, matmul)]  # a value over all columns, and a view of it
    while stack:
        packed, view = stack.pop()
        if view in graph.outputs:
            return None
        for user in graph.users[view]:
            node = graph.nodes[user]
            if node.op is Op.SLICE:
                columns = _range_of(graph, user, packed, matmul)
                if columns is None:
                    return None
                ranges[user] = columns
            elif node.op in (Op.RESHAPE, Op.PERMUTE):
                stack.append((packed, user))
            elif node.family is Family.POINTWISE and view == packed and node.shape == graph.nodes[matmul].shape:
                stack.append((user, user))
            else:
                return None
    return ranges if ranges and _are_disjoint(ranges.values()) and not _are_concatenated(graph, ranges) else None


def _are_concatenated(graph: Graph, ranges: Mapping[int, _Range]) -> bool:
    """True if columns of several ranges are concatenated again, as in a rotated head. One epilogue over the whole matmul computes
    these."""
    origins: dict[int, set[int]] = {view: {span.columns.start} for view, span in ranges.items()}
    for position, node in graph:
        if position not in origins and node.family in (Family.POINTWISE, Family.VIEW):
            starts = set().union(*(origins.get(a, set()) for a in node.args))
            if node.op is Op.CONCAT and len(starts) > 1:
                return True
            if starts:
                origins[position] = starts
    return False


def _are_disjoint(ranges: Iterable[_Range]) -> bool:
    """True if the ranges are disjoint. Split matmuls would compute shared columns twice."""
    columns = {r.columns for r in ranges}
    return len(frozenset[int]().union(*columns)) == sum(map(len, columns))


def _range_of(graph: Graph, view: int, base: int, matmul: int) -> _Range | None:
    """Returns the columns that a view reads; None unless it reads whole rows of them. They lie between two multiples of 8, or are
    interleaved with others."""
    shape, base_shape = graph.nodes[view].shape, graph.nodes[base].shape
    axes = identity_axes(shape)
    position, at = view, without_single(axes.symbols, shape)
    while position != base:
        (source,) = sources(graph, position, at, axes)
        position, at = source.arg, source.index
    last = sympy.sympify(at[-1])
    start = literal(last.subs(dict.fromkeys(axes.symbols, 0)))
    length = literal(sympy.cancel(product(shape) / sympy.sympify(product(base_shape[:-1]))))
    width = literal(base_shape[-1]) or 0
    if start is None or length is None or not 0 < length < width or length % FRAGMENT:
        return None
    for step in (1, width // length):
        column = sympy.expand((last - start) / step)
        may_split = start % FRAGMENT == 0 if step == 1 else start < step and _has_contiguous_depth(graph, matmul)
        if may_split and _is_integer(column) and axes.is_below(column, length):  # else a subset of the rows with as many elements
            offset = sympy.expand(linearize((*at[:-1], column), (*base_shape[:-1], length)))
            order = _in_order(sorted_dims(offset, axes), shape)
            return None if order is None else _Range(base, range(start, start + length * step, step), order)
    return None


def _in_order(order: tuple[int, ...] | None, shape: Shape) -> tuple[int, ...] | None:
    """Leaves dims of one element at their places if that makes a permutation unnecessary."""
    dims = [d for d in order or () if not same(shape[d], 1)]
    return order if order is None or dims != sorted(dims) else tuple(sorted(order))


def _is_integer(index: sympy.Expr) -> bool:
    return all(term.as_coeff_Mul()[0].is_Integer for term in sympy.Add.make_args(index))


def _has_contiguous_depth(graph: Graph, matmul: int) -> bool:
    """True if interleaved columns of the second operand can be read as a matrix."""
    view = strided_view(graph, graph.nodes[matmul].args[1])
    return len(view.shape) == 2 and same(view.strides[0], 1)


def _packed(graph: Graph, matmul: int, ranges: Mapping[int, _Range]) -> set[int]:
    """Returns the matmul and the pointwise values over all its columns; slices read the last of these."""
    ends = {span.packed for span in ranges.values()}
    packed = {matmul}
    for position in range(matmul + 1, max(ends) + 1):
        node = graph.nodes[position]
        if node.family is Family.POINTWISE and not packed.isdisjoint(node.args):
            packed.add(position)
    return packed


class _Split:
    """Rebuilds a graph with one matmul per range."""

    def __init__(self, graph: Graph, matmul: int, ranges: Mapping[int, _Range]) -> None:
        self.graph, self.matmul, self.ranges = graph, matmul, ranges
        self.packed = _packed(graph, matmul, ranges)
        self.sliced: dict[tuple[int, range], int] = {}

    def replaced(self, builder: GraphBuilder, renamed: Sequence[int], position: int) -> int | None:
        """Returns the range that replaces a view; OUT for packed values, which are dropped."""
        self.builder, self.renamed = builder, renamed
        if position in self.ranges:
            return self._range(position, self.ranges[position])
        is_packed = position in self.packed or any(renamed[a] == OUT for a in self.graph.nodes[position].args)
        return OUT if is_packed else None

    def _range(self, view: int, span: _Range) -> int:
        shape, location = self.graph.nodes[view].shape, self.graph.locations[view]
        columns = self._columns(span.packed, span.columns)
        ordered = tuple(shape[d] for d in span.order)
        shaped = self.builder.add(Op.RESHAPE, (columns,), location=location, shape=ordered)
        dims = tuple(span.order.index(d) for d in range(len(shape)))
        return shaped if dims == tuple(range(len(dims))) else self.builder.add(Op.PERMUTE, (shaped,), location=location, dims=dims)

    def _columns(self, position: int, columns: range) -> int:
        """Builds some columns of a pointwise value of the matmul."""
        stack = [position]
        while stack:
            current = stack[-1]
            needed = [a for a in self.graph.nodes[current].args if a in self.packed and (a, columns) not in self.sliced]
            if needed and current != self.matmul:
                stack += needed
            else:
                self.sliced[current, columns] = self._build_columns(stack.pop(), columns)
        return self.sliced[position, columns]

    def _build_columns(self, position: int, columns: range) -> int:
        node, location = self.graph.nodes[position], self.graph.locations[position]
        if position == self.matmul:
            a, b = (self.renamed[arg] for arg in node.args)
            return self.builder.add(Op.MATMUL, (a, self._slice(b, columns)), location=location)
        args = tuple(self._operand(a, node, columns) for a in node.args)
        shape = (*node.shape[:-1], len(columns))
        return self.builder.add_node(Node(node.op, args, node.attrs, shape, node.dtype, node.weak), location)

    def _operand(self, position: int, node: Node, columns: range) -> int:
        if position in self.packed:
            return self.sliced[position, columns]
        renamed, shape = self.renamed[position], self.graph.nodes[position].shape
        return self._slice(renamed, columns) if shape and same(shape[-1], node.shape[-1]) else renamed

    def _slice(self, position: int, columns: range) -> int:
        dim = len(self.builder.nodes[position].shape) - 1
        return self.builder.add(Op.SLICE, (position,), dim=dim, start=columns.start, length=len(columns), step=columns.step)


@dataclass(frozen=True)
class _Copies:
    """The operands and the result of a matmul that are copied to padded rows.

    Attributes:
        operands: the operands without their permutations.
        depth: the depth that the library sums over; None for all of it.
    """

    operands: frozenset[int]
    result: bool
    depth: int | None


def copy_unaligned_rows(graph: Graph, target: Target) -> Graph:
    """Adds copies to padded rows for large library matmuls with unaligned rows; targets without a cost model get none."""
    copies_of = {matmul: copies for matmul in matmuls_of(graph) if (copies := _copies(graph, matmul, target)) is not None}
    return _with(graph, copies_of) if copies_of else graph


def _with(graph: Graph, copies_of: Mapping[int, _Copies]) -> Graph:
    def replaced(builder: GraphBuilder, renamed: Sequence[int], position: int) -> int | None:
        return _Copying(graph, builder, renamed, copies_of[position]).matmul(position) if position in copies_of else None

    return rebuilt(graph, replaced)


@dataclass(frozen=True)
class _Copying:
    """Builds a matmul with its copies in a new graph."""

    graph: Graph
    builder: GraphBuilder
    renamed: Sequence[int]
    copies: _Copies

    def matmul(self, position: int) -> int:
        node, location = self.graph.nodes[position], self.graph.locations[position]
        operands = tuple(map(self._operand, node.args))
        if self.copies.depth is not None:
            return self._over_even_depth(node, operands, self.copies.depth, position)
        result = self.builder.add_node(replace(node, args=operands), location)
        return self._copy(result, position) if self.copies.result else result

    def _over_even_depth(self, node: Node, operands: tuple[int, ...], depth: int, position: int) -> int:
        """Builds the matmul over the even depth, and adds the remaining outer products."""
        location = self.graph.locations[position]
        total = self.builder.add_node(replace(node, args=self._columns(operands, 0, depth)), location)
        arguments = tuple(self.renamed[a] for a in node.args)
        for k in range(depth, literal(self.builder.nodes[operands[1]].shape[0]) or 0):
            outer = self.builder.add(Op.MUL, self._columns(arguments, k, 1), location=location)
            total = self.builder.add(Op.ADD, [total, outer], location=location)
        return total

    def _columns(self, operands: Sequence[int], start: int, length: int) -> tuple[int, int]:
        a, b = operands
        last = len(self.builder.nodes[a].shape) - 1
        dims = ((a, last), (b, 0))
        first, second = (self.builder.add(Op.SLICE, [p], dim=dim, start=start, length=length, step=1) for p, dim in dims)
        return first, second

    def _operand(self, position: int) -> int:
        """Returns an operand: the same view of the copied value, if it is copied."""
        below = _without_permutations(self.graph, position)
        if below not in self.copies.operands:
            return self.renamed[position]
        if position == below:
            return self._copy(self.renamed[position], position)
        node = self.graph.nodes[position]
        return self.builder.add_node(replace(node, args=(self._operand(node.args[0]),)), self.graph.locations[position])

    def _copy(self, value: int, before: int) -> int:
        return self.builder.add(Op.COPY, [value], location=self.graph.locations[before], role="rows", write=0)


def _copies(graph: Graph, matmul: int, target: Target) -> _Copies | None:
    """Returns the copies for a matmul; None if it needs none or they take longer than they save."""
    if target.card not in COSTS or not is_heavy(graph, matmul) or supporting_pipeline(graph, matmul, matmul, target) is not None:
        return None
    unaligned = [p for p in graph.nodes[matmul].args if not rows_are_aligned(graph, strided_view(graph, p))]
    operands = {p: _without_permutations(graph, p) for p in unaligned}
    inputs = {value for p, value in operands.items() if graph.nodes[strided_view(graph, p).base].op is Op.INPUT}
    is_result = _has_odd_rows(graph, matmul) and any(strip_views(graph, o) == matmul for o in graph.outputs)
    depth = _even_depth(graph, matmul)
    if not all(_has_odd_rows(graph, value) for value in operands.values()) or not (inputs or is_result or depth):
        return None
    copies = _Copies(frozenset(inputs), is_result, depth)
    return copies if _pays(graph, matmul, copies, target) else None


def _pays(graph: Graph, matmul: int, copies: _Copies, target: Target) -> bool:
    """True if the matmul with padded rows, including all copies, takes less time than the unaligned one."""
    node, costs = graph.nodes[matmul], COSTS[target.card]
    depth = nominal(graph.operands(matmul)[0].shape[-1])
    size = MatmulSize(nominal(product(node.shape[:-1])), nominal(node.shape[-1]), depth)
    values = [*copies.operands, *([matmul] if copies.result or copies.depth is not None else [])]
    byte_counts = [2 * graph.nodes[value].dtype.itemsize * nominal(product(graph.nodes[value].shape)) for value in values]
    copying = sum(costs.epilogue_start + count / costs.epilogue_bandwidth for count in byte_counts)
    return library_time(costs, (size,), 0, target.sms) + copying < unaligned_time(costs, size, target.sms)


def _even_depth(graph: Graph, matmul: int) -> int | None:
    """Returns the multiple of 8 that the library sums over if an operand is contiguous along an odd depth, else None."""
    depth = literal(graph.operands(matmul)[0].shape[-1])
    a, b = (strided_view(graph, p).strides for p in graph.nodes[matmul].args)
    is_along = same(a[-1], 1) or same(b[0], 1)
    return depth // ROW_MULTIPLE * ROW_MULTIPLE if is_along and depth is not None and may_pad(depth) else None


def _without_permutations(graph: Graph, position: int) -> int:
    while graph.nodes[position].op is Op.PERMUTE:
        (position,) = graph.nodes[position].args
    return position


def _has_odd_rows(graph: Graph, position: int) -> bool:
    """True if a value is materialized with rows that can be padded and are not multiples of 8 elements."""
    extent = literal(graph.nodes[position].shape[-1])
    return extent is not None and may_pad(extent)
