"""Loads the kernel that a user names: a spec, ``FILE.py:NAME`` or ``pkg.mod:NAME``."""

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

from fusegen.api import Kernel
from fusegen.cli.terminal import user_file_line
from fusegen.errors import ArgumentError, FusegenError, SpecNotFoundError
from fusegen.own.case import declared_kernel, fresh_kernel
from fusegen.specs import Spec, find, is_prebuilt

_SUFFIX = ".py"
_DECLARE = "decorate a function with @fusegen.kernel"


@dataclass(frozen=True)
class NamedKernel:
    name: str
    kernel: Kernel[..., Any]
    spec: Spec | None = None


def is_location(name: str) -> bool:
    """True if a name is the location of a user's kernel, False if it is a prebuilt one."""
    return (":" in name and not is_prebuilt(name)) or name.endswith(_SUFFIX)


def location_of(name: str) -> tuple[str, str]:
    """Returns the file or module of a user's kernel, and its name there, "" for the only one."""
    location, _, attribute = (name, "", "") if name.endswith(_SUFFIX) else name.rpartition(":")
    return location, attribute


def file_of(name: str) -> Path | None:
    """Returns the file of a kernel, None for one of a module and a prebuilt one."""
    location = location_of(name)[0] if is_location(name) else ""
    return Path(location) if location.endswith(_SUFFIX) else None


def load_all(names: Sequence[str], options: argparse.Namespace) -> dict[str, NamedKernel]:
    """The kernels by name; a file is imported once.

    Raises:
        SpecNotFoundError, ArgumentError: as for `load`; or shapes are given for several kernels.
    """
    imported = dict[str, ModuleType]()
    kernels = {name: load(name, imported) for name in dict.fromkeys(names)}
    given = next((option for option in ("shape", "arg", "call") if vars(options).get(option)), None)
    if len(kernels) > 1 and given is not None:
        raise ArgumentError(f"--{given} describes one kernel", hint="name one kernel per command")
    return kernels


def load(name: str, imported: MutableMapping[str, ModuleType] | None = None) -> NamedKernel:
    """The kernel of a name.

    Args:
        name: a spec, ``FILE.py``, ``FILE.py:NAME`` or ``pkg.mod:NAME``.
        imported: modules by location; newly imported ones are added.

    Raises:
        SpecNotFoundError: there is no such spec, or no such kernel in the file.
        ArgumentError: the import fails, or the name is not a kernel's.
    """
    if not is_location(name):
        spec = find(name)
        return NamedKernel(spec.name.replace(":", "_"), spec.fresh(), spec)  # the name becomes an attribute of a built package
    location, attribute = location_of(name)
    if not location or name.endswith(":"):
        missing = "kernel after the colon" if location else "file or module before the colon"
        raise ArgumentError(f"{name!r} names no {missing}", hint="path/to/file.py:kernel, path/to/file.py or package.module:kernel")
    modules = {} if imported is None else imported
    if location not in modules:
        modules[location] = module_at(location)
    return _in_module(modules[location], location, attribute)


def module_at(location: str) -> ModuleType:
    """Imports a file or a module.

    Raises:
        ArgumentError: the import fails.
    """
    if not location.endswith(_SUFFIX):
        return _import(location, lambda: _by_name(location))
    path = Path(location)
    if not path.is_file():
        raise ArgumentError(f"no file {location}", hint="give the path of a Python file, as in path/to/file.py:kernel")
    return _import(location, lambda: _by_path(path))


def _by_name(name: str) -> ModuleType:
    """Imports a module; the current folder is searched, as by ``python -m``."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _by_path(path: Path) -> ModuleType:
    """Imports a file; modules in its folder can be imported, as when Python runs it."""
    sys.path.insert(0, str(path.resolve().parent))
    name = f"fusegen_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return module


def _import(location: str, action: Callable[[], ModuleType]) -> ModuleType:
    """Runs an import of a user's code, which can raise anything.

    Raises:
        ArgumentError: the import raised something; the error has its message and line.
        FusegenError: the declaration or call of a kernel is refused.
    """
    try:
        return action()
    except FusegenError as error:
        error.where = error.where or user_file_line(error)  # a declaration is refused before its line is known
        raise
    except (Exception, SystemExit) as error:
        hint = f"python {location}" if location.endswith(_SUFFIX) else f"python -c 'import {location}'"
        what = " ".join(f"importing {location} failed: {type(error).__name__}: {error}".split())
        raise ArgumentError(what, where=user_file_line(error), hint=hint) from error


def _in_module(module: ModuleType, location: str, attribute: str) -> NamedKernel:
    names = [name for name, value in vars(module).items() if declared_kernel(value) is not None]
    if not attribute and len(names) == 1:
        attribute = names[0]
    value = value_at(module, attribute) if attribute else None
    kernel = declared_kernel(value)
    owner, _, name = attribute.rpartition(".")
    if kernel is not None and owner and inspect.isclass(value_at(module, owner)):
        raise ArgumentError(
            f"{attribute} in {location} is a method of a class", hint=f"name the method of an object: {location}:OBJECT.{name}"
        )
    if kernel is not None:
        return NamedKernel(name, fresh_kernel(kernel))
    if callable(value):
        what = f"{attribute} in {location} is a {type(value).__name__}, not a kernel"
        raise ArgumentError(what, hint=_how_to_declare(attribute, value))
    raise _not_found(location, attribute, names)


def value_at(module: ModuleType, path: str) -> object:
    value: object = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _how_to_declare(name: str, value: object) -> str:
    if isinstance(value, nn.Module):
        return f"fuse it: NAME = fusegen.kernel({name})"
    if inspect.isclass(value) and issubclass(value, nn.Module):
        return f"fuse an object of it: NAME = fusegen.kernel({value.__name__}(…))"
    return _DECLARE


def _not_found(location: str, attribute: str, kernels: list[str]) -> SpecNotFoundError:
    unnamed = f"{location} has several kernels" if kernels else f"no kernel in {location}"
    what = f"no kernel {attribute!r} in {location}" if attribute else unnamed
    close = difflib.get_close_matches(attribute, kernels, n=1) or kernels
    return SpecNotFoundError(what, hint=" or ".join(f"{location}:{name}" for name in close) or _DECLARE)
