"""Calls in words: whatever changes what reaches the device changes them, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.program.call import KernelLaunch, LaunchPlan, MatmulCall
from fusegen.program.formula import Formula, FormulaKind, formula_of
from fusegen.verify.lowering import call_description
from tests.naming import case
from tests.unit.lowering import meta


def block(x: Tensor, weight: Tensor, other: Tensor, scale: float) -> Tensor:
    return F.gelu(F.linear(x, weight) * (scale + 1)) @ other


@pytest.fixture(scope="module")
def low() -> fg.Lowered:
    return fg.kernel(block).lower(meta(4096, 4096), meta(4096, 4096), meta(4096, 8), 0.5, target="sm_90a")


def changed_step(kind: type, **fields: Callable[[Any], Any]) -> Callable[[LaunchPlan], LaunchPlan]:
    def change(call: LaunchPlan) -> LaunchPlan:
        number = next(n for n, step in enumerate(call.steps) if isinstance(step, kind))
        step: Any = call.steps[number]
        new = replace(step, **{name: of(getattr(step, name)) for name, of in fields.items()})
        return replace(call, steps=(*call.steps[:number], new, *call.steps[number + 1 :]))

    return change


def first(**fields: Callable[[Any], Any]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A tuple whose first element has other fields."""
    return lambda given: (replace(given[0], **{n: of(getattr(given[0], n)) for n, of in fields.items()}), *given[1:])


CHANGES = {
    "grid": changed_step(KernelLaunch, grid=lambda grid: grid + 1),
    "block": changed_step(KernelLaunch, block=lambda block: block + 32),
    "shared memory": changed_step(KernelLaunch, shared_bytes=lambda bytes_: bytes_ + 16),
    "checks": changed_step(KernelLaunch, checks=lambda checks: not checks),
    "overlap": changed_step(KernelLaunch, overlaps=lambda overlaps: not overlaps),
    "arguments": changed_step(KernelLaunch, arguments=lambda arguments: arguments[::-1]),
    "box": changed_step(KernelLaunch, tensor_maps=first(box=lambda box: box[::-1])),
    "strides of a map": changed_step(KernelLaunch, tensor_maps=first(strides=lambda strides: strides[::-1])),
    "offset of a map": changed_step(KernelLaunch, tensor_maps=first(offset=lambda offset: offset + 8)),
    "operand": changed_step(MatmulCall, b=lambda b: replace(b, strides=b.strides[::-1])),
    "order": lambda call: replace(call, steps=call.steps[::-1]),
    "numbers": lambda call: replace(call, scalars=replace(call.scalars, lines=(*call.scalars.lines[:-1], call.scalars.lines[0]))),
    "buffer": lambda call: replace(call, buffers=first(shape=lambda shape: (*shape, formula_of(2)))(call.buffers)),
}


def test_what_a_call_does_otherwise(low: fg.Lowered) -> None:
    for change in CHANGES.values():
        with case(change):
            call = low.program.call
            assert {type(step) for step in call.steps} == {KernelLaunch, MatmulCall}
            assert list(call_description(change(call), low.sizes)) != list(call_description(call, low.sizes))


def test_a_formula_that_is_written_otherwise_is_the_same_number(low: fg.Lowered) -> None:
    call = low.program.call
    same = changed_step(KernelLaunch, grid=lambda grid: Formula(FormulaKind.MINIMUM, (grid, grid)))(call)
    assert same != call and list(call_description(same, low.sizes)) == list(call_description(call, low.sizes))
