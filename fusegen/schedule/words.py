"""A launch in words: what it is, how it is laid out, and why so."""

from __future__ import annotations

from fusegen.schedule.bodies import ColumnBody, ContractionBody, PointwiseBody, RowBody, ScanBody, TileBody
from fusegen.schedule.plan import LanePlan, MmaPlan, Persistence, PointwisePlan, RowPlan, TilePlan
from fusegen.schedule.program import Launch

_KEPT = {
    Persistence.REGISTERS: "read once, held in registers",
    Persistence.STAGED: "read once, staged in shared memory",
    Persistence.LOOPED: "read again in each phase",
}
_AT_ALIGNED_PLACES = ", at aligned places"


def launch_words(launch: Launch) -> str:
    """What it is, and how its body is laid out."""
    body, kind = launch.kernel.body, launch.group.kind.value
    if isinstance(body, ColumnBody):
        return "combination of the column sums"
    if isinstance(body, PointwiseBody):
        along = f", {body.plan.repeats} times along {body.hoisted.axis}" if body.hoisted is not None else ""
        return f"{kind}, {body.plan.lanes} elements a thread at a time{along}"
    if isinstance(body, TileBody):
        return f"{kind}, tiles of {body.plan.rows} x {body.plan.columns} through shared memory"
    if isinstance(body, ScanBody):
        return f"{kind} along rows, {body.plan.threads * body.plan.lanes} elements of a row at a time"
    if isinstance(body, RowBody):
        sharing = f" by {body.plan.cluster} blocks" if body.plan.cluster > 1 else ""
        return f"{kind}, {len(body.phases)} phases, rows {_KEPT[body.plan.persistence]}{sharing}"
    if isinstance(body, ContractionBody):
        return _products(kind, body)
    return kind


def plan_words(plan: LanePlan) -> str:
    """What tells a plan from the others that a launch could have."""
    if isinstance(plan, PointwisePlan):
        across = f", {plan.rows} rows in turn" if plan.rows > 1 else ", across rows" if plan.wraps else ""
        repeated = f", {plan.repeats} times" if plan.repeats > 1 else ""
        return f"{plan.threads} threads, {plan.unroll} x {plan.lanes} elements each{across}{repeated}"
    if isinstance(plan, TilePlan):
        return f"tiles of {plan.rows} x {plan.columns}: {plan.threads} threads, {plan.unroll} x {plan.lanes} elements each"
    if plan.tiled:
        return _column_tile_words(plan)
    how = plan.persistence.value
    groups = f"{plan.chunks} x {plan.lanes}" if plan.chunks else f"{plan.lanes} at a time"
    rows = f", {plan.rows} rows" if plan.rows > 1 else ""
    rows = f", {plan.blocks_per_sm} blocks a multiprocessor" if plan.slots and plan.blocks_per_sm > 1 else rows
    threads = f"{plan.cluster} blocks of {plan.block}" if plan.cluster > 1 else str(plan.threads)
    shared = ", what rows share at once" if plan.keeps_shared and not plan.resident else ""
    return f"{how}: {threads} threads, {groups} elements each{rows}{shared}" + _AT_ALIGNED_PLACES * plan.shifted


def _column_tile_words(plan: RowPlan) -> str:
    blocks = f"{plan.cluster} blocks together" if plan.finishes else f"{plan.resident} blocks"
    each = f"{plan.threads} x {plan.rows} threads, {plan.unroll} x {plan.lanes} elements each"
    return f"tiles of {plan.span} columns: {blocks}, {each}" + _AT_ALIGNED_PLACES * plan.shifted


def row_reason(plan: RowPlan, *, sums_columns: bool) -> str:
    """Why a row kernel is laid out as it is on a GPU."""
    elements = plan.chunks * plan.lanes
    if plan.tiled:
        return "nothing is reduced along a row: tiles of columns are summed over rows by several blocks"
    if plan.persistence is Persistence.STAGED and sums_columns:
        return "the next rows come to shared memory while the columns of this one are added up in registers"
    sharing = f"{plan.cluster} blocks" if plan.cluster > 1 else "a block"
    if plan.persistence is Persistence.STAGED:
        return f"a row lies in the shared memory of {sharing} while the next ones come"
    if plan.persistence is Persistence.LOOPED:
        return f"a row is too long for {sharing} to keep, or may be"
    threads = f"{plan.threads} threads" + (f" of {sharing}" if plan.cluster > 1 else "")
    return f"a row fits the registers of {threads}, {elements} element{'s' if elements > 1 else ''} each"


def _products(kind: str, body: ContractionBody) -> str:
    """What a launch of products computes at once, if that is more than one."""
    columns = " + ".join(str(part.columns) for part in body.parts)
    results = sum(len(part.results) for part in body.parts)
    several = {f"{columns} columns": len(body.parts), "two products at a time": body.plan.products, f"{results} results": results}
    how = [f"{kind} by mma.sync" if isinstance(body.plan, MmaPlan) else kind]
    return ", ".join([*how, *(words for words, count in several.items() if count > 1)])
