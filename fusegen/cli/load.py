"""Finds the kernel that a user names: a spec, ``FILE.py:NAME`` or ``pkg.mod:NAME``."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fusegen.api import Kernel, Method
from fusegen.cli.terminal import users_line
from fusegen.errors import ArgumentError, FusegenError, SpecNotFoundError
from fusegen.specs import Spec, find, is_prebuilt

_SUFFIX = ".py"
_DECLARE = "decorate a function with @fusegen.kernel"


@dataclass(frozen=True)
class FoundKernel:
    """A kernel, and the spec that it is, if it is one."""

    name: str
    kernel: Kernel[..., Any]
    spec: Spec | None = None


def is_place(name: str) -> bool:
    """Tells if a name says where a kernel is, as those of a user's own kernels do."""
    return (":" in name and not is_prebuilt(name)) or name.endswith(_SUFFIX)


def load_all(names: Sequence[str], options: argparse.Namespace) -> dict[str, FoundKernel]:
    """The kernels of some names, each once; a file that has several is imported once.

    Args:
        options: with shapes and arguments.

    Raises:
        SpecNotFoundError, ArgumentError: as `load` does; or shapes are given for more than one.
    """
    imported = dict[str, ModuleType]()
    found = {name: load(name, imported) for name in dict.fromkeys(names)}
    if len(found) > 1 and (options.shape or options.arg):
        raise ArgumentError("--shape and --arg are of one kernel", hint="name kernels with shapes of their own one by one")
    return found


def load(name: str, imported: MutableMapping[str, ModuleType] | None = None) -> FoundKernel:
    """The kernel of a name.

    Args:
        name: a spec, ``FILE.py``, ``FILE.py:NAME`` or ``pkg.mod:NAME``.
        imported: modules by their places; one that is missing is added.

    Raises:
        SpecNotFoundError: there is no such spec, or no such kernel in the file.
        ArgumentError: the file or module cannot be imported, or the name is no kernel.
    """
    if not is_place(name):
        spec = find(name)
        return FoundKernel(spec.name.replace(":", "_"), spec.fresh(), spec)  # an attribute of what is built of it
    place, _, attribute = (name, "", "") if name.endswith(_SUFFIX) else name.rpartition(":")
    modules = {} if imported is None else imported
    if place not in modules:
        modules[place] = module_at(place)
    return _in_module(modules[place], place, attribute)


def module_at(place: str) -> ModuleType:
    """The module of a file or of a name.

    Raises:
        ArgumentError: it cannot be imported.
    """
    if not place.endswith(_SUFFIX):
        return _import(place, lambda: _by_name(place))
    path = Path(place)
    if not path.is_file():
        raise ArgumentError(f"no file {place}", hint="give the path of a Python file, as in path/to/file.py:kernel")
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
        FusegenError: the file declares or calls a kernel in a way that is refused.
    """
    try:
        return action()
    except FusegenError as error:
        error.where = error.where or users_line(error)  # a declaration is refused before its line is known
        raise
    except (Exception, SystemExit) as error:
        hint = f"python {place}" if place.endswith(_SUFFIX) else f"python -c 'import {place}'"
        what = " ".join(f"importing {place} failed: {type(error).__name__}: {error}".split())
        raise ArgumentError(what, where=users_line(error), hint=hint) from error


def _in_module(module: ModuleType, place: str, attribute: str) -> FoundKernel:
    kernels = [name for name, value in vars(module).items() if _declared(value) is not None]
    if not attribute and len(kernels) == 1:
        attribute = kernels[0]
    value = value_at(module, attribute) if attribute else None
    declared = _declared(value)
    holder, _, name = attribute.rpartition(".")
    if declared is not None and holder and inspect.isclass(value_at(module, holder)):
        raise ArgumentError(f"{attribute} in {place} is a kernel of a class", hint=f"name one of an object: {place}:OBJECT.{name}")
    if declared is not None:
        return FoundKernel(name, _fresh(declared))
    if callable(value):
        what = f"{attribute} in {place} is a {type(value).__name__}, not a kernel"
        raise ArgumentError(what, hint=_how_to_declare(attribute, value))
    raise _not_found(place, attribute, kernels)


def value_at(module: ModuleType, path: str) -> object:
    """The object under a dotted name; None where there is none."""
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _declared(value: object) -> Kernel[..., Any] | Method[..., Any] | None:
    """The kernel that a value is: a declared one, the method of an object, or a module's forward; None where it is none."""
    declared = getattr(value, "_kernel", None) if isinstance(value, nn.Module) else None
    if isinstance(declared, Kernel):
        return Method(declared, value)
    return value if isinstance(value, (Kernel, Method)) else None


def _fresh(declared: Kernel[..., Any] | Method[..., Any]) -> Kernel[..., Any]:
    """The kernel without memory of calls: a file may make some while it is imported, and a second size becomes a run-time value."""
    kernel = declared.kernel if isinstance(declared, Method) else declared
    return kernel.fresh(declared.function)


def _how_to_declare(name: str, value: object) -> str:
    """The way to make a kernel of a value that can be called."""
    if isinstance(value, nn.Module):
        return f"fuse it: NAME = fusegen.kernel({name})"
    if inspect.isclass(value) and issubclass(value, nn.Module):
        return f"fuse an object of it: NAME = fusegen.kernel({value.__name__}(…))"
    return _DECLARE


def _not_found(place: str, attribute: str, kernels: list[str]) -> SpecNotFoundError:
    """The error that offers the kernels of a place: one with a similar name, or all."""
    found = f"which kernel of {place}?" if kernels else f"no kernel in {place}"
    what = f"no kernel {attribute!r} in {place}" if attribute else found
    close = difflib.get_close_matches(attribute, kernels, n=1) or kernels
    return SpecNotFoundError(what, hint=" or ".join(f"{place}:{name}" for name in close) or _DECLARE)
