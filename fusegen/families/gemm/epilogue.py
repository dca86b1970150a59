"""Epilogues: what is computed of products in the accumulators of tensor cores.

An epilogue is computed over the dims of its result, in the order in which a product's elements lie: some number rows, the others
columns. It may take two products of one first operand, and columns of the same head that are further away in the tile. Products
of one first operand that end in different places are parts of one launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import sympy

from fusegen.families.gemm.pipelines import Pipeline, pipeline_named, pipelines_of, refusals, serving
from fusegen.fusion.accumulator import FRAGMENT, LANES, at_lane, is_same_row, reduces_heads
from fusegen.fusion.groups import Domain, EpiloguePart, Group, GroupKind, operand_base, products_below, strip_views
from fusegen.fusion.producers import Producers, domain_axes, walk
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, Position, identity_axes, reshaped
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Dim, Index, Shape, linearize, literal, product, same
from fusegen.target import Target

CONTRACTION = GroupKind("product with epilogue", reads_as_typed=True)

_COMPUTED = (Family.POINTWISE, Family.VIEW, Family.CONTRACTION)
_MOST_PRODUCTS = 2  # that one epilogue takes: they share an accumulator


def ending(graph: Graph, root: int, target: Target, kept: Collection[int]) -> Group | None:
    """The group of products that end in a value, in an epilogue's or in one that is a product itself, by the first pipeline that
    serves it; None when none does.

    Args:
        kept: values that lie in memory.
    """
    if graph.nodes[root].family is Family.CONTRACTION:
        return plain_group(graph, root, target)
    if graph.nodes[root].family not in (Family.POINTWISE, Family.VIEW):
        return None
    for pipeline in pipelines_of(target):
        for matmul in products_below(graph, root, kept):
            group = _group_at(graph, root, matmul, kept, pipeline)
            if group is not None:
                return replace(group, reason=refusals(graph, matmul, root, target))
    return None


def too_wide(graph: Graph, root: int, matmul: int, target: Target, kept: Collection[int]) -> str:
    """The pipelines whose accumulators are too narrow for the columns that an epilogue combines; empty where another reason
    keeps it apart."""
    found: list[str] = []
    for pipeline in pipelines_of(target):
        order = None if pipeline.unserved(graph, matmul, root) else _order_of(graph, root, matmul)
        if order is None:
            continue
        part = EpiloguePart((root,), (order,), (matmul,), _domain_of(graph, root, order, matmul, pipeline))
        producers, head = _below(graph, part, kept)
        if matmul in producers.anchors and not pipeline.tile_widths(head, 1):
            found.append(f"no {pipeline.name}: heads of {head} columns are combined, of which no accumulator holds a whole one")
    return "; ".join(found)


def plain_group(graph: Graph, matmul: int, target: Target) -> Group | None:
    """The group of a product that is a result itself; None when no pipeline serves it."""
    pipeline = serving(graph, matmul, matmul, target)
    if pipeline is None:
        return None
    order = tuple(range(len(graph.nodes[matmul].shape)))
    part = EpiloguePart((matmul,), (order,), (matmul,), _domain_of(graph, matmul, order, matmul, pipeline))
    return replace(_group(graph, (part,), (), pipeline), reason=refusals(graph, matmul, matmul, target))


def extended(graph: Graph, group: Group, roots: Sequence[int], kept: Collection[int]) -> Group | None:
    """The group with more results, computed in the epilogue of its only part; None when that cannot be.

    Args:
        roots: the further results; they may take a second product, which then ends in one of them.
        kept: values that lie in memory.
    """
    (part,) = group.parts
    matmul, pipeline = part.products[0], pipeline_named(group.pipeline)
    if not all(_may_be_result(graph, r) and pipeline.unserved(graph, matmul, r) is None for r in roots):
        return None
    wholes = [_whole(graph, root) for root in roots]
    found_orders = [_order_of(graph, whole, matmul) for whole in wholes]
    orders = [o for o, r, w in zip(found_orders, roots, wholes, strict=True) if o is not None and _is_stored(graph, r, w, o)]
    if len(orders) < len(roots):
        return None
    outputs = (*part.outputs, *roots)
    below = dict.fromkeys(m for r in roots for m in (r, *products_below(graph, r, frozenset(kept) - set(part.outputs))))
    products = (*part.products, *(m for m in below if m not in part.products and _joins(graph, pipeline, matmul, m, outputs)))
    domains = [part.domain, *(_domain_of(graph, w, o, matmul, pipeline) for w, o in zip(wholes, orders, strict=True))]
    for domain in dict.fromkeys(domains):
        wanted = replace(part, outputs=outputs, orders=(*part.orders, *orders), products=products[:_MOST_PRODUCTS], domain=domain)
        found = _walked(graph, wanted, kept, pipeline)
        if found is not None and not any(matmul in graph.ancestors[p] for p in found[1]):
            return replace(_group(graph, found[:1], found[1], pipeline), reason=group.reason)
    return None


def joined(graph: Graph, groups: Sequence[Group]) -> Group:
    """Groups of products of one first operand, of one pipeline, as one launch."""
    parts, inputs = tuple(part for group in groups for part in group.parts), {p for group in groups for p in group.inputs}
    return replace(_group(graph, parts, inputs, pipeline_named(groups[0].pipeline)), reason=groups[0].reason)


def position_of(graph: Graph, output: int, order: tuple[int, ...], domain: Domain, at: Position, axes: Axes) -> Position:
    """The index of a result's element that an epilogue computes.

    Args:
        output, order: the result, and its dims in the order of the domain.
        at: a point of the domain; of a result with an element a head, any of the head.
    """
    shape = graph.nodes[output].shape
    last = len(domain.shape) - (1 if is_a_head(shape, domain) else 0)
    ordered = reshaped(at[:last], domain.shape[:last], tuple(shape[d] for d in order), axes)
    found: list[Index] = [0] * len(shape)
    for index, d in zip(ordered, order, strict=True):
        found[d] = index
    return tuple(found)


def is_a_head(shape: Shape, domain: Domain) -> bool:
    """True if a result has an element a head, and not one a column."""
    return not same(product(shape), product(domain.shape))


def is_computed_once(graph: Graph, matmul: int, roots: Sequence[int], inputs: Iterable[int]) -> bool:
    """True if nobody but the roots needs the product or what is made of it on the way: others would compute it again.

    Args:
        inputs: what the roots read from memory.
    """
    ways = {p for root in roots for p in graph.ancestors[root] if p == matmul or matmul in graph.ancestors[p]}
    between = {p for p in ways if strip_views(graph, p) not in roots}  # views of a result are read from memory
    if not graph.writes:  # what is stored in place is copied on its way, by a kernel that takes the rest as well
        between &= _before(graph, matmul, roots)  # what is made of a root can read it
    if between & set(inputs):
        return False
    return not any(p in graph.outputs or set(graph.users[p]) - ways - set(roots) for p in between)


def _before(graph: Graph, matmul: int, roots: Sequence[int]) -> set[int]:
    """A product and what is made of it before any of the roots is."""
    stack, found = [matmul], set[int]()
    while stack:
        position = stack.pop()
        if position not in found and position not in roots:
            found.add(position)
            stack += graph.users[position]
    return found


def _group_at(graph: Graph, root: int, matmul: int, kept: Collection[int], pipeline: Pipeline) -> Group | None:
    if pipeline.unserved(graph, matmul, root) is not None or not is_computed_once(graph, matmul, (root,), ()):
        return None
    order = _order_of(graph, root, matmul)
    if order is None or not _is_written(graph.nodes[root].shape, order):
        return None
    products = (matmul, *_companions(graph, root, matmul, kept, pipeline))
    part = EpiloguePart((root,), (order,), products, _domain_of(graph, root, order, matmul, pipeline))
    found = _walked(graph, part, kept, pipeline)
    return None if found is None else _group(graph, found[:1], found[1], pipeline)


def _companions(graph: Graph, root: int, matmul: int, kept: Collection[int], pipeline: Pipeline) -> tuple[int, ...]:
    """Products of the same first operand that end in the root, too."""
    others = (m for m in products_below(graph, root, kept) if m != matmul and _joins(graph, pipeline, matmul, m, (root,)))
    return tuple(itertools.islice(others, _MOST_PRODUCTS - 1))


def _joins(graph: Graph, pipeline: Pipeline, matmul: int, other: int, roots: Sequence[int]) -> bool:
    """True if a value is a product of the same first operand that only some roots need."""
    if graph.nodes[other].op is not Op.MATMUL or pipeline.unserved(graph, other, roots[0]) is not None:
        return False
    return _meets_alike(graph, pipeline, matmul, other) and is_computed_once(graph, other, roots, ())


def _meets_alike(graph: Graph, pipeline: Pipeline, one: int, other: int) -> bool:
    """True if two products can be computed together: their first operands are the same, and all lie in memory alike."""
    if graph.nodes[one].dtype is not graph.nodes[other].dtype:
        return False
    a, b = pipeline.operands(graph, one), pipeline.operands(graph, other)
    return a is not None and b is not None and (a.a, a.a_major, a.b_major) == (b.a, b.a_major, b.b_major)


def _walked(
    graph: Graph, part: EpiloguePart, kept: Collection[int], pipeline: Pipeline
) -> tuple[EpiloguePart, tuple[int, ...]] | None:
    """The part as it can be computed, with the products that it takes, and what it reads besides their operands; None when it
    cannot."""
    producers, head = _below(graph, part, kept)
    head = pipeline.tile_of(head, whole=len(part.domain.columns) == 1)
    inputs = tuple(producers.inputs)
    taken = tuple(p for p in part.products if p in producers.anchors)
    if part.products[0] not in taken or not pipeline.tile_widths(head, len(taken)):
        return None
    if not {*taken, *part.outputs}.isdisjoint(inputs):  # which would have to be there before they are computed
        return None
    if not all(is_computed_once(graph, p, part.outputs, inputs) for p in taken):
        return None
    return replace(part, products=taken, head=head), inputs


def _below(graph: Graph, part: EpiloguePart, kept: Collection[int]) -> tuple[Producers, int]:
    """The producers of a part's results, and the number of columns that a tile must hold together for them."""
    axes = domain_axes(part.domain)
    producers, lanes = Producers(), _Lanes(graph, part, axes)
    for output, order in zip(part.outputs, part.orders, strict=True):
        at = position_of(graph, output, order, part.domain, axes.symbols, axes)
        walk(graph, output, at, axes, lanes, producers, frozenset(kept) - set(part.outputs))
    return producers, lanes.head


def _group(graph: Graph, parts: tuple[EpiloguePart, ...], inputs: Iterable[int], pipeline: Pipeline) -> Group:
    products = tuple(dict.fromkeys(p for part in parts for p in part.products))
    operands = {operand_base(graph, a) for p in products for a in graph.nodes[p].args}
    outputs = tuple(o for part in parts for o in part.outputs)
    read = tuple(sorted({*inputs, *operands}))
    match = {product: pipeline.operands(graph, product) for product in products}
    anchors = tuple(sorted(products))
    return Group(CONTRACTION, outputs, read, parts[0].domain, anchors, parts=parts, pipeline=pipeline.name, match=match)


# The dims of a result in the order of a product's elements.


def _domain_of(graph: Graph, root: int, order: tuple[int, ...], matmul: int, pipeline: Pipeline) -> Domain:
    """The iteration space of an epilogue: as many dims as some result has, so that each lies along them."""
    columns = graph.nodes[matmul].shape[-1]
    views = [(root, order)]
    for result in graph.outputs:
        if result != root and strip_views(graph, result) == root:
            found = _order_of(graph, result, matmul)
            views += [(result, found)] if found is not None else []
    shapes = [tuple(graph.nodes[view].shape[d] for d in dims) for view, dims in views]
    domains = (_over(shape, columns, pipeline.column_multiple) for shape in (*shapes, graph.nodes[matmul].shape))
    return max((domain for domain in domains if domain is not None), key=lambda domain: len(domain.columns))


def _over(shape: Shape, columns: Dim, multiple: int) -> Domain | None:
    """The shape as rows and, last, dims that are the product's columns; None where a dim holds both, or heads are no eights."""
    for first in range(len(shape) - 1, -1, -1):
        if same(product(shape[first:]), columns) and not same(shape[-1], 1):
            last = literal(shape[-1])
            if last is None or last % (multiple if first == len(shape) - 1 else FRAGMENT):
                return None
            return Domain(shape, tuple(range(first, len(shape))))
    return None


def _order_of(graph: Graph, root: int, matmul: int) -> tuple[int, ...] | None:
    """The dims of a result, those first that are furthest apart in the product; None when it has another number of elements."""
    shape = graph.nodes[root].shape
    given = tuple(range(len(shape)))
    wanted = graph.nodes[matmul].shape
    if not same(product(shape), product(wanted)):
        return None
    if len(shape) == len(wanted) and all(map(same, shape, wanted)):
        return given
    axes = identity_axes(shape)
    found: list[Position] = []

    def note(position: int, at: Position, _bounds: tuple[Bounds, ...]) -> bool:
        found.extend([at] if position == matmul else [])
        return False

    walk(graph, root, axes.symbols, axes, note, Producers())
    orders = (sorted_dims(sympy.expand(linearize(at, wanted)), axes) for at in found)
    return next((order for order in orders if order is not None), given)


def _may_be_result(graph: Graph, root: int) -> bool:
    return graph.nodes[root].family in _COMPUTED or reduces_heads(graph, root)


def _whole(graph: Graph, root: int) -> int:
    """A value in the dims of a result with as many elements as the product: the result itself, or what is combined over heads for
    it."""
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


def _is_stored(graph: Graph, root: int, whole: int, order: tuple[int, ...]) -> bool:
    """True if an epilogue can store a result: an element a head by itself, anything else as `_is_written` says."""
    return whole != root or _is_written(graph.nodes[root].shape, order)


def _is_written(shape: Shape, order: tuple[int, ...]) -> bool:
    """True if a result can be written in its own shape: in the order of the product's elements, or eight columns at a time."""
    dims = [d for d in order if not same(shape[d], 1)]
    return dims == sorted(dims) or (order[-1] == len(shape) - 1 and (literal(shape[-1]) or 1) % FRAGMENT == 0)


def sorted_dims(offset: sympy.Expr, axes: Axes) -> tuple[int, ...] | None:
    """The order of dims in which an offset counts their elements one by one, from some element on."""
    order: list[int] = []
    left = [d for d, extent in enumerate(axes.extents) if not same(extent, 1)]
    stride: Dim = 1
    while left:
        inner = next((d for d in left if same(offset.coeff(axes.symbols[d]), stride)), None)
        if inner is None:
            return None
        order.insert(0, inner)
        left.remove(inner)
        stride = stride * axes.extents[inner]
    return (*(d for d in range(len(axes.symbols)) if d not in order), *order)


# Where a product is read.


@dataclass
class _Lanes:
    """Accepts products that are read at the epilogue's own row, and at its pair of columns or another one of the same head; and
    reductions of the head itself.

    Attributes:
        head: columns of a head, once a pair of another one's was read, or all of them.
    """

    graph: Graph
    part: EpiloguePart
    axes: Axes
    head: int = field(init=False, default=1)

    def __call__(self, position: int, at: Position, bounds: tuple[Bounds, ...]) -> bool:
        node = self.graph.nodes[position]
        if node.family is Family.REDUCTION:
            return self._is_of_own_head(position, at)
        if node.op is not Op.MATMUL or position not in self.part.products:
            return False
        rows = self.part.domain.rows
        symbols, extents = (tuple(values[d] for d in rows) for values in (self.axes.symbols, self.axes.extents))
        if not same(node.shape[-1], product(self.axes.extents[len(rows) :])):
            return False
        if not is_same_row(node.shape[:-1], at[:-1], symbols, extents):
            return False
        return self._is_near(at[-1], len(rows), bounds)

    def _is_of_own_head(self, position: int, at: Position) -> bool:
        """True if a reduction is of the head that is being computed, as far as its own index says: what it reads must be, too."""
        if not reduces_heads(self.graph, position) or self.graph.ancestors[position].isdisjoint(self.part.products):
            return False
        shape, extent = self.graph.nodes[self.graph.nodes[position].args[0]].shape, self.axes.extents[-1]
        column = self.axes.symbols[-1]
        if len(shape) != len(self.axes.symbols) or not same(shape[-1], extent) or any(sympy.sympify(i).has(column) for i in at):
            return False
        self.head = literal(extent) or 1
        return True

    def _is_near(self, index: Index, rows: int, bounds: tuple[Bounds, ...]) -> bool:
        """True if an index names columns of the pair itself, or of a pair of the same head."""
        symbols, extents = self.axes.symbols[rows:], self.axes.extents[rows:]
        column = symbols[-1]
        own = sympy.expand(index - linearize(symbols, extents) + column)
        for lane in range(LANES):
            offset = sympy.expand(at_lane(own, column, lane) - column)
            if not offset.is_Integer or int(offset) % FRAGMENT >= LANES:
                return False
            shift = int(offset) - int(offset) % FRAGMENT
            if shift and not self._stays(column, shift, bounds):
                return False
        return True

    def _stays(self, column: sympy.Symbol, shift: int, bounds: tuple[Bounds, ...]) -> bool:
        """True if a pair so far away belongs to the same head wherever its value is used."""
        extent = literal(self.axes.extents[-1])
        assert extent is not None  # which `_over` saw
        first, end = 0, extent
        for bound in bounds:
            distance = sympy.expand(bound.index - column)
            lower, upper = literal(bound.lower or 0), extent if bound.upper is None else literal(bound.upper)
            if distance.is_Integer and lower is not None and upper is not None:
                first, end = max(first, lower - int(distance)), min(end, upper - int(distance))
        self.head = extent
        return first // LANES * LANES + shift >= 0 and -(-end // LANES) * LANES + shift <= extent
