"""Launches that do not depend on each other become parts of one: each has a range of its blocks.

A function's results often have spaces of their own (q and k of a rotation, the three parts of a packed projection), which no single
loop goes through. As parts of one launch they start together, and none of them waits for the last blocks of another. What takes one
block, as a check of a norm's weights, goes before the first launch that it can start with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fusegen.ir.symbolic import literal, product
from fusegen.program.call import TensorMapSpec
from fusegen.schedule.bodies import PointwiseBody, RowBody, TileBody
from fusegen.schedule.kernel import Pointer
from fusegen.schedule.plan import LanePlan, PointwisePlan, RowPlan
from fusegen.schedule.program import Launch, Step, is_of_one_block
from fusegen.target import Backend, Target

_MOST = 8  # parts: each adds its code to the kernel
_LITTLE = 8 << 10  # bytes of shared memory, with which a multiprocessor is full of threads before


def in_parts(steps: Sequence[Step], target: Target) -> list[Step]:
    """The steps, of which launches directly behind each other that can start together are parts of one."""
    if target.backend is Backend.CPU:
        return list(steps)
    return [part for run in _runs(_brought_forward(steps), _have_one_block) for part in _numbered(run)]


def _brought_forward(steps: Sequence[Step]) -> list[Step]:
    """The steps, of which launches of one block come before an earlier one that they can start with."""
    found: list[Step] = []
    for step in steps:
        place = _earlier_place(found, step) if isinstance(step, Launch) and is_of_one_block(step) else None
        found.insert(len(found) if place is None else place, step)
    return found


def _earlier_place(steps: Sequence[Step], step: Launch) -> int | None:
    """The place before the last launch that a step can start with, where it needs none of those behind that."""
    for place in reversed(range(len(steps))):
        other = steps[place]
        if not isinstance(other, Launch) or not _are_independent(other, step):
            return None
        if _joins([other], step, lambda *_: True):
            return place
    return None


def agreed(steps: Sequence[Step], target: Target) -> dict[tuple[int, ...], LanePlan]:
    """Plans with which launches have as many threads a block as the launches beside them, by the outputs of their groups.

    Rows say how many threads their blocks have; points, and what takes one block, go with any.
    """
    found: dict[tuple[int, ...], LanePlan] = {}
    if target.backend is Backend.CPU:
        return found
    for run in _runs(steps, lambda *_: True):
        launches = [step for step in run if isinstance(step, Launch)]
        small = [launch for launch in launches if is_of_one_block(launch)]
        large = [launch for launch in launches if launch not in small] or launches
        fixed = [launch for launch in large if not isinstance(launch.plan, PointwisePlan)]
        is_crowded = any(launch.shared_bytes > _LITTLE for launch in large)
        for launch in small if is_crowded else launches:  # many blocks of points would wait for as much room as those of rows take
            plan = _with_threads(launch, (fixed or large)[0].block)
            if plan is not None:
                found[launch.group.outputs] = plan
    return found


def _with_threads(launch: Launch, threads: int) -> LanePlan | None:
    """The candidate that differs from a pointwise launch's plan in its threads alone, the first with such blocks of a row's; None
    where the plan has as many, or rows take several blocks."""
    plan, body = launch.plan, launch.kernel.body
    if isinstance(body, RowBody) and body.plan.block != threads and is_of_one_block(launch):
        rows = literal(product(body.row_axes.extents)) or body.plan.rows
        plans = (c for c in launch.candidates if isinstance(c, RowPlan) and c.block == threads and c.cluster == 1)
        return next((c for c in plans if c.rows >= rows), None)
    if not isinstance(plan, PointwisePlan) or plan.threads == threads:
        return None
    wanted = replace(plan, threads=threads)
    alike = (
        c for c in launch.candidates if isinstance(c, PointwisePlan) and replace(c, blocks_per_sm=plan.blocks_per_sm) == wanted
    )
    return next(alike, None)


def _runs(steps: Sequence[Step], agree: Callable[[Launch, Launch], bool]) -> list[list[Step]]:
    """The steps, of which those that can start together are one run.

    Args:
        agree: says of two launches that could whether they do.
    """
    runs: list[list[Step]] = []
    for step in steps:
        if runs and isinstance(step, Launch) and _joins(runs[-1], step, agree):
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def _have_one_block(one: Launch, other: Launch) -> bool:
    return one.block == other.block


def _numbered(run: Sequence[Step]) -> list[Step]:
    if len(run) == 1:
        return list(run)
    return [replace(step, part=number) for number, step in enumerate(run, 1) if isinstance(step, Launch)]


def _joins(run: Sequence[Step], step: Launch, agree: Callable[[Launch, Launch], bool]) -> bool:
    """True if a launch can be one more part of some that start together."""
    before = [each for each in run if isinstance(each, Launch)]
    is_alike = len(before) == len(run) < _MOST and all(_is_simple(each) and agree(each, step) for each in (*before, step))
    return is_alike and all(_are_independent(each, step) and _agree(each, step) for each in before)


def _is_simple(launch: Launch) -> bool:
    """True if a launch needs nothing but its blocks."""
    is_kind = isinstance(launch.kernel.body, (PointwiseBody, TileBody, RowBody))
    return is_kind and not launch.tensor_maps and not launch.extra and launch.cluster == 1


def _are_independent(one: Launch, other: Launch) -> bool:
    """True if neither touches what the other writes; a call refuses tensors that overlap with one that is written to."""
    return not (_written(one) & _touched(other) or _touched(one) & _written(other))


def _written(launch: Launch) -> frozenset[int]:
    return frozenset(each.buffer for each in _places(launch) if each.writable)


def _touched(launch: Launch) -> frozenset[int]:
    return frozenset(each.buffer for each in _places(launch))


def _places(launch: Launch) -> list[Pointer | TensorMapSpec]:
    """All by which a launch reaches buffers."""
    return [*launch.kernel.pointers, *launch.tensor_maps]


def _agree(one: Launch, other: Launch) -> bool:
    """True if parameters of one name are the same ones."""
    names = {pointer.name: pointer for pointer in one.kernel.pointers}
    return all(names.get(pointer.name, pointer) == pointer for pointer in other.kernel.pointers)
