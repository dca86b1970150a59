"""Builds shared libraries with `torch.utils.cpp_extension` and ninja, cached by content; the native module is one of them.

Each build is a process in its own folder: a killed build leaves no lock and no partial library. Finished libraries are moved to the
cache atomically.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from fusegen import native
from fusegen.emit.environment import templates
from fusegen.errors import CompileError, FusegenError, SettingsError, ToolNotFoundError
from fusegen.files import FORMAT, cache_writes, is_undamaged, one_builder, unsealed, write_atomically, write_sealed
from fusegen.jit.cache import keep_within_size
from fusegen.jit.host import ARITHMETIC, ProcessResult, compile_object, find_compiler, in_memory, is_ending, run
from fusegen.jit.nvrtc import cpus
from fusegen.settings import cache_folder, settings
from fusegen.threads import new_lock

_SECONDS = 600

OPERATOR_FLAGS = ("-O2", *ARITHMETIC)
"""Flags of the C++ texts of operators."""

# With -P: "-c" would put the current folder first, which may contain a json.py.
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
class LibrarySources:
    """The sources of a library.

    Attributes:
        name: for messages.
        files: C++ texts by file name.
        flags: of the compiler.
        kernels: texts of CPU kernels by file name, without torch's headers.
        kernel_flags: those of `kernels`; only these may name a processor.
    """

    name: str
    files: Mapping[str, str]
    flags: tuple[str, ...]
    kernels: Mapping[str, str] = field(default_factory=dict)
    kernel_flags: tuple[str, ...] = ()


def library_of(texts: LibrarySources) -> Path:
    """Builds a library, unless it is cached, and returns its path.

    Raises:
        ToolNotFoundError: there is no C++ compiler, or no ninja.
        CompileError: the compiler rejected the text, or took too long; includes its output.
        SettingsError: the cache cannot be written to.
    """
    folder = cache_folder("extension")
    library = folder / f"{key_of(texts)}.so"
    if is_undamaged(library):
        return library
    try:
        with cache_writes(folder), one_builder(library, _SECONDS):
            if not is_undamaged(library):
                _store(texts, library)
        keep_within_size(library)
        return library
    except SettingsError as error:
        return in_memory(library, error, lambda inner: build_library(texts, inner))


def library_content(texts: LibrarySources) -> bytes:
    """Builds a library, unless it is cached, and returns its content; errors are those of `library_of`."""
    return unsealed(library_of(texts).read_bytes(), f"{key_of(texts)}.so") or b""


def _store(texts: LibrarySources, library: Path) -> None:
    print(f"fusegen: building the extension of {texts.name} (torch's headers take a while) …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-", ignore_cleanup_errors=True) as inner:
        content = build_library(texts, Path(inner))
        write_atomically(library.with_suffix(".cpp"), next(iter(texts.files.values())).encode())
        write_sealed(library, content)


def build_library(texts: LibrarySources, folder: Path) -> bytes:
    """Builds a library in a folder; errors are those of `library_of`."""
    for name, text in texts.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    request = {
        "name": "extension",
        "sources": [str(folder / name) for name in texts.files if name.endswith(".cpp")],
        "extra_cflags": [*texts.flags, *_prefix_maps(folder)],
        "extra_ldflags": [*map(shlex.quote, _objects(texts, folder)), "-fopenmp"],
        "build_directory": str(folder),
        "is_python_module": False,
        "with_cuda": False,
    }
    result = run([sys.executable, "-P", "-c", _BUILDER, json.dumps(request)], _SECONDS, _variables(folder))
    library = folder / "extension.so"
    if result.code != 0 or not library.is_file():
        raise _build_error(texts.name, result)
    return library.read_bytes()


def _objects(texts: LibrarySources, folder: Path) -> list[str]:
    """Compiles the CPU kernels. The linker reads them last, so that of equal functions those for every processor are kept."""
    paths = [folder / f"{name}.o" for name in texts.kernels]
    with ThreadPoolExecutor(settings().jobs() or cpus()) as pool:
        built = pool.map(lambda text, path: compile_object(text, texts.kernel_flags, path), texts.kernels.values(), paths)
        return [str(path) for path in built]


def _prefix_maps(folder: Path) -> list[str]:
    """Returns flags for short paths in assertions, so that a library has no path of this machine and is the same on others."""
    torch_folder = Path(torch.__file__).parent
    return [shlex.quote(f"-ffile-prefix-map={path}={name}") for path, name in ((folder, "fusegen"), (torch_folder, "torch"))]


def _variables(folder: Path) -> dict[str, str]:
    """Returns the environment of a build: the configured compiler and ninja, without user settings of torch."""
    try:
        import ninja  # provides a program; imported only for a build
    except ImportError as error:
        raise ToolNotFoundError(f"ninja cannot be used: {error}", hint="pip install ninja") from error
    path = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])
    command = find_compiler(settings().cxx).command
    return {"PATH": path, "CXX": " ".join(command), "TMPDIR": str(folder), "TORCH_EXTENSIONS_DIR": str(folder)}


def _build_error(name: str, result: ProcessResult) -> CompileError | ToolNotFoundError:
    if result.code is None:
        return CompileError(f"the extension of {name} was not built in {_SECONDS} s", hint="build it on a less busy machine")
    what = f"the extension of {name} was not built: torch's builder {result.exit_description}\n{result.output.strip()}"
    return CompileError(what, hint="see fusegen doctor; if the compiler works, report it with this text")


def key_of(texts: LibrarySources) -> str:
    """Returns the digest of the texts, the compiler and torch."""
    compiler = find_compiler(settings().cxx)
    sources = [part for some in (texts.files, texts.kernels) for part in (*some, *some.values(), "")]
    flags = (*texts.flags, "", *texts.kernel_flags)
    parts = (*sources, *flags, *compiler.command, compiler.version, torch.__version__, FORMAT)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# The native module is built in the background at its first use, once for all processes.

_SHARED = ("attention.h", "library.h")
"""Headers that extensions include too."""

_FLAGS = ("-O2", "-DNDEBUG")
_RETRY_SECONDS = 600  # until a failed build is retried

_lock = new_lock()
_builder: threading.Thread | None = None
_reason = "it has not been used yet"


def ensure_native() -> None:
    """Loads the native module, or starts to build it in the background."""
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
            if is_undamaged(library):
                _use(library)
                return
            _reason = "it is being built"
            _builder.start()
        except (FusegenError, OSError, ImportError, RuntimeError) as error:  # RuntimeError: no more threads
            _reason = str(error)


def wait() -> None:
    """Waits until the native module is built, or has failed."""
    ensure_native()
    if _builder is not None and _builder.is_alive():
        _builder.join()


def reason() -> str:
    """Returns the reason why Python is used; empty if the native module is loaded."""
    return "" if native.loaded() is not None else _reason


def failure() -> str:
    """Returns the reason why new processes will use Python; empty if the module is built, or its first use will build it.

    Raises:
        FusegenError: there is no compiler, or no cache.
    """
    if not settings().native:
        return "FUSEGEN_NATIVE=0"
    library = _library()
    return "" if is_undamaged(library) else _recent_failure(library)


def _native_texts() -> LibrarySources:
    sources = [*native.SOURCES, *(templates() / "binding" / name for name in _SHARED)]
    return LibrarySources("fusegen", {path.name: path.read_text(encoding="utf-8") for path in sources}, _FLAGS)


def _library() -> Path:
    return cache_folder("native") / f"{key_of(_native_texts())}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def _build() -> None:
    global _reason
    try:
        library = _library()
        with one_builder(library, _SECONDS):
            if not is_undamaged(library):
                _build_once(library)
        _use(library)
    except (FusegenError, OSError, ImportError) as error:
        _reason = str(error)


def _build_once(library: Path) -> None:
    """Builds the library; raises `FusegenError` if that fails, or failed recently."""
    if recent_failure := _recent_failure(library):
        raise FusegenError(recent_failure)
    folder, prefix = library.parent, f"building-{library.stem[:16]}-"
    for leftover in folder.glob(f"{prefix}*"):  # of a killed process: there is one build at a time
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with cache_writes(folder), tempfile.TemporaryDirectory(dir=folder, prefix=prefix, ignore_cleanup_errors=True) as inner:
            content = build_library(_native_texts(), Path(inner))
    except CompileError as error:  # other errors may be fixed by installing a compiler, or freeing disk space
        if not is_ending():
            write_atomically(_failure_file(library), str(error).encode())
        raise
    write_sealed(library, content)


def _recent_failure(library: Path) -> str:
    note = _failure_file(library)
    is_recent = note.is_file() and time.time() - note.stat().st_mtime < _RETRY_SECONDS
    return note.read_text(encoding="utf-8", errors="replace") if is_recent else ""


def _failure_file(library: Path) -> Path:
    return library.with_suffix(".txt")


def _use(library: Path) -> None:
    """Loads the library; raises ImportError and deletes it if that fails, so that it is rebuilt later."""
    try:
        native.use(_loaded(library))
    except ImportError as error:
        write_atomically(_failure_file(library), str(error).encode())
        library.unlink(missing_ok=True)
        raise


def _loaded(library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(native.NAME, str(library))
    spec = importlib.util.spec_from_loader(native.NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _after_fork() -> None:
    global _builder
    if native.loaded() is None:  # the building thread belongs to the parent
        _builder = None


os.register_at_fork(after_in_child=_after_fork)
