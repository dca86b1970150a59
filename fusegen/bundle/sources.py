"""Writes kernels as CUDA files, with C functions that launch them and a CMake target."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import chain, count
from pathlib import Path

from fusegen.bundle.build import Wanted, traced_calls
from fusegen.bundle.folder import new_folder, require_name, require_new, write, writing_to
from fusegen.bundle.traced import Traced
from fusegen.errors import BundleError
from fusegen.extension.kinds import Shaped
from fusegen.extension.sources_text import cmake_text, program_files
from fusegen.extension.unit import header
from fusegen.target import Backend


def build_sources(folder: Path, wanted: Iterable[Wanted], library: str) -> tuple[str, ...]:
    """Writes CUDA files, a header for launches and a CMake target into a new folder: there whole or not at all.

    Args:
        folder, wanted, library: as of `bundle.extension.build_extension`; for GPUs alone.

    Returns:
        The names of the functions.

    Raises:
        ArgumentError, BundleError: as there, or a kernel leaves a step to torch.
    """
    require_name(library)
    require_new(folder)
    files = {"fusegen.h": "#pragma once\n" + header("sources.h")}
    made: dict[str, list[str]] = {}
    for call in (call for each in wanted for call in traced_calls(each)):
        target = call.wanted.target
        if target.backend is Backend.CPU:
            raise BundleError("sources are CUDA", mend="give GPUs: --arch sm_90a; --format extension has the CPU too")
        traced = Traced(call)
        kind = traced.kind()
        name = _unique("_".join([traced.name, *_dtypes(kind.tensors), target.name]), files)
        files |= program_files(name, target.name, kind.programs)
        made.setdefault(target.name, []).append(name)
    files["CMakeLists.txt"] = cmake_text(library, made)
    with new_folder(folder) as unfinished, writing_to(folder):
        for file, text in files.items():
            write(unfinished / file, text.encode())
    return tuple(name for names in made.values() for name in names)


def _unique(name: str, files: Container[str]) -> str:
    """The name of a further kind of calls: with a number, where a function has it already."""
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(each for each in names if f"{each}.cu" not in files)


def _dtypes(tensors: Sequence[Shaped]) -> Sequence[str]:
    """Dtypes as part of a name: those of floats, which ints beside them seldom change; of all where none is a float."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    floats = [dtype.short for dtype in dtypes if dtype.is_float]
    return floats or [dtype.short for dtype in dtypes]
