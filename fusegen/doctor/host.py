"""Probes of the host: the settings, the C++ compiler, the cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fusegen.doctor.child import ProbeError, ask, failure, run
from fusegen.doctor.finding import Look, broken, found, missing
from fusegen.errors import ToolNotFoundError
from fusegen.jit.cache import usage
from fusegen.jit.host import HostCompiler, find_compiler
from fusegen.settings import cache_folder, settings

_FLAGS = ("-std=c++17", "-O2", "-fopenmp", "-march=native", "-shared", "-fPIC")
_TEXT = """
#include <cmath>
#include <omp.h>
extern "C" int probe() {
    int sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < 100; ++i) sum += i;
    return sum;
}
"""
_SUM = 4950
_ELSEWHERE = "set FUSEGEN_CACHE_DIR to a folder of yours from which libraries may be loaded"
_MEND = "install g++ or clang++ with OpenMP, or set CXX to such a compiler"


def look_at_settings() -> Look:
    """The environment's variables."""
    chosen = settings()
    shown = [f"FUSEGEN_CACHE_DIR={chosen.cache_dir}", f"FUSEGEN_EMULATE={int(chosen.emulate)}", f"CXX={chosen.cxx or ''}"]
    shown += [f"FUSEGEN_COMPILER={chosen.compiler}", f"FUSEGEN_NVCC={chosen.nvcc or ''}", f"FUSEGEN_NATIVE={int(chosen.native)}"]
    return found(detail=", ".join(shown))


def look_at_compiler() -> Look:
    """The host compiler, by a small kernel with OpenMP that is built, loaded and called."""
    try:
        compiler = find_compiler(settings().cxx)
    except ToolNotFoundError as error:
        return missing(error.what, error.mend)
    where = " ".join(compiler.command)
    problem = _problem(compiler)
    return found(compiler.version, where) if problem is None else broken(problem, _MEND, version=compiler.version, where=where)


def look_at_native() -> Look:
    """The native module, which is built at its first use."""
    problem = ask("from fusegen.extension.native import failure\nanswer(problem=failure())")["problem"]
    if problem:
        return missing(f"calls run in Python, slower: {problem}", "let it be built: FUSEGEN_NATIVE=1, and a compiler that works")
    return found(detail="calls run in C++, once it is built at the first use")


def look_at_extensions() -> Look:
    """Ninja and torch's headers; with the C++ compiler they are all that extensions need."""
    try:
        answer = ask("import ninja, torch.utils.cpp_extension as t\nanswer(ninja=ninja.BIN_DIR, headers=t.include_paths())")
        done = run([str(Path(answer["ninja"], "ninja")), "--version"])
    except ProbeError as error:
        return missing(f"ninja cannot be used: {error.what}", "pip install ninja")
    if not any(Path(folder, "torch", "library.h").is_file() for folder in answer["headers"]):
        return missing("torch's headers are not there", "install torch from a wheel that has them, as those of PyPI do")
    return found(f"ninja {done.stdout.strip()}", answer["ninja"])


def _problem(compiler: HostCompiler) -> str | None:
    with tempfile.TemporaryDirectory(prefix="fusegen-doctor-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_TEXT, encoding="utf-8")
        try:
            done = run([*compiler.command, *_FLAGS, str(source), "-o", str(library)])
            if done.returncode != 0:
                return f"it cannot build a kernel with OpenMP: {failure(done)}"
            told = ask(f"import ctypes\nanswer(sum=ctypes.CDLL({str(library)!r}).probe())")["sum"]
        except ProbeError as error:
            return error.what
    return None if told == _SUM else f"what it builds computes {told} instead of {_SUM}"


def look_at_cache() -> Look:
    """The cache, by writing into it."""
    folder = settings().cache_dir
    try:
        with tempfile.TemporaryFile(dir=cache_folder("cpu")) as file:
            file.write(b"fusegen")
    except OSError as error:
        what = f"nothing can be written there: {error.strerror}"
        return broken(what, _ELSEWHERE, where=str(folder))
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return broken("libraries there cannot be loaded: the file system is mounted noexec", _ELSEWHERE, where=str(folder))
    kinds = usage(folder)
    count, size = sum(kind.entries for kind in kinds), sum(kind.bytes for kind in kinds)
    return found(where=str(folder), detail=f"{count} entries, {size / 2**20:.1f} MiB")
