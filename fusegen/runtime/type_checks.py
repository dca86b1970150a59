"""Whether a function may ask for the exact type of a number: ``type(s) is int``, to which a traced scalar has no answer."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_DEEPEST = 3  # calls from the function
_LIBRARIES = ("torch", "fusegen", "numpy", "math")


def asks_for_types(function: Callable[..., Any]) -> bool:
    """Whether ``type`` is named by a function, or by one that it may call; a look at names, which may say yes too often."""
    level: list[Any] = [function]
    seen: set[int] = set()
    for _ in range(_DEEPEST + 1):
        functions = [f for value in level if (f := _function(value)) is not None and id(f) not in seen]
        seen.update(map(id, functions))
        if any(_names_type(f) for f in functions):
            return True
        level = [value for f in functions for value in _reached(f)]
    return False


def _function(value: Any) -> FunctionType | None:
    """The Python function behind a value; None of what is a library's, or none."""
    found = getattr(value, "function", value) if not isinstance(value, (MethodType, FunctionType)) else value
    found = found.__func__ if isinstance(found, MethodType) else found
    if not isinstance(found, FunctionType) or (found.__module__ or "").partition(".")[0] in _LIBRARIES:
        return None
    return found


def _names_type(function: FunctionType) -> bool:
    is_builtin = function.__globals__.get("type", builtins.type) is builtins.type
    return is_builtin and any("type" in code.co_names for code in _codes(function.__code__))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _reached(function: FunctionType) -> Iterator[Any]:
    """Values that a function's names stand for, and attributes of these that it names."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    for value in values:
        yield value
        if not _is_library(value):
            yield from _attributes(value, names)


def _is_library(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _LIBRARIES


def _attributes(value: Any, names: set[str]) -> Iterator[Any]:
    """Named attributes, found without running properties."""
    for holder in (value, *type(value).__mro__[:-1], *(value.__mro__[:-1] if isinstance(value, type) else ())):
        own = getattr(holder, "__dict__", {})
        yield from (own[name] for name in names if name in own)
