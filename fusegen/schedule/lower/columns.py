"""Column sums: the workspace of partial sums, and the kernel that combines them in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, mul

from fusegen.ir.formula import ceil_div, formula
from fusegen.ir.reductions import REDUCTIONS
from fusegen.ir.symbolic import Axes, Dim, FloorDiv, Index, axis_symbol, product
from fusegen.program.formula import Formula, formula_of, minimum
from fusegen.schedule.bodies import ColumnBody, ColumnSum
from fusegen.schedule.heuristics.columns import column_plan
from fusegen.schedule.lower.assembly import assemble, uses_of
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.memory import Store, total_bytes
from fusegen.schedule.lower.row_names import statistic_name
from fusegen.schedule.names import Namer
from fusegen.schedule.plan import RowPlan
from fusegen.schedule.program import Launch, Traffic
from fusegen.schedule.reductions import component, element_type, reduction_of
from fusegen.schedule.shared import SCRATCH_BYTES, arranged
from fusegen.target import Backend

PART = axis_symbol("part")
"""The number of a part of the rows, and of the block that works on it: its row of the workspace."""


@dataclass(frozen=True)
class PartialState:
    """A reduction over rows of which every part of the rows has left its state.

    Attributes:
        workspace: the buffers of the partial states, one a component.
        stores: for each node that is a part of the state, where it goes, over the column axes.
    """

    workspace: tuple[int, ...]
    stores: Mapping[int, Sequence[Store]]


def row_blocks(context: Context, plan: RowPlan, row_axes: Axes) -> Dim | None:
    """Blocks that the rows make, where no others have work; None where all of the plan's have: of tiles of columns, which start
    whatever the rows are, and on the CPU."""
    if plan.tiled or context.target.backend is Backend.CPU:
        return None
    rows = product(row_axes.extents)
    return rows if plan.rows == 1 else FloorDiv(rows + (plan.rows - 1), plan.rows)


def parts_of(context: Context, plan: RowPlan, row_axes: Axes) -> Formula:
    """Parts of the rows, each the work of a block, which leaves its column sums."""
    blocks = row_blocks(context, plan, row_axes)
    return formula_of(plan.resident) if blocks is None else minimum(formula(blocks), plan.resident)


def partials_buffers(context: Context, node: int, parts: Formula, column_axes: Axes) -> tuple[int, ...]:
    """The workspace of a column sum: for each component of its state, a row for each part of the rows."""
    shape = (parts, formula(product(column_axes.extents)))
    found = context.graph.nodes[node]
    components, element = REDUCTIONS[found.op].components, element_type(context.graph, found)
    names = [f"partial_{node}" if len(components) == 1 else f"partial_{node}_{c.name}" for c in components]
    return tuple(context.memory.add(name, c.dtype(element), shape) for name, c in zip(names, components, strict=True))


def partial_offset(column_axes: Axes) -> Index:
    """Where in the workspace a component of a part's state lies, over the part's number and the column axes."""
    position: Index = PART
    for symbol, extent in zip(column_axes.symbols, column_axes.extents, strict=True):
        position = position * extent + symbol
    return position


def combine_partials(context: Context, states: Sequence[PartialState], row_axes: Axes, column_axes: Axes, plan: RowPlan) -> Launch:
    """The launch that combines partial sums into the results."""
    names = Namer()
    sums = tuple(_column_sum(context, state, column_axes, names) for state in states)
    partials = [a for s in sums for a in s.partials]
    writes = [a for s in sums for a in s.writes]
    plan_of_columns = column_plan(context.target, len(partials), tiled=plan.tiled)
    threads = plan_of_columns.columns * plan_of_columns.rows
    shared = arranged(scratch=[threads * SCRATCH_BYTES for _ in partials])
    blocks = row_blocks(context, plan, row_axes)
    body = ColumnBody(sums, column_axes, plan.resident, blocks, shared, plan_of_columns)
    extents = column_axes.extents if blocks is None else (*column_axes.extents, blocks)
    uses = uses_of([(a.offset, ()) for a in (*partials, *writes)], (), (), extents)
    pointers = context.pointers((a.buffer for a in partials), (a.buffer for a in writes))
    kernel = assemble(context, body, [uses], pointers, axes=(*column_axes.symbols, PART))
    kernel = replace(kernel, name=f"{context.name}_combine")
    grid = ceil_div(product(column_axes.extents), plan_of_columns.columns)
    return Launch(kernel, context.group, (), grid, threads, shared.bytes, _traffic(states, context))


def _column_sum(context: Context, state: PartialState, column_axes: Axes, names: Namer) -> ColumnSum:
    nodes, lane = tuple(state.stores), column_axes.symbols[-1]
    name = statistic_name(context.graph, nodes[0], over_rows=True)
    reduction = reduction_of(context.graph, nodes[0], names.take, fast=context.fast, name=name)
    position = partial_offset(column_axes)
    components = [c.name for c in reduction.components]
    places = [(components[component(context.graph.nodes[n])], store) for n in nodes for store in state.stores[n]]
    return ColumnSum(
        reduction,
        tuple(context.access(c, w, position, lane, 1) for c, w in zip(components, state.workspace, strict=True)),
        tuple(context.access(c, store.buffer, store.offset, lane, 1) for c, store in places),
    )


def _traffic(states: Sequence[PartialState], context: Context) -> Traffic:
    partials = [context.memory.spec(key) for state in states for key in state.workspace]
    read = [reduce(mul, w.shape, formula_of(w.dtype.itemsize)) for w in partials]
    nodes = [node for state in states for node, stores in state.stores.items() for _ in stores]
    written = [(product(context.graph.nodes[n].shape), context.memory.dtype(n).itemsize) for n in nodes]
    return Traffic(reduce(add, read), total_bytes(written))
