"""Epilogues: the math on accumulators of tensor cores.

An epilogue runs over the dims of its result in the order of the matmul's elements: leading dims index rows, the others columns.
It may read two matmuls with the same first operand, and columns of the same head elsewhere in the tile. Matmuls that share the
first operand and end in different results are parts of one launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import sympy

from fusegen.families.gemm.first_operands import row_math
from fusegen.families.gemm.pipelines import (
    Pipeline,
    computes_rows,
    has_pairs,
    leaves_heads_apart,
    operand_pairs,
    pipeline_named,
    pipelines_of,
    rejection_reasons,
    supporting_pipeline,
    weight_on_load,
)
from fusegen.families.gemm.weights import stored_leaves
from fusegen.fusion.accumulator import FRAGMENT, LANES, at_lane, is_same_row, reduces_heads, without_single
from fusegen.fusion.groups import Domain, EpiloguePart, Group, GroupKind, matmuls_below, operand_base, strip_views
from fusegen.fusion.producers import Producers, domain_axes, walk
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, Position, identity_axes, reshaped
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Dim, Index, Shape, linearize, literal, product, same
from fusegen.target import Target

CONTRACTION = GroupKind("matmul with epilogue", writes_in_place=True, is_tiled=True, reads_logical_dtype=True)

_COMPUTED = (Family.POINTWISE, Family.VIEW, Family.CONTRACTION)
_MOST_PRODUCTS = 2  # per epilogue: they share an accumulator


def group_ending_at(graph: Graph, root: int, target: Target, materialized: Collection[int]) -> Group | None:
    """Returns the group of matmuls that ends in a matmul or an epilogue's result, by the first supporting pipeline, or None."""
    if graph.nodes[root].family is Family.CONTRACTION:
        return plain_group(graph, root, target)
    if graph.nodes[root].family not in (Family.POINTWISE, Family.VIEW):
        return None
    for pipeline in pipelines_of(target):
        for matmul in matmuls_below(graph, root, materialized):
            group = _group_at(graph, root, matmul, materialized, pipeline)
            if group is not None:
                return replace(group, reason=rejection_reasons(graph, matmul, root, target))
    return None


def width_rejections(graph: Graph, root: int, matmul: int, target: Target, materialized: Collection[int]) -> str:
    """Returns the pipelines whose accumulators are too narrow for the combined columns; empty for other reasons."""
    rejections: list[str] = []
    for pipeline in pipelines_of(target):
        order = None if pipeline.rejection_reason(graph, matmul, root) else _order_of(graph, root, matmul)
        if order is None:
            continue
        part = EpiloguePart((root,), (order,), (matmul,), _domain_of(graph, root, order, matmul, pipeline))
        producers, lanes = _part_producers(graph, part, materialized)
        head = lanes.head
        if matmul in producers.core_nodes and not pipeline.tile_widths(head, 1):
            rejections.append(f"no {pipeline.name}: heads of {head} columns are combined, more than an accumulator holds")
    return "; ".join(rejections)


def plain_group(graph: Graph, matmul: int, target: Target) -> Group | None:
    """Returns the group of a matmul without an epilogue, or None if no pipeline supports it."""
    pipeline = supporting_pipeline(graph, matmul, matmul, target)
    if pipeline is None:
        return None
    order = tuple(range(len(graph.nodes[matmul].shape)))
    part = EpiloguePart((matmul,), (order,), (matmul,), _domain_of(graph, matmul, order, matmul, pipeline))
    return replace(_group(graph, (part,), (), pipeline), reason=rejection_reasons(graph, matmul, matmul, target))


def with_outputs(graph: Graph, group: Group, roots: Sequence[int], materialized: Collection[int]) -> Group | None:
    """Returns the group with more results of its only epilogue, or None if that is impossible. They may read a second matmul, whose
    epilogue then ends in one of them."""
    (part,) = group.parts
    matmul, pipeline = part.products[0], pipeline_named(group.pipeline)
    if not all(_may_be_result(graph, r) and pipeline.rejection_reason(graph, matmul, r) is None for r in roots):
        return None
    bases = [_head_operand(graph, root) for root in roots]
    found_orders = [_order_of(graph, base, matmul) for base in bases]
    orders = [o for o, r, w in zip(found_orders, roots, bases, strict=True) if o is not None and _is_stored(graph, r, w, o)]
    if len(orders) < len(roots):
        return None
    outputs = (*part.outputs, *roots)
    matmuls = dict.fromkeys(m for r in roots for m in (r, *matmuls_below(graph, r, frozenset(materialized) - set(part.outputs))))
    products = (*part.products, *(m for m in matmuls if m not in part.products and _joins(graph, pipeline, matmul, m, outputs)))
    domains = [part.domain, *(_domain_of(graph, w, o, matmul, pipeline) for w, o in zip(bases, orders, strict=True))]
    for domain in dict.fromkeys(domains):
        wider = replace(part, outputs=outputs, orders=(*part.orders, *orders), products=products[:_MOST_PRODUCTS], domain=domain)
        walked = _checked_part(graph, wider, materialized, pipeline)
        if walked is not None and all(graph.ancestors[p].isdisjoint(walked[0].products) for p in walked[1]):
            return replace(_group(graph, walked[:1], walked[1], pipeline), reason=group.reason)
    return None


def merged_launch(graph: Graph, groups: Sequence[Group]) -> Group:
    """Merges groups of one pipeline whose matmuls share the first operand into one launch."""
    parts, inputs = tuple(part for group in groups for part in group.parts), {p for group in groups for p in group.inputs}
    return replace(_group(graph, parts, inputs, pipeline_named(groups[0].pipeline)), reason=groups[0].reason)


def result_index(graph: Graph, output: int, order: tuple[int, ...], domain: Domain, at: Position, axes: Axes) -> Position:
    """Returns the index of the result's element that an epilogue computes at an index of the domain; `order` lists the result's
    dims in the order of the domain."""
    shape = graph.nodes[output].shape
    last = len(domain.shape) - (1 if has_element_per_head(shape, domain) else 0)
    at = without_single(at, domain.shape)
    indices = reshaped(at[:last], domain.shape[:last], tuple(shape[d] for d in order), axes)
    position: list[Index] = [0] * len(shape)
    for index, d in zip(indices, order, strict=True):
        position[d] = index
    return tuple(position)


def has_element_per_head(shape: Shape, domain: Domain) -> bool:
    """True if a result has one element per head instead of one per column."""
    return not same(product(shape), product(domain.shape))


def is_computed_once(graph: Graph, matmul: int, roots: Sequence[int], inputs: Iterable[int]) -> bool:
    """True if only the roots need the matmul and the values in between, so that no other kernel computes them again."""
    path = {p for root in roots for p in graph.ancestors[root] if p == matmul or matmul in graph.ancestors[p]}
    between = {p for p in path if strip_views(graph, p) not in roots}  # views of a result are materialized
    if not graph.writes:  # in-place writes copy the value through a kernel that reads the users as well
        between &= _before_roots(graph, matmul, roots)  # users of a root can read the root
    if between & set(inputs):
        return False
    return not any(p in graph.outputs or set(graph.users[p]) - path - set(roots) for p in between)


def is_used_unpermuted(graph: Graph, product: int) -> bool:
    """True if a matmul's result is used without a permutation."""
    return product in graph.outputs or any(graph.nodes[user].op is not Op.PERMUTE for user in _users(graph, product))


def _users(graph: Graph, position: int) -> list[int]:
    """Returns the readers of a value, through reshapes."""
    readers: list[int] = []
    stack = [position]
    while stack:
        for user in graph.users[stack.pop()]:
            (stack if graph.nodes[user].op is Op.RESHAPE and user not in graph.outputs else readers).append(user)
    return readers


def _before_roots(graph: Graph, matmul: int, roots: Sequence[int]) -> set[int]:
    """Returns a matmul and the values that depend on it but on none of the roots."""
    stack, values = [matmul], set[int]()
    while stack:
        position = stack.pop()
        if position not in values and position not in roots:
            values.add(position)
            stack += graph.users[position]
    return values


def _group_at(graph: Graph, root: int, matmul: int, materialized: Collection[int], pipeline: Pipeline) -> Group | None:
    if pipeline.rejection_reason(graph, matmul, root) is not None or not is_computed_once(graph, matmul, (root,), ()):
        return None
    order = _order_of(graph, root, matmul)
    if order is None or not _is_written(graph.nodes[root].shape, order):
        return None
    products = (matmul, *_companions(graph, root, matmul, materialized, pipeline))
    part = EpiloguePart((root,), (order,), products, _domain_of(graph, root, order, matmul, pipeline))
    walked = _checked_part(graph, part, materialized, pipeline)
    return None if walked is None else _group(graph, walked[:1], walked[1], pipeline)


def _companions(graph: Graph, root: int, matmul: int, materialized: Collection[int], pipeline: Pipeline) -> tuple[int, ...]:
    """Returns the other matmuls that share the first operand of `matmul` and whose results `root` is computed from."""
    companions = (
        m for m in matmuls_below(graph, root, materialized) if m != matmul and _joins(graph, pipeline, matmul, m, (root,))
    )
    return tuple(itertools.islice(companions, _MOST_PRODUCTS - 1))


def _joins(graph: Graph, pipeline: Pipeline, matmul: int, companion: int, roots: Sequence[int]) -> bool:
    """True if `companion` is a matmul with the same first operand, and only the roots need it."""
    if graph.nodes[companion].op is not Op.MATMUL or pipeline.rejection_reason(graph, companion, roots[0]) is not None:
        return False
    return _shares_operand(graph, pipeline, matmul, companion) and is_computed_once(graph, companion, roots, ())


def _shares_operand(graph: Graph, pipeline: Pipeline, first: int, second: int) -> bool:
    """True if two matmuls have the same first operand and dtype, and their second operands the same layout."""
    if graph.nodes[first].dtype is not graph.nodes[second].dtype:
        return False
    a, b = pipeline.operands(graph, first), pipeline.operands(graph, second)
    return a is not None and b is not None and a.layout == b.layout


def _checked_part(
    graph: Graph, part: EpiloguePart, materialized: Collection[int], pipeline: Pipeline
) -> tuple[EpiloguePart, tuple[int, ...]] | None:
    """Returns the part with the columns that a tile must hold and only the matmuls that it reads; and its other inputs.

    None if the pipeline cannot compute it.
    """
    producers, lanes = _part_producers(graph, part, materialized)
    head = pipeline.tile_of(lanes.head, is_full_row=len(part.domain.columns) == 1)
    inputs = tuple(producers.inputs)
    taken = tuple(p for p in part.products if p in producers.core_nodes)
    if part.products[0] not in taken or not pipeline.tile_widths(head, len(taken)):
        return None
    if not {*taken, *part.outputs}.isdisjoint(inputs):  # these would have to be materialized before they are computed
        return None
    if not all(is_computed_once(graph, p, part.outputs, inputs) for p in taken):
        return None
    return replace(part, products=taken, head=head, shift=lanes.shift), inputs


def _part_producers(graph: Graph, part: EpiloguePart, materialized: Collection[int]) -> tuple[Producers, _Lanes]:
    """Returns the producers of a part's results, and the columns that are combined for them."""
    axes = domain_axes(part.domain)
    producers, vec = Producers(), _Lanes(graph, part, axes)
    for output, order in zip(part.outputs, part.orders, strict=True):
        at = result_index(graph, output, order, part.domain, axes.symbols, axes)
        walk(graph, output, at, axes, vec, producers, frozenset(materialized) - set(part.outputs))
    return producers, vec


def epilogue_inputs(graph: Graph, part: EpiloguePart, materialized: Collection[int]) -> frozenset[int]:
    """Returns the values that an epilogue reads from memory."""
    return frozenset(_part_producers(graph, part, materialized)[0].inputs)


def operands_in_memory(graph: Graph, matmul: int) -> tuple[int, ...]:
    """Returns the values that a matmul reads from memory."""
    if has_pairs(graph, matmul):
        return tuple(operand_base(graph, p) for pair in operand_pairs(graph, matmul) for p in pair)
    a, b = graph.nodes[matmul].args
    math = row_math(graph, matmul) if computes_rows(graph, matmul) else None
    stored = None if weight_on_load(graph, matmul) is None else stored_leaves(graph, matmul)
    first = (operand_base(graph, a),) if math is None else math.leaves
    return (*first, *((operand_base(graph, b),) if stored is None else stored))


def _group(graph: Graph, parts: tuple[EpiloguePart, ...], inputs: Iterable[int], pipeline: Pipeline) -> Group:
    products = tuple(dict.fromkeys(p for part in parts for p in part.products))
    operands = {base for p in products for base in operands_in_memory(graph, p)}
    outputs = tuple(o for part in parts for o in part.outputs)
    read = tuple(sorted({*inputs, *operands}))
    match = {product: pipeline.operands(graph, product) for product in products}
    core_nodes = tuple(sorted(products))
    return Group(CONTRACTION, outputs, read, parts[0].domain, core_nodes, parts=parts, pipeline=pipeline.name, match=match)


def _domain_of(graph: Graph, root: int, order: tuple[int, ...], matmul: int, pipeline: Pipeline) -> Domain:
    """Returns the iteration space of an epilogue, with the most dims that any view of the result needs."""
    columns = graph.nodes[matmul].shape[-1]
    views = [(root, order)]
    for result in (*graph.outputs, *(graph.nodes[put].args[1] for put in graph.puts)):
        if result != root and strip_views(graph, result) == root:
            dims = _order_of(graph, result, matmul)
            views += [(result, dims)] if dims is not None else []
    shapes = [tuple(graph.nodes[view].shape[d] for d in view_order) for view, view_order in views]
    domains = (_split_columns(shape, columns, pipeline.column_multiple) for shape in (*shapes, graph.nodes[matmul].shape))
    return max((domain for domain in domains if domain is not None), key=lambda domain: len(domain.columns))


def _split_columns(shape: Shape, columns: Dim, multiple: int) -> Domain | None:
    """Splits a shape into rows and the matmul's columns; None if a dim holds both, or the last dim is not the needed multiple."""
    for first in range(len(shape) - 1, -1, -1):
        if same(product(shape[first:]), columns) and not same(shape[-1], 1):
            last = literal(shape[-1])
            if last is None or last % (multiple if first == len(shape) - 1 else FRAGMENT):
                return None
            return Domain(shape, tuple(range(first, len(shape))))
    return None


def _order_of(graph: Graph, root: int, matmul: int) -> tuple[int, ...] | None:
    """Returns the result's dims in the order of the matmul's elements; None if the numbers of elements differ."""
    shape = graph.nodes[root].shape
    identity = tuple(range(len(shape)))
    full = graph.nodes[matmul].shape
    if not same(product(shape), product(full)):
        return None
    if len(shape) == len(full) and all(map(same, shape, full)):
        return identity
    axes = identity_axes(shape)
    positions: list[Position] = []

    def note(position: int, at: Position, _bounds: tuple[Bounds, ...]) -> bool:
        positions.extend([at] if position == matmul else [])
        return False

    walk(graph, root, axes.symbols, axes, note, Producers())
    orders = (sorted_dims(_offset_of_pair(linearize(at, full), axes), axes) for at in positions)
    return next((order for order in orders if order is not None), identity)


def _offset_of_pair(offset: Dim, axes: Axes) -> sympy.Expr:
    """Returns an offset for even columns, which may be those of stacked results."""
    column = axes.symbols[-1]
    first = at_lane(offset, column, 0)
    return first + column if same(axes.extents[-1], LANES) and not first.has(column) else first


def _may_be_result(graph: Graph, root: int) -> bool:
    return graph.nodes[root].family in _COMPUTED or reduces_heads(graph, root)


def _head_operand(graph: Graph, root: int) -> int:
    """Returns the value that a reduction over heads reduces to the result; without such a reduction, the result itself."""
    shape = graph.nodes[root].shape
    stack, seen = [root] if shape and same(shape[-1], 1) else [], set[int]()
    while stack:
        position = stack.pop()
        node = graph.nodes[position]
        if reduces_heads(graph, position) and len(node.shape) == len(shape) and all(map(same, node.shape, shape)):
            return node.args[0]
        if position not in seen and node.family is Family.POINTWISE:
            stack += node.args
        seen.add(position)
    return root


def _is_stored(graph: Graph, root: int, base: int, order: tuple[int, ...]) -> bool:
    """True if an epilogue can store a result: one element per head, or as in `_is_written`."""
    return base != root or _is_written(graph.nodes[root].shape, order)


def _is_written(shape: Shape, order: tuple[int, ...]) -> bool:
    """True if a result can be written in its own shape: in the matmul's element order, or eight columns at a time."""
    dims = [d for d in order if not same(shape[d], 1)]
    last = itertools.takewhile(lambda d: order[d - len(shape)] == d, reversed(range(len(shape))))  # neighbours in memory too
    return dims == sorted(dims) or (literal(product(shape[d] for d in last)) or 1) % FRAGMENT == 0


def sorted_dims(offset: sympy.Expr, axes: Axes) -> tuple[int, ...] | None:
    """Returns the order of dims in which an offset is contiguous, up to a constant, or None."""
    order: list[int] = []
    remaining = [d for d, extent in enumerate(axes.extents) if not same(extent, 1)]
    stride: Dim = 1
    while remaining:
        inner = next((d for d in remaining if same(offset.coeff(axes.symbols[d]), stride)), None)
        if inner is None:
            return None
        order.insert(0, inner)
        remaining.remove(inner)
        stride = stride * axes.extents[inner]
    return (*(d for d in range(len(axes.symbols)) if d not in order), *order)


# Reads of a matmul.


@dataclass
class _Lanes:
    """Decides which reads an epilogue supports: head reductions, and elements of its matmuls in the same row and head.

    Attributes:
        head: the number of columns that one tile must hold for the accepted reads.
        shift: as in `EpiloguePart`.
    """

    graph: Graph
    part: EpiloguePart
    axes: Axes
    head: int = field(init=False, default=1)
    shift: int | None = field(init=False, default=0)

    def __call__(self, position: int, at: Position, bounds: tuple[Bounds, ...]) -> bool:
        node = self.graph.nodes[position]
        if node.family is Family.REDUCTION:
            return self._is_current_head(position, at)
        if node.op is not Op.MATMUL or position not in self.part.products:
            return False
        rows = self.part.domain.rows
        symbols, extents = (tuple(values[d] for d in rows) for values in (self.axes.symbols, self.axes.extents))
        if not same(node.shape[-1], product(self.axes.extents[len(rows) :])):
            return False
        if not is_same_row(node.shape[:-1], at[:-1], symbols, extents):
            return False
        return self._is_in_head(at[-1], len(rows), bounds)

    def _is_current_head(self, position: int, at: Position) -> bool:
        """True if a reduction's index is that of the current head. The reduction's operands are checked by their own reads."""
        products = self.graph.ancestors[position].intersection(self.part.products)
        if not reduces_heads(self.graph, position) or not products or any(leaves_heads_apart(self.graph, p) for p in products):
            return False
        shape, extent = self.graph.nodes[self.graph.nodes[position].args[0]].shape, self.axes.extents[-1]
        column = self.axes.symbols[-1]
        if len(shape) != len(self.axes.symbols) or not same(shape[-1], extent) or any(sympy.sympify(i).has(column) for i in at):
            return False
        self.head, self.shift = literal(extent) or 1, None
        return True

    def _is_in_head(self, index: Index, rows: int, bounds: tuple[Bounds, ...]) -> bool:
        """True if an index selects the pair of columns itself, or another pair of the same head."""
        symbols, extents = self.axes.symbols[rows:], self.axes.extents[rows:]
        column = symbols[-1]
        relative = sympy.expand(index - linearize(without_single(symbols, extents), extents) + column)
        for lane in range(LANES):
            offset = sympy.expand(at_lane(relative, column, lane) - column)
            if not offset.is_Integer or int(offset) % FRAGMENT >= LANES:
                return False
            shift = int(offset) - int(offset) % FRAGMENT
            if shift and not self._stays_in_head(column, shift, bounds):
                return False
        return True

    def _stays_in_head(self, column: sympy.Symbol, shift: int, bounds: tuple[Bounds, ...]) -> bool:
        """True if the pair at this distance is in the same head wherever the bounds allow the read."""
        extent = literal(self.axes.extents[-1])
        assert extent is not None  # checked by `_split_columns`
        first, end = 0, extent
        for bound in bounds:
            distance = sympy.expand(bound.index - column)
            lower, upper = literal(bound.lower or 0), extent if bound.upper is None else literal(bound.upper)
            if distance.is_Integer and lower is not None and upper is not None:
                first, end = max(first, lower - int(distance)), min(end, upper - int(distance))
        self.head = extent
        self._add_shift(shift, first, end)
        return first // LANES * LANES + shift >= 0 and -(-end // LANES) * LANES + shift <= extent

    def _add_shift(self, shift: int, first: int, end: int) -> None:
        """Updates `shift` with reads at a distance by the columns from `first` to `end`. A tile of two slabs holds them only if the
        columns lie in the lower halves of blocks of two distances, for reads to the right, or in the upper halves."""
        distance = abs(shift)
        start = first % (2 * distance) - (distance if shift < 0 else 0)
        is_paired = start >= 0 and start + end - first <= distance
        self.shift = distance if is_paired and self.shift in (0, distance) else None
