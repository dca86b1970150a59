"""The host C++ compiler: text to a shared library, kept by content.

Serves the CPU target and the emulator. Nothing here knows what the text means, and nothing is loaded unless asked.
"""

from __future__ import annotations

import ctypes
import hashlib
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fusegen.errors import CompileError, ToolNotFoundError
from fusegen.settings import settings

ARITHMETIC = ("-ffp-contract=off", "-fwrapv")
"""What every text is compiled with: each operation rounds once, so that a value is the same number wherever it is computed, and
integers wrap."""

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
        command = tuple(shlex.split(name))
        if command and shutil.which(command[0]):
            return HostCompiler(command, _version(command))
    raise ToolNotFoundError(
        f"no host C++ compiler: {preferred or ', '.join(_USUAL_NAMES)} not found",
        where="CXX" if preferred else "PATH",
        mend="install g++ or clang++, or set CXX to the compiler's path",
    )


def compile_shared(text: str, flags: tuple[str, ...], cache_dir: Path) -> Path:
    """Compiles C++ to a shared library and returns its path in ``cache_dir``, from there when it was built before.

    The name is the digest of text, flags and compiler; the source lies beside it. Processes may race: each builds its
    own file, and the last to finish replaces an equal one.

    Raises:
        ToolNotFoundError: there is no compiler.
        CompileError: the compiler refused the text; holds all of its output.
    """
    compiler = find_compiler(settings().cxx)
    library = cache_dir / f"{_digest(text, flags, compiler)}.so"
    if not library.exists():
        _build(compiler, text, flags, library)
    return library


def load_shared(library: Path) -> ctypes.CDLL:
    """Loads a library that :func:`compile_shared` returned; its symbols stay its own."""
    return ctypes.CDLL(str(library))


def _version(command: tuple[str, ...]) -> str:
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    return shown.partition("\n")[0]


def _digest(text: str, flags: tuple[str, ...], compiler: HostCompiler) -> str:
    parts = (text, *flags, "", *compiler.command, compiler.version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _build(compiler: HostCompiler, text: str, flags: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as folder:
        source, built = Path(folder, library.stem + ".cpp"), Path(folder, library.name)
        source.write_text(text)
        kept_source = library.with_suffix(".cpp")
        done = _run([*compiler.command, "-shared", "-fPIC", *flags, str(source), "-o", str(built)])
        source.replace(kept_source)
        if done.returncode != 0:
            raise CompileError(
                f"the host compiler refused the text:\n{done.stdout}",
                where=str(kept_source),
                mend="report it with this file",
            )
        built.replace(library)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
