"""What code runs on a device."""

from __future__ import annotations

from functools import lru_cache

import torch

from fusegen import target as targets
from fusegen.errors import ArgumentError
from fusegen.target import Target


def target_of(device: torch.device) -> Target:
    """The target of a device.

    Raises:
        ArgumentError: for a device that is neither a CPU nor an NVIDIA GPU.
    """
    if device.type == "cpu":
        return targets.CPU
    if device.type == "cuda" and torch.version.hip is None:
        return targets.from_capability(*_capability(device))
    raise ArgumentError(f"device {device} is not supported", mend="use a CPU or an NVIDIA GPU")


def index_of(device: torch.device) -> int:
    """The number of a GPU."""
    return torch.cuda.current_device() if device.index is None else device.index


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
