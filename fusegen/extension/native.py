"""Shared libraries of C++ texts, built by `torch.utils.cpp_extension` and ninja, kept by content; the native module is one of them.

Each build is a process of its own in a folder of its own: one that is killed leaves no lock that others wait for, and no half of a
library. What is finished takes its place in the cache in one step.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TextIO

import torch

from fusegen import native
from fusegen.emit.environment import templates
from fusegen.errors import CompileError, FusegenError, ToolNotFoundError
from fusegen.files import is_whole, sealed, write_atomically, writing_to
from fusegen.jit.host import Done, find_compiler, is_ending, run
from fusegen.settings import cache_folder, settings
from fusegen.threads import new_lock

_SECONDS = 600
# With -P, for "-c" puts the current folder first, where a json.py of the user's may lie.
_BUILDER = """
import json, os, signal, sys, threading

def end_with_parent():
    os.read(0, 1)  # returns when the parent has ended, in whatever way
    os.killpg(0, signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from torch.utils.cpp_extension import load
load(**json.loads(sys.argv[1]), verbose=True)
"""


@dataclass(frozen=True)
class Texts:
    """Texts that become a library.

    Attributes:
        name: what it is for, in messages.
        files: C++ texts by file name.
        flags: of the compiler.
    """

    name: str
    files: Mapping[str, str]
    flags: tuple[str, ...]


def library_of(texts: Texts) -> Path:
    """The path of a library, which is built unless it was before.

    Raises:
        ToolNotFoundError: there is no C++ compiler, or no ninja.
        CompileError: the compiler refused the text, or took too long; holds all of its output.
        SettingsError: the cache cannot be written to.
    """
    folder = cache_folder("extension")
    library = folder / f"{key_of(texts)}.so"
    if not is_whole(library):
        print(f"fusegen: building the extension of {texts.name} (torch's headers take a while) …", file=sys.stderr, flush=True)
        with writing_to(folder), tempfile.TemporaryDirectory(dir=folder, prefix="building-", ignore_cleanup_errors=True) as place:
            content = built(texts, Path(place))
            write_atomically(library.with_suffix(".cpp"), next(iter(texts.files.values())).encode())
            write_atomically(library, sealed(content))
    return library


def built(texts: Texts, folder: Path) -> bytes:
    """Builds a library in a folder.

    Raises:
        As `library_of`.
    """
    for name, text in texts.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    request = {
        "name": "extension",
        "sources": [str(folder / name) for name in texts.files if name.endswith(".cpp")],
        "extra_cflags": list(texts.flags),
        "extra_ldflags": ["-fopenmp"],
        "build_directory": str(folder),
        "is_python_module": False,
        "with_cuda": False,
    }
    done = run([sys.executable, "-P", "-c", _BUILDER, json.dumps(request)], _SECONDS, _variables(folder))
    library = folder / "extension.so"
    if done.code != 0 or not library.is_file():
        raise _refused(texts.name, done)
    return library.read_bytes()


def _variables(folder: Path) -> dict[str, str]:
    """The environment of a build: our compiler, our ninja, and no other one's settings."""
    try:
        import ninja  # a package that holds a program; here: nothing else needs it
    except ImportError as error:
        raise ToolNotFoundError(f"ninja cannot be used: {error}", hint="pip install ninja") from error
    path = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])
    command = find_compiler(settings().cxx).command
    return {"PATH": path, "CXX": " ".join(command), "TMPDIR": str(folder), "TORCH_EXTENSIONS_DIR": str(folder)}


def _refused(name: str, done: Done) -> CompileError | ToolNotFoundError:
    if done.code is None:
        return CompileError(f"the extension of {name} was not built in {_SECONDS} s", hint="build it on a machine with less to do")
    what = f"the extension of {name} was not built: torch's builder {done.manner}\n{done.output.strip()}"
    return CompileError(what, hint="see fusegen doctor; if the compiler works, report it with this text")


def key_of(texts: Texts) -> str:
    """The name of a library: a digest of its texts, the compiler and torch."""
    compiler = find_compiler(settings().cxx)
    parts = (*texts.files, *texts.files.values(), *texts.flags, *compiler.command, compiler.version, torch.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# The build of the native module: in the background at its first use, once for all processes, kept by content.


_SHARED = ("attention.h", "library.h")
"""Headers of what extensions call too."""

_FLAGS = ("-O2", "-DNDEBUG")
_SECONDS_OF_A_FAILURE = 600  # before a build that failed is tried again

_lock = new_lock()
_builder: threading.Thread | None = None
_reason = "nothing has asked for it"
_locked: list[TextIO] = []


def ensure_native() -> None:
    """Loads the native module, or begins to build it in the background where it was not built before."""
    global _builder, _reason
    if native.loaded() is not None or _builder is not None:
        return
    with _lock:
        if native.loaded() is not None or _builder is not None:
            return
        if not settings().native:
            _reason = "FUSEGEN_NATIVE=0"
            return
        _builder = threading.Thread(target=_build, name="fusegen-native", daemon=True)
        try:
            library = _library()
            if is_whole(library):
                _use(library)
                return
            _reason = "it is being built"
            _builder.start()
        except (FusegenError, OSError, ImportError, RuntimeError) as error:  # the last: no more threads
            _reason = str(error)


def wait() -> None:
    """Waits until the native module is built, or cannot be."""
    ensure_native()
    if _builder is not None and _builder.is_alive():
        _builder.join()


def reason() -> str:
    """Why Python is in use; nothing where the native module is."""
    return "" if native.loaded() is not None else _reason


def failure() -> str:
    """Why processes that start now run in Python; nothing where the module is built, or will be at its first use.

    Raises:
        FusegenError: there is no compiler, or no cache.
    """
    if not settings().native:
        return "FUSEGEN_NATIVE=0"
    library = _library()
    return "" if is_whole(library) else _failed_lately(library)


def _texts() -> Texts:
    sources = [*native.SOURCES, *(templates() / "binding" / name for name in _SHARED)]
    return Texts("fusegen", {path.name: path.read_text(encoding="utf-8") for path in sources}, _FLAGS)


def _library() -> Path:
    return cache_folder("native") / f"{key_of(_texts())}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def _build() -> None:
    global _reason
    try:
        library = _library()
        with _alone(library):
            if not is_whole(library):
                _make(library)
        _use(library)
    except (FusegenError, OSError, ImportError) as error:
        _reason = str(error)


def _make(library: Path) -> None:
    """Builds the library, unless that failed a short time ago.

    Raises:
        FusegenError: it cannot be built.
    """
    if lately := _failed_lately(library):
        raise FusegenError(lately)
    folder, prefix = library.parent, f"building-{library.stem[:16]}-"
    for left in folder.glob(f"{prefix}*"):  # by a process that was killed: there is one build at a time
        shutil.rmtree(left, ignore_errors=True)
    try:
        with writing_to(folder), tempfile.TemporaryDirectory(dir=folder, prefix=prefix, ignore_cleanup_errors=True) as place:
            content = built(_texts(), Path(place))
    except CompileError as error:  # else a compiler that is installed, or room on the disk, is all it takes
        if not is_ending():
            write_atomically(_note(library), str(error).encode())
        raise
    write_atomically(library, sealed(content))


def _failed_lately(library: Path) -> str:
    """Why a build failed, a short time ago."""
    note = _note(library)
    is_recent = note.is_file() and time.time() - note.stat().st_mtime < _SECONDS_OF_A_FAILURE
    return note.read_text(encoding="utf-8", errors="replace") if is_recent else ""


def _note(library: Path) -> Path:
    return library.with_suffix(".txt")


def _use(library: Path) -> None:
    """Loads the library; one that cannot be loaded is built anew some time later.

    Raises:
        ImportError: it cannot be.
    """
    try:
        native.use(_loaded(library))
    except ImportError as error:
        write_atomically(_note(library), str(error).encode())
        library.unlink(missing_ok=True)
        raise


def _loaded(library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(native.NAME, str(library))
    spec = importlib.util.spec_from_loader(native.NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@contextmanager
def _alone(library: Path) -> Iterator[None]:
    """One process at a time; the lock of one that ends is free."""
    with library.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _locked.append(file)
        try:
            yield
        finally:
            _locked.remove(file)
            fcntl.flock(file, fcntl.LOCK_UN)  # children have the same file open


def _after_fork() -> None:
    global _builder
    if native.loaded() is None:  # the thread that builds it is the parent's
        _builder = None
    for file in _locked:  # else the lock would be held as long as this process
        file.close()
    _locked.clear()


os.register_at_fork(after_in_child=_after_fork)
