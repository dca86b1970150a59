"""Kernels lowered for a GPU from meta tensors: nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusegen as fg
from fusegen.fusion import GroupKind
from fusegen.lowered import Lowered
from fusegen.schedule.choices import Choice, Measured
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without values."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def lowered(function: Callable[..., object], *args: object, target: str = "sm_90a") -> Lowered:
    """All stages of a function as a kernel."""
    return fg.kernel(function).lower(*args, target=target)


def kinds(low: Lowered) -> list[GroupKind]:
    """The kinds of all groups, in order."""
    return [group.kind for group in low.groups]


def pinned(launch: Launch, plan: Plan) -> Measured:
    """The plan of one launch; every other choice is by the cost model."""
    return lambda choice: plan if choice.name == launch.kernel.name and plan in choice.candidates else None


def choices(
    function: Callable[..., Any], *arguments: Tensor, of: Plan | None = None, taken: Plan | None = None, target: str = "sm_90a"
) -> list[Choice]:
    """The choices that are asked for a kernel, those with the candidate `of`. Each takes the candidate `taken`, if it has it."""
    asked: list[Choice] = []

    def answer(choice: Choice) -> Plan | None:
        asked.append(choice)
        return taken if taken in choice.candidates else None

    kernel = function if isinstance(function, fg.Kernel) else fg.kernel(function)
    kernel.lower(*arguments, target=target).program_by(answer)
    return [choice for choice in asked if of is None or of in choice.candidates]
