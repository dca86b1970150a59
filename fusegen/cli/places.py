"""The line of a user's that raised an error."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import fusegen

_OTHERS = (str(Path(fusegen.__file__).parent), sysconfig.get_path("stdlib"), "<")
"""Beginnings of names of files that a user did not write: fusegen's, Python's, and those that are no files."""


def users_line(error: BaseException) -> str | None:
    """``FILE:LINE`` of the innermost frame in a file of the user's; None where there is none.

    For a syntax error it is the line that cannot be read.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _is_users(filename: str) -> bool:
    return not filename.startswith(_OTHERS) and "site-packages" not in filename
