"""Calls kernels of the CPU target."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_VALUE_BYTES = 8  # pointers, sizes and scalars alike


class HostKernel:
    """A compiled kernel of the CPU target; calls from several threads do not disturb each other.

    Args:
        function: the entry, which takes an array of pointers to the arguments.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._function.restype = None
        self._function.argtypes = (ctypes.c_void_p,)
        self._frames = threading.local()

    def __call__(self, arguments: Sequence[int | float]) -> None:
        """Runs the kernel to its end.

        Args:
            arguments: addresses and sizes as int, float scalars as float, in the order of the kernel's parameters.
        """
        frame = getattr(self._frames, "frame", None)
        if frame is None:
            frame = self._frames.frame = _Frame(len(arguments))
        frame.fill(arguments)
        self._function(frame.address)


class _Frame:
    """The values of one call, and the array of pointers to them that an entry takes."""

    def __init__(self, count: int) -> None:
        self._values = ctypes.create_string_buffer(_VALUE_BYTES * max(count, 1))
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * count)(*(first + _VALUE_BYTES * i for i in range(count)))
        self._layouts: dict[tuple[type, ...], struct.Struct] = {}
        self.address = ctypes.addressof(self._pointers)

    def fill(self, arguments: Sequence[int | float]) -> None:
        """Writes the values of a call."""
        kinds = tuple(map(type, arguments))
        layout = self._layouts.get(kinds)
        if layout is None:
            layout = self._layouts[kinds] = struct.Struct("".join("d" if kind is float else "q" for kind in kinds))
        layout.pack_into(self._values, 0, *arguments)


def instruction_set() -> str:
    """A digest of what the processor can do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return "m" + hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:16]
