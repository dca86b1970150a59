"""Which of its plans a launch of points or of rows is expected to be fastest with, at some sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sympy import sympify

from fusegen.ir.formula import formula
from fusegen.ir.symbolic import literal
from fusegen.passes.fuse import GroupKind
from fusegen.schedule.access import Access, Pattern
from fusegen.schedule.bodies import PointwiseBody, RowBody, TileBody
from fusegen.schedule.column_cost import ColumnWork, column_time
from fusegen.schedule.heuristics.columns import FEWEST
from fusegen.schedule.heuristics.pointwise import SHORT
from fusegen.schedule.indices import Checked, Loaded
from fusegen.schedule.lane_cost import LANE_COSTS, PointWork, point_time, row_time
from fusegen.schedule.likeness import extents
from fusegen.schedule.plan import LanePlan, PointwisePlan, RowPlan, TilePlan
from fusegen.schedule.program import Launch, Program
from fusegen.schedule.staged_cost import RowWork
from fusegen.target import Target

_BUSY = 512  # threads of a multiprocessor
_MARGIN = 0.97  # of the time of the first plan: what is expected to be hardly faster is not worth a kernel of its own


def preferred(launch: Launch, sizes: Mapping[str, int], target: Target) -> LanePlan | None:
    """The plan that is expected to be fastest; the first one where none is clearly faster, None where there are no several."""
    if not launch.candidates:
        return None
    times, first = expected_times(launch, sizes, target), launch.candidates[0]
    if isinstance(launch.kernel.body, TileBody):
        return _tiled(launch.kernel.body, launch.candidates, sizes, target.processors)
    if isinstance(launch.kernel.body, PointwiseBody) and isinstance(first, PointwisePlan) and first.repeats > 1:
        return _repeated(launch.kernel.body, launch.candidates, sizes, target.processors)
    best = min(times, key=lambda plan: times[plan], default=first)
    return best if best in times and times[best] < _MARGIN * times.get(first, times[best]) else first


def expected_times(launch: Launch, sizes: Mapping[str, int], target: Target) -> dict[LanePlan, float]:
    """What a launch is expected to take with each of its plans, in µs; nothing where nothing is known of them.

    Args:
        launch: with any of its plans.
        sizes: values of all sizes.
    """
    costs = LANE_COSTS.get(target.name)
    work = _work(launch, sizes)
    if costs is None or work is None or any(isinstance(plan, TilePlan) for plan in launch.candidates):
        return {}
    if isinstance(work, ColumnWork):
        tiles = [plan for plan in launch.candidates if isinstance(plan, RowPlan)]
        return {plan: column_time(costs.columns, plan, work, target.processors) for plan in tiles}
    if isinstance(work, RowWork):
        plans = [plan for plan in launch.candidates if isinstance(plan, RowPlan)]
        return {plan: row_time(costs, plan, work, target.processors) for plan in plans}
    points = [plan for plan in launch.candidates if isinstance(plan, PointwisePlan) and not (plan.wraps and _is_short(launch))]
    if any(plan.repeats > 1 for plan in points):
        return {}  # plans that compute less have no times
    return {plan: point_time(costs.points, plan, work, target.processors) for plan in points}


def expected_time(launch: Launch, sizes: Mapping[str, int], target: Target) -> float | None:
    """What a launch is expected to take with its plan, in µs; None where nothing is known of it."""
    return None if launch.plan is None else expected_times(launch, sizes, target).get(launch.plan)


def program_time(program: Program, sizes: Mapping[str, int], target: Target) -> float | None:
    """What the launches of a program are expected to take, in µs; None where nothing is known of some."""
    times = [expected_time(launch, sizes, target) for launch in program.launches]
    known = [time for time in times if time is not None]
    return math.fsum(known) if len(known) == len(times) else None


def is_faster_apart(launch: Launch, sizes: Mapping[str, int], target: Target) -> bool:
    """Whether what a launch does for rows, and its sums of their columns, are expected to be faster in two kernels.

    The blocks of one kernel go through rows one after the other, and what they have summed is combined by a second one. Two kernels
    read everything twice, which costs little while a cache holds it. On an H200, a norm's backward pass takes in one kernel and in
    two, each with its best plan: 64 x 8192 in bfloat16 13.2 and 9.9 µs, 46 x 11552 in float32 15.7 and 11.1, 50000 x 128 41 and 36,
    8192 x 768 28.5 and 27.2; 2000 x 4096 30 and 36, 6000 x 2048 34 and 48, 16384 x 4096 120 and 189.
    """
    costs = LANE_COSTS.get(target.name)
    if costs is None or launch.group.kind is not GroupKind.ROW_COLUMN or not isinstance(launch.kernel.body, RowBody):
        return False
    return launch.traffic.read(sizes) <= costs.columns.cache


def _tiled(body: TileBody, candidates: Sequence[LanePlan], sizes: Mapping[str, int], processors: int) -> LanePlan:
    """The first plan whose tiles keep all processors busy, else that of the most tiles; one without where an axis is too short."""
    extents = {axis: formula(extent)(sizes) for axis, extent in zip(body.axes.symbols, body.axes.extents, strict=True)}
    rows, columns = extents[body.row_axis], extents[body.column_axis]
    if min(rows, columns) < FEWEST:
        return next((plan for plan in candidates if not isinstance(plan, TilePlan)), candidates[0])
    others = math.prod(extents.values()) // (rows * columns)
    plans = [plan for plan in candidates if isinstance(plan, TilePlan)]
    tiles = {plan: math.ceil(rows / plan.rows) * math.ceil(columns / plan.columns) * others for plan in plans}
    return next((plan for plan in plans if tiles[plan] >= processors), max(plans, key=lambda plan: tiles[plan]))


def _repeated(body: PointwiseBody, candidates: Sequence[LanePlan], sizes: Mapping[str, int], processors: int) -> LanePlan:
    """The first plan whose threads keep all processors busy; one that does not repeat where none does."""
    points = math.prod(formula(extent)(sizes) for extent in body.axes.extents)
    plans = [plan for plan in candidates if isinstance(plan, PointwisePlan)]
    enough = processors * _BUSY
    return next((plan for plan in plans if plan.repeats == 1 or points >= enough * plan.lanes * plan.repeats), candidates[0])


def _is_short(launch: Launch) -> bool:
    """Whether points lie in rows that a group of lanes would wrap around often, which nobody has measured."""
    body = launch.kernel.body
    columns = literal(body.axes.extents[-1]) if isinstance(body, PointwiseBody) else None
    return columns is not None and columns < SHORT


def _work(launch: Launch, sizes: Mapping[str, int]) -> RowWork | PointWork | ColumnWork | None:
    """What a launch has to do; None for what nobody has measured: sums of columns beside reductions along rows, and rows that an
    index leads to, for which the time that memory takes to answer matters twice."""
    kernel, (rows, columns) = launch.kernel, extents(launch, sizes)
    moved = launch.traffic.moved(sizes)
    itemsizes = {pointer.buffer: pointer.dtype.itemsize for pointer in kernel.pointers if pointer.stream is None}
    if isinstance(kernel.body, PointwiseBody):
        reads = [access for access in kernel.body.reads if access.buffer in itemsizes]  # others are drawn
        return PointWork(rows * columns, moved, len(reads) + len(kernel.body.writes))
    if isinstance(kernel.body, RowBody) and kernel.body.plan.tiled:
        return _column_work(kernel.body, itemsizes, rows, columns, moved)
    if not isinstance(kernel.body, RowBody) or kernel.body.partials or _is_led_to(kernel.body):
        return None
    return _row_work(kernel.body, itemsizes, rows, columns, moved)


def _row_work(body: RowBody, itemsizes: Mapping[int, int], rows: int, columns: int, moved: int) -> RowWork:
    found = {access.name: access for phase in body.phases for access in (*phase.reads, *phase.late)}
    found |= {access.name: access for access in body.kept}
    reads = [access for access in found.values() if access.buffer in itemsizes]  # others are drawn
    of_row = [itemsizes[access.buffer] * len(access.variables) for access in reads if _numbers_rows(access, body)]
    writes = sum(len(phase.writes) for phase in body.phases)
    reductions = sum(len(phase.reductions) for phase in body.phases)
    itemsize, shared = max(of_row, default=0), len(reads) - len(of_row)
    return RowWork(rows, columns, moved, itemsize, sum(of_row), len(reads) + writes, shared, reductions)


def _column_work(body: RowBody, itemsizes: Mapping[int, int], rows: int, columns: int, moved: int) -> ColumnWork:
    (phase,) = body.phases
    read = [itemsizes[access.buffer] for access in phase.reads if access.buffer in itemsizes]
    sums = sum(len(r.components) for r in phase.column_sums)
    return ColumnWork(rows, columns, moved, max(read, default=1), len(read), len(phase.row_reads), sums)


def _is_led_to(body: RowBody) -> bool:
    """True if an index that is read says where neighbours of a row lie."""
    neighbours = [a for phase in body.phases for a in (*phase.reads, *phase.late) if a.pattern is Pattern.VECTOR]
    return any(sympify(access.offset).has(Loaded, Checked) for access in neighbours)


def _numbers_rows(access: Access, body: RowBody) -> bool:
    return bool(sympify(access.offset).free_symbols & set(body.row_axes.symbols))
