"""Atomic writes, and binaries with an embedded digest."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fusegen.errors import ArgumentError, SettingsError, one_line

T = TypeVar("T")

_MARK = b"fusegen-sha256:"
_DIGEST_BYTES = 32


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


def write_for_user(path: Path, text: str, hint: str) -> None:
    """Atomically writes a file that the user named; raises `ArgumentError` if that fails."""
    try:
        write_atomically(path, text.encode())
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


def sealed(content: bytes) -> bytes:
    """Appends the digest to a binary, where loaders ignore it."""
    return content + _MARK + hashlib.sha256(content).digest()


def unsealed(binary: bytes) -> bytes | None:
    """Returns the content of a `sealed` binary; None if it is damaged or was never sealed."""
    end = len(binary) - _DIGEST_BYTES - len(_MARK)
    content = binary[: max(end, 0)]
    return content if end >= 0 and sealed(content) == binary else None


def is_undamaged(binary: Path) -> bool:
    """Returns True if the file exists and is an undamaged `sealed` binary."""
    try:
        return unsealed(read_regular(binary)) is not None
    except OSError:
        return False


def read_regular(path: Path) -> bytes:
    """Reads a file; raises ``OSError`` for a pipe, because reading it might block forever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


@contextmanager
def cache_writes(folder: Path) -> Iterator[None]:
    """Converts an ``OSError`` while writing to a cache folder to a `SettingsError` that names the folder."""
    try:
        yield
    except OSError as error:
        raise unusable(folder, error.strerror or str(error)) from error


def unusable(folder: Path, reason: str) -> SettingsError:
    return SettingsError(
        f"the cache folder {folder} cannot be used: {reason}",
        where=f"FUSEGEN_CACHE_DIR ({folder.parent})",
        hint="free space there, or set FUSEGEN_CACHE_DIR to a folder that you can write to and load libraries from",
    )
