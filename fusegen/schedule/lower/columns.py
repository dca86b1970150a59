"""Column sums: the workspace of partial sums, and the kernel that combines them in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add, mul

from fusegen.calls.formula import formula_of
from fusegen.ir.formula import ceil_div, formula
from fusegen.ir.symbolic import Axes, Index, axis_symbol, product
from fusegen.schedule.heuristics.columns import column_plan
from fusegen.schedule.kernel import ColumnBody, Kernel, Reduction
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.memory import Store, total_bytes
from fusegen.schedule.names import Namer
from fusegen.schedule.plan import RowPlan
from fusegen.schedule.program import Launch, Traffic

PARTIAL = axis_symbol("part")
"""The number of a partial row."""


def partials_buffer(context: Context, node: int, plan: RowPlan, column_axes: Axes) -> int:
    """The workspace of a column sum: a row for each block that shares the rows."""
    shape = (formula_of(plan.resident), formula(product(column_axes.extents)))
    return context.memory.add(f"partial_{node}", context.graph.nodes[node].dtype.compute, shape)


def combine_partials(
    context: Context,
    nodes: Sequence[int],
    workspace: Sequence[int],
    stores: Sequence[Store],
    column_axes: Axes,
    plan: RowPlan,
) -> Launch:
    """The launch that combines partial sums into the results.

    Args:
        nodes: the reductions.
        workspace: their partial sums.
        stores: where the results go, over the column axes.
    """
    names = Namer()
    lane = column_axes.symbols[-1]
    reductions = [
        Reduction(
            names.take(f"{context.graph.nodes[n].op.row.name}_{n}"), context.graph.nodes[n].op, context.graph.nodes[n].dtype.compute
        )
        for n in nodes
    ]
    position: Index = PARTIAL
    for symbol, extent in zip(column_axes.symbols, column_axes.extents, strict=True):
        position = position * extent + symbol
    partials = tuple(context.access(r.name, w, position, lane, 1) for r, w in zip(reductions, workspace, strict=True))
    writes = tuple(context.access(r.name, s.buffer, s.offset, lane, 1) for r, s in zip(reductions, stores, strict=True))
    plan_of_columns = column_plan(context.target)
    expressions = [*(a.offset for a in (*partials, *writes)), *column_axes.extents]
    kernel = Kernel(
        name=f"{context.name}_combine",
        pointers=context.pointers((a.buffer for a in partials), (a.buffer for a in writes)),
        sizes=context.sizes(expressions, (*column_axes.symbols, PARTIAL)),
        scalars=(),
        body=ColumnBody(tuple(reductions), partials, writes, column_axes, plan.resident, plan_of_columns),
        wide=context.wide,
    )
    threads = plan_of_columns.columns * plan_of_columns.rows
    grid = ceil_div(product(column_axes.extents), plan_of_columns.columns)
    shared = len(reductions) * threads * 8
    return Launch(kernel, context.group, (), grid, threads, shared, _traffic(workspace, nodes, context))


def _traffic(workspace: Sequence[int], nodes: Sequence[int], context: Context) -> Traffic:
    partials = map(context.memory.spec, workspace)
    read = [reduce(mul, w.shape, formula_of(w.dtype.itemsize)) for w in partials]
    written = [(product(context.graph.nodes[n].shape), context.memory.dtype(n).itemsize) for n in nodes]
    return Traffic(reduce(add, read), total_bytes(written))
