"""The table of traceable torch functions, filled by `trace.functions`."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled

from fusegen.errors import FusegenError, TraceError, UnsupportedError
from fusegen.trace.memory import TracedMemory, require_current
from fusegen.trace.modes import MAY_RETURN_INPUT, detach_like_torch, flat, functions_named, under_autocast
from fusegen.trace.user import user_line

Handler = TypeVar("Handler", bound=Callable[..., Any])

HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}
CREATORS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Handlers of functions that create tensors; their first argument is the tracer."""

PROPERTIES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.T.__get__: torch.t,  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__: torch.adjoint,  # type: ignore[attr-defined]
    torch.Tensor.data.__get__: torch.detach,  # type: ignore[attr-defined]
}
"""Torch functions equivalent to property getters."""

_ARGUMENT_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError, AssertionError)
"""Errors that a handler raises for unexpected arguments."""


def implements(*names: str) -> Callable[[Handler], Handler]:
    """Registers a handler for all torch functions of the given names: in torch, torch.special, F and Tensor.

    If their signatures differ, a later registration of ``Tensor.name`` or ``torch.name`` overrides one of them.
    """

    def register(handler: Handler) -> Handler:
        for function in functions_named(names):
            HANDLERS[function] = handler
        return handler

    return register


def creates(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            CREATORS[getattr(torch, name)] = handler
        return handler

    return register


def handler_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    try:
        return HANDLERS.get(function)
    except TypeError:  # an unhashable callable
        return None


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a torch function or of a getter's property, for messages."""
    name: str = getattr(function, "__name__", str(function))
    return getattr(getattr(function, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name


class Composite:
    """A value that consists of several traced tensors, e.g. a complex one, and handles torch functions itself."""

    def rule_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError


def call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Traces a call of a torch function, or raises `UnsupportedError`; errors name the user's line."""
    composite = next((value for value in flat((*args, *kwargs.values())) if isinstance(value, Composite)), None)
    handler = handler_of(function) if composite is None else composite.rule_of(function)
    name = name_of(function)
    if handler is None:
        raise UnsupportedError(f"torch's {name!r} cannot be traced yet", where=user_line(), hint=_suggestion(name))
    if "axis" in kwargs and "dim" not in kwargs:  # numpy's name, which torch accepts as well
        kwargs = {"dim" if key == "axis" else key: value for key, value in kwargs.items()}
    if is_any_autocast_enabled():
        handler = under_autocast(function, handler)
    return located(name, handler, args, kwargs)


def calling(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    """Returns a function or method that traces a torch function, optionally with swapped operands."""

    def calls(*args: Any, **kwargs: Any) -> Any:
        return call(function, args[::-1] if swapped else args, kwargs)

    return calls


def located(name: str, handler: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a handler and adds the user's line to its errors."""
    if "out" in kwargs:
        kwargs = _without_out(name, kwargs)
    hook = sys.gettrace()
    is_traced = getattr(hook, "follows_users", False)  # a hook that follows the user's function need not follow handlers
    try:
        for a in args:
            if isinstance(getattr(a, "_memory", None), TracedMemory):
                require_current(a)
        before = [getattr(a, "_writes", None) for a in args]
        if is_traced:
            sys.settrace(None)
        result = detach_like_torch(name, handler(*args, **kwargs), args, before)
        return _with_own_memory(name, result, args, before)
    except TraceError as error:
        _require_numbers((*args, *kwargs.values()))
        if error.where is None:
            raise type(error)(error.what, where=user_line(), hint=error.hint) from None
        raise
    except FusegenError:  # some are also TypeErrors or ValueErrors
        raise
    except _ARGUMENT_ERRORS as error:
        _require_numbers((*args, *kwargs.values()))
        raise TraceError(
            f"{name}: {error or type(error).__name__}",
            where=user_line(),
            hint="leave the argument out or pass another one: not all of torch's arguments are supported",
        ) from error
    finally:
        if is_traced:
            sys.settrace(hook)


def _with_own_memory(name: str, result: Any, args: Sequence[Any], before: Sequence[int | None]) -> Any:
    """Gives a result its own memory if a handler returned an argument or a view where torch returns new memory."""
    is_tensor, is_argument = hasattr(result, "_memory"), any(result is a for a in args)
    if is_tensor and not is_argument and name not in _ITSELF_OR_VIEWS:
        return result if result._root == result._position else result._tracer.value(result._position)
    is_copied = False
    if is_tensor and name in ("contiguous", "ravel"):
        memory, position = result._memory, result._position
        if not memory.declared and not memory.parameter and position != memory.value:  # a view of unknown strides
            return result._tracer.value(position, TracedMemory.possible_alias(memory, position))
        is_copied = is_argument and result._tracer.is_copied(position, memory, contiguous=True)
    if not is_argument or (name in _ITSELF_OR_VIEWS and not is_copied):
        return result
    writes = next(w for a, w in zip(args, before, strict=True) if a is result)
    return result if writes is None or writes != result._writes else result._tracer.value(result._position)


_VIEWS = """
    detach alias view view_as reshape reshape_as expand expand_as broadcast_to flatten unflatten ravel squeeze unsqueeze __getitem__
    permute transpose t T mT adjoint movedim moveaxis swapaxes swapdims narrow chunk split unbind diagonal data select
    linalg_diagonal unfold meshgrid broadcast_tensors
"""
_ITSELF_OR_VIEWS = MAY_RETURN_INPUT.union(_VIEWS.split())
"""Functions that may return the tensor itself, or a view of all of it."""


def _without_out(name: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    if kwargs["out"] is not None:
        message = f"{name}: out= would write to a tensor, which cannot be traced"
        raise UnsupportedError(message, where=user_line(), hint="leave out= out, and use the returned tensor")
    return {key: value for key, value in kwargs.items() if key != "out"}


def _require_numbers(values: Iterable[Any]) -> None:
    """Specializes run-time scalars among the arguments, since the call may be valid with their values."""
    for value in flat(values):
        if hasattr(value, "require_static"):
            value.require_static()


def known_functions() -> list[Callable[..., Any]]:
    return sorted(HANDLERS, key=name_of)


_CLOSE = 0.9
"""Suggested names need at least this similarity: torch has the unknown name, so it is not a typo."""


_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "masked_scatter", "masked_scatter_", "unique", "unique_consecutive"}
)
"""Functions whose result size depends on values."""


def _suggestion(name: str) -> str:
    if name in _BY_VALUES:
        return (
            "the size of its result depends on values: use torch.where(mask, x, other) and sums, or call it outside of the kernel"
        )
    if name.endswith("_") and not name.endswith("__"):
        return "use the function without the trailing underscore; to write to a parameter, declare mutates= and call x.copy_(value)"
    known = sorted({known_name for known_name in map(name_of, HANDLERS) if not known_name.endswith("_")})
    matches = difflib.get_close_matches(name, known, n=3, cutoff=_CLOSE)
    listed = f"; similar names: {', '.join(matches)}" if matches else ""
    return f"write it with operations that can be traced, or call it outside of the kernel{listed}"
