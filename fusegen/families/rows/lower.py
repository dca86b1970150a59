"""Row groups: phases that end in reductions along the row, and column sums over rows through a workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce

import sympy

from fusegen.dtypes import DType
from fusegen.families.rows.columns import (
    PartialState,
    anchor_of,
    combine_partials,
    is_alike,
    partials_buffers,
    parts_of,
    reused_soon,
)
from fusegen.families.rows.heuristics import RowFeatures, row_plans
from fusegen.families.rows.kernel import RowKernelBuilder, RowMath, is_shared
from fusegen.families.rows.match import COLUMN
from fusegen.families.rows.phases import Keep, PhaseSplitter, PhaseTerms, Root
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.fusion.groups import Domain
from fusegen.fusion.producers import domain_axes, reduced_dims
from fusegen.fusion.space import Space, is_per_segment, places_of_row, unrolled
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position, broadcast_index
from fusegen.ir.ops import Family
from fusegen.ir.symbolic import Axes, Index, axis_symbol, linearize, same
from fusegen.schedule.access import AccessPattern, Anchor, divisor, merge_axes
from fusegen.schedule.context import Context, Leaves, leaves_of
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.indices import Checked, Loaded
from fusegen.schedule.lanes import interleaved_bytes
from fusegen.schedule.memory import Store
from fusegen.schedule.program import Launch
from fusegen.schedule.reductions import combined, element_type, lifted, states_of
from fusegen.schedule.terms import BufferRead, Leaf, Term, Terms

_KEEP = {Persistence.REGISTERS: Keep.ALL, Persistence.STAGED: Keep.ROW, Persistence.LOOPED: Keep.NOTHING}
"""Element values that live on between phases: registers hold those of a short row, shared memory those of a staged one."""

_SMALLEST_COPY = 4
"""Bytes of the smallest asynchronous copy."""

_SENT = (4, 8)
"""Bytes of values that a block can send to the shared memory of another."""


def lower_rows(context: Context) -> list[Launch]:
    """The launches of a row, column or row-and-column group: one, and one more that combines column sums."""
    math = _evaluate(context)
    plan, phases = _plan(context, math)
    columns = [root.key for root in math.roots if root.kind == "column"]
    stores = {node: _state_stores(context, math, node) for node in columns}
    if plan.finishes:
        return [RowKernelBuilder(context, math, plan, phases, {}, stores).launch()]
    parts = parts_of(context, plan, math.row_axes)
    workspace = {node: partials_buffers(context, node, parts, math.column_axes) for node in columns}
    launches = [RowKernelBuilder(context, math, plan, phases, workspace, stores).launch()]
    if columns:
        sums = [PartialState(workspace[node], stores[node]) for node in columns]
        launches.append(combine_partials(context, sums, math.row_axes, math.column_axes, plan))
    return launches


def _state_stores(context: Context, math: RowMath, node: int) -> dict[int, list[Store]]:
    """The stores of a column sum: for each node that is a part of its state, over the merged column axes."""
    return {part: _column_stores(context, part, dict(math.moves)) for part in math.states[node]}


def _evaluate(context: Context) -> RowMath:
    """Terms of all outputs and of everything that is reduced, with row axes and column axes merged."""
    graph, space = context.graph, unrolled(context.graph, context.group)
    axes = space.axes
    evaluator = Evaluator(
        graph, axes, context.stored, lambda p, at: _reduction(graph, p), context.rounded, context.contracted, context.inverted
    )
    is_order = {p: graph.nodes[p].family is Family.ORDER for p in context.group.anchors}
    orders = [p for p, known in is_order.items() if known and p not in context.group.inputs]  # where another kernel has it too
    states = states_of(graph, [p for p, known in is_order.items() if not known])
    statistics: dict[int, tuple[int, ...]] = {}
    roots: list[Root] = []
    for node in sorted([*orders, *states]):  # the operands of a reduction have to come before the terms that read its result
        if node in orders:
            statistics[node] = (evaluator.value(graph.nodes[node].args[0], _own_index(context, node, axes)),)
            roots.append(Root("order", node, statistics[node]))
            continue
        parts, points = states[node], [_reduced(context, evaluator, node, p) for p in space.points]
        reduced = reduce(partial(combined, evaluator.terms, graph.nodes[node].op), points)
        statistics |= dict.fromkeys(parts, reduced)
        if not context.group.domain.is_segment(reduced_dims(graph, node)):  # a segment has its place where it is used
            roots.append(Root("column" if _is_column_sum(context, node) else "reduce", node, reduced))
    stores: list[Store] = []
    for output in context.group.outputs:
        if _is_column_sum(context, output):
            continue
        for index, kind in _places(context, output, space):
            term = evaluator.value(output, index)
            found = context.stores(output, index, axes)
            roots += [
                Root(kind, len(stores) + k, (evaluator.stored(term, context.dtype(s.buffer)),), s.buffer in context.stored.values())
                for k, s in enumerate(found)
            ]
            stores += [Store(s.buffer, evaluator.place(s.offset, s.gathers)) for s in found]
    needed = [*(t for r in roots for t in r.terms), *(t for reduced in statistics.values() for t in reduced)]
    leaves = leaves_of(evaluator.terms, list(dict.fromkeys(needed)), evaluator.checks())
    return _merged(context, evaluator.terms, roots, leaves, states, statistics, stores, axes)


def _reduced(context: Context, evaluator: Evaluator, node: int, point: Position) -> tuple[int, ...]:
    """The state of one element that a reduction combines: a term a component.

    Args:
        point: of the domain, in terms of the axes.
    """
    graph, terms = context.graph, evaluator.terms
    operand, dims = graph.nodes[node].args[0], reduced_dims(graph, node)
    own = broadcast_index(graph.nodes[node].shape, point)
    at = tuple(point[d] if d in dims else i for d, i in enumerate(own))
    value = evaluator.value(operand, broadcast_index(graph.nodes[operand].shape, at))
    index = linearize([point[d] for d in dims], [context.group.domain.shape[d] for d in dims])
    number = terms.put(Term(Leaf.COORDINATE, (), DType.INT64, index))
    return lifted(terms, graph.nodes[node].op, terms.convert(value, element_type(graph, graph.nodes[node])), number)


def _reduction(graph: Graph, position: int) -> int | None:
    """The key of a reduction in the kernel that computes it."""
    return position if graph.nodes[position].family in (Family.REDUCTION, Family.ORDER) else None


def _own_index(context: Context, node: int, axes: Axes) -> Position:
    """A value's element at a point of the domain: 0 along extents of 1."""
    return broadcast_index(context.graph.nodes[node].shape, axes.symbols)


def _is_column_sum(context: Context, node: int) -> bool:
    """True if a value is a reduction over the rows, which only the combining kernel finishes."""
    domain = context.group.domain
    is_reduction = context.graph.nodes[node].family is Family.REDUCTION
    return is_reduction and domain.rows != domain.columns and reduced_dims(context.graph, node) == domain.rows


def _places(context: Context, output: int, space: Space) -> list[tuple[Position, str]]:
    """The elements of a result that a thread writes at a point of the space: each with the kind of its root."""
    graph, domain = context.graph, context.group.domain
    axes = domain_axes(domain)
    places = places_of_row(graph, output, domain, axes)
    if is_per_segment(domain, places[0], axes):
        return [(places[0], "segment_write")]
    if len(places) > 1 or _is_per_row(domain, places[0]):
        return [(place, "row_write") for place in places]
    return [(broadcast_index(graph.nodes[output].shape, point), "write") for point in space.points]


def _is_per_row(domain: Domain, index: Position) -> bool:
    """True if an element is one of a row, and not one at each column."""
    columns = {domain_axes(domain).symbols[d] for d in domain.columns}
    along = any(not isinstance(i, int) and not i.free_symbols.isdisjoint(columns) for i in index)
    return not along and not all(same(domain.shape[d], 1) for d in domain.columns)


def _merged(
    context: Context,
    terms: Terms,
    roots: list[Root],
    leaves: Leaves,
    states: Mapping[int, tuple[int, ...]],
    statistics: Mapping[int, tuple[int, ...]],
    stores: list[Store],
    axes: Axes,
) -> RowMath:
    domain = context.group.domain
    sums = [s for r in roots if r.kind == "column" for part in states[r.key] for s in _column_stores(context, part, {})]
    expressions = [*leaves.expressions(), *(s.offset for s in (*stores, *sums))]
    segments = {
        part: node for node, parts in states.items() if domain.is_segment(reduced_dims(context.graph, node)) for part in parts
    }
    segment = domain.segment if segments or any(root.kind == "segment_write" for root in roots) else 0
    written = [stores[r.key].buffer for r in roots if r.kind == "write"]
    own_axis = [axes.symbols[domain.columns[-1]]] if segment else []  # which therefore stays one
    row_axes, column_axes, moves = rows_and_columns(
        domain, axes, [*expressions, *own_axis], _row_order(context, axes, leaves, written)
    )
    moved = tuple(Store(s.buffer, substitute(s.offset, moves)) for s in stores)
    rows, columns = (frozenset(axes.symbols[d] for d in dims) for dims in (domain.rows, domain.columns))
    leaves = leaves.moved(moves)
    touched = [(s.buffer, s.offset) for s in (moved[r.key] for r in roots if r.kind == "write")]
    reads = [r for r in leaves.reads.values() if not r.drawn and not r.conditions]  # else they may be below 0
    reads.sort(key=lambda r: not _along(r.offset, row_axes))  # operands that all rows share may start anywhere
    touched += [(r.buffer, r.offset) for r in reads]
    anchor = anchor_of(context, touched, row_axes, column_axes)
    return RowMath(
        terms=terms,
        roots=tuple(roots),
        states=states,
        statistics=statistics,
        stores=moved,
        leaves=leaves,
        row_axes=row_axes,
        column_axes=column_axes,
        rows=rows,
        columns=columns,
        moves=moves,
        anchor=anchor,
        segments=segments,
        segment=segment,
    )


def _row_order(context: Context, axes: Axes, leaves: Leaves, written: Sequence[int]) -> Axes:
    """The axes that number rows, in the order in which a GPU's cache serves best.

    Args:
        written: buffers that get an element at each point.
    """
    domain = context.group.domain
    rows, columns = _sub_axes(axes, domain.rows, "row"), _sub_axes(axes, domain.columns, "column")
    if not context.target.warp or context.group.kind is COLUMN:
        return rows
    itemsizes = [context.dtype(read.buffer).itemsize for read in leaves.reads.values()]
    itemsizes += [context.dtype(buffer).itemsize for buffer in written]
    return reused_soon(rows, columns, [read.offset for read in leaves.reads.values()], itemsizes)


def rows_and_columns(
    domain: Domain, axes: Axes, expressions: Sequence[Index], rows: Axes | None = None
) -> tuple[Axes, Axes, dict[object, Index]]:
    """The merged axes that number rows, those along which a row runs, and what became of the domain's axes.

    Args:
        expressions: everything that depends on them.
        rows: the axes that number rows, in another order than the domain's.
    """
    row_axes, row_moves = merge_axes(rows or _sub_axes(axes, domain.rows, "row"), expressions, "row")
    column_axes, column_moves = merge_axes(_sub_axes(axes, domain.columns, "column"), expressions, "column")
    return row_axes, column_axes, {**row_moves, **column_moves}


def _sub_axes(axes: Axes, dims: tuple[int, ...], name: str) -> Axes:
    if not dims:
        return Axes((axis_symbol(name),), (1,))
    return Axes(tuple(axes.symbols[d] for d in dims), tuple(axes.extents[d] for d in dims))


def _plan(context: Context, math: RowMath) -> tuple[RowPlan, list[PhaseTerms]]:
    """The plan, and the phases that it implies."""
    kept = _split(math, Keep.ALL)
    itemsizes = [context.dtype(r.buffer).itemsize for r in math.leaves.reads.values() if _along(r.offset, math.column_axes)]
    itemsizes += [context.dtype(math.stores[r.key].buffer).itemsize for r in math.roots if r.kind == "write"]
    features = RowFeatures(
        axes=math.column_axes,
        itemsizes=itemsizes,
        held=_most_held(context, math, kept),
        column_sums=sum(max(1, math.terms.items[t].dtype.itemsize / 4) for r in math.roots if r.kind == "column" for t in r.terms),
        shared=sum(_registers(context, math, t) for t in math.leaves.reads if is_shared(math, t)),
        reductions=sum(len(r.terms) for r in math.roots if r.kind == "reduce"),
        stage_bytes=_stage_bytes(context, math),
        read=_read_of_row(context, math),
        shifted_stage_bytes=_shifted_stage_bytes(context, math),
        row_step=_row_step(context, math),
        sendable=_is_sendable(math),
        segment=math.segment,
        in_turn=_in_turn(context, math),
        indexed=any(sympy.sympify(read.offset).has(Loaded, Checked) for read in _fragments_of_row(math)),
        deferred=_deferred(context, math),
        orders=any(root.kind == "order" for root in math.roots),
        computed=sum(math.terms.items[p].dtype.itemsize for phase in kept for p in phase.held if p not in math.leaves.reads),
    )
    plan = context.chosen(row_plans(features, context.target, context.multiples, dict(context.graph.bounds)))
    return plan, _split(math, _KEEP[plan.persistence])


def _split(math: RowMath, keep: Keep) -> list[PhaseTerms]:
    return PhaseSplitter(math.terms, math.rows, math.columns, math.statistics, math.segments, keep).split(math.roots)


def _most_held(context: Context, math: RowMath, phases: list[PhaseTerms]) -> float:
    """Registers that an element takes at the busiest border between phases; what is fetched ahead counts from the start."""
    last_use = {position: number for number, phase in enumerate(phases) for position in (*phase.reads, *phase.given)}
    first = {position: number for number, phase in enumerate(phases) for position in phase.held}
    first |= {position: 0 for phase in phases for position in phase.reads if _along_row(math, position)}
    borders = range(len(phases))
    return max((sum(_registers(context, math, p) for p in first if first[p] <= n < last_use[p]) for n in borders), default=0)


def _in_turn(context: Context, math: RowMath) -> int:
    """Bytes that a lane takes of the widest access to several variables in turn; 0 where there is none."""
    if not context.target.warp or context.group.kind is COLUMN:
        return 0
    writes = [BufferRead(store.buffer, store.offset) for store in (math.stores[r.key] for r in math.roots if r.kind == "write")]
    return interleaved_bytes(context, (list(math.leaves.reads.values()), writes), math.column_axes.symbols[-1])


def _read_of_row(context: Context, math: RowMath) -> tuple[int, ...]:
    """Bytes of an element of each fragment that is read of the row itself."""
    return tuple(context.dtype(r.buffer).itemsize for r in _fragments_of_row(math))


def _fragments_of_row(math: RowMath) -> list[BufferRead]:
    return [r for t, r in math.leaves.reads.items() if _along_row(math, t) and _along(r.offset, math.column_axes)]


def _stage_bytes(context: Context, math: RowMath) -> int:
    """Bytes of an element's fragments that asynchronous copies can bring to shared memory; 0 when some cannot be brought so."""
    total = 0
    for term, read in math.leaves.reads.items():
        if _along(read.offset, math.column_axes) and _along_row(math, term):
            access = context.access("", read.buffer, read.offset, math.column_axes.symbols[-1], 8, read.conditions)
            itemsize = context.dtype(read.buffer).itemsize
            if read.conditions or access.pattern is not AccessPattern.VECTOR or access.width * itemsize < _SMALLEST_COPY:
                return 0  # copies ask for no conditions: rows of two tensors, one behind the other, lie outside of one of them
            total += itemsize
    return total


def _deferred(context: Context, math: RowMath) -> int:
    """Bytes of an element's fragments of a row that only the last of several phases reads. Where the kernel writes over what it
    reads, all is read before."""
    *earlier, last = _split(math, _KEEP[Persistence.STAGED])
    if not earlier or any(root.last for root in math.roots):
        return 0
    before = {term for phase in earlier for term in phase.reads}
    late = [math.leaves.reads[t] for t in last.reads if t not in before and _along_row(math, t)]
    return sum(context.dtype(read.buffer).itemsize for read in late)


def _shifted_stage_bytes(context: Context, math: RowMath) -> int | None:
    """The same where groups of lanes are shifted; None where they cannot be. None is staged where the kernel writes over what it
    reads: the first group of a row brings the end of the one before, which another block may just write."""
    if math.anchor is None:
        return None
    if any(root.last for root in math.roots):
        return 0
    return sum(_read_of_row(context, math)) if _lies_alike(context, math, math.anchor) else 0


def _lies_alike(context: Context, math: RowMath, anchor: Anchor) -> bool:
    """True if all fragments that are read of the row itself lie as the anchor does."""
    axis, reads = math.column_axes.symbols[-1], _fragments_of_row(math)
    return all(not r.conditions and is_alike(context, r.buffer, r.offset, axis, anchor) for r in reads)


def _row_step(context: Context, math: RowMath) -> int | None:
    """A number that divides the elements from one row to the next; None where what is read of rows does not lie alike, or these do
    not follow each other in equal steps."""
    if math.anchor is None or len(math.row_axes.symbols) > 1 or not _lies_alike(context, math, math.anchor):
        return None
    (row,), start = math.row_axes.symbols, sympy.expand(math.anchor.start)
    step = start.coeff(row)
    is_even = step != 0 and not sympy.expand(start - step * row).has(row)
    return divisor(step, context.multiples) if is_even else None


def _is_sendable(math: RowMath) -> bool:
    """True if blocks may share a row: they can send each other all that is reduced along it, and none writes over a number of the
    row that another may still have to read."""
    reduced = [math.terms.items[t].dtype for r in math.roots if r.kind == "reduce" for t in r.terms]
    in_place = any(r.kind == "row_write" and r.last for r in math.roots)
    return not in_place and all(dtype.itemsize in _SENT for dtype in reduced)


def _along_row(math: RowMath, term: int) -> bool:
    """True if a fragment of the row comes from memory; what is drawn is computed where it is used."""
    read = math.leaves.reads[term]
    return not read.drawn and _along(read.offset, math.row_axes)


def _registers(context: Context, math: RowMath, term: int) -> float:
    """Registers of an element: reads are held as they lie in memory, computed values as they were computed."""
    read = math.leaves.reads.get(term)
    itemsize = math.terms.items[term].dtype.itemsize if read is None else context.dtype(read.buffer).itemsize
    return itemsize / 4


def _along(offset: Index, axes: Axes) -> bool:
    return not isinstance(offset, int) and bool(offset.free_symbols & set(axes.symbols))


def _column_stores(context: Context, node: int, moves: dict[object, Index]) -> list[Store]:
    """The stores of a column sum over the merged column axes; none if it is no result of the kernel."""
    if node not in context.group.outputs:
        return []
    axes = domain_axes(context.group.domain)
    found = context.stores(node, _own_index(context, node, axes), axes)
    return [Store(store.buffer, substitute(store.offset, moves)) for store in found]
