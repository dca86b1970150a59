"""The table of torch functions that can be traced, filled by `lang.functions`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from fusegen.errors import TraceError, UnsupportedError
from fusegen.lang.places import here

Handler = TypeVar("Handler", bound=Callable[..., Any])

_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}
_CREATORS: dict[Callable[..., Any], Callable[..., Any]] = {}
_SPACES = (torch, torch.special, F, torch.Tensor)


def implements(*names: str) -> Callable[[Handler], Handler]:
    """Registers a handler for every torch function of the given names: in torch, torch.special, F and Tensor."""

    def register(handler: Handler) -> Handler:
        for function in twins(names):
            _HANDLERS[function] = handler
        return handler

    return register


def creates(*names: str) -> Callable[[Handler], Handler]:
    """Registers a handler for torch functions that make a tensor of nothing; it gets the tracer first."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _CREATORS[getattr(torch, name)] = handler
        return handler

    return register


def creator_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The handler of a factory function, if there is one."""
    return _CREATORS.get(function)


def twins(names: Sequence[str]) -> list[Callable[..., Any]]:
    """The torch functions of some names that exist in this version of torch."""
    found = (getattr(space, name, None) for name in names for space in _SPACES)
    return [function for function in found if callable(function)]


def handler_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The handler of a torch function, if there is one."""
    try:
        return _HANDLERS.get(function)
    except TypeError:  # an unhashable callable
        return None


def call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Traces a call of a torch function.

    Raises:
        UnsupportedError: when the function is not in the table.
        TraceError: when the arguments do not fit it; names the user's line.
    """
    handler = handler_of(function)
    name = getattr(function, "__name__", str(function))
    if handler is None:
        raise UnsupportedError(f"torch's {name!r} cannot be traced yet", where=here(), mend=_suggestion(name))
    try:
        return handler(*args, **kwargs)
    except TraceError as error:
        if error.where is None:
            raise type(error)(error.what, where=here(), mend=error.mend) from None
        raise
    except TypeError as error:
        raise TraceError(f"{name}: {error}", where=here()) from error


def known_names() -> list[str]:
    """Names of all functions that can be traced."""
    return sorted({getattr(function, "__name__", "") for function in _HANDLERS})


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, known_names(), n=3)
    if name.endswith("_"):
        return "in-place operations are not traced; use the one without the trailing underscore"
    listed = f"; close to it: {', '.join(close)}" if close else ""
    return f"write it with operations that can be traced, or call it outside of the kernel{listed}"
