"""Functions of what can be called and is none: objects with ``__call__``, and ``functools.partial``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from fusegen.errors import ArgumentError

_COMPLETED = compile(
    """
def completed(function, given, named):
    def call(*args, **kwargs):
        return function(*given, *args, **{**named, **kwargs})
    return call
""",
    "<a partial>",
    "exec",
)
"""Code that is no library's, which is taken not to change: each call looks at what it closes over."""


def python_function(target: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or bound method, that runs when something is called.

    Raises:
        ArgumentError: no Python function does.
    """
    if hasattr(target, "__code__"):
        return target
    if isinstance(target, functools.partial):
        return _completed(python_function(target.func), target.args, target.keywords, _signature(target))
    method = getattr(target, "__call__", None)  # noqa: B004  # the method itself
    if isinstance(method, MethodType) and not isinstance(target, type):
        return _completed(method, (), {}, inspect.signature(method), target)  # its class may have another later
    raise ArgumentError(f"{target!r} is no Python function", mend="wrap it: def f(x): return ...")


def name_of(target: Callable[..., Any]) -> str:
    """The name of the kernel that is made of it."""
    if isinstance(target, functools.partial):
        return name_of(target.func)
    return str(getattr(target, "__name__", type(target).__name__))


def by_position(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as those of a call that names only what it must: a parameter may have the name of one of `lower`'s."""
    bound = inspect.signature(function).bind(**arguments)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _completed(
    function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], signature: inspect.Signature, called: Any = None
) -> Callable[..., Any]:
    """A partial, or an object, as a function of the parameters that it leaves open; those that it names are defaults.

    Args:
        function: what its annotations are of.
        given, named: arguments that are there already.
        signature: of what is left.
        called: what is called, where this is not the function.
    """
    scope: dict[str, Any] = {"__name__": "a partial"}
    exec(_COMPLETED, scope)
    call: Callable[..., Any] = scope["completed"](function if called is None else called, given, named)
    call.__name__, call.__qualname__, call.__module__ = function.__name__, function.__qualname__, function.__module__
    call.__doc__ = function.__doc__
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = _annotations(function)
    return call


def _signature(target: functools.partial[Any]) -> inspect.Signature:
    try:
        return inspect.signature(target)
    except ValueError as error:
        raise ArgumentError(f"{target!r} cannot be called: {error}", mend="complete no more parameters than there are") from None


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations as values, which the function's own variables resolve; as they are written where these do not."""
    try:
        return inspect.get_annotations(function, eval_str=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return dict(function.__annotations__)
