"""The CUDA toolkit's nvcc in place of NVRTC, for those who name one: its version may be newer, or one that they have tested."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fusegen.errors import CompileError, ToolNotFoundError
from fusegen.jit.process import run

_VERSION_SECONDS, _BUILD_SECONDS = 60, 600
_MEND = "set FUSEGEN_NVCC to the path of the CUDA toolkit's nvcc, or unset it: NVRTC compiles then"


@dataclass(frozen=True)
class Nvcc:
    """A compiler: its command line's first words, and its version, such as ``13.0.48``."""

    command: tuple[str, ...]
    version: str


@lru_cache(maxsize=8)
def find_nvcc(name: str) -> Nvcc:
    """The compiler of a command line, such as ``"/usr/local/cuda/bin/nvcc -ccbin g++-12"``.

    Raises:
        ToolNotFoundError: it cannot be read or started, or is another program.
    """
    try:
        command = tuple(shlex.split(name))
    except ValueError as error:
        raise ToolNotFoundError(f"FUSEGEN_NVCC={name!r} cannot be read as a command line: {error}", mend=_MEND) from None
    try:
        done = run([*command, "--version"], _VERSION_SECONDS)
    except ToolNotFoundError as error:
        raise ToolNotFoundError(error.what, where="FUSEGEN_NVCC", mend=_MEND) from None
    match = re.search(r"release [\d.]+, V([\d.]+)", done.output)
    if match is None:
        raise ToolNotFoundError(f"FUSEGEN_NVCC={name!r} is no nvcc: it does not say its version", mend=_MEND)
    return Nvcc(command, match[1])


def cubin_of(nvcc: Nvcc, source: Path, architecture: str, flags: Sequence[str]) -> bytes:
    """The machine code of a file.

    Raises:
        CompileError: nvcc refused the text, crashed or took too long; holds all of its output.
    """
    with tempfile.TemporaryDirectory(dir=source.parent, prefix="building-", ignore_cleanup_errors=True) as folder:
        built = Path(folder, "kernel.cubin")
        target = [f"-arch={architecture}", "-lineinfo", "-cubin", str(source), "-o", str(built)]
        done = run([*nvcc.command, *flags, *target], _BUILD_SECONDS, {"TMPDIR": folder})
        if done.code != 0 or not built.is_file():
            what = f"nvcc {nvcc.version} {done.manner} for {architecture}:\n{done.output.strip()}"
            raise CompileError(what, where=str(source), mend="unset FUSEGEN_NVCC, or report it with this file")
        return built.read_bytes()
