"""Files that are there whole or not at all, and binaries that carry their own digest."""

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
    """Writes a file so that no reader ever sees a part of it; the last of several writers wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:  # with the rights that the user's files have; those of `mkstemp` are the owner's alone
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_for_user(path: Path, text: str, hint: str) -> None:
    """Writes a file that a user has named, whole or not at all.

    Raises:
        ArgumentError: it cannot be written.
    """
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}", hint=hint) from None


def read_json(path: Path, kind: str, version: int, make: Callable[[Any], T], hint: str) -> T:
    """Makes a value of a file of JSON that has a format's version.

    Args:
        kind: of the file, for errors.
        make: from the document; it may fail in any way on what is none of ours.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != version:
            raise ValueError(f"its format is {data['format']}, not {version}")
        return make(data)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ArgumentError(f"{path} is no {kind} ({one_line(error)})", hint=hint) from None


def sealed(content: bytes) -> bytes:
    """A binary with its digest behind it, where no loader looks."""
    return content + _MARK + hashlib.sha256(content).digest()


def unsealed(whole: bytes) -> bytes | None:
    """The content that `sealed` was given; None where it was damaged since, or never sealed."""
    end = len(whole) - _DIGEST_BYTES - len(_MARK)
    content = whole[: max(end, 0)]
    return content if end >= 0 and sealed(content) == whole else None


def is_whole(binary: Path) -> bool:
    """True if a file is there, and is what `sealed` made."""
    try:
        return unsealed(read_regular(binary)) is not None
    except OSError:
        return False


def read_regular(path: Path) -> bytes:
    """The content of a file; a pipe in its place, which might never have any, is no file.

    Raises:
        OSError: there is none, or it cannot be read.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turns the system's refusal of files in a folder of the cache into an error that names the folder.

    Raises:
        SettingsError: a file could not be written: no room, no permission, no such folder.
    """
    try:
        yield
    except OSError as error:
        raise unusable(folder, error.strerror or str(error)) from error


def unusable(folder: Path, reason: str) -> SettingsError:
    """The error of a folder of the cache in which files cannot be kept."""
    return SettingsError(
        f"the cache folder {folder} cannot be used: {reason}",
        where=f"FUSEGEN_CACHE_DIR ({folder.parent})",
        hint="make room there, or set FUSEGEN_CACHE_DIR to a folder of yours from which libraries may be loaded",
    )
