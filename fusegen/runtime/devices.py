"""What code runs on a device."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from fusegen import target as targets
from fusegen.errors import ArgumentError
from fusegen.target import PORTABLE_CLUSTER, Target


def target_of(device: torch.device) -> Target:
    """The target of a device.

    Raises:
        ArgumentError: for a device that is neither a CPU nor an NVIDIA GPU.
    """
    if device.type == "cpu":
        return targets.CPU
    if device.type == "cuda" and torch.version.hip is None:
        return _of_gpu(index_of(device))
    raise ArgumentError(f"device {device} is not supported", mend="use a CPU or an NVIDIA GPU")


def index_of(device: torch.device) -> int:
    """The number of a GPU."""
    return torch.cuda.current_device() if device.index is None else device.index


@lru_cache(maxsize=64)
def _of_gpu(index: int) -> Target:
    """The target of a GPU. One with fewer multiprocessors than its kind has, as a part of it has, may have no room for large
    clusters."""
    found = targets.from_capability(*torch.cuda.get_device_capability(index))
    is_whole = torch.cuda.get_device_properties(index).multi_processor_count >= found.processors
    return found if is_whole else replace(found, cluster=min(found.cluster, PORTABLE_CLUSTER))
