"""Probes of Python, its packages and this one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import fusegen
from fusegen.doctor.child import ask
from fusegen.doctor.finding import Look, broken, found, missing

_OLDEST = (3, 11)
_PACKAGES = ("jinja2", "sympy", "numpy", "rich")


def look_at_python() -> Look:
    """The interpreter."""
    version = platform.python_version()
    if sys.version_info < _OLDEST:
        return broken("it is too old", "install Python 3.11 or newer", version=version, where=sys.executable)
    return found(version, sys.executable)


@lru_cache(maxsize=1)
def told_by_package() -> Mapping[str, Any]:
    """Where the templates are, by a process that imports all of this package.

    Raises:
        ProbeError: it cannot be imported.
    """
    return ask(
        "import fusegen.api, fusegen.specs\nfrom fusegen.emit.environment import templates\nanswer(templates=str(templates()))"
    )


def look_at_fusegen() -> Look:
    """This package: whether all of it can be imported."""
    folder = Path(fusegen.__file__).parent
    told_by_package()
    return found(fusegen.__version__, str(folder), _installation(folder))


def _installation(folder: Path) -> str:
    kind = "a checkout" if (folder.parent / "pyproject.toml").is_file() else "installed"
    try:
        known = importlib.metadata.version("fusegen")
    except importlib.metadata.PackageNotFoundError:
        return f"{kind}, not installed"
    return kind if known == fusegen.__version__ else f"{kind}; pip knows it as {known}: pip install it again"


def look_at_packages() -> Look:
    """Packages without a compiled part of CUDA."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES if importlib.util.find_spec(name)}
    if lacking := [name for name in _PACKAGES if name not in versions]:
        return missing(", ".join(lacking), f"pip install {' '.join(lacking)}")
    ask("\n".join(f"import {name}" for name in _PACKAGES) + "\nanswer()")
    return found(detail=", ".join(f"{name} {version}" for name, version in versions.items()))


def look_at_templates() -> Look:
    """The texts that kernels are made of."""
    folder = Path(told_by_package()["templates"])
    count = sum(path.is_file() for path in folder.rglob("*"))
    return found(where=str(folder), detail=f"{count} files")
