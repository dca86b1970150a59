"""The head of a kernel's function: an entry that is launched, or a part of one, which is told its block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusegen.emit.views import entry, kernel_parameters
from fusegen.schedule.program import Launch

PART = "run"
"""The name of a part's function, in the namespace of the part."""


def head(launch: Launch) -> dict[str, Any]:
    """The values of a template: ``entry``, ``parameters``, ``overlaps``; ``begins``, which writes the head up to its parameters for
    bounds of the launch; ``block`` and ``blocks``, the number of the block and of all blocks."""
    is_part = launch.part > 0
    parameters = kernel_parameters(launch.kernel)
    return {
        "entry": entry(launch.kernel),
        "overlaps": launch.overlaps and not is_part,
        "parameters": ["i32 block", "i32 blocks", *parameters] if is_part else parameters,
        "begins": _part if is_part else _entry(entry(launch.kernel)),
        "block": "block" if is_part else "block_id()",
        "blocks": "blocks" if is_part else "block_count()",
    }


def _entry(name: str) -> Callable[..., str]:
    return lambda bounds, more="": f'extern "C" __global__ void {more}__launch_bounds__({bounds})\n{name}'


def _part(*_: object) -> str:
    return f"__device__ __forceinline__ void {PART}"
