"""Targets of devices, and kernels of the CPU target."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fusegen import target as targets
from fusegen.errors import ArgumentError
from fusegen.target import PORTABLE_CLUSTER, Target


def target_of(device: torch.device) -> Target:
    """Returns the target of a CPU or an NVIDIA GPU; raises `ArgumentError` for other devices."""
    if device.type == "cpu":
        return targets.CPU
    if device.type == "cuda" and torch.version.hip is None:
        return _gpu_target(index_of(device))
    raise ArgumentError(f"device {device} is not supported", hint="use a CPU or an NVIDIA GPU")


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@lru_cache(maxsize=64)
def _gpu_target(index: int) -> Target:
    """Returns the target of a GPU, with its own costs if they were measured.

    A GPU with fewer SMs than usual, such as a MIG slice, may not support large clusters.
    """
    target = targets.from_capability(*torch.cuda.get_device_capability(index))
    target = targets.on_card(target, torch.cuda.get_device_name(index))
    has_all_sms = torch.cuda.get_device_properties(index).multi_processor_count >= target.sms
    return target if has_all_sms else replace(target, cluster=min(target.cluster, PORTABLE_CLUSTER))


def host_kernel(function: Any) -> Any:
    """Sets the C signature of a CPU kernel; it takes the address of its packed arguments, eight bytes each."""
    function.restype, function.argtypes = None, (ctypes.c_char_p,)
    return function


X86 = ("x86_64", "AMD64")
"""Names of x86-64 in `platform.machine`."""

_ADDED_FEATURES = {
    "x86-64": (),
    "x86-64-v2": ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"),
    "x86-64-v3": ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
"""The CPU features, as Linux names them, that each level of x86-64 adds to the one before."""

LEVELS = tuple(_ADDED_FEATURES)
"""The levels of x86-64."""


_COMPILED = re.compile(r"avx|bmi|fma|pni|sse|ssse|tbm|xop|(abm|cx16|f16c|gfni|lahf_lm|movbe|popcnt)$")
"""CPU features of x86-64 that compilers use in plain C++."""


def needed_features(level: str) -> tuple[str, ...]:
    """Returns the CPU features of a level; for "", those of this machine's processor that compilers use, if it is x86-64."""
    if level:
        return tuple(feature for each in LEVELS[: LEVELS.index(level) + 1] for feature in _ADDED_FEATURES[each])
    return tuple(sorted(filter(_COMPILED.match, _feature_names()))) if platform.machine() in X86 else ()


def added_features() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the levels of x86-64, each with the CPU features that it adds to the one before."""
    return tuple(_ADDED_FEATURES.items())


def level_here() -> str:
    """Returns the highest level of x86-64 that this processor has; "" for other processors."""
    return next(filter(runs_here, reversed(LEVELS)), "")


@lru_cache
def runs_here(machine: str) -> bool:
    """True if this processor runs binaries for a level, or for the processor with this digest of its features."""
    if machine not in LEVELS:
        return machine == instruction_set()
    return platform.machine() in X86 and _feature_names().issuperset(needed_features(machine))


def instruction_set() -> str:
    """Returns a digest of the CPU features."""
    return "m" + hashlib.sha256(f"{platform.machine()} {_features()}".encode()).hexdigest()[:16]


def _feature_names() -> frozenset[str]:
    return frozenset(_features().partition(":")[2].split())


def _features() -> str:
    """Returns the line of CPU features."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
