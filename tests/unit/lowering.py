"""Kernels lowered for a GPU from meta tensors: nothing is run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fusegen as fg
from fusegen.fusion import GroupKind
from fusegen.lowered import Lowered
from fusegen.schedule.choices import Measured
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
