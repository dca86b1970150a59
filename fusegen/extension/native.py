"""The build of the native module: in the background at its first use, once for all processes, kept by content."""

from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.util
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TextIO

from fusegen import native
from fusegen.emit.environment import templates
from fusegen.errors import CompileError, FusegenError
from fusegen.extension.library import Texts, built, key_of
from fusegen.files import is_whole, sealed, write_atomically, writing_to
from fusegen.jit.process import is_ending
from fusegen.settings import cache_folder, settings
from fusegen.threads import new_lock

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
