"""Compiles kernels of the CPU target."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fusegen.emit.environment import unit_text
from fusegen.jit.host import ARITHMETIC, compile_shared, load_shared
from fusegen.runtime.host_kernel import host_kernel, instruction_set
from fusegen.settings import cache_folder
from fusegen.source import Source

_FLAGS = (
    "-std=c++17", "-O3", *ARITHMETIC, "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions",
    "-fvisibility=default",
)  # fmt: skip
_X86 = ("x86_64", "AMD64")


_LOADED: dict[Source, Any] = {}


def host_kernels(sources: Sequence[Source], flags: tuple[str, ...] | None = None) -> list[Any]:
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
        _LOADED.update((source, host_kernel(getattr(library, source.entry))) for source in new)
    return [_LOADED[source] for source in sources]


@lru_cache(maxsize=1)
def host_flags() -> tuple[str, ...]:
    """The compiler's flags on this machine; the definition puts its instruction set into the key of what is compiled."""
    vectors = ("-mprefer-vector-width=512",) if platform.machine() in _X86 else ()
    return (*_FLAGS, "-march=native", *vectors, f"-DFG_MACHINE={instruction_set()}")
