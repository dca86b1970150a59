"""Compiles and calls kernels of the CPU target."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import struct
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fusegen.emit.unit import unit_text
from fusegen.jit.host import ARITHMETIC, compile_shared, load_shared
from fusegen.settings import cache_folder
from fusegen.source import Source

_FLAGS = (
    "-std=c++17", "-O3", *ARITHMETIC, "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions",
    "-fvisibility=default",
)  # fmt: skip
_X86 = ("x86_64", "AMD64")
_VALUE_BYTES = 8  # pointers, sizes and scalars alike


_LOADED: dict[Source, HostKernel] = {}


def host_kernels(sources: Sequence[Source], flags: tuple[str, ...] | None = None) -> list[HostKernel]:
    """The kernels of some sources: those that this process does not have yet are compiled as one unit, unless they were before.

    Args:
        sources: emitted C++, with entries that differ.
        flags: of the compiler; by default those of `host_flags`.

    Raises:
        ToolNotFoundError: there is no compiler.
        CompileError: the compiler refused the text.
    """
    new = [source for source in dict.fromkeys(sources) if source not in _LOADED]
    if new:
        library = load_shared(compile_shared(unit_text(new), flags or host_flags(), cache_folder("cpu")))
        _LOADED.update((source, HostKernel(getattr(library, source.entry))) for source in new)
    return [_LOADED[source] for source in sources]


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


@lru_cache(maxsize=1)
def host_flags() -> tuple[str, ...]:
    """The compiler's flags on this machine; the definition puts its instruction set into the key of what is compiled."""
    vectors = ("-mprefer-vector-width=512",) if platform.machine() in _X86 else ()
    return (*_FLAGS, "-march=native", *vectors, f"-DFG_MACHINE={_instruction_set()}")


def _instruction_set() -> str:
    """A digest of what the processor can do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return "m" + hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:16]
