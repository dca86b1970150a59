"""The only reader of the environment.

Each field says which variable sets it and whether it takes part in cache keys. Settings are read once, on first use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from fusegen.errors import SettingsError

Compiler: TypeAlias = Literal["nvrtc", "extension"]
"""Ways to compile: by NVRTC (the host's compiler on the CPU target) with launches from Python, or as a C++ operator of torch."""

COMPILERS: tuple[Compiler, ...] = get_args(Compiler)

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


@dataclass(frozen=True)
class Settings:
    """The settings of the environment.

    Attributes:
        cache_dir: folder of compiled binaries (``FUSEGEN_CACHE_DIR``; not part of any key).
        emulate: run CUDA kernels through the emulator on the CPU (``FUSEGEN_EMULATE``; not part of any key, since
            the emulator keeps its own binaries under their own digest).
        cxx: the host compiler (``CXX``; part of the host compiler's key).
        nvcc: the CUDA compiler in place of NVRTC (``FUSEGEN_NVCC``; its version is part of the key of cubins).
        compiler: of kernels that do not say one (``FUSEGEN_COMPILER``; the two ways keep binaries apart).
        native: build and use the native module (``FUSEGEN_NATIVE``; not part of any key).
        progress: say on stderr that kernels are compiled (``FUSEGEN_PROGRESS``; not part of any key). Under ``torchrun``
            the first process of a machine does.
    """

    cache_dir: Path
    emulate: bool
    cxx: str | None
    nvcc: str | None = None
    compiler: Compiler = "nvrtc"
    native: bool = True
    progress: bool = True


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process."""
    return Settings(
        cache_dir=_cache_dir(),
        emulate=_flag("FUSEGEN_EMULATE"),
        cxx=os.environ.get("CXX") or None,
        nvcc=os.environ.get("FUSEGEN_NVCC") or None,
        compiler=_compiler(),
        native=_flag("FUSEGEN_NATIVE", default="1"),
        progress=_flag("FUSEGEN_PROGRESS", default="1") and os.environ.get("LOCAL_RANK", "0") == "0",
    )


def cache_folder(name: str) -> Path:
    """A folder of the cache, made if it is not there.

    Raises:
        SettingsError: it cannot be made or written to.
    """
    folder = settings().cache_dir / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"the cache folder {folder} cannot be used: {error.strerror}", hint="set FUSEGEN_CACHE_DIR to a folder of yours"
        ) from None
    return folder


def _cache_dir() -> Path:
    chosen, base = os.environ.get("FUSEGEN_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "fusegen"
    except RuntimeError:  # there is no such user, or this one has no home
        what = f"FUSEGEN_CACHE_DIR={chosen!r} names no user's home" if chosen else "there is no home folder for the cache"
        raise SettingsError(what, hint="set FUSEGEN_CACHE_DIR to a folder of yours") from None


def _compiler() -> Compiler:
    value = os.environ.get("FUSEGEN_COMPILER") or "nvrtc"
    if value not in COMPILERS:
        raise SettingsError(f"FUSEGEN_COMPILER={value!r} is no way to compile", hint=f"set it to {' or '.join(COMPILERS)}")
    return value


def _flag(name: str, default: str = "") -> bool:
    value = os.environ.get(name, "").strip().lower() or default
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SettingsError(f"{name}={value!r} is neither true nor false", hint=f"set {name} to 1 or 0")
