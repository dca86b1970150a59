"""Lowers row groups: phases that end in row reductions, and column sums through a workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce

import sympy

from fusegen.dtypes import DType
from fusegen.families.rows.columns import (
    PartialState,
    anchor_of,
    combine_partials,
    has_alignment_of,
    order_for_reuse,
    partials_buffers,
    parts_of,
)
from fusegen.families.rows.heuristics import RowFeatures, row_plans
from fusegen.families.rows.kernel import RowKernelBuilder, RowMath, is_shared
from fusegen.families.rows.match import COLUMN
from fusegen.families.rows.phases import HeldValues, PhaseSplitter, PhaseTerms, Root
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.fusion.groups import Domain
from fusegen.fusion.producers import domain_axes, reduced_dims
from fusegen.fusion.space import Space, is_per_segment, row_elements, unrolled
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position, broadcast_index
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Index, axis_symbol, linearize, same
from fusegen.passes.moments import has_16_bits
from fusegen.schedule.access import AccessPattern, Anchor, divisor, merge_axes
from fusegen.schedule.column_pairs import interleaved_bytes
from fusegen.schedule.context import Context, Leaves, leaves_of
from fusegen.schedule.evaluate import Evaluator, substitute
from fusegen.schedule.indices import CheckedIndex, LoadedIndex
from fusegen.schedule.memory import Store
from fusegen.schedule.program import Launch, Traffic
from fusegen.schedule.reductions import combined, element_type, grouped_by_reduction, lifted
from fusegen.schedule.terms import BufferRead, Leaf, Term, Terms

_KEEP = {Persistence.REGISTERS: HeldValues.ALL, Persistence.STAGED: HeldValues.ROW, Persistence.MULTI_PASS: HeldValues.NOTHING}
"""Element values that live across phases: registers hold those of a short row, shared memory those of a staged one."""

_SMALLEST_COPY = 4
"""Bytes of the smallest asynchronous copy."""

_SENT = (4, 8)
"""Sizes in bytes that a block can send to another block's shared memory."""


def lower_rows(context: Context) -> list[Launch]:
    """Returns the launch of a row, column or row-and-column group, and one that combines column sums if needed."""
    math = _evaluate(context)
    plan, phases = _plan(context, math)
    columns = [root.key for root in math.roots if root.kind == "column"]
    stores = {node: _state_stores(context, math, node) for node in columns}
    if plan.finishes:
        return [RowKernelBuilder(context, math, plan, phases, {}, stores).launch()]
    parts = parts_of(context, plan, math.row_axes)
    workspace = {node: partials_buffers(context, node, parts, math.column_axes) for node in columns}
    launch = RowKernelBuilder(context, math, plan, phases, workspace, stores).launch()
    if not columns:
        return [launch]
    sums = [PartialState(workspace[node], stores[node]) for node in columns]
    combining = combine_partials(context, sums, math.row_axes, math.column_axes, plan)
    own = context.traffic(besides=[part for node in columns for part in math.states[node]])
    return [replace(launch, traffic=Traffic(own.read, own.written + combining.traffic.read)), combining]


def _state_stores(context: Context, math: RowMath, node: int) -> dict[int, list[Store]]:
    return {part: _column_stores(context, part, dict(math.axis_map)) for part in math.states[node]}


def _evaluate(context: Context) -> RowMath:
    graph, space = context.graph, unrolled(context.graph, context.group)
    axes = space.axes
    evaluator = Evaluator(
        graph,
        axes,
        context.stored,
        lambda p, at: _reduction(graph, p),
        context.rounded,
        context.contracted,
        context.reciprocal_divisions,
    )
    is_order = {p: graph.nodes[p].family is Family.ORDER for p in context.group.core_nodes}
    orders = [p for p, known in is_order.items() if known and p not in context.group.inputs]  # unless another kernel sorts them
    states = grouped_by_reduction(graph, [p for p, known in is_order.items() if not known])
    statistics: dict[int, tuple[int, ...]] = {}
    roots: list[Root] = []
    for node in sorted([*orders, *states]):  # operands of a reduction come before terms that read its result
        if node in orders:
            statistics[node] = (evaluator.value(graph.nodes[node].args[0], _own_index(context, node, axes)),)
            roots.append(Root("order", node, statistics[node]))
            continue
        parts, points = states[node], [_reduced(context, evaluator, node, p) for p in space.points]
        reduced = reduce(partial(combined, evaluator.terms, graph.nodes[node].op), points)
        statistics |= dict.fromkeys(parts, reduced)
        if not context.group.domain.is_segment(reduced_dims(graph, node)):  # segments are reduced where they are used
            roots.append(Root("column" if _is_column_sum(context, node) else "reduce", node, reduced))
    stores: list[Store] = []
    for output in context.group.outputs:
        if _is_column_sum(context, output):
            continue
        for index, kind in _written_elements(context, output, space):
            term = evaluator.value(output, index)
            stored = context.stores(output, index, axes)
            roots += [
                Root(
                    kind,
                    len(stores) + k,
                    (evaluator.without_final_cast(term, context.dtype(s.buffer)),),
                    s.buffer in context.stored.values(),
                )
                for k, s in enumerate(stored)
            ]
            stores += [Store(s.buffer, evaluator.write_offset(s.offset, s.gathers)) for s in stored]
    needed = [*(t for r in roots for t in r.terms), *(t for reduced in statistics.values() for t in reduced)]
    leaves = leaves_of(evaluator.terms, list(dict.fromkeys(needed)), evaluator.checks())
    return _merged(context, evaluator.terms, roots, leaves, states, statistics, stores, axes)


def _reduced(context: Context, evaluator: Evaluator, node: int, point: Position) -> tuple[int, ...]:
    """Returns the terms of the state of the element at an index of the domain, one per component."""
    graph, terms = context.graph, evaluator.terms
    operand, dims = graph.nodes[node].args[0], reduced_dims(graph, node)
    own = broadcast_index(graph.nodes[node].shape, point)
    at = tuple(point[d] if d in dims else i for d, i in enumerate(own))
    value = evaluator.value(operand, broadcast_index(graph.nodes[operand].shape, at))
    index = linearize([point[d] for d in dims], [context.group.domain.shape[d] for d in dims])
    number = terms.add(Term(Leaf.COORDINATE, (), DType.INT64, index))
    return lifted(terms, graph.nodes[node].op, terms.convert(value, element_type(graph, graph.nodes[node])), number)


def _reduction(graph: Graph, position: int) -> int | None:
    return position if graph.nodes[position].family in (Family.REDUCTION, Family.ORDER) else None


def _own_index(context: Context, node: int, axes: Axes) -> Position:
    return broadcast_index(context.graph.nodes[node].shape, axes.symbols)


def _is_column_sum(context: Context, node: int) -> bool:
    """True if a value is reduced over rows, so that only the combining kernel finishes it."""
    domain = context.group.domain
    is_reduction = context.graph.nodes[node].family is Family.REDUCTION
    return is_reduction and domain.rows != domain.columns and reduced_dims(context.graph, node) == domain.rows


def _written_elements(context: Context, output: int, space: Space) -> list[tuple[Position, str]]:
    """Returns the elements of a result that a thread writes at an index of the space, each with the kind of its root."""
    graph, domain = context.graph, context.group.domain
    axes = domain_axes(domain)
    indices = row_elements(graph, output, domain, axes)
    if is_per_segment(domain, indices[0], axes):
        return [(indices[0], "segment_write")]
    if len(indices) > 1 or _is_per_row(domain, indices[0]):
        return [(index, "row_write") for index in indices]
    return [(broadcast_index(graph.nodes[output].shape, point), "write") for point in space.points]


def _is_per_row(domain: Domain, index: Position) -> bool:
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
    own_axis = [axes.symbols[domain.columns[-1]]] if segment else []  # keeps the segment axis unmerged
    row_axes, column_axes, moves = rows_and_columns(
        domain, axes, [*expressions, *own_axis], _row_order(context, axes, leaves, written)
    )
    substituted = tuple(Store(s.buffer, substitute(s.offset, moves)) for s in stores)
    rows, columns = (frozenset(axes.symbols[d] for d in dims) for dims in (domain.rows, domain.columns))
    leaves = leaves.substituted(moves)
    touched = [(s.buffer, s.offset) for s in (substituted[r.key] for r in roots if r.kind == "write")]
    reads = [r for r in leaves.reads.values() if not r.drawn and not r.conditions]  # conditional offsets may be below 0
    reads.sort(key=lambda r: not _along(r.offset, row_axes))  # operands shared by all rows may start anywhere
    touched += [(r.buffer, r.offset) for r in reads]
    anchor = anchor_of(context, touched, row_axes, column_axes)
    return RowMath(
        terms=terms,
        roots=tuple(roots),
        states=states,
        statistics=statistics,
        stores=substituted,
        leaves=leaves,
        row_axes=row_axes,
        column_axes=column_axes,
        rows=rows,
        columns=columns,
        axis_map=moves,
        anchor=anchor,
        segments=segments,
        segment=segment,
    )


def _row_order(context: Context, axes: Axes, leaves: Leaves, written: Sequence[int]) -> Axes:
    """Returns the row axes in the order that is best for the L2 cache."""
    domain = context.group.domain
    rows, columns = _sub_axes(axes, domain.rows, "row"), _sub_axes(axes, domain.columns, "column")
    if not context.target.warp or context.group.kind is COLUMN:
        return rows
    itemsizes = [context.dtype(read.buffer).itemsize for read in leaves.reads.values()]
    itemsizes += [context.dtype(buffer).itemsize for buffer in written]
    return order_for_reuse(rows, columns, [read.offset for read in leaves.reads.values()], itemsizes)


def rows_and_columns(
    domain: Domain, axes: Axes, expressions: Sequence[Index], rows: Axes | None = None
) -> tuple[Axes, Axes, dict[object, Index]]:
    """Returns the merged row axes, the merged column axes, and the domain's axes in terms of these.

    ``expressions`` is everything that depends on the axes; ``rows`` are the row axes in another order than the domain's.
    """
    row_axes, row_moves = merge_axes(rows or _sub_axes(axes, domain.rows, "row"), expressions, "row")
    column_axes, column_moves = merge_axes(_sub_axes(axes, domain.columns, "column"), expressions, "column")
    return row_axes, column_axes, {**row_moves, **column_moves}


def _sub_axes(axes: Axes, dims: tuple[int, ...], name: str) -> Axes:
    if not dims:
        return Axes((axis_symbol(name),), (1,))
    return Axes(tuple(axes.symbols[d] for d in dims), tuple(axes.extents[d] for d in dims))


def _plan(context: Context, math: RowMath) -> tuple[RowPlan, list[PhaseTerms]]:
    phases = _split(math, HeldValues.ALL)
    itemsizes = [context.dtype(r.buffer).itemsize for r in math.leaves.reads.values() if _along(r.offset, math.column_axes)]
    itemsizes += [context.dtype(math.stores[r.key].buffer).itemsize for r in math.roots if r.kind == "write"]
    features = RowFeatures(
        axes=math.column_axes,
        itemsizes=itemsizes,
        held=_most_held(context, math, phases),
        column_sums=sum(max(1, math.terms.items[t].dtype.itemsize / 4) for r in math.roots if r.kind == "column" for t in r.terms),
        shared=sum(_registers(context, math, t) for t in math.leaves.reads if is_shared(math, t)),
        reductions=sum(len(r.terms) for r in math.roots if r.kind == "reduce"),
        row_registers=sum(math.terms.items[t].dtype.itemsize // 4 for r in math.roots if r.kind == "reduce" for t in r.terms),
        stage_bytes=_stage_bytes(context, math),
        read=_read_of_row(context, math),
        shifted_stage_bytes=_shifted_stage_bytes(context, math),
        row_step=_row_step(context, math),
        may_exchange=_is_sendable(math),
        segment=math.segment,
        interleaved_bytes=_interleaved_bytes(context, math),
        indexed=any(sympy.sympify(read.offset).has(LoadedIndex, CheckedIndex) for read in _fragments_of_row(math)),
        late_bytes=_deferred(context, math),
        orders=any(root.kind == "order" for root in math.roots),
        computed=sum(math.terms.items[p].dtype.itemsize for phase in phases for p in phase.held if p not in math.leaves.reads),
        streamable=_is_streamable(context, math),
    )
    plan = context.choose(row_plans(features, context.target, context.multiples, dict(context.graph.bounds)))
    return plan, _split(math, _KEEP[plan.persistence])


def _is_streamable(context: Context, math: RowMath) -> bool:
    """True if only one phase reads elements of a row where none is held. Moments of 32-bit rows are not: each thread of a block
    adds so many elements that after an outlier, a sum of squares loses bits that a cluster's sum keeps."""
    nodes = context.graph.nodes
    reduced = [nodes[root.key] for root in math.roots if root.kind == "reduce"]
    if any(node.op is Op.MOMENTS and not has_16_bits(context.graph, node.args[0]) for node in reduced):
        return False
    reads = {term for term, read in math.leaves.reads.items() if not read.drawn and _along(read.offset, math.column_axes)}
    return sum(not reads.isdisjoint(phase.reads) for phase in _split(math, HeldValues.NOTHING)) == 1


def _split(math: RowMath, held_values: HeldValues) -> list[PhaseTerms]:
    return PhaseSplitter(math.terms, math.rows, math.columns, math.statistics, math.segments, held_values).split(math.roots)


def _most_held(context: Context, math: RowMath, phases: list[PhaseTerms]) -> float:
    """Returns the maximum registers per element between two phases. Reads count from the start, since they are prefetched."""
    last_use = {position: number for number, phase in enumerate(phases) for position in (*phase.reads, *phase.earlier)}
    first = {position: number for number, phase in enumerate(phases) for position in phase.held}
    first |= {position: 0 for phase in phases for position in phase.reads if _along_row(math, position)}
    borders = range(len(phases))
    return max((sum(_registers(context, math, p) for p in first if first[p] <= n < last_use[p]) for n in borders), default=0)


def _interleaved_bytes(context: Context, math: RowMath) -> int:
    """Returns the bytes per lane of the widest interleaved access; 0 if there is none."""
    if not context.target.warp or context.group.kind is COLUMN:
        return 0
    writes = [BufferRead(store.buffer, store.offset) for store in (math.stores[r.key] for r in math.roots if r.kind == "write")]
    return interleaved_bytes(context, (list(math.leaves.reads.values()), writes), math.column_axes.symbols[-1])


def _read_of_row(context: Context, math: RowMath) -> tuple[int, ...]:
    return tuple(context.dtype(r.buffer).itemsize for r in _fragments_of_row(math))


def _fragments_of_row(math: RowMath) -> list[BufferRead]:
    return [r for t, r in math.leaves.reads.items() if _along_row(math, t) and _along(r.offset, math.column_axes)]


def _stage_bytes(context: Context, math: RowMath) -> int:
    """Returns the bytes per element to stage in shared memory; 0 if asynchronous copies cannot read some fragment."""
    total = 0
    for term, read in math.leaves.reads.items():
        if _along(read.offset, math.column_axes) and _along_row(math, term):
            access = context.access("", read.buffer, read.offset, math.column_axes.symbols[-1], 8, read.conditions)
            itemsize = context.dtype(read.buffer).itemsize
            if read.conditions or access.pattern is not AccessPattern.VECTOR or access.width * itemsize < _SMALLEST_COPY:
                return 0  # copies check no conditions, and a row concatenated from two tensors exceeds each of them
            total += itemsize
    return total


def _deferred(context: Context, math: RowMath) -> int:
    """Returns the bytes per element of row data that only the last phase reads.

    Returns 0 if the kernel overwrites its input: all of the row must be read before the first write.
    """
    *earlier, last = _split(math, _KEEP[Persistence.STAGED])
    if not earlier or any(root.last for root in math.roots):
        return 0
    before = {term for phase in earlier for term in phase.reads}
    late = [math.leaves.reads[t] for t in last.reads if t not in before and _along_row(math, t)]
    return sum(context.dtype(read.buffer).itemsize for read in late)


def _shifted_stage_bytes(context: Context, math: RowMath) -> int | None:
    """Returns `_stage_bytes` for shifted vectors; None if vectors cannot shift.

    Returns 0 if the kernel overwrites its input: the first vector of a row includes the end of the previous row, which another
    block may be writing.
    """
    if math.anchor is None:
        return None
    if any(root.last for root in math.roots):
        return 0
    return sum(_read_of_row(context, math)) if _is_aligned_alike(context, math, math.anchor) else 0


def _is_aligned_alike(context: Context, math: RowMath, anchor: Anchor) -> bool:
    axis, reads = math.column_axes.symbols[-1], _fragments_of_row(math)
    return all(not r.conditions and has_alignment_of(context, r.buffer, r.offset, axis, anchor) for r in reads)


def _row_step(context: Context, math: RowMath) -> int | None:
    """Returns a divisor of the elements between rows; None if fragments differ in alignment or rows are not equidistant."""
    if math.anchor is None or len(math.row_axes.symbols) > 1 or not _is_aligned_alike(context, math, math.anchor):
        return None
    (row,), start = math.row_axes.symbols, sympy.expand(math.anchor.start)
    step = start.coeff(row)
    is_even = step != 0 and not sympy.expand(start - step * row).has(row)
    return divisor(step, context.multiples) if is_even else None


def _is_sendable(math: RowMath) -> bool:
    """True if the blocks of a cluster may share a row: they can send each other all reduced values, and none overwrites a row value
    that another must still read."""
    reduced = [math.terms.items[t].dtype for r in math.roots if r.kind == "reduce" for t in r.terms]
    in_place = any(r.kind == "row_write" and r.last for r in math.roots)
    return not in_place and all(dtype.itemsize in _SENT for dtype in reduced)


def _along_row(math: RowMath, term: int) -> bool:
    """True if a fragment of the row comes from memory; random bits are generated at their use."""
    read = math.leaves.reads[term]
    return not read.drawn and _along(read.offset, math.row_axes)


def _registers(context: Context, math: RowMath, term: int) -> float:
    """Returns the registers per element, by the dtype in memory of a read, or the computing type of another term."""
    read = math.leaves.reads.get(term)
    itemsize = math.terms.items[term].dtype.itemsize if read is None else context.dtype(read.buffer).itemsize
    return itemsize / 4


def _along(offset: Index, axes: Axes) -> bool:
    return not isinstance(offset, int) and bool(offset.free_symbols & set(axes.symbols))


def _column_stores(context: Context, node: int, moves: dict[object, Index]) -> list[Store]:
    if node not in context.group.outputs:
        return []
    axes = domain_axes(context.group.domain)
    stores = context.stores(node, _own_index(context, node, axes), axes)
    return [Store(store.buffer, substitute(store.offset, moves)) for store in stores]
