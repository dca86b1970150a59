"""Kernels that reduce each row, each column, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from sympy import sympify

from fusegen.families.base import Emitters, KernelFamily
from fusegen.families.rows import cpu, cuda
from fusegen.families.rows.cost import LANE_COSTS, RowWork, row_time
from fusegen.families.rows.lower import lower_rows
from fusegen.families.rows.match import COLUMN, ROW, ROW_COLUMN, merge_rows, reduction_group
from fusegen.families.rows.plan import ColumnBody, RowBody, RowPlan
from fusegen.families.rows.tiles import ColumnWork, column_time
from fusegen.fusion.groups import Group, Materialized
from fusegen.fusion.matcher import Decision
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal, product
from fusegen.schedule.access import Access, AccessPattern
from fusegen.schedule.choices import extents
from fusegen.schedule.context import Context
from fusegen.schedule.indices import CheckedIndex, LoadedIndex
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch, Step, has_one_block
from fusegen.target import Target


class RowFamily(KernelFamily):
    kinds = (ROW, COLUMN, ROW_COLUMN)
    cuda: ClassVar[Emitters] = {RowBody: cuda.emit_cuda, ColumnBody: cuda.emit_columns}
    cpu: ClassVar[Emitters] = {RowBody: cpu.emit_cpp, ColumnBody: cpu.emit_columns}

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        return reduction_group(graph, root, decision.materialized)

    def merged(self, graph: Graph, group: Group, other: int, materialized: Materialized) -> Group | None:
        return merge_rows(graph, group, other, materialized)

    def lower(self, context: Context) -> Sequence[Step]:
        return lower_rows(context)

    def times(self, launch: Launch, sizes: Mapping[str, int], target: Target) -> Mapping[Plan, float]:
        """Uses the cost model of rows, or of column tiles. It does not cover column sums next to row reductions, nor gathered rows,
        which pay the memory latency twice."""
        costs, body = LANE_COSTS.get(target.card), launch.kernel.body
        if costs is None or not isinstance(body, RowBody):
            return {}
        plans = [plan for plan in launch.candidates if isinstance(plan, RowPlan)]
        if body.plan.tiled:
            columns = _column_work(launch, body, sizes)
            return {plan: column_time(costs.columns, plan, columns, target.sms) for plan in plans}
        if body.partials or _is_gathered(body):
            return {}
        rows = _row_work(launch, body, sizes)
        return {plan: row_time(costs, plan, rows, target) for plan in plans}

    def with_threads(self, launch: Launch, threads: int) -> Plan | None:
        """Only a plan with a single block can change its threads."""
        body = launch.kernel.body
        if not isinstance(body, RowBody) or body.plan.block == threads or not has_one_block(launch):
            return None
        rows = literal(product(body.row_axes.extents)) or body.plan.rows
        plans = (c for c in launch.candidates if isinstance(c, RowPlan) and c.block == threads and c.cluster == 1)
        return next((c for c in plans if c.rows >= rows), None)


def is_faster_split(launch: Launch, sizes: Mapping[str, int], target: Target) -> bool:
    """True if the row results and the column sums of a launch are expected to be faster in two kernels.

    In one kernel, each block loops over rows and a second launch combines the blocks' sums. Two kernels read everything twice,
    which is cheap while L2 holds it. Times of a norm's backward pass on an H200, in one kernel and in two, each with its best plan:
    13.2 and 9.9 µs for 64 x 8192 in bfloat16, 15.7 and 11.1 for 46 x 11552 in float32, 41 and 36 for 50000 x 128, 28.5 and 27.2 for
    8192 x 768; but 30 and 36 for 2000 x 4096, 34 and 48 for 6000 x 2048, 120 and 189 for 16384 x 4096.
    """
    costs = LANE_COSTS.get(target.card)
    if costs is None or launch.group.kind is not ROW_COLUMN or not isinstance(launch.kernel.body, RowBody):
        return False
    return launch.traffic.read(sizes) <= costs.columns.cache


_ELEMENTARY = frozenset(
    {
        Op.EXP,
        Op.EXP2,
        Op.EXPM1,
        Op.LOG,
        Op.LOG2,
        Op.LOG1P,
        Op.SIN,
        Op.COS,
        Op.TANH,
        Op.SIGMOID,
        Op.ERF,
        Op.ONE_PLUS_ERF,
        Op.ERFC,
        Op.POW,
    }
)
"""Functions that take an instruction of low rate, or many instructions."""


def _row_work(launch: Launch, body: RowBody, sizes: Mapping[str, int]) -> RowWork:
    (rows, columns), itemsizes = extents(launch, sizes), _itemsizes(launch)
    accesses = {access.name: access for phase in body.phases for access in (*phase.reads, *phase.late)}
    accesses |= {access.name: access for access in body.cached}
    reads = [access for access in accesses.values() if access.buffer in itemsizes]
    of_row = [itemsizes[access.buffer] * len(access.variables) for access in reads if _numbers_rows(access, body)]
    writes = sum(len(phase.writes) for phase in body.phases)
    reductions = [reduction for phase in body.phases for reduction in phase.reductions]
    components = sum(len(reduction.components) for reduction in reductions)
    itemsize, shared, traffic = max(of_row, default=0), len(reads) - len(of_row), launch.traffic.moved(sizes)
    functions = sum(term.op in _ELEMENTARY for phase in body.phases if phase.call for term in phase.call.function.terms)
    operands = len(reads) + writes
    return RowWork(rows, columns, traffic, itemsize, sum(of_row), operands, shared, len(reductions), components, functions)


def _column_work(launch: Launch, body: RowBody, sizes: Mapping[str, int]) -> ColumnWork:
    (rows, columns), itemsizes = extents(launch, sizes), _itemsizes(launch)
    (phase,) = body.phases
    read = [itemsizes[access.buffer] for access in phase.reads if access.buffer in itemsizes]
    sums = sum(len(r.components) for r in phase.column_sums)
    partial_bytes = body.plan.persistent_blocks * columns * sum(itemsizes[access.buffer] for access in body.partials)
    moved = launch.traffic.moved(sizes) - partial_bytes  # the cost model adds those of each plan
    return ColumnWork(rows, columns, moved, max(read, default=1), len(read), len(phase.row_reads), sums)


def _itemsizes(launch: Launch) -> dict[int, int]:
    return {pointer.buffer: pointer.dtype.itemsize for pointer in launch.kernel.pointers if pointer.stream is None}


def _is_gathered(body: RowBody) -> bool:
    """True if the offset of a row depends on an index that is read."""
    neighbours = [a for phase in body.phases for a in (*phase.reads, *phase.late) if a.pattern is AccessPattern.VECTOR]
    return any(sympify(access.offset).has(LoadedIndex, CheckedIndex) for access in neighbours)


def _numbers_rows(access: Access, body: RowBody) -> bool:
    return bool(sympify(access.offset).free_symbols & set(body.row_axes.symbols))
