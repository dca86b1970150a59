"""Packages that fusegen works with and does not need."""

from __future__ import annotations

import importlib
from typing import Any

from fusegen.errors import ToolNotFoundError


def installed(name: str) -> Any:
    """A module of such a package.

    Raises:
        ToolNotFoundError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ToolNotFoundError(f"{package} is not installed", mend=f"pip install {package}") from error
