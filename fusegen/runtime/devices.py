"""Devices: the target of each, and kernels of the CPU."""

from __future__ import annotations

import ctypes
import hashlib
import platform
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

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
    raise ArgumentError(f"device {device} is not supported", hint="use a CPU or an NVIDIA GPU")


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


# Kernels of the CPU target.


def host_kernel(function: Any) -> Any:
    """A compiled kernel of the CPU target, as a function of its packed arguments; calls from several threads do not meet.

    Args:
        function: the entry, which takes the address of the arguments: eight bytes each, one after the other.
    """
    function.restype, function.argtypes = None, (ctypes.c_char_p,)
    return function


def instruction_set() -> str:
    """A digest of what the processor can do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return "m" + hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:16]
