"""The host C++ compiler: source text to a shared library, cached by content. The CPU target and the emulator use it."""

from __future__ import annotations

import atexit
import ctypes
import errno
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fusegen.errors import CompileError, SettingsError, ToolNotFoundError
from fusegen.files import (
    FORMAT,
    cache_writes,
    is_undamaged,
    one_builder,
    sealed,
    unusable,
    warn_of_cache,
    write_atomically,
    write_sealed,
)
from fusegen.jit.cache import keep_within_size
from fusegen.settings import settings

ARITHMETIC = ("-ffp-contract=off", "-fwrapv")
"""Flags of every compilation: no contraction, so that a value is the same wherever it is computed, and integers wrap."""

_VERSION_SECONDS, _BUILD_SECONDS = 60, 300
_DISK_ERRORS = (
    "No space left on device",
    "Disk quota exceeded",
    "Read-only file system",
    "File size limit exceeded",
    "File too large",
    "Bus error",
)
_DEFAULT_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler: the start of its command line, and its version line, which is part of cache keys."""

    command: tuple[str, ...]
    version: str


@lru_cache(maxsize=8)
def find_compiler(preferred: str | None = None) -> HostCompiler:
    """Returns ``preferred`` (a command line such as ``"ccache g++"``), or the first default compiler that is installed.

    Raises:
        ToolNotFoundError: there is none.
    """
    for name in (preferred,) if preferred else _DEFAULT_COMPILERS:
        command = _split_command(name)
        if command and shutil.which(command[0]):
            return HostCompiler(command, _version(command))
    raise ToolNotFoundError(
        f"no host C++ compiler: {preferred or ', '.join(_DEFAULT_COMPILERS)} not found",
        where="CXX" if preferred else "PATH",
        hint="install g++ or clang++, or set CXX to the compiler's path",
    )


def compile_shared(text: str, flags: tuple[str, ...], cache_dir: Path) -> Path:
    """Compiles C++ to a shared library in ``cache_dir``, unless it is cached, and returns its path.

    The name is the digest of text, flags and compiler; the source is stored next to it. A damaged library is rebuilt. Of several
    processes one builds, and the others wait. If the folder cannot be written to, the library is a file in memory.

    Raises:
        ToolNotFoundError: there is no compiler.
        CompileError: the compiler rejected the text, crashed, built nothing or took too long; includes its output.
        SettingsError: no folder for temporary files can be written to.
    """
    compiler = find_compiler(settings().cxx)
    library = cache_dir / f"{_digest(text, flags, compiler)}.so"
    if is_undamaged(library):
        return library
    try:
        with cache_writes(cache_dir):
            cache_dir.mkdir(parents=True, exist_ok=True)
            with one_builder(library, _BUILD_SECONDS):
                if not is_undamaged(library):
                    _build(compiler, text, flags, library)
        keep_within_size(library)
        return library
    except SettingsError as error:
        return _in_memory(compiler, text, flags, library, error)


def load_compiled(text: str, flags: tuple[str, ...], cache_dir: Path, *, for_others: bool = False) -> tuple[ctypes.CDLL, Path]:
    """Compiles and loads a library: that of :func:`compile_shared`, or one in memory if the system does not load that one, because
    it was removed meanwhile, is foreign, or lies on a file system without execution. Returns the library and its path."""
    library = compile_shared(text, flags, cache_dir)
    try:
        return load_shared(library, for_others=for_others), library
    except SettingsError as error:
        library = _in_memory(find_compiler(settings().cxx), text, flags, cache_dir / library.name, error)
        return load_shared(library, for_others=for_others), library


def load_shared(library: Path, *, for_others: bool = False) -> ctypes.CDLL:
    """Loads a library that :func:`compile_shared` returned; raises `SettingsError` if the system refuses to.

    Args:
        for_others: whether libraries that are loaded later may use its symbols.
    """
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOW | (os.RTLD_GLOBAL if for_others else os.RTLD_LOCAL))
    except OSError as error:
        raise unusable(library.parent, str(error)) from error


def _in_memory(compiler: HostCompiler, text: str, flags: tuple[str, ...], library: Path, error: SettingsError) -> Path:
    return in_memory(library, error, lambda folder: _built(compiler, text, flags, folder / f"{library.stem}.cpp"))


_MEMORY = Path("/dev/shm")
_IN_MEMORY: dict[Path, Path] = {}  # open for as long as the process runs: the system finds a loaded library by its path


def in_memory(library: Path, error: SettingsError, build: Callable[[Path], bytes]) -> Path:
    """Builds a library that the cache cannot store, once per process, and returns the path of a file in memory.

    Args:
        error: the reason why the cache cannot store it. A warning reports it, or it is raised if nothing else can be written to.
        build: returns the library; it may write to the folder that it is given.
    """
    if library not in _IN_MEMORY:
        name, content = library.name, sealed(_built_elsewhere(error, build), library.name)
        warn_of_cache(library.parent, error)
        descriptor = os.memfd_create(name)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        _IN_MEMORY[library] = Path(f"/proc/self/fd/{descriptor}")
    return _IN_MEMORY[library]


def _built_elsewhere(error: SettingsError, build: Callable[[Path], bytes]) -> bytes:
    if not hasattr(os, "memfd_create"):
        raise error
    for parent in (None, _MEMORY):
        with (
            suppress(OSError, SettingsError),
            tempfile.TemporaryDirectory(dir=parent, prefix="fusegen-", ignore_cleanup_errors=True) as folder,
        ):
            return build(Path(folder))
    raise error


def _split_command(name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(name))
    except ValueError as error:
        what = f"CXX={name!r} cannot be read as a command line: {error}"
        raise ToolNotFoundError(what, where="CXX", hint="set CXX to the compiler's path") from None


def _version(command: tuple[str, ...]) -> str:
    return run([*command, "--version"], _VERSION_SECONDS).output.partition("\n")[0]


def _digest(text: str, flags: tuple[str, ...], compiler: HostCompiler) -> str:
    parts = (text, *flags, FORMAT, *compiler.command, compiler.version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _build(compiler: HostCompiler, text: str, flags: tuple[str, ...], library: Path) -> None:
    source = library.with_suffix(".cpp")
    write_atomically(source, text.encode())
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-", ignore_cleanup_errors=True) as folder:
        write_sealed(library, _built(compiler, text, flags, Path(folder, source.name), str(source)))


def _built(compiler: HostCompiler, text: str, flags: tuple[str, ...], source: Path, where: str | None = None) -> bytes:
    return _compiled(compiler, text, ("-shared", *flags), source.with_suffix(".so"), where).read_bytes()


def compile_object(text: str, flags: tuple[str, ...], built: Path) -> Path:
    """Compiles C++ to an object file, in a temporary folder, and returns its path; errors are those of `compile_shared`."""
    return _compiled(find_compiler(settings().cxx), text, ("-c", *flags), built)


def _compiled(compiler: HostCompiler, text: str, flags: tuple[str, ...], built: Path, where: str | None = None) -> Path:
    """Compiles a text. The source file does not exist yet; its folder is temporary."""
    source = built.with_suffix(".cpp")
    source.write_text(text, encoding="utf-8")
    command = [*compiler.command, "-fPIC", *flags, str(source), "-o", str(built)]
    result = run(command, _BUILD_SECONDS, {"TMPDIR": str(source.parent)})
    _check(result, command[0], where, built)
    return built


def _check(result: ProcessResult, compiler: str, where: str | None, built: Path) -> None:
    if result.code is None:
        what = f"{compiler} was stopped after {_BUILD_SECONDS} s: the source is too large for it"
        raise CompileError(what, where=where, hint="split the kernel into several; materialized values are computed once")
    if result.code != 0 and (reason := next((error for error in _DISK_ERRORS if error in result.output), None)):
        raise OSError(errno.ENOSPC, reason)
    if result.code != 0 and result.output.strip():
        raise CompileError(
            f"the C++ compiler rejected the emitted code:\n{result.output}", where=where, hint="report it with the text"
        )
    if result.code != 0 or not built.is_file():
        printed = repr(result.output.strip()) if result.output.strip() else "nothing"
        what = f"{compiler} {result.exit_description}, printed {printed} and built nothing"
        raise CompileError(what, where=where, hint="set CXX to a C++ compiler that works, such as g++; see fusegen doctor")


# Compiler processes, with a time limit; their children end with them.


_SECONDS_TO_END = 2
_running: set[subprocess.Popen[str]] = set()
_is_ending = False


@dataclass(frozen=True)
class ProcessResult:
    """The exit code of a process (negative for a signal, None for a timeout) and its output."""

    code: int | None
    output: str

    @property
    def exit_description(self) -> str:
        """Describes how the process ended."""
        if self.code is None:
            return "took too long"
        if self.code < 0:
            return f"was ended by {_signal(-self.code)}"
        return f"ended with exit code {self.code}"


def run(command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None) -> ProcessResult:
    """Runs a command with a time limit in seconds. If this call ends early, the command and its children are killed.

    Args:
        variables: added to the environment.

    Raises:
        ToolNotFoundError: it cannot be started.
    """
    read_end, write_end = os.pipe()  # never written: it closes when this process ends, even if killed
    with os.fdopen(write_end, "wb"):
        process = _start(command, variables, read_end)
        _running.add(process)
        with process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                _end(process)
                return ProcessResult(None, "")
            except BaseException:
                _end(process)
                raise
            finally:
                _running.discard(process)
    return ProcessResult(process.returncode, output)


def _start(command: Sequence[str], variables: Mapping[str, str] | None, stdin: int) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(variables or {})},
            start_new_session=True,  # compiler drivers have children: the whole group is killed
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ToolNotFoundError(f"{command[0]} cannot be started: {reason}", hint="install a compiler that runs here") from error
    finally:
        os.close(stdin)


def is_ending() -> bool:
    """Returns True while this process, and the commands that it runs, end."""
    return _is_ending


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process and its children. ninja's commands have their own groups; ninja ends them on SIGTERM."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            continue
        except (ProcessLookupError, PermissionError):  # it has already ended
            process.kill()
        return


os.register_at_fork(after_in_child=_running.clear)  # they belong to the parent


@atexit.register
def _end_all() -> None:
    global _is_ending
    _is_ending = True
    for process in list(_running):
        _end(process)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
