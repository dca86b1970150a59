"""Writes kernels as CUDA files, with C functions that launch them and a CMake target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fusegen.bundle.build import Wanted
from fusegen.bundle.folder import new_folder, require_name, require_new, write, writing_to
from fusegen.bundle.traced import Traced
from fusegen.errors import BundleError
from fusegen.extension.headers import header
from fusegen.extension.kinds import Shaped
from fusegen.extension.sources_text import cmake_text, program_files
from fusegen.target import Backend


def build_sources(folder: Path, wanted: Iterable[Wanted], library: str) -> tuple[str, ...]:
    """Writes CUDA files, a header for launches and a CMake target into a new folder: there whole or not at all.

    Args:
        folder, wanted, library: as of `bundle.extension.build_extension`; for GPUs alone.

    Returns:
        The names of the functions.

    Raises:
        ArgumentError, BundleError: as there, or a kernel leaves a step to torch, or two would have one name.
    """
    require_name(library)
    require_new(folder)
    files = {"fusegen.h": "#pragma once\n" + header("sources.h")}
    made: dict[str, list[str]] = {}
    for each in wanted:
        if each.target.backend is Backend.CPU:
            raise BundleError("sources are CUDA", mend="give GPUs: --arch sm_90a; --format extension has the CPU too")
        traced = Traced(each)
        kind = traced.kind()
        name = "_".join([traced.name, *_dtypes(kind.tensors), each.target.name])
        if f"{name}.cu" in files:
            raise BundleError(f"two kinds of calls would be called {name}", mend="build them into two folders")
        files |= program_files(name, each.target.name, kind.programs)
        made.setdefault(each.target.name, []).append(name)
    files["CMakeLists.txt"] = cmake_text(library, made)
    with new_folder(folder) as unfinished, writing_to(folder):
        for file, text in files.items():
            write(unfinished / file, text.encode())
    return tuple(name for names in made.values() for name in names)


def _dtypes(tensors: Sequence[Shaped]) -> Sequence[str]:
    """Dtypes as part of a name: those of floats, which ints beside them seldom change; of all where none is a float."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    floats = [dtype.short for dtype in dtypes if dtype.is_float]
    return floats or [dtype.short for dtype in dtypes]
