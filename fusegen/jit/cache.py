"""The disk cache as a whole: its entries, its size and limit, and removal while others use it. Unknown files are left alone."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fusegen.errors import SettingsError
from fusegen.settings import settings

_STALE_SECONDS = 3600  # age of an abandoned partial file


@dataclass(frozen=True)
class CacheFolder:
    """A folder of the cache.

    Attributes:
        holds: describes the contents.
        entry: pattern of the relative paths of finished files.
        unfinished: pattern of the relative paths of partial files.
    """

    name: str
    holds: str
    entry: re.Pattern[str]
    unfinished: re.Pattern[str]


_LIBRARY = re.compile(r"[0-9a-f]{64}\.(so|cpp)")
_BUILDING = re.compile(r"building-\w+/.+|\.[0-9a-f]{64}\.(so|cpp)[.-]\w+")

KINDS = (
    CacheFolder("cubin", "machine code for GPUs", re.compile(r"[0-9a-f]{64}"), re.compile(r"\.[0-9a-f]{64}[.-]\w+")),
    CacheFolder("cuda", "CUDA sources of the cubins", re.compile(r"[0-9a-f]{32}\.cu"),
         re.compile(r"building-\w+/.+|\.[0-9a-f]{32}\.cu-\w+")),
    CacheFolder("cpu", "libraries of the CPU target, with C++ sources", _LIBRARY, _BUILDING),
    CacheFolder("extension", "operators of torch, with C++ sources", _LIBRARY, _BUILDING),
    CacheFolder("native", "the native module",
         re.compile(r"[0-9a-f]{64}\.[\w-]+\.(so|txt)"),
         re.compile(r"building-\w+/.+|\.[0-9a-f]{64}\..+")),
    CacheFolder("emulator", "libraries of the emulator, with C++ sources", _LIBRARY, _BUILDING),
    CacheFolder("emitted", "digests of the text of prebuilt kernels", re.compile(r"\w+-\w+-\w+\.json"),
         re.compile(r"\.\w+-\w+-\w+\.json-\w+")),
    CacheFolder("plans", "plans of kernels, with their text", re.compile(r"[0-9a-f]{64}"), re.compile(r"\.[0-9a-f]{64}-\w+")),
    CacheFolder("templates", "templates of kernels, compiled", re.compile(r"[0-9a-f]{64}"), re.compile(r"\.[0-9a-f]{64}-\w+")),
    CacheFolder("tuned", "plans that fg.tune measured", re.compile(r"[0-9a-f]{32}/\d+(x\d+)+\.json"),
         re.compile(r"[0-9a-f]{32}/\.\d+(x\d+)+\.json-\w+")),
)  # fmt: skip
_MEASURED = "tuned"  # never removed for space: a GPU measured them


@dataclass(frozen=True)
class Usage:
    """The disk space of a folder of the cache.

    Attributes:
        entries: number of kernels; a library and its source are one.
        bytes: of all its files.
    """

    name: str
    holds: str
    folder: Path
    entries: int
    bytes: int


def usage(root: Path) -> tuple[Usage, ...]:
    """Returns the disk space of each folder of the cache; raises `SettingsError` if it cannot be read."""
    return tuple(_usage(root, kind, _own_files(root, kind)) for kind in KINDS)


def unknown_names(root: Path) -> tuple[str, ...]:
    """Returns the names in the cache folder that fusegen did not create."""
    try:
        return tuple(sorted({path.name for path in root.iterdir()} - {kind.name for kind in KINDS}))
    except OSError:
        return ()


def clear(root: Path) -> tuple[Usage, ...]:
    """Removes all entries, file by file, and returns their disk space. Folders stay, since other processes may write to them.

    A process that uses an entry keeps it in memory, or compiles again. Raises `SettingsError` if a file cannot be removed.
    """
    return tuple(_clear(root, kind) for kind in KINDS)


def _clear(root: Path, kind: CacheFolder) -> Usage:
    files = _own_files(root, kind)
    try:
        for path in sorted(files, key=lambda path: path.suffix, reverse=True):  # a library before the source that it names
            path.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(f"{error.filename} cannot be removed: {error.strerror}", hint="remove it yourself") from None
    return _usage(root, kind, files)


def _usage(root: Path, kind: CacheFolder, files: dict[Path, os.stat_result]) -> Usage:
    entries = {path.with_suffix("") for path in files if kind.entry.fullmatch(path.relative_to(root / kind.name).as_posix())}
    return Usage(kind.name, kind.holds, root / kind.name, len(entries), sum(state.st_size for state in files.values()))


# The limit. The entries that were used least recently are removed: a read sets a file's times.

_FILLED_TO = 0.9  # of the limit, after a removal
_room = 0.0  # bytes that this process may still write before it looks again


def keep_within_size(written: Path) -> None:
    """Called after a file was written: removes entries that were used least recently if the cache exceeds its limit."""
    global _room
    chosen = settings()
    with suppress(OSError, SettingsError):
        _room -= written.stat().st_size
        if _room < 0:
            limit = chosen.cache_mib << 20
            _room = (limit - _shrink(chosen.cache_dir, limit)) / 10  # other processes write too


def _shrink(root: Path, limit: int) -> int:
    """Removes entries if all together exceed the limit. Returns the bytes that stay."""
    entries: dict[Path, dict[Path, os.stat_result]] = {}  # a library and its source are one
    for kind in KINDS:
        for path, state in _own_files(root, kind).items() if kind.name != _MEASURED else ():
            entries.setdefault(path.with_suffix(""), {})[path] = state
    size = sum(state.st_size for files in entries.values() for state in files.values())
    if size <= limit:
        return size
    for files in sorted(entries.values(), key=lambda files: max(state.st_mtime_ns for state in files.values())):
        for path in sorted(files, key=lambda path: path.suffix, reverse=True):  # a library before the source that it names
            path.unlink(missing_ok=True)
            size -= files[path].st_size
        if size <= limit * _FILLED_TO:
            break
    return size


def _own_files(root: Path, kind: CacheFolder) -> dict[Path, os.stat_result]:
    try:
        if root.exists() and not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return dict(_files(root / kind.name, kind))
    except OSError as error:
        raise SettingsError(
            f"the cache folder {root} cannot be read: {error.strerror}", hint="set FUSEGEN_CACHE_DIR to a folder of yours"
        ) from None


def _files(folder: Path, kind: CacheFolder) -> Iterator[tuple[Path, os.stat_result]]:
    now = time.time()
    for path in _all_files(folder):
        name = path.relative_to(folder).as_posix()
        is_entry, is_unfinished = kind.entry.fullmatch(name), kind.unfinished.fullmatch(name)
        if not (is_entry or is_unfinished) or path.is_symlink():
            continue
        try:
            state = path.stat()
        except FileNotFoundError:  # removed concurrently
            continue
        if is_entry or now - state.st_mtime > _STALE_SECONDS:
            yield path, state


def _all_files(folder: Path) -> Iterator[Path]:
    """Lists all files of a folder; tolerates concurrent removal."""

    def failed(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error

    for parent, _, names in os.walk(folder, onerror=failed):
        yield from (Path(parent, name) for name in names)
