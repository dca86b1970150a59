"""Files of the cache: atomic writes, embedded digests, locks; and a cache that cannot be written to."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fusegen.errors import ArgumentError, SettingsError, one_line

T = TypeVar("T")

_MARK = b"fusegen-sha256:"
_DIGEST_BYTES = 32
FORMAT = "sealed with the name"
"""Part of the keys of sealed files."""


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that readers never see a part of it; the last writer wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:  # default permissions; `mkstemp` would grant access to the owner only
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


PAGE = b"<!DOCTYPE html>\n<!-- fusegen -->"


def check_writable(path: Path, option: str, begins: bytes = b"") -> None:
    """Raises `ArgumentError` if the file that ``option`` names cannot be written, or exists and begins with other bytes."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():  # a pipe, or a device such as /dev/stdout
            raise OSError(errno.EINVAL, "Not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        first = b""
        if path.is_file():
            with path.open("rb") as file:
                first = file.read(len(begins))
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}", hint=f"choose another file with {option}") from None
    if first and first != begins:
        raise ArgumentError(f"{option} would replace {path}, a file of another kind", hint=f"choose another file with {option}")


def write_for_user(path: Path, text: str, hint: str) -> None:
    """Atomically writes a file that the user named; raises `ArgumentError` if that fails."""
    try:
        write_atomically(path.resolve(), text.encode())  # a link stays one
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}", hint=hint) from None


def read_json(path: Path, kind: str, version: int, make: Callable[[Any], T], hint: str) -> T:
    """Reads a JSON file of a given format version; raises `ArgumentError` if it cannot be read or has another format.

    Args:
        kind: the kind of file, for error messages.
        make: converts the document; it may raise anything on invalid input.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != version:
            raise ValueError(f"its format is {data['format']}, not {version}")
        return make(data)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ArgumentError(f"{path} is not a {kind} ({one_line(error)})", hint=hint) from None


def sealed(content: bytes, name: str) -> bytes:
    """Appends a digest of the content and of the file's name to a binary, where loaders ignore it."""
    return content + _MARK + hashlib.sha256(name.encode() + b"\0" + content).digest()


def unsealed(binary: bytes, name: str) -> bytes | None:
    """Returns the content of a `sealed` binary; None if it is damaged, was never sealed, or belongs to another name."""
    end = len(binary) - _DIGEST_BYTES - len(_MARK)
    content = binary[: max(end, 0)]
    return content if end >= 0 and sealed(content, name) == binary else None


def write_sealed(path: Path, content: bytes) -> None:
    """Atomically writes an entry of the cache."""
    write_atomically(path, sealed(content, path.name))


def read_sealed(path: Path) -> bytes | None:
    """Returns the content of an entry of the cache; None if it is missing or damaged. It then counts as used."""
    try:
        content = unsealed(read_regular(path), path.name)
    except OSError:
        return None
    if content is not None:
        with suppress(OSError):  # a read-only cache
            os.utime(path)
    return content


def is_undamaged(path: Path) -> bool:
    """Returns True if an entry of the cache exists and is undamaged."""
    return read_sealed(path) is not None


def read_regular(path: Path) -> bytes:
    """Reads a file; raises ``OSError`` for a pipe, because reading it might block forever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


# Locks. They only save time: without them, several processes build equal files, and the last one replaces the others.

_WAIT_SECONDS = 0.02
_LOCKED: set[int] = set()  # descriptors


@contextmanager
def one_builder(path: Path, seconds: float) -> Iterator[None]:
    """Keeps other threads and processes from building a file of the cache at the same time, for at most some seconds.

    The lock of a process that ends is released. On a file system without locks, nothing is locked.
    """
    lock = path.with_name(f".{path.name}.lock")
    descriptor = _locked(lock, seconds)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                lock.unlink()
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked children share the open file
            _LOCKED.discard(descriptor)
            os.close(descriptor)


def _locked(lock: Path, seconds: float) -> int | None:
    """Locks a file and returns its descriptor; None if that is not possible."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    except OSError:
        return None
    _LOCKED.add(descriptor)
    end = time.monotonic() + seconds
    with suppress(OSError):
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_WAIT_SECONDS)
    return descriptor


def _forget_locks() -> None:
    """Closes the locks of the parent; otherwise this process would hold them when the parent has been killed."""
    for descriptor in _LOCKED:
        os.close(descriptor)
    _LOCKED.clear()


os.register_at_fork(after_in_child=_forget_locks)


# A cache that cannot be written to: its kernels are compiled again by each process.

_SAID: set[Path] = set()


@contextmanager
def cache_writes(folder: Path) -> Iterator[None]:
    """Converts an ``OSError`` while writing to a cache folder to a `SettingsError` that names the folder."""
    try:
        yield
    except OSError as error:
        raise unusable(folder, error.strerror or str(error)) from error


@contextmanager
def stored_if_possible(folder: Path) -> Iterator[None]:
    """Warns once, instead of raising, if a cache folder cannot be written to."""
    try:
        with cache_writes(folder):
            yield
    except SettingsError as error:
        warn_of_cache(folder, error)


def warn_of_cache(folder: Path, error: SettingsError) -> None:
    """Warns once per process that kernels are not stored."""
    if folder.parent not in _SAID:
        _SAID.add(folder.parent)
        warnings.warn(f"kernels are compiled by each process: {error.one_line}", RuntimeWarning, stacklevel=2)


def unusable(folder: Path, reason: str) -> SettingsError:
    return SettingsError(
        f"the cache folder {folder} cannot be used: {reason}",
        where=f"FUSEGEN_CACHE_DIR ({folder.parent})",
        hint="free space there, or set FUSEGEN_CACHE_DIR to a folder that you can write to and load libraries from",
    )
