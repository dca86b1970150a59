"""A folder that is there whole or not at all."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusegen.errors import ArgumentError, BundleError


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside the one that is wanted, which takes its place when all has gone well."""
    try:
        unfinished = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
        unfinished.mkdir()
    except OSError as error:
        raise BundleError(f"{folder} cannot be made: {error.strerror}", mend="give a folder whose parent is there") from None
    try:
        yield unfinished
        with writing_to(folder):
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Puts into words why the disk refuses; nothing of the user's runs in here."""
    try:
        yield
    except OSError as error:
        raise BundleError(f"{folder} cannot be written: {error.strerror}", mend="make room, or give another folder") from error


def write(path: Path, content: bytes) -> None:
    """Writes a file of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def require_new(folder: Path) -> None:
    """Refuses a folder that is there.

    Raises:
        BundleError: it is.
    """
    if folder.exists():
        raise BundleError(f"{folder} is there already", mend="remove it, or build into another folder")


def require_name(library: str) -> None:
    """Refuses what no library of torch, and no C++ text, can be called.

    Raises:
        ArgumentError: it is such a name.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", library, re.ASCII):
        raise ArgumentError(f"the library is {library!r}", mend="give a name such as mylib by --library")
