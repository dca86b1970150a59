"""Launches that do not depend on each other become parts of one: each has a range of its blocks.

A function's results often have spaces of their own (q and k of a rotation, the three parts of a packed projection), which no single
loop goes through. As parts of one launch they start together, and none of them waits for the last blocks of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusegen.schedule.bodies import PointwiseBody, RowBody, TileBody
from fusegen.schedule.program import Launch, Step
from fusegen.target import Backend, Target

_MOST = 8  # parts: each adds its code to the kernel


def in_parts(steps: Sequence[Step], target: Target) -> list[Step]:
    """The steps, of which launches directly behind each other that can start together are parts of one."""
    if target.backend is Backend.CPU:
        return list(steps)
    runs: list[list[Step]] = []
    for step in steps:
        if runs and isinstance(step, Launch) and _joins(runs[-1], step):
            runs[-1].append(step)
        else:
            runs.append([step])
    return [part for run in runs for part in _numbered(run)]


def _numbered(run: Sequence[Step]) -> list[Step]:
    if len(run) == 1:
        return list(run)
    return [replace(step, part=number) for number, step in enumerate(run, 1) if isinstance(step, Launch)]


def _joins(run: Sequence[Step], step: Launch) -> bool:
    """True if a launch can be one more part of some that start together."""
    before = [each for each in run if isinstance(each, Launch)]
    is_alike = len(before) == len(run) < _MOST and all(_is_simple(each) and each.block == step.block for each in (*before, step))
    return is_alike and all(_are_independent(each, step) and _agree(each, step) for each in before)


def _is_simple(launch: Launch) -> bool:
    """True if a launch needs nothing but its blocks."""
    is_kind = isinstance(launch.kernel.body, (PointwiseBody, TileBody, RowBody))
    return is_kind and not launch.tensor_maps and not launch.extra and launch.cluster == 1


def _are_independent(one: Launch, other: Launch) -> bool:
    """True if neither touches what the other writes; a call refuses tensors that overlap with one that is written to."""
    return not (_written(one) & _touched(other) or _touched(one) & _written(other))


def _written(launch: Launch) -> frozenset[int]:
    return frozenset(pointer.buffer for pointer in launch.kernel.pointers if pointer.writable)


def _touched(launch: Launch) -> frozenset[int]:
    return frozenset(pointer.buffer for pointer in launch.kernel.pointers)


def _agree(one: Launch, other: Launch) -> bool:
    """True if parameters of one name are the same ones."""
    names = {pointer.name: pointer for pointer in one.kernel.pointers}
    return all(names.get(pointer.name, pointer) == pointer for pointer in other.kernel.pointers)
