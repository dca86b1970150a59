"""The settings from environment variables; no other module reads the environment.

Each field names its variable and its part in cache keys. Settings are read once, on first use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from fusegen.errors import SettingsError

Compiler: TypeAlias = Literal["nvrtc", "extension"]
"""NVRTC (the host's compiler on the CPU target) with launches from Python, or C++ operators of torch."""

COMPILERS: tuple[Compiler, ...] = get_args(Compiler)

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


@dataclass(frozen=True)
class Settings:
    """The settings of the environment.

    Attributes:
        cache_dir: folder of compiled binaries (``FUSEGEN_CACHE_DIR``; not part of any key).
        emulate: run CUDA kernels in the emulator on the CPU (``FUSEGEN_EMULATE``; not part of any key: the emulator stores its
            binaries under their own digest).
        cxx: the host compiler (``CXX``; part of the host compiler's key).
        nvcc: the CUDA compiler instead of NVRTC (``FUSEGEN_NVCC``; its version is part of the key of cubins).
        compiler: the default of ``fg.kernel(compiler=)`` (``FUSEGEN_COMPILER``; the two compilers store binaries separately).
        native: build and use the native module (``FUSEGEN_NATIVE``; not part of any key).
        progress: report compilation on stderr (``FUSEGEN_PROGRESS``; not part of any key). Under ``torchrun`` only the first
            process of a machine does.
        tuning_path: files and folders with more tuning records, separated like those of ``PATH`` (``FUSEGEN_TUNING_PATH``; the
            records are part of the key of a plan). They may be read-only.
        max_jobs: processes of ``fusegen build`` (``MAX_JOBS``; not part of any key); None for one per CPU.
        arch_list: the default of ``fusegen build --arch`` (``TORCH_CUDA_ARCH_LIST``; not part of any key).
    """

    cache_dir: Path
    emulate: bool
    cxx: str | None
    nvcc: str | None = None
    compiler: Compiler = "nvrtc"
    native: bool = True
    progress: bool = True
    tuning_path: tuple[Path, ...] = ()
    max_jobs: int | None = None
    arch_list: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def settings() -> Settings:
    return Settings(
        cache_dir=_cache_dir(),
        emulate=_flag("FUSEGEN_EMULATE"),
        cxx=os.environ.get("CXX") or None,
        nvcc=os.environ.get("FUSEGEN_NVCC") or None,
        compiler=_compiler(),
        native=_flag("FUSEGEN_NATIVE", default="1"),
        progress=_flag("FUSEGEN_PROGRESS", default="1") and os.environ.get("LOCAL_RANK", "0") == "0",
        tuning_path=tuple(map(Path, filter(None, os.environ.get("FUSEGEN_TUNING_PATH", "").split(os.pathsep)))),
        max_jobs=_max_jobs(),
        arch_list=tuple(os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()),
    )


def cache_folder(name: str) -> Path:
    """Returns a folder of the cache, and creates it if necessary; raises `SettingsError` if that fails."""
    folder = settings().cache_dir / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"the cache folder {folder} cannot be used: {error.strerror}",
            hint="set FUSEGEN_CACHE_DIR to a folder that you can write to",
        ) from None
    return folder


def _cache_dir() -> Path:
    folder, xdg = os.environ.get("FUSEGEN_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        if folder:
            return Path(folder).expanduser()
        return (Path(xdg) if xdg else Path.home() / ".cache") / "fusegen"
    except RuntimeError:  # no such user, or no home folder
        what = f"FUSEGEN_CACHE_DIR={folder!r} does not name a user's home" if folder else "there is no home folder for the cache"
        raise SettingsError(what, hint="set FUSEGEN_CACHE_DIR to a folder that you can write to") from None


def _compiler() -> Compiler:
    value = os.environ.get("FUSEGEN_COMPILER") or "nvrtc"
    if value not in COMPILERS:
        raise SettingsError(f"FUSEGEN_COMPILER={value!r} is not a compiler", hint=f"set it to {' or '.join(COMPILERS)}")
    return value


def _max_jobs() -> int | None:
    value = os.environ.get("MAX_JOBS", "").strip()
    return int(value) or None if value.isdecimal() else None


def _flag(name: str, default: str = "") -> bool:
    value = os.environ.get(name, "").strip().lower() or default
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SettingsError(f"{name}={value!r} is not a flag", hint=f"set {name} to 1 or 0")
