"""Calls kernels of the CPU target."""

from __future__ import annotations

import ctypes
import hashlib
import platform
from pathlib import Path
from typing import Any


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
