"""Devices: what code is made for them, and what launches it there."""

from __future__ import annotations

from functools import lru_cache

import torch

from fusegen import target as targets
from fusegen.errors import ArgumentError
from fusegen.runtime.execute import Backend, CudaBackend, EmulatorBackend, HostBackend
from fusegen.settings import settings
from fusegen.target import Target


def target_of(device: torch.device) -> Target:
    """The target of a device.

    Raises:
        ArgumentError: for a device that is neither a CPU nor an NVIDIA GPU.
    """
    if device.type == "cpu":
        return _emulated() if settings().emulate else targets.CPU
    if device.type == "cuda" and torch.version.hip is None:
        return targets.from_capability(*_capability(device))
    raise ArgumentError(f"device {device} is not supported", mend="use a CPU or an NVIDIA GPU")


def backend_of(device: torch.device) -> tuple[Target, Backend]:
    """The target of a device, and what launches there."""
    target = target_of(device)
    if device.type == "cuda":
        return target, _cuda_backend(target.name, device)
    return target, EmulatorBackend() if settings().emulate else HostBackend()


@lru_cache(maxsize=64)
def _cuda_backend(architecture: str, device: torch.device) -> CudaBackend:
    return CudaBackend(architecture, device)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _emulated() -> Target:
    """The machine that the emulator plays: Hopper, with its tensor cores and its copy engine."""
    return targets.target("sm_90a")
