"""Code that runs: the names and strings that a code object mentions, whose code it is, and the function that it belongs to."""

from __future__ import annotations

import dis
import gc
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import cast

from fusegen.errors import UnsupportedError
from fusegen.guards.values import cell_contents, is_a

_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_SETS_GLOBAL = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})
_SETS_ATTRIBUTE = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_LOOKS_UP = frozenset({"getattr", "hasattr", "vars", "globals", "__dict__"})
"""Words that may look up what no name in the code tells."""


@dataclass(frozen=True)
class Names:
    """The names that a code object mentions; functions inside of it have their own.

    Attributes:
        variables: names of globals that it reads or sets, in the order of their use.
        attributes: names of attributes that it reads or sets, and strings, which may name one.
        modules: names of modules that it imports when it runs.
        compares: whether it asks whether two things are one.
        computes: whether it may look up a name that it does not spell out.
        stores: whether it sets globals.
        sets: whether it may set attributes.
        asked: names of attributes that may be missing: those that it gives to ``getattr`` and the like, and all where it handles
            exceptions.
    """

    variables: tuple[str, ...]
    attributes: frozenset[str]
    modules: tuple[str, ...]
    compares: bool
    computes: bool
    stores: bool
    sets: bool
    asked: frozenset[str]


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """The names that a code object mentions."""
    variables: dict[str, None] = {}
    modules: dict[str, None] = {}
    compares = stores = False
    sets = "setattr" in code.co_names
    last = None
    strings = frozenset(c for constant in code.co_consts for c in _strings(constant))
    attributes, changed = set(strings), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in _GLOBAL or step.opname in _SETS_GLOBAL:
            variables[str(step.argval)] = None
        elif step.opname in _ATTRIBUTE:
            attributes.add(str(step.argval))
        elif step.opname in _SETS_ATTRIBUTE:
            changed.add(str(step.argval))
        elif step.opname == "IMPORT_NAME":
            modules[str(step.argval)] = None
        stores |= step.opname in _SETS_GLOBAL
        compares |= step.opname == "IS_OP" and not (last is not None and last.opname == "LOAD_CONST")
        last = step
    sets |= bool(changed)
    compares |= "id" in variables
    computes = not _LOOKS_UP.isdisjoint({*variables, *attributes})
    asked = frozenset(attributes) if code.co_exceptiontable else strings if computes else frozenset[str]()
    return Names(tuple(variables), frozenset(attributes | changed), tuple(modules), compares, computes, stores, sets, asked)


def _strings(constant: object) -> Iterator[str]:
    """Words of a constant that may name an attribute, also dotted ones."""
    if isinstance(constant, str) and len(constant) < 100:
        yield from (part for part in constant.split(".") if part.isidentifier())
    elif isinstance(constant, (tuple, frozenset)):
        for element in constant:
            yield from _strings(element)


# Libraries: torch, NumPy, the standard library and fusegen itself are taken to be as they were; all else is the user's.

_PACKAGES = ("torch", "numpy", "sympy", "mpmath", "fusegen")
_NAMES = frozenset({*_PACKAGES, *sys.stdlib_module_names} - {"__main__"})
_HEAP = 1 << 9  # a flag of CPython's types: made by Python code
_IMMUTABLE = 1 << 8  # likewise: closed to changes


def of_library(cls: type) -> bool:
    """True if a class is a library's; one that was made in a namespace without a name says to be of ``builtins``."""
    return is_library(cls.__module__) and not (cls.__module__ == "builtins" and is_heap(cls))


def is_heap(cls: type) -> bool:
    """True if a class was made by Python code."""
    return bool(cls.__flags__ & _HEAP)


def is_closed(cls: type) -> bool:
    """Tells if reads of a class's objects cannot be watched: it is the interpreter's, or closed to changes."""
    return not is_heap(cls) or bool(cls.__flags__ & _IMMUTABLE)


def is_library(module: object) -> bool:
    """True if a module's name is that of a library; a file of the user's may have the name of one of the standard library."""
    root = str(module).partition(".")[0]
    if root not in _NAMES:
        return False
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is None or _is_library_file(file)


def runs_library(frame: FrameType) -> bool:
    """True if a library's code runs in a frame; of code without a file, as dataclasses make it, its variables tell."""
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


_UNTRACEABLE = {
    ("torch.nn.attention.flex_attention", "flex_attention"): "call F.scaled_dot_product_attention with attn_mask or is_causal, or "
    "flex_attention outside of the kernel",
}
"""Functions of libraries that look into tensors, with what to do in place of calling them, by module and name."""


def require_traceable(frame: FrameType) -> None:
    """Refuses a library's function that cannot work on traced tensors."""
    name = frame.f_code.co_name
    mend = _UNTRACEABLE.get((str(frame.f_globals.get("__name__")), name))
    if mend is not None:
        raise UnsupportedError(f"{name} cannot be traced", where=called_at(frame), mend=mend)


# The function of a code, and the line that called it.

FUNCTIONS_OF = ("__wrapped__", "function", "fget", "func", "__func__", "default_factory")
"""Attributes in which wrappers of the standard library, and kernels, keep the function that they call."""

_UNSET = object()


def closes_over(function: FunctionType, frame: FrameType) -> bool:
    """True if a function's variables hold what those of a frame do."""
    cells = zip(function.__code__.co_freevars, map(cell_contents, function.__closure__ or ()), strict=True)
    held = frame.f_locals
    return all(now[0] is held.get(name, _UNSET) if now else name not in held for name, now in cells)


def method_of(frame: FrameType) -> FunctionType | None:
    """The method of a frame that closes over its class alone, as ``super`` makes it: found there, since a look through all that
    lives takes a tenth of a second in a large process."""
    cls = frame.f_locals.get("__class__")
    for value in tuple(vars(cls).values()) if is_a(cls, type) else ():
        inside = [getattr(value, part, None) for part in FUNCTIONS_OF] if of_library(type(value)) else []
        for found in (value, *inside):
            if is_a(found, FunctionType) and found.__code__ is frame.f_code:
                return cast(FunctionType, found)
    return None


def functions_of(code: CodeType, start: object) -> list[FunctionType]:
    """Functions of a code that were made before something else was, since which the collector has not run."""
    young = gc.get_objects(generation=0)
    first = next((place for place, each in enumerate(young) if each is start), -1) + 1
    made = set(map(id, young[first:]))
    return [each for each in gc.get_referrers(code) if is_a(each, FunctionType) and id(each) not in made]


def called_at(frame: FrameType) -> str | None:
    """The line of the user's from which a library's function was called."""
    caller: FrameType | None = frame
    while caller is not None and runs_library(caller):
        caller = caller.f_back
    return None if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}"
