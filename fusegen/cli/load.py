"""Finds the kernel that a user names: a spec, ``FILE.py:NAME`` or ``pkg.mod:NAME``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fusegen.api import Kernel
from fusegen.errors import ArgumentError, FusegenError, SpecNotFoundError
from fusegen.specs import Spec, find

_SUFFIX = ".py"


@dataclass(frozen=True)
class Found:
    """A kernel, and the spec that it is, if it is one."""

    name: str
    kernel: Kernel[..., Any]
    spec: Spec | None = None


def load(name: str) -> Found:
    """The kernel of a name.

    Raises:
        SpecNotFoundError: there is no such spec, or no such kernel in the file.
        ArgumentError: the file or module cannot be imported, or the name is no kernel.
    """
    place, colon, attribute = name.rpartition(":")
    if colon and place:
        return _in_module(_module(place), place, attribute)
    if name.endswith(_SUFFIX):
        return _in_module(_module(name), name, "")
    return Found(name, find(name).fresh(), find(name))


def _module(place: str) -> ModuleType:
    if not place.endswith(_SUFFIX):
        return _import(place, lambda: _by_name(place))
    path = Path(place)
    if not path.is_file():
        raise ArgumentError(f"no file {place}", mend="give the path of a Python file, as in path/to/file.py:kernel")
    return _import(place, lambda: _by_path(path))


def _by_name(name: str) -> ModuleType:
    """A module of a package, with the current folder searched as Python itself does."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _by_path(path: Path) -> ModuleType:
    """A file as a module of its own; what lies beside it can be imported, as when Python runs it."""
    sys.path.insert(0, str(path.resolve().parent))
    name = f"fusegen_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


def _import(place: str, action: Callable[[], ModuleType]) -> ModuleType:
    """Runs an import of a user's code, which can raise anything.

    Raises:
        ArgumentError: naming what was raised, and the line.
    """
    try:
        return action()
    except FusegenError:
        raise
    except (Exception, SystemExit) as error:
        mend = f"python {place}" if place.endswith(_SUFFIX) else f"python -c 'import {place}'"
        what = " ".join(f"importing {place} failed: {type(error).__name__}: {error}".split())
        raise ArgumentError(what, where=_line(error), mend=mend) from error


def _line(error: BaseException) -> str | None:
    """Where a user's code raised: the last frame outside of the import machinery."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename and f.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _in_module(module: ModuleType, place: str, attribute: str) -> Found:
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, Kernel)}
    if not attribute and len(kernels) == 1:
        attribute = next(iter(kernels))
    value = getattr(module, attribute, None) if attribute else None
    if isinstance(value, Kernel):
        return Found(attribute, value)
    if callable(value):
        what = f"{attribute} in {place} is a {type(value).__name__}, not a kernel"
        raise ArgumentError(what, mend="decorate it with @fusegen.kernel")
    what = f"no kernel {attribute!r} in {place}" if attribute else f"which kernel of {place}?"
    raise SpecNotFoundError(what, mend=_choice(place, attribute, list(kernels)))


def _choice(place: str, attribute: str, kernels: list[str]) -> str:
    if not kernels:
        return f"{place} has no kernel: decorate a function with @fusegen.kernel"
    close = difflib.get_close_matches(attribute, kernels, n=1) or kernels
    return " or ".join(f"{place}:{name}" for name in close)
