"""A kernel's parameters: which are tensors or run-time scalars, which select code, and what the user calls their dims."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

from fusegen.errors import ArgumentError

T = TypeVar("T")

_STATIC = "fusegen.static"
Static = Annotated[T, _STATIC]
"""``fg.Static[int]``: the argument's value selects code instead of being passed at run time."""

_REQUIRED = inspect.Parameter.empty
_REFUSED_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function.

    Attributes:
        function: the user's function.
        names: in order.
        defaults: where there are any.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    defaults: Mapping[str, object]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """The parameters of a function.

        Raises:
            ArgumentError: for ``*args`` and ``**kwargs``, which a kernel cannot have.
        """
        found = inspect.signature(function).parameters
        for parameter in found.values():
            if parameter.kind in _REFUSED_KINDS:
                raise ArgumentError(f"{function.__name__}: a kernel cannot take {parameter}", mend="name every parameter")
        defaults = {name: p.default for name, p in found.items() if p.default is not _REQUIRED}
        return cls(function, tuple(found), defaults)

    @cached_property
    def annotations(self) -> Mapping[str, Any]:
        """Resolved annotations; empty where they cannot be resolved, since they are optional."""
        try:
            return typing.get_type_hints(self.function, include_extras=True)
        except (NameError, TypeError, AttributeError):
            return {}

    @cached_property
    def static(self) -> frozenset[str]:
        """Parameters whose value selects code by their annotation."""
        return frozenset(n for n in self.names if _is_static(self.annotations.get(n)))

    @cached_property
    def dim_names(self) -> Mapping[str, tuple[str, ...]]:
        """Names of dims, from annotations such as ``Annotated[Tensor, "rows cols"]``."""
        found = {n: _dims(self.annotations.get(n)) for n in self.names}
        return {n: dims for n, dims in found.items() if dims}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All arguments in the order of the parameters.

        Raises:
            TypeError: as Python would for such a call.
        """
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        return [bound.arguments[name] for name in self.names]


def _is_static(annotation: Any) -> bool:
    if annotation in (bool, str):
        return True
    return typing.get_origin(annotation) is Annotated and _STATIC in annotation.__metadata__


def _dims(annotation: Any) -> tuple[str, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((d for part in typing.get_args(annotation) if (d := _dims(part))), ())
    if typing.get_origin(annotation) is not Annotated:
        return ()
    texts = [m for m in annotation.__metadata__ if isinstance(m, str) and m != _STATIC]
    return tuple(texts[0].split()) if texts else ()
