"""What a function closes over: tensors, which are inputs that each call finds anew, and settings, which select code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch

from fusegen.errors import TraceError
from fusegen.lang.places import here

Accessor: TypeAlias = Callable[[], Any]

_DEEPEST = 3  # attributes and calls from the function to a tensor
_SETTINGS = (bool, int, float, str, type(None), torch.dtype)
_CONTAINERS = (list, tuple, dict, set, frozenset)  # of settings; each is looked at whole


def find(function: Callable[..., Any], tensor: torch.Tensor) -> tuple[str, Accessor]:
    """The name of a closed-over tensor and how to get at it again: a closure variable, a global, an attribute of one, a parameter
    of a module, or any of these of a function or kernel that the function calls.

    Raises:
        TraceError: when it is none of these; a kernel could not notice that it changed.
    """
    for name, accessor, _ in _reachable(function):
        if accessor() is tensor:
            return name, accessor
    raise TraceError(
        "the kernel uses a tensor that is neither a parameter nor a variable that it closes over",
        where=here() or inspect.getsourcefile(function),
        mend="pass the tensor as a parameter; one that is computed inside from other tensors, compute outside",
    )


def settings_of(function: Callable[..., Any]) -> tuple[Accessor, ...]:
    """Variables of the function, and of those that it calls, that hold a plain value or a container."""
    return tuple(accessor for _, accessor, value in _reachable(function) if isinstance(value, _SETTINGS + _CONTAINERS))


def aliases(function: Callable[..., Any], tensors: Iterable[torch.Tensor]) -> tuple[Accessor, ...]:
    """For variables that hold one closed-over tensor, which a variant knows under one name: whether they still do."""
    holders: dict[int, list[Accessor]] = {id(tensor): [] for tensor in tensors}
    for _, accessor, value in _reachable(function):
        if id(value) in holders:
            holders[id(value)].append(accessor)
    return tuple(_same(found[0], other) for found in holders.values() for other in found[1:])


def _same(one: Accessor, other: Accessor) -> Accessor:
    return lambda: one() is other()


def setting(value: Any) -> object:
    """What a variable's value means for the choice of code: a plain value itself, a container its elements."""
    if isinstance(value, dict):
        return (dict, tuple((setting(key), setting(element)) for key, element in value.items()))
    if isinstance(value, _CONTAINERS):
        return (type(value), tuple(setting(element) for element in value))
    return (type(value), value) if isinstance(value, _SETTINGS) else None


def _reachable(function: Callable[..., Any]) -> Iterator[tuple[str, Accessor, Any]]:
    """Variables and what is behind them, the nearest first: name, accessor and present value."""
    seen: set[int] = {id(function)}
    level = [(name, accessor, function.__code__) for name, accessor in _roots(function)]
    for _ in range(_DEEPEST):
        following: list[tuple[str, Accessor, CodeType]] = []
        for name, accessor, code in level:
            try:
                value = accessor()
            except (ValueError, KeyError, AttributeError):  # not assigned yet, or no longer there
                continue
            yield name, accessor, value
            if id(value) not in seen:
                seen.add(id(value))
                following += _behind(name, accessor, value, code)
        level = following


def _behind(name: str, accessor: Accessor, value: Any, code: CodeType) -> list[tuple[str, Accessor, CodeType]]:
    """Attributes of a value that the code mentions, parameters of a module, variables of a function."""
    called = getattr(value, "function", value)
    if isinstance(called, FunctionType):
        if called.__module__.partition(".")[0] in ("torch", "fusegen"):
            return []
        return [(n, a, called.__code__) for n, a in _roots(called)]
    if isinstance(value, torch.nn.Module):
        inner = [n for n, _ in (*value.named_parameters(), *value.named_buffers())]
        own = [(f"{name}_{n.replace('.', '_')}", _attribute(accessor, n), code) for n in inner]
        return own + _mentioned(name, accessor, value, code)
    if isinstance(value, (torch.Tensor, *_SETTINGS)):
        return []
    return _mentioned(name, accessor, value, code)


def _mentioned(name: str, accessor: Accessor, value: Any, code: CodeType) -> list[tuple[str, Accessor, CodeType]]:
    return [(f"{name}_{a}", _attribute(accessor, a), code) for a in code.co_names if a in _own_names(value)]


def _own_names(value: Any) -> set[str]:
    """Names of a value's attributes, without running properties; of a library's modules none."""
    if isinstance(value, ModuleType) and value.__name__.partition(".")[0] in ("torch", "math", "fusegen", "numpy"):
        return set()
    return {*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())}


def _attribute(accessor: Accessor, path: str) -> Accessor:
    def get() -> Any:
        value = accessor()
        for part in path.split("."):
            value = getattr(value, part)
        return value

    return get


def _roots(function: Callable[..., Any]) -> Iterator[tuple[str, Accessor]]:
    code, cells = function.__code__, function.__closure__ or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        yield name, lambda cell=cell: cell.cell_contents  # type: ignore[misc]
    for name in _names(code):
        if name in function.__globals__:
            yield name, lambda name=name: function.__globals__[name]  # type: ignore[misc]


def _names(code: CodeType) -> Iterator[str]:
    """Names in a function's code, and in that of functions and comprehensions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
