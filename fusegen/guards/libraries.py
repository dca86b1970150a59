"""What is taken to be as it was: torch, NumPy, the standard library and fusegen itself; all else is the user's."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

_PACKAGES = ("torch", "numpy", "sympy", "mpmath", "fusegen")
_NAMES = frozenset({*_PACKAGES, *sys.stdlib_module_names} - {"__main__"})
_HEAP = 1 << 9  # a flag of CPython's types: made by Python code
_IMMUTABLE = 1 << 8  # likewise: closed to changes


def of_library(cls: type) -> bool:
    """Whether a class is a library's; one that was made in a namespace without a name says to be of ``builtins``."""
    return is_library(cls.__module__) and not (cls.__module__ == "builtins" and is_heap(cls))


def is_heap(cls: type) -> bool:
    """Whether a class was made by Python code."""
    return bool(cls.__flags__ & _HEAP)


def is_closed(cls: type) -> bool:
    """Tells if reads of a class's objects cannot be watched: it is the interpreter's, or closed to changes."""
    return not is_heap(cls) or bool(cls.__flags__ & _IMMUTABLE)


def is_library(module: object) -> bool:
    """Whether a module's name is that of a library; a file of the user's may have the name of one of the standard library."""
    root = str(module).partition(".")[0]
    if root not in _NAMES:
        return False
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is None or _is_library_file(file)


def runs_library(frame: FrameType) -> bool:
    """Whether a library's code runs in a frame; of code without a file, as dataclasses make it, its variables tell."""
    file = frame.f_code.co_filename
    return is_library(frame.f_globals.get("__name__")) if file.startswith("<") else _is_library_file(file)


@lru_cache(maxsize=4096)
def _is_library_file(file: str) -> bool:
    if file.startswith(_homes()):
        return True
    return file.startswith(_folders("stdlib", "platstdlib")) and not file.startswith(_folders("purelib", "platlib"))


@lru_cache(maxsize=1)
def _homes() -> tuple[str, ...]:
    """Folders of the packages."""
    found = [spec.origin for name in _PACKAGES if (spec := find_spec(name)) is not None and spec.origin is not None]
    return tuple(f"{Path(origin).parent}/" for origin in found)


def _folders(*names: str) -> tuple[str, ...]:
    return tuple(f"{sysconfig.get_path(name)}/" for name in names)
