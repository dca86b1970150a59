"""Pointwise groups: one pass, one function, vectors along the last axis; tiles where operands lie across each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import sympy

from fusegen.families.pointwise.heuristics import PointFeatures, pointwise_plans, tile_plans
from fusegen.families.pointwise.plan import Hoisted, PointwiseBody, PointwisePlan, TileBody, TilePlan
from fusegen.families.rows.columns import may_wrap, reused_soon, wrapped
from fusegen.fusion.groups import GroupKind
from fusegen.fusion.space import Space, unrolled
from fusegen.ir.formula import ceil_div, formula
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Axes, FloorDiv, Index, Modulo, Stride, axis_symbol, exact_quotient, literal, product
from fusegen.schedule.access import Access, AccessPattern, divisor, merge_axes, pattern_of
from fusegen.schedule.context import Context, Leaves, bound_index, leaves_of
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.indices import Checked, Loaded
from fusegen.schedule.kernel import Plan, SharedArrays, arranged
from fusegen.schedule.lanes import Fragments, interleaved, interleaved_bytes
from fusegen.schedule.math import CallArgument, Origin
from fusegen.schedule.program import Launch
from fusegen.schedule.terms import BufferRead, Terms
from fusegen.threads import cached_property

_LANES = 8  # of most plans


POINTWISE = GroupKind("pointwise", merges=True, writes_in_place=True, is_strided=True)


def lower_pointwise(context: Context) -> Launch:
    """The launch of a pointwise group."""
    points = _points(context)
    crossing = crossing_of(points) if points.together == 1 else None
    tiled = () if crossing is None else plans_of(context, points, crossing)
    hoisting = hoisting_of(points) if crossing is None and context.target.warp > 0 else None
    candidates: tuple[Plan, ...] = (*tiled, *_plans(context, points, hoisting))
    plan = context.chosen(candidates)
    if crossing is not None and isinstance(plan, TilePlan):
        return lower_tiles(context, points, crossing, plan)
    assert isinstance(plan, PointwisePlan)
    return _launch(context, points, plan, hoisting if plan.repeats > 1 else None)


def _points(context: Context) -> Points:
    space = unrolled(context.graph, context.group)
    points = _points_over(context, space)
    apart = in_parts_of(space.axes, [offset for _, offset in points.touched])
    if apart is not None:
        axes, index = apart
        moved_to = dict(zip(space.axes.symbols, index, strict=True))
        points = _points_over(context, Space(axes, tuple(tuple(substitute(i, moved_to) for i in p) for p in space.points)))
    reads, places = [read.offset for read in points.leaves.reads.values()], [offset for _, offset in points.stores]
    ordered = _ordered(context, in_memory_order(points.axes, reads, places), points)
    merged, replaced = merge_axes(ordered, [*points.leaves.expressions(), *places], "position")
    if not merged.symbols:
        merged = Axes((axis_symbol("position"),), (1,))
    moved = tuple((buffer, substitute(offset, dict(replaced))) for buffer, offset in points.stores)
    return replace(points, leaves=points.leaves.moved(replaced), stores=moved, axes=merged)


def _ordered(context: Context, axes: Axes, points: Points) -> Axes:
    """The axes in the order in which a GPU's cache serves best. Lanes go on along the last one."""
    if not context.target.warp or not axes.symbols or divisor(axes.extents[-1], context.multiples) % _LANES:
        return axes  # rows that groups of lanes do not divide are best one behind the other
    lanes = Axes(axes.symbols[-1:], axes.extents[-1:])
    itemsizes = [context.dtype(buffer).itemsize for buffer, _ in points.touched]
    outer = Axes(axes.symbols[:-1], axes.extents[:-1])
    outer = reused_soon(outer, lanes, [read.offset for read in points.leaves.reads.values()], itemsizes)
    return Axes((*outer.symbols, *lanes.symbols), (*outer.extents, *lanes.extents))


def _points_over(context: Context, space: Space) -> Points:
    """The points of a group, of which a thread computes some together."""
    axes = space.axes
    evaluator = Evaluator(
        context.graph, axes, context.stored, lambda position, index: None, context.rounded, context.contracted, context.inverted
    )
    roots: list[int] = []
    stores: list[tuple[int, Index]] = []
    for output, index in itertools.product(context.group.outputs, space.points):
        root = evaluator.value(output, index)
        for store in context.stores(output, index, axes):
            roots.append(evaluator.stored(root, context.dtype(store.buffer)))
            stores.append((store.buffer, evaluator.place(store.offset, store.gathers)))
    leaves = leaves_of(evaluator.terms, roots, evaluator.checks())
    return Points(evaluator.terms, tuple(roots), leaves, tuple(stores), axes, len(space.points))


def _plans(context: Context, points: Points, hoisting: Hoisting | None) -> tuple[PointwisePlan, ...]:
    touched = tuple(points.touched)
    itemsizes, offsets = [context.dtype(b).itemsize for b, _ in touched], [o for _, o in touched]
    wraps = may_wrap(context, touched, points.stores, points.axes) and not points.leaves.checks
    along = dict(zip(points.axes.symbols, points.axes.extents, strict=True))
    features = PointFeatures(
        axes=points.axes,
        itemsizes=itemsizes,
        offsets=offsets,
        may_wrap=wraps,
        in_turn=_in_turn(context, points),
        together=points.together,
        along=None if hoisting is None else along[hoisting.axis],
    )
    return pointwise_plans(features, context.target, context.multiples)


def _in_turn(context: Context, points: Points) -> int:
    """Bytes that a lane takes of the widest access to several variables in turn; 0 where there is none."""
    if not context.target.warp:
        return 0
    reads = [BufferRead(read.buffer, read.offset, read.conditions) for read in points.leaves.reads.values()]
    return interleaved_bytes(
        context, (reads, [BufferRead(buffer, offset) for buffer, offset in points.stores]), points.axes.symbols[-1]
    )


def _launch(context: Context, points: Points, plan: PointwisePlan, hoisting: Hoisting | None) -> Launch:
    axes = points.axes if hoisting is None else hoisting.ordered(points.axes)

    def access(name: str, read: BufferRead) -> Access:
        found = context.access(name, read.buffer, read.offset, axes.symbols[-1], plan.lanes, read.conditions)
        return wrapped(context, found, axes, plan.lanes) if plan.wraps else found

    def joined(accesses: Sequence[Access]) -> tuple[Access, ...]:
        if not context.target.warp or plan.wraps:
            return tuple(accesses)
        return interleaved(context, accesses, axes.symbols[-1], plan.lanes)

    fragments = Fragments(context, points.terms, points.leaves, access, [offset for _, offset in points.stores])
    writes = tuple(access(context.names.take("result"), BufferRead(b, o)) for b, o in points.stores)
    once = frozenset[int]() if hoisting is None else hoisting.reads
    hoisted = None if hoisting is None else _hoisted(fragments, hoisting, joined([fragments.reads[t] for t in sorted(once)]))
    call = fragments.call(context.name, [(w.name, root) for w, root in zip(writes, points.roots, strict=True)])
    reads = joined([each for t, each in fragments.reads.items() if t not in once])
    body = PointwiseBody(axes, reads, joined(writes), fragments.checks, call, plan, hoisted)
    grid = ceil_div(product(body.threads.extents), plan.threads * plan.lanes * (plan.unroll if hoisting is None else 1))
    kernel = fragments.kernel(body, writes, [axes])
    return Launch(kernel, context.group, (), grid, plan.threads, 0, context.traffic(), candidates=context.candidates)


def _hoisted(fragments: Fragments, hoisting: Hoisting, reads: tuple[Access, ...]) -> Hoisted:
    """The values that are computed before a loop, which calls in the loop take."""
    context = fragments.context
    roots = [(context.names.take("hoisted"), term) for term in hoisting.terms]
    call = fragments.call(f"{context.name}_once", roots) if roots else None
    fragments.values |= {term: CallArgument(Origin.LANES, name) for name, term in roots}
    return Hoisted(hoisting.axis, reads, call)


# Loops of a thread along an axis on which costly parts of the math do not depend, as the angles of a rotation on the head: these
# are computed once, before the loop.


_COSTS = {Op.POW: 3, Op.SIN: 2, Op.COS: 2, Op.ATAN2: 2, Op.LGAMMA: 3}
"""Prices of operations, beside those of a few instructions, and those that are as much as an exponential."""

_CHEAP = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.NEG, Op.ABS, Op.MAXIMUM, Op.MINIMUM, Op.CAST, Op.WHERE, Op.SQRT, Op.RSQRT)
_LEAST = 4
"""The price of what is worth a loop: an exponential an element still goes along with memory."""


@dataclass(frozen=True)
class Hoisting:
    """The math that does not depend on an axis.

    Attributes:
        axis: the one that a thread goes along.
        terms: computed before.
        reads: terms of what is read before.
    """

    axis: sympy.Symbol
    terms: tuple[int, ...]
    reads: frozenset[int]

    def ordered(self, axes: Axes) -> Axes:
        """The axes with its own first."""
        symbols = sorted(axes.symbols, key=lambda axis: axis != self.axis)
        extents = dict(zip(axes.symbols, axes.extents, strict=True))
        return Axes(tuple(symbols), tuple(extents[axis] for axis in symbols))


def hoisting_of(points: Points) -> Hoisting | None:
    """The axis along which most of what is costly is the same; None where that is nothing, or an index is checked."""
    if points.leaves.checks:
        return None
    axes = zip(points.axes.symbols[:-1], points.axes.extents[:-1], strict=True)
    found = [_Invariance(points, axis) for axis, extent in axes if literal(extent) != 1]
    best = max(found, key=lambda each: each.saved, default=None)
    if best is None or best.saved < _LEAST:
        return None
    return Hoisting(best.axis, best.terms, best.reads)


@dataclass(frozen=True)
class _Invariance:
    points: Points
    axis: sympy.Symbol

    @property
    def saved(self) -> int:
        """The price of what does not depend on the axis."""
        found = [self.points.terms.items[t].op for t in self.points.terms.below(self.terms)]
        return sum(_COSTS.get(op, 1) for op in found if isinstance(op, Op) and op not in _CHEAP)

    @property
    def reads(self) -> frozenset[int]:
        """Reads that do not depend on it."""
        return frozenset(t for t in self.points.leaves.reads if t not in self._varying)

    @cached_property
    def terms(self) -> tuple[int, ...]:
        """The outermost operations that do not depend on it."""
        items, varying = self.points.terms.items, self._varying
        used = {a for t in varying for a in items[t].args}.union(self.points.roots)
        return tuple(sorted(t for t in used if t not in varying and isinstance(items[t].op, Op)))

    @cached_property
    def _varying(self) -> frozenset[int]:
        """Terms that depend on the axis."""
        found: set[int] = set()
        for position in self.points.terms.below(self.points.roots):
            if self._is_leaf_along(position) or not found.isdisjoint(self.points.terms.items[position].args):
                found.add(position)
        return frozenset(found)

    def _is_leaf_along(self, position: int) -> bool:
        leaves = self.points.leaves
        if position in leaves.reads:
            read = leaves.reads[position]
            return any(self._goes_along(index) for index in (read.offset, *map(bound_index, read.conditions)))
        coordinate = leaves.coordinates.get(position)
        return coordinate is not None and self._goes_along(bound_index(coordinate))

    def _goes_along(self, index: Index) -> bool:
        return bool(sympy.sympify(index).has(self.axis))


# Axes that tensors lie along in parts: as two axes, so that neighbours within a part are seen as such. A packed projection goes
# along heads times channels; its heads lie apart in the result. Along the joined axis no two elements are known to be neighbours
# there; along the channels alone they are.


def in_parts_of(axes: Axes, places: Iterable[Index]) -> tuple[Axes, tuple[Index, ...]] | None:
    """The axes, of which those that places divide by one number are two, and the old axes in terms of them; None if none is.

    Args:
        axes: of an iteration space.
        places: offsets in tensors.
    """
    found = [_part(axis, extent, places) for axis, extent in zip(axes.symbols, axes.extents, strict=True)]
    if not any(found):
        return None
    symbols: list[sympy.Symbol] = []
    extents: list[Index] = []
    index: list[Index] = []
    for axis, extent, part in zip(axes.symbols, axes.extents, found, strict=True):
        if part is None:
            symbols, extents, index = [*symbols, axis], [*extents, extent], [*index, axis]
            continue
        count, length = part
        outer, inner = axis_symbol(f"{axis.name}_part"), axis_symbol(f"{axis.name}_within")
        symbols, extents = [*symbols, outer, inner], [*extents, count, length]
        index.append(outer * length + inner)
    return Axes(tuple(symbols), tuple(extents)), tuple(index)


def _part(axis: sympy.Symbol, extent: Index, places: Iterable[Index]) -> tuple[Index, int] | None:
    """The number of parts of an axis, and their length, where all places that divide it divide it by that."""
    divisions = [d for place in places for d in sympy.sympify(place).atoms(FloorDiv, Modulo) if d.args[0] == axis]
    lengths = {d.args[1] for d in divisions}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    if not length.is_Integer:
        return None
    count = exact_quotient(extent, int(length))
    return None if count is None else (count, int(length))


# Pointwise groups tile by tile: operands that lie across the results are read as they lie, and turned in shared memory.


_VECTOR_BYTES = 16  # the widest memory access of a thread
_MOST_LANES = 8


def plans_of(context: Context, points: Points, crossing: Crossing) -> tuple[TilePlan, ...]:
    """The plans of a kernel whose operands lie across its results; none where tiles do not pay."""
    extents = dict(zip(points.axes.symbols, points.axes.extents, strict=True))
    columns = extents[crossing.column_axis]
    lanes = min(_MOST_LANES, _VECTOR_BYTES // min(context.dtype(buffer).itemsize for buffer, _ in points.touched))
    while (literal(columns) or 0) % lanes:
        lanes //= 2
    itemsizes = [context.dtype(read.buffer).itemsize for read in points.leaves.reads.values() if read in crossing.reads]
    return tile_plans(extents[crossing.row_axis], columns, lanes, itemsizes, context.target)


def lower_tiles(context: Context, points: Points, crossing: Crossing, plan: TilePlan) -> Launch:
    """The launch of a pointwise group with a plan of tiles."""
    return _TileBuilder(context, points, crossing, plan).launch()


class _TileBuilder:
    """Builds the kernel of a pointwise group that works tile by tile."""

    def __init__(self, context: Context, points: Points, crossing: Crossing, plan: TilePlan) -> None:
        self.context, self.points, self.crossing, self.plan = context, points, crossing, plan
        self.extents = dict(zip(points.axes.symbols, points.axes.extents, strict=True))
        self.fragments = Fragments(context, points.terms, points.leaves, self._access)
        self.writes = tuple(self._access(context.names.take("result"), BufferRead(b, o)) for b, o in points.stores)

    def launch(self) -> Launch:
        """The launch of the kernel."""
        context, points, plan = self.context, self.points, self.plan
        accesses = {read: self.fragments.reads[t] for t, read in points.leaves.reads.items()}
        across = tuple(access for read, access in accesses.items() if read in self.crossing.reads)
        body = TileBody(
            points.axes,
            self.crossing.row_axis,
            self.crossing.column_axis,
            self._tiles(),
            across,
            tuple(access for access in accesses.values() if access not in across),
            self.writes,
            _independent(tuple(dict.fromkeys(self._multiples()))),
            self.fragments.call(context.name, [(w.name, root) for w, root in zip(self.writes, points.roots, strict=True)]),
            self._staged(across),
            plan,
        )
        kernel = self.fragments.kernel(body, self.writes, [points.axes])
        grid, candidates = formula(product(body.tiles.extents)), context.candidates
        return Launch(kernel, context.group, (), grid, plan.threads, body.shared.bytes, context.traffic(), candidates=candidates)

    def _tiles(self) -> Axes:
        """The axes that number blocks. Consecutive blocks read consecutive memory."""
        row, column = self.crossing.row_axis, self.crossing.column_axis
        others = {axis: extent for axis, extent in self.extents.items() if axis not in (row, column)}
        symbols = (*others, axis_symbol("tile_column"), axis_symbol("tile_row"))
        sides = _parts(self.extents[column], self.plan.columns), _parts(self.extents[row], self.plan.rows)
        return Axes(symbols, (*others.values(), *sides))

    def _staged(self, accesses: Sequence[Access]) -> SharedArrays:
        return arranged(staged=[self.plan.tile_bytes(self.context.dtype(a.buffer).itemsize) for a in accesses])

    def _access(self, name: str, read: BufferRead) -> Access:
        if read in self.crossing.reads:
            return self.context.access(name, read.buffer, read.offset, self.crossing.row_axis, self._widest(read), read.conditions)
        rest = sympy.Add(*(term for term, _ in self._assumed(read)))
        plain = sympy.expand(sympy.sympify(read.offset) - rest)
        axis, lanes = self.crossing.column_axis, self.plan.lanes
        return replace(self.context.access(name, read.buffer, plain, axis, lanes, read.conditions), offset=read.offset)

    def _widest(self, read: BufferRead) -> int:
        """Elements of an access to what lies across: a thread's part of a tile at most."""
        widest = _VECTOR_BYTES // self.context.dtype(read.buffer).itemsize
        return min(widest, self.plan.rows * self.plan.columns // self.plan.threads)

    def _multiples(self) -> Iterator[sympy.Expr]:
        """Sizes that must be multiples of a number of lanes, so that groups of lanes are whole and at aligned places."""
        extent = sympy.sympify(self.extents[self.crossing.column_axis])
        if divisor(extent, self.context.multiples) % self.plan.lanes:
            yield extent
        others = [read for read in self.points.leaves.reads.values() if read not in self.crossing.reads]
        for read in (*others, *(BufferRead(b, o) for b, o in self.points.stores)):
            yield from (sizes for _, sizes in self._assumed(read))

    def _assumed(self, read: BufferRead) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
        """Terms of a vector's offset that are multiples of the lanes if a call's sizes are, each with these sizes."""
        context, axis = self.context, self.crossing.column_axis
        if pattern_of(read.offset, axis) is not AccessPattern.VECTOR:
            return
        own = max(1, context.alignment(read.buffer) // context.dtype(read.buffer).itemsize)
        for term in sympy.Add.make_args(sympy.expand(sympy.sympify(read.offset) - axis)):
            sizes, _ = term.as_independent(*self.points.axes.symbols, as_Add=False)
            is_known_at_the_call = sizes.free_symbols and not any(isinstance(s, Stride) for s in sizes.free_symbols)
            if is_known_at_the_call and divisor(term, context.multiples, own) % self.plan.lanes:
                yield term, sizes


def _independent(sizes: Sequence[sympy.Expr]) -> tuple[Index, ...]:
    """Those that are no multiples of others whatever the sizes are."""
    return tuple(size for size in sizes if not any(size != other and (size / other).is_integer for other in sizes))


def _parts(extent: Index, side: int) -> Index:
    return FloorDiv(sympy.sympify(extent) + side - 1, sympy.Integer(side))


# Operands of pointwise kernels that lie across the results, as a transposed one does: where results are contiguous, neighbours
# of theirs are far apart, and where they are contiguous, those of the results are.


@dataclass(frozen=True)
class Crossing:
    """Two axes along which different tensors of a kernel are contiguous.

    Attributes:
        row_axis: along which some operands are, which lie across the results.
        column_axis: along which all results are.
        reads: of those operands.
    """

    row_axis: sympy.Symbol
    column_axis: sympy.Symbol
    reads: frozenset[BufferRead]


def in_memory_order(axes: Axes, reads: Sequence[Index], stores: Sequence[Index]) -> Axes:
    """The axes with that last along which all results are contiguous, where nothing is along the last one: as where a transposed
    tensor is worked on in place.

    Args:
        reads, stores: offsets.
    """
    if any(pattern_of(offset, axis) is AccessPattern.VECTOR for axis in axes.symbols[-1:] for offset in (*reads, *stores)):
        return axes
    inner = next((axis for axis in axes.symbols if _are_contiguous(stores, axis)), None)
    extents = dict(zip(axes.symbols, axes.extents, strict=True))
    symbols = tuple(sorted(extents, key=lambda axis: axis == inner))
    return Axes(symbols, tuple(extents[axis] for axis in symbols))


def crossing_of(points: Points) -> Crossing | None:
    """The axes between which most operands lie across the results; None where none does, or where one place may depend on what
    another point does: on an index that is read, or on an operand that the kernel writes to."""
    if points.leaves.checks or any(sympy.sympify(offset).has(Loaded, Checked) for _, offset in points.touched):
        return None
    symbols = points.axes.symbols
    columns = [axis for axis in symbols if _are_contiguous([offset for _, offset in points.stores], axis)]
    pairs = [Crossing(row, column, _across(points, row, column)) for column in columns for row in symbols if row != column]
    found = max(pairs, key=lambda pair: len(pair.reads), default=None)
    return found if found is not None and found.reads else None


def _across(points: Points, row: sympy.Symbol, column: sympy.Symbol) -> frozenset[BufferRead]:
    """Reads of what lies across."""
    written = {buffer for buffer, _ in points.stores}
    reads = (r for r in points.leaves.reads.values() if r.buffer not in written and not r.drawn)
    return frozenset(r for r in reads if _lies_across(r, row, column))


def _are_contiguous(offsets: Sequence[Index], axis: sympy.Symbol) -> bool:
    return all(pattern_of(offset, axis) is AccessPattern.VECTOR for offset in offsets)


def _lies_across(read: BufferRead, row: sympy.Symbol, column: sympy.Symbol) -> bool:
    """True if neighbours in memory differ in the row alone, and all points of a tile or none of them read."""
    if any(sympy.sympify(bounds.index).has(row, column) for bounds in read.conditions):
        return False
    return pattern_of(read.offset, row) is AccessPattern.VECTOR and pattern_of(read.offset, column) is AccessPattern.GATHER


# The math of a pointwise kernel, before its layout is decided.


@dataclass(frozen=True)
class Points:
    """Points of an iteration space.

    Attributes:
        terms: the math.
        roots: the term of each store.
        leaves: of the terms, over the axes.
        stores: buffers, and the offsets at which they are written.
        axes: merged.
        together: how many points of the group's domain one of the space is.
    """

    terms: Terms
    roots: tuple[int, ...]
    leaves: Leaves
    stores: tuple[tuple[int, Index], ...]
    axes: Axes
    together: int

    @property
    def touched(self) -> Iterator[tuple[int, Index]]:
        """Buffers and offsets of all that is read or written."""
        yield from ((read.buffer, read.offset) for read in self.leaves.reads.values())
        yield from self.stores
