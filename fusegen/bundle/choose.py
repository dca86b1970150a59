"""Selects the built program of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch

from fusegen.bundle.manifest import BuiltProgram
from fusegen.bundle.match import Mismatch, OtherForm
from fusegen.runtime import devices

Reasons: TypeAlias = list[tuple[BuiltProgram, str]]
"""Programs that are not good for a call, each with the reason."""


def choose(
    programs: Iterable[tuple[int, BuiltProgram]], sizes_of: Callable[[BuiltProgram], Mapping[str, int]], device: torch.device
) -> tuple[int, dict[str, int]] | Reasons:
    """The number of the first program that is good for a call, and the sizes of the call; the reasons where none is.

    Args:
        programs: numbered.
        sizes_of: matches a program with the call.
        device: of the call.
    """
    room = devices.target_of(device).cluster
    reasons: Reasons = []
    for number, program in programs:
        if (cluster := max((each.cluster for each in program.call.launches), default=1)) > room:
            reasons.append((program, f"{device} has no room for {cluster} blocks that share a row"))
            continue
        try:
            return number, dict(sizes_of(program))
        except OtherForm:
            continue
        except Mismatch as reason:
            reasons.append((program, str(reason)))
    return reasons
