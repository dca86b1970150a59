"""NVRTC: CUDA text to cubin or PTX, cached by content. Needs neither a GPU nor a host compiler.

The key is the digest of the text without comments, the architecture, the flags and the compiler's version. Each entry ends with its
digest; a damaged one is compiled again.
``FUSEGEN_NVCC`` replaces NVRTC by nvcc for cubins.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fusegen.errors import CompileError, SettingsError, ToolNotFoundError
from fusegen.files import FORMAT, one_builder, read_sealed, stored_if_possible, write_atomically, write_sealed
from fusegen.jit.cache import keep_within_size
from fusegen.jit.host import run
from fusegen.settings import cache_folder, settings
from fusegen.source import Source, strip_comments
from fusegen.threads import new_lock

_STANDARD = "c++17"
_IMPORTING = new_lock()
"""Held while cuda.core is imported: a second thread would see a module without its names."""

FLAGS = (f"--std={_STANDARD}", "--fmad=false")
"""Flags of NVRTC and nvcc that affect results. Without contraction a value is the same wherever it is computed: a contracted
`x * s - max` would differ from `x * s`."""


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: machine code for one architecture, and the path of its source."""

    entry: str
    architecture: str
    cubin: bytes
    source_path: Path
    from_cache: bool


def compile_cubin(source: Source, architecture: str) -> Binary:
    """Compiles a source to a cubin, unless it is cached. Of several processes one compiles, and the others wait.

    Raises:
        ToolNotFoundError: NVRTC is not installed, or ``FUSEGEN_NVCC`` is not an nvcc.
        CompileError: the compiler rejected the text; includes its log.
    """
    key = _key(source, architecture)
    entry, path = cache_folder("cubin") / key, cache_folder("cuda") / f"{key[:32]}.cu"
    cubin = read_sealed(entry)
    if cubin is None:
        with one_builder(entry, _BUILD_SECONDS):
            cubin = read_sealed(entry)
            if cubin is None:
                return Binary(source.entry, architecture, _stored(source, architecture, entry, path), path, from_cache=False)
    if not path.exists():
        with suppress(OSError):  # a read-only cache
            write_atomically(path, source.text.encode())
    return Binary(source.entry, architecture, cubin, path, from_cache=True)


def _stored(source: Source, architecture: str, entry: Path, path: Path) -> bytes:
    """Compiles a source and stores the cubin, and the source at its line-info path, for profilers and debuggers."""
    with stored_if_possible(path.parent):
        write_atomically(path, source.text.encode())
    cubin = _compile(source.text, architecture, path)
    with stored_if_possible(entry.parent):
        write_sealed(entry, cubin)
        keep_within_size(entry)
    return cubin


def compile_cubins(sources: Sequence[Source], architecture: str) -> list[Binary]:
    """Compiles several sources in parallel: NVRTC releases the GIL. Raises the error of the first that fails."""
    by_digest = {source.digest: source for source in sources}
    compile_ = partial(compile_cubin, architecture=architecture)
    if len(by_digest) < 2:
        return [compile_(source) for source in sources]
    with ThreadPoolExecutor(min(len(by_digest), cpus())) as pool:
        try:
            compiled: Iterable[Binary] = pool.map(compile_, by_digest.values())
        except RuntimeError:  # the interpreter ends and starts no more threads
            compiled = map(compile_, by_digest.values())
        binaries = dict(zip(by_digest, compiled, strict=True))
    return [binaries[source.digest] for source in sources]


def cpus() -> int:
    """Returns the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forget(source: Source, architecture: str) -> None:
    """Removes a damaged binary from the cache."""
    with suppress(OSError):
        (cache_folder("cubin") / _key(source, architecture)).unlink()


def compile_ptx(source: Source, architecture: str) -> str:
    """Compiles a source to PTX; errors are those of `compile_cubin`."""
    nvrtc = _nvrtc()
    status, program = nvrtc.nvrtcCreateProgram(source.text.encode(), source.entry.encode(), 0, [], [])
    options = [flag.encode() for flag in (f"--gpu-architecture={architecture.replace('sm_', 'compute_')}", *FLAGS)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        raise CompileError(f"NVRTC rejected {source.name} for {architecture}:\n{log}", hint="report it with the source")
    return _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)


def _text(program: Any, size_of: Callable[[Any], tuple[Any, int]], fill: Callable[[Any, bytes], Any]) -> str:
    """Reads an output of NVRTC: PTX, or the log."""
    _, size = size_of(program)
    text = b" " * size
    fill(program, text)
    return bytes(text).rstrip(b"\0").decode(errors="replace")


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """Returns the version of NVRTC, e.g. ``13.0``; raises `ToolNotFoundError` if it is not installed."""
    try:
        _, major, minor = _nvrtc().nvrtcVersion()
    except Exception as error:  # the bindings raise various loader errors
        raise _missing() from error
    return f"{major}.{minor}"


def compiler_version() -> str:
    """Returns the version of the cubin compiler, e.g. ``13.0`` for NVRTC or ``nvcc 13.0.48``."""
    command = settings().nvcc
    return nvrtc_version() if command is None else f"nvcc {find_nvcc(command).version}"


def _compile(text: str, architecture: str, path: Path) -> bytes:
    if chosen := settings().nvcc:
        return _cubin_by_nvcc(find_nvcc(chosen), text, path, architecture)
    with _IMPORTING:
        from cuda.core import Program, ProgramOptions

    nvrtc_version()
    options = ProgramOptions(name=str(path), arch=architecture, std=_STANDARD, fma=False, lineinfo=True)
    try:
        compiled = Program(text, "c++", options).compile("cubin")
    except Exception as error:
        raise CompileError(
            f"NVRTC rejected the emitted code for {architecture}:\n{error}", where=str(path), hint="report it with this file"
        ) from error
    return bytes(compiled.code)


def _key(source: Source, architecture: str) -> str:
    parts = (FORMAT, source.digest, architecture, *FLAGS, "lineinfo", *_compiler_identity(settings().nvcc))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _compiler_identity(nvcc: str | None) -> tuple[str, ...]:
    """Returns the texts that tell a compiler from others: releases of NVRTC with one version differ in the size of the library."""
    if nvcc is not None:
        found = find_nvcc(nvcc)
        return ("nvcc", found.version, *found.command)
    return nvrtc_version(), str(_nvrtc_bytes())


@lru_cache(maxsize=1)
def _nvrtc_bytes() -> int:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        return Path(load_nvidia_dynamic_lib("nvrtc").abs_path or "").stat().st_size
    except (OSError, RuntimeError):  # the system's loader found it
        return 0


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise _missing() from error
    return nvrtc


def _missing() -> ToolNotFoundError:
    return ToolNotFoundError("NVRTC is not installed", hint="pip install 'cuda-bindings[all]' cuda-core (Linux and Windows)")


# The CUDA toolkit's nvcc instead of NVRTC, e.g. a newer or a tested version.


_VERSION_SECONDS, _BUILD_SECONDS = 60, 600
_NVCC_HINT = "set FUSEGEN_NVCC to the path of the CUDA toolkit's nvcc, or unset it to use NVRTC"


@dataclass(frozen=True)
class Nvcc:
    """The start of a command line of nvcc, and its version, e.g. ``13.0.48``."""

    command: tuple[str, ...]
    version: str


@lru_cache(maxsize=8)
def find_nvcc(name: str) -> Nvcc:
    """Returns the nvcc of a command line, such as ``"/usr/local/cuda/bin/nvcc -ccbin g++-12"``.

    Raises:
        ToolNotFoundError: it cannot be parsed or started, or is another program.
    """
    try:
        command = tuple(shlex.split(name))
    except ValueError as error:
        raise ToolNotFoundError(f"FUSEGEN_NVCC={name!r} cannot be read as a command line: {error}", hint=_NVCC_HINT) from None
    try:
        result = run([*command, "--version"], _VERSION_SECONDS)
    except ToolNotFoundError as error:
        raise ToolNotFoundError(error.what, where="FUSEGEN_NVCC", hint=_NVCC_HINT) from None
    match = re.search(r"release [\d.]+, V([\d.]+)", result.output)
    if match is None:
        raise ToolNotFoundError(f"FUSEGEN_NVCC={name!r} is not an nvcc: it prints no version", hint=_NVCC_HINT)
    return Nvcc(command, match[1])


def _cubin_by_nvcc(nvcc: Nvcc, text: str, path: Path, architecture: str) -> bytes:
    if path.is_file():
        return cubin_of(nvcc, path, architecture, FLAGS)
    with tempfile.TemporaryDirectory(prefix="fusegen-", ignore_cleanup_errors=True) as folder:  # the cache stores nothing
        source = Path(folder, path.name)
        source.write_text(text, encoding="utf-8")
        return cubin_of(nvcc, source, architecture, FLAGS)


def cubin_of(nvcc: Nvcc, source: Path, architecture: str, flags: Sequence[str]) -> bytes:
    """Compiles a file by nvcc; raises `CompileError`, with all output, if that fails."""
    with tempfile.TemporaryDirectory(dir=source.parent, prefix="building-", ignore_cleanup_errors=True) as folder:
        built = Path(folder, "kernel.cubin")
        target = [f"-arch={architecture}", "-lineinfo", "-cubin", str(source), "-o", str(built)]
        result = run([*nvcc.command, *flags, *target], _BUILD_SECONDS, {"TMPDIR": folder})
        if result.code != 0 or not built.is_file():
            what = f"nvcc {nvcc.version} {result.exit_description} for {architecture}:\n{result.output.strip()}"
            raise CompileError(what, where=str(source), hint="unset FUSEGEN_NVCC, or report it with this file")
        return built.read_bytes()


# Registers and spills, as the compiler notes them in a cubin, which is an ELF file.


@dataclass(frozen=True)
class Resources:
    """The memory of a thread of a compiled kernel.

    Attributes:
        registers: registers of 32 bits.
        local_bytes: memory for spills, and for arrays with run-time indices.
    """

    registers: int
    local_bytes: int

    @property
    def description(self) -> str:
        local = f"{self.local_bytes} B of local memory per thread" if self.local_bytes else "no spills"
        return f"{self.registers} registers per thread, {local}"


_SECTION = struct.Struct("<II4QII2Q")
_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of a kernel: numbers of registers, and of bytes
_SIZED = 4  # the format of an attribute with a size


def resources(cubin: bytes) -> Resources:
    """Reads the resources of a cubin with one kernel."""
    (table,), (_, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    sections = [_SECTION.unpack_from(cubin, table + number * _SECTION.size) for number in range(count)]
    start = sections[names][4]
    info = next(each for each in sections if cubin[start + each[0] :].startswith(b".nv.info\0"))
    found = dict(_attributes(cubin[info[4] : info[4] + info[5]]))
    return Resources(found[_REGISTERS], found[_FRAME])


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    """The attributes of kernels and their values."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if attribute in (_REGISTERS, _FRAME):
                _, value = struct.unpack_from("<II", info, at)
                yield attribute, value
            at += size


# SASS: disassembled machine code.


_SECONDS = 120

_NVDISASM = (
    ("triton", "backends/nvidia/bin/nvdisasm"),
    ("nvidia", "cu13/bin/nvdisasm"),
    ("nvidia", "cuda_nvdisasm/bin/nvdisasm"),
)


def find_nvdisasm() -> str | None:
    """Returns the path of nvdisasm: on the PATH, in Triton's package, or from PyPI's nvidia-cuda-nvdisasm."""
    if path := shutil.which("nvdisasm"):
        return path
    for package, relative_path in _NVDISASM:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            candidate = Path(folder) / relative_path
            if candidate.is_file():
                return str(candidate)
    return None


@dataclass(frozen=True)
class Instruction:
    """An instruction of SASS, or a label.

    Attributes:
        lines: indices of the lines of the source's text that it computes: that of the innermost inlined function first.
    """

    text: str
    lines: tuple[int, ...]


def instructions(source: Source, architecture: str) -> list[Instruction]:
    """Compiles and disassembles a source; errors are those of `compile_cubin` and `sass`."""
    binary = compile_cubin(source, architecture)
    # A cubin in the cache may be that of a text with other comments.
    compiled = binary.source_path.read_text(encoding="utf-8") if binary.source_path.is_file() else source.text
    lines = dict(zip(_code_lines(compiled), _code_lines(source.text), strict=False))
    found, places, is_open = list[Instruction](), list[int](), False
    for line in sass(binary.cubin, "-gi").splitlines():
        if place := _PLACE.match(line):
            places = [*(places if is_open else ()), int(place[1]) - 1]
            is_open = True
        elif code := _CODE.match(line):
            found.append(Instruction(code[1], tuple(lines[place] for place in places if place in lines)))
            is_open = False
    return found


_PLACE = re.compile(r'\s*//## File "[^"]*", line (\d+)')
_CODE = re.compile(r"(?:\s+/\*[0-9a-f]{4,}\*/)?\s*(\.L_\w+:|(?<=\s)[@A-Z].*;)")


def _code_lines(text: str) -> list[int]:
    """Returns the indices of the lines with code."""
    return [number for number, line in enumerate(text.splitlines()) if strip_comments(line).strip()]


def sass(cubin: bytes, *options: str) -> str:
    """Disassembles a cubin, with further options of nvdisasm.

    Raises:
        ToolNotFoundError: no disassembler was found, or it does not run here.
        CompileError: it rejected the machine code.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise ToolNotFoundError("nvdisasm is not installed", hint="pip install nvidia-cuda-nvdisasm, or install the CUDA toolkit")
    try:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            result = run([tool, "-c", *options, file.name], _SECONDS)
    except OSError as error:
        what = f"no temporary file can be written: {error.strerror or error}"
        raise SettingsError(what, where="TMPDIR", hint="free space there, or set TMPDIR to another folder") from error
    if result.code != 0:
        raise CompileError(
            f"{tool} {result.exit_description}:\n{result.output}", hint="install an nvdisasm at least as new as NVRTC"
        )
    return result.output
