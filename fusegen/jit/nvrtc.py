"""NVRTC: CUDA text to cubin or PTX, kept on disk by content. Needs neither a GPU nor a host compiler.

The cache is cuda.core's program cache (atomic, shared by processes, least recently used goes first). Its key is ours: the
digest of the text without comments, the architecture, the flags and the compiler's version. So is the digest behind each entry:
one that was damaged is compiled again. Where ``FUSEGEN_NVCC`` names an nvcc, that makes the cubins.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fusegen.errors import CompileError, ToolNotFoundError
from fusegen.files import sealed, unsealed, write_atomically, writing_to
from fusegen.jit.host import run
from fusegen.settings import cache_folder, settings
from fusegen.source import Source

_CACHE_BYTES = 1 << 30
_STANDARD = "c++17"

FLAGS = (f"--std={_STANDARD}", "--fmad=false")
"""Flags that decide about the meaning of a text, as NVRTC and nvcc take it. Each operation rounds once, so that a value is the
same number wherever it is computed; contracted, `x * s` and `x * s - peak` would hold two."""


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: machine code for one architecture, and where its source lies."""

    entry: str
    architecture: str
    cubin: bytes
    source_path: Path
    from_cache: bool


def compile_cubin(source: Source, architecture: str) -> Binary:
    """The cubin of a source, from the cache when it was compiled before.

    Raises:
        ToolNotFoundError: NVRTC is not installed, or ``FUSEGEN_NVCC`` names no nvcc.
        CompileError: the compiler refused the text; holds its log.
        SettingsError: the cache cannot be written to.
    """
    key = _key(source, architecture)
    path = _source_path(key)
    with writing_to(path.parent):
        known = unsealed(_cache().get(key) or b"")
        if known is not None and path.exists():
            return Binary(source.entry, architecture, known, path, from_cache=True)
        _write(path, source.text)
    cubin = _compile(source.text, architecture, path)
    with writing_to(cache_folder("cubin")):
        _cache()[key] = sealed(cubin)
    return Binary(source.entry, architecture, cubin, path, from_cache=False)


def compile_cubins(sources: Sequence[Source], architecture: str) -> list[Binary]:
    """The cubins of some sources, compiled side by side: NVRTC works outside the interpreter's lock.

    Raises:
        As `compile_cubin`, for the first source that cannot be compiled.
    """
    different = {source.digest: source for source in sources}
    if len(different) < 2:
        return [compile_cubin(source, architecture) for source in sources]
    with ThreadPoolExecutor(min(len(different), processors())) as pool:
        found = pool.map(partial(compile_cubin, architecture=architecture), different.values())
        binaries = dict(zip(different, found, strict=True))
    return [binaries[source.digest] for source in sources]


def processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forget(source: Source, architecture: str) -> None:
    """Removes a cached binary, for one that turned out to be damaged."""
    with contextlib.suppress(KeyError):
        del _cache()[_key(source, architecture)]


def compile_ptx(source: Source, architecture: str) -> str:
    """The PTX of a source.

    Raises:
        ToolNotFoundError: NVRTC is not installed.
        CompileError: NVRTC refused the text.
    """
    nvrtc = _nvrtc()
    status, program = nvrtc.nvrtcCreateProgram(source.text.encode(), source.entry.encode(), 0, [], [])
    options = [flag.encode() for flag in (f"--gpu-architecture={architecture.replace('sm_', 'compute_')}", *FLAGS)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        raise CompileError(f"NVRTC refused {source.name} for {architecture}:\n{log}", hint="report it with the source")
    return _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)


def _text(program: Any, size_of: Callable[[Any], tuple[Any, int]], fill: Callable[[Any, bytes], Any]) -> str:
    """The output of NVRTC for a program: its PTX, or the compiler's log."""
    _, size = size_of(program)
    text = b" " * size
    fill(program, text)
    return bytes(text).rstrip(b"\0").decode(errors="replace")


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """NVRTC's version, such as ``13.0``.

    Raises:
        ToolNotFoundError: NVRTC is not installed.
    """
    try:
        _, major, minor = _nvrtc().nvrtcVersion()
    except Exception as error:  # the bindings raise whatever the loader found
        raise _missing() from error
    return f"{major}.{minor}"


def compiler_version() -> str:
    """The version of what makes cubins, such as ``13.0`` for NVRTC or ``nvcc 13.0.48``.

    Raises:
        ToolNotFoundError: NVRTC is not installed, or ``FUSEGEN_NVCC`` names no nvcc.
    """
    chosen = settings().nvcc
    return nvrtc_version() if chosen is None else f"nvcc {find_nvcc(chosen).version}"


def _compile(text: str, architecture: str, path: Path) -> bytes:
    if chosen := settings().nvcc:
        return cubin_of(find_nvcc(chosen), path, architecture, FLAGS)
    from cuda.core import Program, ProgramOptions

    nvrtc_version()
    options = ProgramOptions(name=str(path), arch=architecture, std=_STANDARD, fma=False, lineinfo=True)
    try:
        compiled = Program(text, "c++", options).compile("cubin")
    except Exception as error:
        raise CompileError(
            f"NVRTC refused the emitted text for {architecture}:\n{error}", where=str(path), hint="report it with this file"
        ) from error
    return bytes(compiled.code)


def _key(source: Source, architecture: str) -> bytes:
    parts = (source.digest, architecture, *FLAGS, "lineinfo", compiler_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest().encode()


def _source_path(key: bytes) -> Path:
    return cache_folder("cuda") / f"{key.decode()[:32]}.cu"


def _write(path: Path, text: str) -> None:
    """The source beside its binary: profilers and debuggers find the lines there."""
    write_atomically(path, text.encode())


@lru_cache(maxsize=1)
def _cache() -> Any:
    from cuda.core.utils import FileStreamProgramCache

    return FileStreamProgramCache(cache_folder("cubin"), max_size_bytes=_CACHE_BYTES)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise _missing() from error
    return nvrtc


def _missing() -> ToolNotFoundError:
    return ToolNotFoundError("NVRTC is not installed", hint="pip install 'cuda-bindings[all]' cuda-core (Linux and Windows)")


# The CUDA toolkit's nvcc in place of NVRTC, for those who name one: its version may be newer, or one that they have tested.


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
        raise ToolNotFoundError(f"FUSEGEN_NVCC={name!r} cannot be read as a command line: {error}", hint=_MEND) from None
    try:
        done = run([*command, "--version"], _VERSION_SECONDS)
    except ToolNotFoundError as error:
        raise ToolNotFoundError(error.what, where="FUSEGEN_NVCC", hint=_MEND) from None
    match = re.search(r"release [\d.]+, V([\d.]+)", done.output)
    if match is None:
        raise ToolNotFoundError(f"FUSEGEN_NVCC={name!r} is no nvcc: it does not say its version", hint=_MEND)
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
            raise CompileError(what, where=str(source), hint="unset FUSEGEN_NVCC, or report it with this file")
        return built.read_bytes()


# SASS: a cubin's machine code as text, by NVIDIA's disassembler where one is found.


_SECONDS = 120

_PLACES = (("triton", "backends/nvidia/bin/nvdisasm"), ("nvidia", "cu13/bin/nvdisasm"), ("nvidia", "cuda_nvdisasm/bin/nvdisasm"))


def find_nvdisasm() -> str | None:
    """The disassembler: on the PATH, in Triton's package, or from PyPI's nvidia-cuda-nvdisasm."""
    if found := shutil.which("nvdisasm"):
        return found
    for package, inside in _PLACES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            candidate = Path(folder) / inside
            if candidate.is_file():
                return str(candidate)
    return None


def sass(cubin: bytes) -> str:
    """The machine code of a cubin as text.

    Raises:
        ToolNotFoundError: no disassembler was found, or it does not run here.
        CompileError: it refused the machine code.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise ToolNotFoundError(
            "nvdisasm is not on this machine", hint="pip install nvidia-cuda-nvdisasm, or install the CUDA toolkit"
        )
    folder = cache_folder("cubin")
    with writing_to(folder), tempfile.NamedTemporaryFile(suffix=".cubin", dir=folder) as file:
        file.write(cubin)
        file.flush()
        done = run([tool, "-c", file.name], _SECONDS)
    if done.code != 0:
        raise CompileError(f"{tool} {done.manner}:\n{done.output}", hint="install an nvdisasm that is as new as NVRTC")
    return done.output
