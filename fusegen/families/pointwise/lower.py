"""Lowers pointwise groups: one pass, one function, vectors along the last axis; tiles for transposed operands."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import sympy

from fusegen.families.pointwise.heuristics import PointwiseFeatures, pointwise_plans, tile_plans
from fusegen.families.pointwise.plan import HoistedMath, PointwiseBody, PointwisePlan, TileBody, TilePlan
from fusegen.families.rows.columns import may_wrap, order_for_reuse, wrapped
from fusegen.fusion.groups import GroupKind
from fusegen.fusion.space import Space, unrolled
from fusegen.ir.formula import ceil_div, formula
from fusegen.ir.ops import DtypeRule, Family, Op
from fusegen.ir.symbolic import Axes, FloorDiv, Index, Modulo, Stride, axis_symbol, exact_quotient, literal, product
from fusegen.schedule.access import Access, AccessPattern, divisor, merge_axes, pattern_of
from fusegen.schedule.column_pairs import Fragments, interleaved, interleaved_bytes
from fusegen.schedule.context import Context, Leaves, bound_index, leaves_of
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.indices import CheckedIndex, LoadedIndex, has_checks
from fusegen.schedule.kernel import Plan, SharedArrays, arrange_shared_arrays
from fusegen.schedule.math import CallArgument, MathCall, Origin
from fusegen.schedule.program import Launch
from fusegen.schedule.terms import BufferRead, Terms
from fusegen.threads import cached_property

_LANES = 8  # vector width of most plans


POINTWISE = GroupKind("pointwise", merges=True, writes_in_place=True, is_strided=True)


def lower_pointwise(context: Context) -> Launch:
    points = _points(context)
    transposed = transposed_reads_of(points) if points.elements_per_index == 1 else None
    tiled = () if transposed is None else tile_candidates(context, points, transposed)
    hoisting = hoisting_of(points) if transposed is None and context.target.warp > 0 else None
    candidates: tuple[Plan, ...] = (*tiled, *_plans(context, points, hoisting))
    plan = context.choose(candidates)
    if transposed is not None and isinstance(plan, TilePlan):
        return lower_tiles(context, points, transposed, plan)
    assert isinstance(plan, PointwisePlan)
    return _launch(context, points, plan, hoisting if plan.repeats > 1 else None)


def _points(context: Context) -> PointwiseMath:
    space = unrolled(context.graph, context.group)
    points = _points_over(context, space)
    split = split_axes(space.axes, [offset for _, offset in points.touched])
    if split is not None:
        axes, index = split
        replacements = dict(zip(space.axes.symbols, index, strict=True))
        points = _points_over(context, Space(axes, tuple(tuple(substitute(i, replacements) for i in p) for p in space.points)))
    reads, offsets = [read.offset for read in points.leaves.reads.values()], [offset for _, offset in points.stores]
    ordered = _ordered(context, in_memory_order(points.axes, reads, offsets), points)
    merged, replaced = merge_axes(ordered, [*points.leaves.expressions(), *offsets], "position")
    if not merged.symbols:
        merged = Axes((axis_symbol("position"),), (1,))
    stores = tuple((buffer, substitute(offset, dict(replaced))) for buffer, offset in points.stores)
    return replace(points, leaves=points.leaves.substituted(replaced), stores=stores, axes=merged)


def _ordered(context: Context, axes: Axes, points: PointwiseMath) -> Axes:
    """Returns the axes in the order that is best for the L2 cache. The last axis stays, since vectors run along it."""
    if not context.target.warp or not axes.symbols or divisor(axes.extents[-1], context.multiples) % _LANES:
        return axes  # rows that vectors do not divide are fastest in sequence
    vec = Axes(axes.symbols[-1:], axes.extents[-1:])
    itemsizes = [context.dtype(buffer).itemsize for buffer, _ in points.touched]
    outer = Axes(axes.symbols[:-1], axes.extents[:-1])
    outer = order_for_reuse(outer, vec, [read.offset for read in points.leaves.reads.values()], itemsizes)
    return Axes((*outer.symbols, *vec.symbols), (*outer.extents, *vec.extents))


def _points_over(context: Context, space: Space) -> PointwiseMath:
    axes = space.axes
    evaluator = Evaluator(
        context.graph,
        axes,
        context.stored,
        lambda position, index: None,
        context.rounded,
        context.contracted,
        context.reciprocal_divisions,
    )
    roots: list[int] = []
    stores: list[tuple[int, Index]] = []
    for output, index in itertools.product(context.group.outputs, space.points):
        root = evaluator.value(output, index)
        for store in context.stores(output, index, axes):
            roots.append(evaluator.without_final_cast(root, context.dtype(store.buffer)))
            stores.append((store.buffer, evaluator.write_offset(store.offset, store.gathers)))
    leaves = leaves_of(evaluator.terms, roots, evaluator.checks())
    return PointwiseMath(evaluator.terms, tuple(roots), leaves, tuple(stores), axes, len(space.points))


def _plans(context: Context, points: PointwiseMath, hoisting: Hoisting | None) -> tuple[PointwisePlan, ...]:
    touched = tuple(points.touched)
    itemsizes, offsets = [context.dtype(b).itemsize for b, _ in touched], [o for _, o in touched]
    wraps = may_wrap(context, touched, points.stores, points.axes) and not points.leaves.checks
    along = dict(zip(points.axes.symbols, points.axes.extents, strict=True))
    features = PointwiseFeatures(
        axes=points.axes,
        itemsizes=itemsizes,
        offsets=offsets,
        may_wrap=wraps,
        interleaved_bytes=_interleaved_bytes(context, points),
        elements_per_index=points.elements_per_index,
        along=None if hoisting is None else along[hoisting.axis],
    )
    return pointwise_plans(features, context.target, context.multiples)


def _interleaved_bytes(context: Context, points: PointwiseMath) -> int:
    """Returns the bytes per lane of the widest interleaved access; 0 if there is none."""
    if not context.target.warp:
        return 0
    reads = [BufferRead(read.buffer, read.offset, read.conditions) for read in points.leaves.reads.values()]
    return interleaved_bytes(
        context, (reads, [BufferRead(buffer, offset) for buffer, offset in points.stores]), points.axes.symbols[-1]
    )


def _launch(context: Context, points: PointwiseMath, plan: PointwisePlan, hoisting: Hoisting | None) -> Launch:
    axes = points.axes if hoisting is None else hoisting.ordered(points.axes)

    def access(name: str, read: BufferRead) -> Access:
        found = context.access(name, read.buffer, read.offset, axes.symbols[-1], plan.vec, read.conditions)
        return wrapped(context, found, axes, plan.vec) if plan.wraps else found

    def joined(accesses: Sequence[Access]) -> tuple[Access, ...]:
        if not context.target.warp or plan.wraps:
            return tuple(accesses)
        return interleaved(context, accesses, axes.symbols[-1], plan.vec)

    fragments = Fragments(context, points.terms, points.leaves, access, [offset for _, offset in points.stores])
    writes = tuple(access(context.names.take("result"), BufferRead(b, o)) for b, o in points.stores)
    once = frozenset[int]() if hoisting is None else hoisting.reads
    hoisted = None if hoisting is None else _hoisted(fragments, hoisting, joined([fragments.reads[t] for t in sorted(once)]))
    is_vector = context.target.warp > 0 and plan.vec > 1 and not plan.wraps
    common = _common(fragments, points) if is_vector and hoisting is None else None
    reads, stored = joined([each for t, each in fragments.reads.items() if t not in once]), joined(writes)
    copies = () if hoisting is not None else _copies(fragments, points, writes, {a.name for a in (*reads, *stored)})
    call = _call(fragments, points, writes, copies)
    body = PointwiseBody(axes, reads, stored, fragments.checks, call, plan, hoisted, common, copies)
    grid = ceil_div(product(body.threads.extents), body.elements_per_block)
    is_implied = context.target.warp > 0 and body.is_exact and hoisting is None  # the number of blocks gives the first extent
    in_text = Axes(axes.symbols, (1, *axes.extents[1:])) if is_implied else axes
    kernel = fragments.kernel(body, writes, [in_text])
    return Launch(kernel, context.group, (), grid, plan.threads, 0, context.traffic(), candidates=context.candidates)


def _copies(fragments: Fragments, points: PointwiseMath, writes: Sequence[Access], apart: set[str]) -> tuple[tuple[str, str], ...]:
    """Returns the writes that copy a read, with that read. Both must be in `apart`, the accesses that are not interleaved, and a
    CPU kernel must check no index."""
    context = fragments.context
    if not context.target.warp and has_checks([offset for _, offset in points.touched]):
        return ()
    pairs = [(w, root, fragments.reads[root]) for w, root in zip(writes, points.roots, strict=True) if root in fragments.reads]
    return tuple(
        (write.name, read.name)
        for write, root, read in pairs
        if {read.name, write.name} <= apart and read.pattern is not AccessPattern.UNIFORM
        if context.dtype(read.buffer) is context.dtype(write.buffer) and points.leaves.reads[root].is_stored
    )


def _call(
    fragments: Fragments, points: PointwiseMath, writes: Sequence[Access], copies: Sequence[tuple[str, str]]
) -> MathCall | None:
    """Returns the call that computes all results that are not copies."""
    roots = [(w.name, root) for w, root in zip(writes, points.roots, strict=True) if w.name not in dict(copies)]
    return fragments.call(fragments.context.name, roots) if roots else None


def _hoisted(fragments: Fragments, hoisting: Hoisting, reads: tuple[Access, ...]) -> HoistedMath:
    """Returns the values computed before a loop, for calls inside it."""
    context = fragments.context
    roots = [(context.names.take(fragments.terms.name(term)), term) for term in hoisting.terms]
    call = fragments.call(f"{context.name}_once", roots) if roots else None
    fragments.values |= {term: CallArgument(Origin.LANES, name) for name, term in roots}
    return HoistedMath(hoisting.axis, reads, call)


def _common(fragments: Fragments, points: PointwiseMath) -> MathCall | None:
    """Returns the functions of values that all lanes of a vector have in common. Under a condition, the compiler would repeat them
    for each lane, as in the gradient of a loss, which divides where a target counts."""
    items, context = points.terms.items, fragments.context
    invariant = _Invariance(points, points.axes.symbols[-1]).terms
    terms = [t for t in invariant if any(_is_function(items[p].op) for p in points.terms.producers((t,)))]
    if not terms:
        return None
    roots = [(context.names.take(points.terms.name(term)), term) for term in terms]
    call = fragments.call(f"{context.name}_common", roots)
    fragments.values |= {term: CallArgument(Origin.VALUE, name) for name, term in roots}
    return call


def _is_function(op: object) -> bool:
    """True for divisions and for functions such as exponentials."""
    return isinstance(op, Op) and op.family is Family.POINTWISE and op.row.result is DtypeRule.FLOAT


# Hoisting: a thread loops along an axis that expensive math does not depend on, e.g. a rotation's angles do not depend on the head.
# This math is computed once, before the loop.


_COSTS = {Op.POW: 3, Op.SIN: 2, Op.COS: 2, Op.ATAN2: 2, Op.LGAMMA: 3}
"""Prices of operations that cost more than an exponential, whose price is 1. `_CHEAP` operations are free."""

_CHEAP = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.NEG, Op.ABS, Op.MAXIMUM, Op.MINIMUM, Op.CAST, Op.WHERE, Op.SQRT, Op.RSQRT)
_LEAST = 4
"""Lowest price that justifies a loop: memory latency still hides one exponential per element."""


@dataclass(frozen=True)
class Hoisting:
    """Terms and reads that do not depend on an axis, and are computed before a thread's loop along it."""

    axis: sympy.Symbol
    terms: tuple[int, ...]
    reads: frozenset[int]

    def ordered(self, axes: Axes) -> Axes:
        symbols = sorted(axes.symbols, key=lambda axis: axis != self.axis)
        extents = dict(zip(axes.symbols, axes.extents, strict=True))
        return Axes(tuple(symbols), tuple(extents[axis] for axis in symbols))


def hoisting_of(points: PointwiseMath) -> Hoisting | None:
    """Returns the axis along which most of the expensive math is invariant; None if too little is, or an index is checked."""
    if points.leaves.checks:
        return None
    axes = zip(points.axes.symbols[:-1], points.axes.extents[:-1], strict=True)
    invariances = [_Invariance(points, axis) for axis, extent in axes if literal(extent) != 1]
    best = max(invariances, key=lambda each: each.saved, default=None)
    if best is None or best.saved < _LEAST:
        return None
    return Hoisting(best.axis, best.terms, best.reads)


@dataclass(frozen=True)
class _Invariance:
    points: PointwiseMath
    axis: sympy.Symbol

    @property
    def saved(self) -> int:
        ops = [self.points.terms.items[t].op for t in self.points.terms.producers(self.terms)]
        return sum(_COSTS.get(op, 1) for op in ops if isinstance(op, Op) and op not in _CHEAP)

    @property
    def reads(self) -> frozenset[int]:
        return frozenset(t for t in self.points.leaves.reads if t not in self._varying)

    @cached_property
    def terms(self) -> tuple[int, ...]:
        """The outermost invariant operations."""
        items, varying = self.points.terms.items, self._varying
        used = {a for t in varying for a in items[t].args}.union(self.points.roots)
        return tuple(sorted(t for t in used if t not in varying and isinstance(items[t].op, Op)))

    @cached_property
    def _varying(self) -> frozenset[int]:
        varying: set[int] = set()
        for position in self.points.terms.producers(self.points.roots):
            if self._is_leaf_along(position) or not varying.isdisjoint(self.points.terms.items[position].args):
                varying.add(position)
        return frozenset(varying)

    def _is_leaf_along(self, position: int) -> bool:
        leaves = self.points.leaves
        if position in leaves.reads:
            read = leaves.reads[position]
            return any(self._goes_along(index) for index in (read.offset, *map(bound_index, read.conditions)))
        coordinate = leaves.coordinates.get(position)
        return coordinate is not None and self._goes_along(bound_index(coordinate))

    def _goes_along(self, index: Index) -> bool:
        return bool(sympy.sympify(index).has(self.axis))


# An axis that tensors index in parts is split into two, so that neighbours within a part are recognized. For example, a packed
# projection joins heads and channels in one axis, but heads are not adjacent in the result. Only along the separate channels are
# elements known to be neighbours.


def split_axes(axes: Axes, offsets: Iterable[Index]) -> tuple[Axes, tuple[Index, ...]] | None:
    """Splits each axis that all offsets divide by the same number into two.

    Returns the new axes, and the old axes in terms of these; None if no axis is split.
    """
    splits = [_split_of(axis, extent, offsets) for axis, extent in zip(axes.symbols, axes.extents, strict=True)]
    if not any(splits):
        return None
    symbols: list[sympy.Symbol] = []
    extents: list[Index] = []
    index: list[Index] = []
    for axis, extent, part in zip(axes.symbols, axes.extents, splits, strict=True):
        if part is None:
            symbols, extents, index = [*symbols, axis], [*extents, extent], [*index, axis]
            continue
        count, length = part
        outer, inner = axis_symbol(f"{axis.name}_part"), axis_symbol(f"{axis.name}_within")
        symbols, extents = [*symbols, outer, inner], [*extents, count, length]
        index.append(outer * length + inner)
    return Axes(tuple(symbols), tuple(extents)), tuple(index)


def _split_of(axis: sympy.Symbol, extent: Index, offsets: Iterable[Index]) -> tuple[Index, int] | None:
    """Returns the number of parts of an axis and their length, if all divisions of the axis are by that length."""
    divisions = [d for offset in offsets for d in sympy.sympify(offset).atoms(FloorDiv, Modulo) if d.args[0] == axis]
    lengths = {d.args[1] for d in divisions}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    if not length.is_Integer:
        return None
    count = exact_quotient(extent, int(length))
    return None if count is None else (count, int(length))


# Pointwise groups by tiles: transposed operands are read along their contiguous axis and transposed in shared memory.


_VECTOR_BYTES = 16  # the widest memory access of a thread
_MOST_LANES = 8


def tile_candidates(context: Context, points: PointwiseMath, transposed: TransposedReads) -> tuple[TilePlan, ...]:
    """Returns the tile plans of a kernel with transposed operands; empty if tiles would not be faster."""
    extents = dict(zip(points.axes.symbols, points.axes.extents, strict=True))
    columns = extents[transposed.column_axis]
    vec = min(_MOST_LANES, _VECTOR_BYTES // min(context.dtype(buffer).itemsize for buffer, _ in points.touched))
    while (literal(columns) or 0) % vec:
        vec //= 2
    itemsizes = [context.dtype(read.buffer).itemsize for read in points.leaves.reads.values() if read in transposed.reads]
    return tile_plans(extents[transposed.row_axis], columns, vec, itemsizes, context.target)


def lower_tiles(context: Context, points: PointwiseMath, transposed: TransposedReads, plan: TilePlan) -> Launch:
    return _TileBuilder(context, points, transposed, plan).launch()


class _TileBuilder:
    def __init__(self, context: Context, points: PointwiseMath, transposed: TransposedReads, plan: TilePlan) -> None:
        self.context, self.points, self.transposed, self.plan = context, points, transposed, plan
        self.extents = dict(zip(points.axes.symbols, points.axes.extents, strict=True))
        self.fragments = Fragments(context, points.terms, points.leaves, self._access)
        self.writes = tuple(self._access(context.names.take("result"), BufferRead(b, o)) for b, o in points.stores)

    def launch(self) -> Launch:
        context, points, plan = self.context, self.points, self.plan
        accesses = {read: self.fragments.reads[t] for t, read in points.leaves.reads.items()}
        across = tuple(access for read, access in accesses.items() if read in self.transposed.reads)
        copies = _copies(self.fragments, points, self.writes, {a.name for a in (*accesses.values(), *self.writes)})
        body = TileBody(
            points.axes,
            self.transposed.row_axis,
            self.transposed.column_axis,
            self._tiles(),
            across,
            tuple(access for access in accesses.values() if access not in across),
            self.writes,
            _independent(tuple(dict.fromkeys(self._multiples()))),
            _call(self.fragments, points, self.writes, copies),
            self._staged(across),
            plan,
            copies,
        )
        kernel = self.fragments.kernel(body, self.writes, [points.axes])
        grid, candidates = formula(product(body.tiles.extents)), context.candidates
        return Launch(kernel, context.group, (), grid, plan.threads, body.shared.bytes, context.traffic(), candidates=candidates)

    def _tiles(self) -> Axes:
        """Returns the axes that number blocks. Consecutive blocks read consecutive memory."""
        row, column = self.transposed.row_axis, self.transposed.column_axis
        outer = {axis: extent for axis, extent in self.extents.items() if axis not in (row, column)}
        symbols = (*outer, axis_symbol("tile_column"), axis_symbol("tile_row"))
        sides = _tile_count(self.extents[column], self.plan.columns), _tile_count(self.extents[row], self.plan.rows)
        return Axes(symbols, (*outer.values(), *sides))

    def _staged(self, accesses: Sequence[Access]) -> SharedArrays:
        return arrange_shared_arrays(staged=[self.plan.tile_bytes(self.context.dtype(a.buffer).itemsize) for a in accesses])

    def _access(self, name: str, read: BufferRead) -> Access:
        if read in self.transposed.reads:
            return self.context.access(
                name, read.buffer, read.offset, self.transposed.row_axis, self._widest(read), read.conditions
            )
        assumed = sympy.Add(*(term for term, _ in self._assumed(read)))
        plain = sympy.expand(sympy.sympify(read.offset) - assumed)
        axis, vec = self.transposed.column_axis, self.plan.vec
        return replace(self.context.access(name, read.buffer, plain, axis, vec, read.conditions), offset=read.offset)

    def _widest(self, read: BufferRead) -> int:
        """Returns the vector width for a transposed operand, at most a thread's part of a tile."""
        widest = _VECTOR_BYTES // self.context.dtype(read.buffer).itemsize
        return min(widest, self.plan.rows * self.plan.columns // self.plan.threads)

    def _multiples(self) -> Iterator[sympy.Expr]:
        """Yields sizes that must be multiples of the vector width for whole, aligned vectors."""
        extent = sympy.sympify(self.extents[self.transposed.column_axis])
        if divisor(extent, self.context.multiples) % self.plan.vec:
            yield extent
        reads = [read for read in self.points.leaves.reads.values() if read not in self.transposed.reads]
        for read in (*reads, *(BufferRead(b, o) for b, o in self.points.stores)):
            yield from (sizes for _, sizes in self._assumed(read))

    def _assumed(self, read: BufferRead) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
        """Yields pairs of a term of a vector's offset and a size: if the size is a multiple of the vector width, so is the term."""
        context, axis = self.context, self.transposed.column_axis
        if pattern_of(read.offset, axis) is not AccessPattern.VECTOR:
            return
        own = max(1, context.alignment(read.buffer) // context.dtype(read.buffer).itemsize)
        for term in sympy.Add.make_args(sympy.expand(sympy.sympify(read.offset) - axis)):
            sizes, _ = term.as_independent(*self.points.axes.symbols, as_Add=False)
            is_known_at_the_call = sizes.free_symbols and not any(isinstance(s, Stride) for s in sizes.free_symbols)
            if is_known_at_the_call and divisor(term, context.multiples, own) % self.plan.vec:
                yield term, sizes


def _independent(sizes: Sequence[sympy.Expr]) -> tuple[Index, ...]:
    """Returns the sizes that are not provably multiples of another one."""
    return tuple(size for size in sizes if not any(size != other and (size / other).is_integer for other in sizes))


def _tile_count(extent: Index, side: int) -> Index:
    return FloorDiv(sympy.sympify(extent) + side - 1, sympy.Integer(side))


# Transposed operands of pointwise kernels. Along the axis in which results are contiguous, neighbouring elements of these
# operands are far apart, and vice versa.


@dataclass(frozen=True)
class TransposedReads:
    """Transposed operands (`reads`), which are contiguous along `row_axis`, while results are contiguous along `column_axis`."""

    row_axis: sympy.Symbol
    column_axis: sympy.Symbol
    reads: frozenset[BufferRead]


def in_memory_order(axes: Axes, reads: Sequence[Index], stores: Sequence[Index]) -> Axes:
    """Moves the axis along which all results are contiguous to the end, if no tensor is contiguous along the last axis.

    An example is a transposed tensor that is changed in place. ``reads`` and ``stores`` are offsets.
    """
    if any(pattern_of(offset, axis) is AccessPattern.VECTOR for axis in axes.symbols[-1:] for offset in (*reads, *stores)):
        return axes
    inner = next((axis for axis in axes.symbols if _are_contiguous(stores, axis)), None)
    extents = dict(zip(axes.symbols, axes.extents, strict=True))
    symbols = tuple(sorted(extents, key=lambda axis: axis == inner))
    return Axes(symbols, tuple(extents[axis] for axis in symbols))


def transposed_reads_of(points: PointwiseMath) -> TransposedReads | None:
    """Returns the pair of axes with the most transposed operands.

    None without transposed operands, or if an element may depend on another element's write or on an index that is read.
    """
    if points.leaves.checks or any(sympy.sympify(offset).has(LoadedIndex, CheckedIndex) for _, offset in points.touched):
        return None
    symbols = points.axes.symbols
    columns = [axis for axis in symbols if _are_contiguous([offset for _, offset in points.stores], axis)]
    pairs = [TransposedReads(row, column, _across(points, row, column)) for column in columns for row in symbols if row != column]
    best = max(pairs, key=lambda pair: len(pair.reads), default=None)
    return best if best is not None and best.reads else None


def _across(points: PointwiseMath, row: sympy.Symbol, column: sympy.Symbol) -> frozenset[BufferRead]:
    written = {buffer for buffer, _ in points.stores}
    reads = (r for r in points.leaves.reads.values() if r.buffer not in written and not r.drawn)
    return frozenset(r for r in reads if _is_transposed(r, row, column))


def _are_contiguous(offsets: Sequence[Index], axis: sympy.Symbol) -> bool:
    return all(pattern_of(offset, axis) is AccessPattern.VECTOR for offset in offsets)


def _is_transposed(read: BufferRead, row: sympy.Symbol, column: sympy.Symbol) -> bool:
    """True if a read is contiguous along the row axis but not along the column axis, under conditions that ignore both."""
    if any(sympy.sympify(bounds.index).has(row, column) for bounds in read.conditions):
        return False
    return pattern_of(read.offset, row) is AccessPattern.VECTOR and pattern_of(read.offset, column) is AccessPattern.GATHER


# The math of a pointwise kernel, before its layout is chosen.


@dataclass(frozen=True)
class PointwiseMath:
    """The math of a pointwise group over an iteration space.

    Attributes:
        roots: the term of each store.
        leaves: leaves of the terms, over the axes.
        stores: written buffers and offsets.
        axes: the merged axes.
        elements_per_index: elements of the group's domain that a thread computes at each index of the axes.
    """

    terms: Terms
    roots: tuple[int, ...]
    leaves: Leaves
    stores: tuple[tuple[int, Index], ...]
    axes: Axes
    elements_per_index: int

    @property
    def touched(self) -> Iterator[tuple[int, Index]]:
        yield from ((read.buffer, read.offset) for read in self.leaves.reads.values())
        yield from self.stores
