"""Pointwise groups tile by tile: operands that lie across the results are read as they lie, and turned in shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy

from fusegen.ir.formula import formula
from fusegen.ir.symbolic import Axes, FloorDiv, Index, Stride, axis_symbol, literal, product
from fusegen.schedule.access import Access, Pattern, divisor, pattern_of
from fusegen.schedule.bodies import TileBody
from fusegen.schedule.heuristics.tiles import tile_plans
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.crossing import Crossing
from fusegen.schedule.lower.fragments import Fragments
from fusegen.schedule.lower.points import Points
from fusegen.schedule.plan import TilePlan
from fusegen.schedule.program import Launch
from fusegen.schedule.shared import SharedArrays, arranged
from fusegen.schedule.terms import Read

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
        self.writes = tuple(self._access(context.names.take("result"), Read(b, o)) for b, o in points.stores)

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
        """What blocks are numbered by. Those that follow each other read memory that does."""
        row, column = self.crossing.row_axis, self.crossing.column_axis
        others = {axis: extent for axis, extent in self.extents.items() if axis not in (row, column)}
        symbols = (*others, axis_symbol("tile_column"), axis_symbol("tile_row"))
        sides = _parts(self.extents[column], self.plan.columns), _parts(self.extents[row], self.plan.rows)
        return Axes(symbols, (*others.values(), *sides))

    def _staged(self, accesses: Sequence[Access]) -> SharedArrays:
        return arranged(staged=[self.plan.tile_bytes(self.context.dtype(a.buffer).itemsize) for a in accesses])

    def _access(self, name: str, read: Read) -> Access:
        if read in self.crossing.reads:
            return self.context.access(name, read.buffer, read.offset, self.crossing.row_axis, self._widest(read), read.conditions)
        rest = sympy.Add(*(term for term, _ in self._assumed(read)))
        plain = sympy.expand(sympy.sympify(read.offset) - rest)
        axis, lanes = self.crossing.column_axis, self.plan.lanes
        return replace(self.context.access(name, read.buffer, plain, axis, lanes, read.conditions), offset=read.offset)

    def _widest(self, read: Read) -> int:
        """Elements of an access to what lies across: a thread's part of a tile at most."""
        widest = _VECTOR_BYTES // self.context.dtype(read.buffer).itemsize
        return min(widest, self.plan.rows * self.plan.columns // self.plan.threads)

    def _multiples(self) -> Iterator[sympy.Expr]:
        """Sizes that must be multiples of a number of lanes, so that groups of lanes are whole and at aligned places."""
        extent = sympy.sympify(self.extents[self.crossing.column_axis])
        if divisor(extent, self.context.multiples) % self.plan.lanes:
            yield extent
        others = [read for read in self.points.leaves.reads.values() if read not in self.crossing.reads]
        for read in (*others, *(Read(b, o) for b, o in self.points.stores)):
            yield from (sizes for _, sizes in self._assumed(read))

    def _assumed(self, read: Read) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
        """Terms of a vector's offset that are multiples of the lanes if a call's sizes are, each with these sizes."""
        context, axis = self.context, self.crossing.column_axis
        if pattern_of(read.offset, axis) is not Pattern.VECTOR:
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
