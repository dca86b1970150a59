"""The host C++ compiler: text to a shared library, kept by content.

Serves the CPU target and the emulator. Nothing here knows what the text means, and nothing is loaded unless asked.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fusegen.errors import CompileError, ToolNotFoundError
from fusegen.files import is_whole, sealed, unusable, writing_to
from fusegen.settings import settings

ARITHMETIC = ("-ffp-contract=off", "-fwrapv")
"""The flags of every text: each operation rounds once, so that a value is the same number wherever it is computed, and
integers wrap."""

_VERSION_SECONDS, _BUILD_SECONDS = 60, 300
_SIGNS_OF_THE_DISK = (
    "No space left on device",
    "Disk quota exceeded",
    "Read-only file system",
    "File size limit exceeded",
    "File too large",
)
_USUAL_NAMES = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler: its command line's first words, and the version line that takes part in keys."""

    command: tuple[str, ...]
    version: str


@lru_cache(maxsize=8)
def find_compiler(preferred: str | None = None) -> HostCompiler:
    """The compiler to use: ``preferred`` (a command line such as ``"ccache g++"``) or the first of the usual names.

    Raises:
        ToolNotFoundError: ``preferred`` is not on this machine, or nothing was preferred and none of the usual names is.
    """
    for name in (preferred,) if preferred else _USUAL_NAMES:
        command = _words(name)
        if command and shutil.which(command[0]):
            return HostCompiler(command, _version(command))
    raise ToolNotFoundError(
        f"no host C++ compiler: {preferred or ', '.join(_USUAL_NAMES)} not found",
        where="CXX" if preferred else "PATH",
        hint="install g++ or clang++, or set CXX to the compiler's path",
    )


def compile_shared(text: str, flags: tuple[str, ...], cache_dir: Path) -> Path:
    """Compiles C++ to a shared library and returns its path in ``cache_dir``, from there when it was built before.

    The name is the digest of text, flags and compiler; the source lies beside it. The library carries a digest of its own,
    and one that was damaged is built again. Processes may race: each builds its own file, and the last to finish replaces an
    equal one.

    Raises:
        ToolNotFoundError: there is no compiler.
        CompileError: the compiler refused the text, crashed, built nothing or took too long; holds all of its output.
        SettingsError: the folder cannot be written to.
    """
    compiler = find_compiler(settings().cxx)
    library = cache_dir / f"{_digest(text, flags, compiler)}.so"
    if not is_whole(library):
        with writing_to(cache_dir):
            cache_dir.mkdir(parents=True, exist_ok=True)
            _build(compiler, text, flags, library)
    return library


def load_shared(library: Path, *, for_others: bool = False) -> ctypes.CDLL:
    """Loads a library that :func:`compile_shared` returned.

    Args:
        library: its path.
        for_others: whether libraries that are loaded later may use its symbols, which otherwise stay its own.

    Raises:
        SettingsError: the system does not load libraries from that folder.
    """
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOW | (os.RTLD_GLOBAL if for_others else os.RTLD_LOCAL))
    except OSError as error:
        raise unusable(library.parent, str(error)) from error


def _words(name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(name))
    except ValueError as error:
        what = f"CXX={name!r} cannot be read as a command line: {error}"
        raise ToolNotFoundError(what, where="CXX", hint="set CXX to the compiler's path") from None


def _version(command: tuple[str, ...]) -> str:
    return run([*command, "--version"], _VERSION_SECONDS).output.partition("\n")[0]


def _digest(text: str, flags: tuple[str, ...], compiler: HostCompiler) -> str:
    parts = (text, *flags, "", *compiler.command, compiler.version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _build(compiler: HostCompiler, text: str, flags: tuple[str, ...], library: Path) -> None:
    kept = library.with_suffix(".cpp")
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-", ignore_cleanup_errors=True) as folder:
        source, built = Path(folder, kept.name), Path(folder, library.name)
        source.write_text(text, encoding="utf-8")
        command = [*compiler.command, "-shared", "-fPIC", *flags, str(source), "-o", str(built)]
        done = run(command, _BUILD_SECONDS, {"TMPDIR": folder})
        source.replace(kept)
        _check(done, command[0], kept, built)
        built.write_bytes(sealed(built.read_bytes()))
        built.replace(library)


def _check(done: Done, compiler: str, source: Path, built: Path) -> None:
    """Refuses what a compiler left when it did not end well."""
    if done.code is None:
        what = f"{compiler} was ended after {_BUILD_SECONDS} s: the text is too much for it"
        raise CompileError(what, where=str(source), hint="split the kernel into several; what lies in memory is computed once")
    if done.code != 0 and (reason := next((sign for sign in _SIGNS_OF_THE_DISK if sign in done.output), None)):
        raise unusable(source.parent, reason)
    if done.code != 0 and done.output.strip():
        raise CompileError(
            f"the host compiler refused the text:\n{done.output}", where=str(source), hint="report it with this file"
        )
    if done.code != 0 or not built.is_file():
        printed = repr(done.output.strip()) if done.output.strip() else "nothing"
        what = f"{compiler} {done.manner}, printed {printed} and built nothing"
        raise CompileError(what, where=str(source), hint="set CXX to a C++ compiler that works, such as g++; see fusegen doctor")


# Compilers as processes: with a limit of time, and nothing of them left when they are given up.


_SECONDS_TO_END = 2
_running: set[subprocess.Popen[str]] = set()
_is_ending = False


@dataclass(frozen=True)
class Done:
    """The end of a process.

    Attributes:
        code: its exit code, negative for a signal; None when it took too long.
        output: all that it printed.
    """

    code: int | None
    output: str

    @property
    def manner(self) -> str:
        """The end, in words."""
        if self.code is None:
            return "took too long"
        if self.code < 0:
            return f"was ended by {_signal(-self.code)}"
        return f"ended with exit code {self.code}"


def run(command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None) -> Done:
    """Runs a command to its end or to a limit; if this call ends early, so do the command and all that it has started.

    Args:
        command: with its arguments.
        seconds: the limit.
        variables: of the environment, beside those of this process.

    Raises:
        ToolNotFoundError: it cannot be started.
    """
    theirs, ours = os.pipe()  # nothing comes through it: it ends when this process does, in whatever way
    with os.fdopen(ours, "wb"):
        process = _started(command, variables, theirs)
        _running.add(process)
        with process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                _end(process)
                return Done(None, "")
            except BaseException:
                _end(process)
                raise
            finally:
                _running.discard(process)
    return Done(process.returncode, output)


def _started(command: Sequence[str], variables: Mapping[str, str] | None, stdin: int) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(variables or {})},
            start_new_session=True,  # a driver such as g++ works by children: the group ends as a whole
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ToolNotFoundError(f"{command[0]} cannot be started: {reason}", hint="install a compiler that runs here") from error
    finally:
        os.close(stdin)


def is_ending() -> bool:
    """True once this process ends, and with it the commands that it runs."""
    return _is_ending


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process with all that it has started: ninja's commands are in groups of their own, which it ends if it is asked to."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            continue
        except (ProcessLookupError, PermissionError):  # it has just ended
            process.kill()
        return


os.register_at_fork(after_in_child=_running.clear)  # they are the parent's


@atexit.register
def _end_all() -> None:
    """Ends what other threads run, which end with this process."""
    global _is_ending
    _is_ending = True
    for process in list(_running):
        _end(process)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
