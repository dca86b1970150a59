"""The settings from environment variables; no other module reads the environment.

Each field names its variable and its part in cache keys. Settings are read once, on first use.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from fusegen.errors import SettingsError
from fusegen.lazy import dataclass

Compiler: TypeAlias = Literal["nvrtc", "extension"]
"""NVRTC (the host's compiler on the CPU target) with launches from Python, or C++ operators of torch."""

COMPILERS: tuple[Compiler, ...] = get_args(Compiler)

_NO_HOME = Path(os.devnull, "no-home-folder", "fusegen")  # nobody can create it
_MOST_DIGITS, _MOST_SHOWN = 18, 40
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


@dataclass(frozen=True)
class Settings:
    """The settings of the environment.

    Attributes:
        cache_dir: folder of compiled binaries (``FUSEGEN_CACHE_DIR``; not part of any key).
        cache_mib: the size that the cache is kept below (``FUSEGEN_CACHE_MIB``; not part of any key).
        shared_cache: use a cache that others can write to (``FUSEGEN_SHARED_CACHE``; not part of any key).
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
        bundle_path: folders of built kernels that calls take instead of compiling, separated likewise (``FUSEGEN_BUNDLE_PATH``; not
            part of any key: the kernels have their own). They may be read-only.
        max_jobs: processes of ``fusegen build`` (``MAX_JOBS``; not part of any key); "" for one per CPU. Only builds read it: other
            tools have the variable too.
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
    bundle_path: tuple[Path, ...] = ()
    max_jobs: str = ""
    arch_list: tuple[str, ...] = ()
    cache_mib: int = 4096
    shared_cache: bool = False

    def jobs(self) -> int | None:
        """Returns the number of processes of a build, or None for one per CPU.

        Raises:
            SettingsError: ``MAX_JOBS`` is not a number of processes.
        """
        jobs = _positive(self.max_jobs)
        if self.max_jobs and jobs is None:
            what = f"MAX_JOBS={_shown(self.max_jobs)} is not a number of processes"
            raise SettingsError(what, hint="set it to 1 or more, or unset it")
        return jobs


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
        tuning_path=_paths("FUSEGEN_TUNING_PATH"),
        bundle_path=_paths("FUSEGEN_BUNDLE_PATH"),
        max_jobs=os.environ.get("MAX_JOBS", "").strip(),
        arch_list=tuple(os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()),
        cache_mib=_size("FUSEGEN_CACHE_MIB", default=4096),
        shared_cache=_flag("FUSEGEN_SHARED_CACHE"),
    )


def cache_folder(name: str) -> Path:
    """Returns a folder of the cache, and creates it if that is possible: reads and writes report a folder that is not there.

    Raises:
        SettingsError: others can write to it, so that they could run code as this user.
    """
    root, is_shared = settings().cache_dir, settings().shared_cache
    folder, mode = root / name, 0o777 if is_shared else 0o700
    with suppress(OSError):
        for each in reversed((folder, root, *root.parents)):
            each.mkdir(mode, exist_ok=True)
    if not is_shared:
        for each in (root, folder):
            _refuse_others(each)
    return folder


def _refuse_others(folder: Path) -> None:
    if who := _others_who_write(folder, os.geteuid()):
        raise SettingsError(
            f"the cache folder {folder} is refused: {who}, and its files are run as code",
            where="FUSEGEN_CACHE_DIR",
            hint=f"empty it, as files that others wrote there would be run, then chmod go-w {folder}; or set FUSEGEN_CACHE_DIR to "
            "a folder of yours; FUSEGEN_SHARED_CACHE=1 trusts all who can write",
        )


def require_trusted(path: Path) -> None:
    """Refuses a part of a folder of built kernels that others can write to. It may belong to root, as in an image of a container.

    Raises:
        SettingsError: others can write to it.
    """
    who = _others_who_write(path, os.geteuid(), 0)
    if who and not settings().shared_cache:
        raise SettingsError(
            f"{path} is refused: {who}, and built kernels are run as code",
            where="FUSEGEN_BUNDLE_PATH",
            hint=f"build it again in a folder of yours, with umask 022: {path} may hold what others wrote; "
            "FUSEGEN_SHARED_CACHE=1 trusts all who can write",
        )


def _others_who_write(path: Path, *owners: int) -> str | None:
    """The reason why others than some owners can write to a file or folder; None if they cannot, or if it is missing."""
    try:
        state = path.stat()
    except OSError:
        return None
    if state.st_uid not in owners:
        return f"it belongs to another user ({state.st_uid})"
    return f"other users can write to it ({stat.filemode(state.st_mode)})" if state.st_mode & 0o022 else None


def _cache_dir() -> Path:
    folder, xdg = os.environ.get("FUSEGEN_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        if folder:
            return Path(folder).expanduser()
        return (Path(xdg) if xdg else Path.home() / ".cache") / "fusegen"
    except RuntimeError:  # no such user, or no home folder
        if not folder:
            return _NO_HOME
        what = f"FUSEGEN_CACHE_DIR={folder!r} does not name a user's home"
        raise SettingsError(what, hint="set FUSEGEN_CACHE_DIR to a folder that you can write to") from None


def _paths(name: str) -> tuple[Path, ...]:
    """The absolute paths of a variable: the program may change its current folder."""
    return tuple(Path(path).absolute() for path in os.environ.get(name, "").split(os.pathsep) if path)


def _compiler() -> Compiler:
    value = os.environ.get("FUSEGEN_COMPILER") or "nvrtc"
    if value not in COMPILERS:
        raise SettingsError(f"FUSEGEN_COMPILER={value!r} is not a compiler", hint=f"set it to {' or '.join(COMPILERS)}")
    return value


def _flag(name: str, default: str = "") -> bool:
    value = os.environ.get(name, "").strip().lower() or default
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SettingsError(f"{name}={value!r} is not a flag", hint=f"set {name} to 1 or 0")


def _size(name: str, default: int) -> int:
    value = os.environ.get(name, "").strip() or str(default)
    size = _positive(value)
    if size is None:
        raise SettingsError(f"{name}={_shown(value)} is not a size", hint=f"set {name} to a number of MiB, such as {default}")
    return size


def _positive(text: str) -> int | None:
    """Returns a number above 0 that fits in 63 bits; None for other texts."""
    return int(text) or None if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")
