"""Places that hold what a function reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from keyword import iskeyword
from typing import Any

GONE = (AttributeError, LookupError, ValueError, TypeError, NameError)
"""Errors of a place that holds nothing any more."""


class Kind(Enum):
    """How a place is reached from its owner: the text of an expression, of the owner and of the key."""

    ATTRIBUTE = "getattr({o}, {k})"
    ITEM = "{o}[{k}]"
    TYPE = "type({o})"
    PARAMETER = "{o}._parameters[{k}]"
    BUFFER = "{o}._buffers[{k}]"
    SUBMODULE = "{o}._modules[{k}]"
    METHOD = "(m.__func__ if (m := getattr({o}, {k})).__self__ is {o} else None)"  # bound to the owner
    DEFINED = "{o}.__dict__[{k}]"
    HAS = "hasattr({o}, {k})"
    CELL = "{o}.__closure__[{k}].cell_contents"
    LENGTH = "len({o})"
    RESULT = "{o}(*{k})"
    MISSING = "{o}.keys().isdisjoint({k})"
    CACHE = "{o}.cache_info()"


@dataclass(frozen=True, eq=False)
class Slot:
    """A place: an owner, and where in it.

    Attributes:
        owner: an object, a dictionary of variables, a function.
        kind: how the place is reached.
        key: a name, an index, the arguments of a call.
    """

    owner: Any
    kind: Kind
    key: object = None

    def get(self) -> Any:
        """What the place holds now.

        Raises:
            AttributeError, LookupError, ValueError: nothing any more.
        """
        return _GETTERS[self.kind](self.owner, self.key)

    def text(self, owner: str, key: str) -> str:
        """The place as an expression.

        Args:
            owner: the owner's expression.
            key: that of the key, where it is no literal.
        """
        is_name = isinstance(self.key, str) and self.key.isidentifier() and self.key.isascii() and not iskeyword(self.key)
        if self.kind is Kind.ATTRIBUTE and is_name:
            return f"{owner}.{self.key}"
        return self.kind.value.format(o=owner, k=repr(self.key) if type(self.key) in (str, int) else key)


_GETTERS: dict[Kind, Callable[[Any, Any], Any]] = {
    Kind.ATTRIBUTE: getattr,
    Kind.ITEM: lambda owner, key: owner[key],
    Kind.TYPE: lambda owner, _: type(owner),
    Kind.PARAMETER: lambda owner, key: owner._parameters[key],
    Kind.BUFFER: lambda owner, key: owner._buffers[key],
    Kind.SUBMODULE: lambda owner, key: owner._modules[key],
    Kind.METHOD: lambda owner, key: method.__func__ if (method := getattr(owner, key)).__self__ is owner else None,
    Kind.DEFINED: lambda owner, key: owner.__dict__[key],
    Kind.HAS: hasattr,
    Kind.CELL: lambda owner, key: owner.__closure__[key].cell_contents,
    Kind.LENGTH: lambda owner, _: len(owner),
    Kind.RESULT: lambda owner, key: owner(*key),
    Kind.MISSING: lambda owner, key: owner.keys().isdisjoint(key),
    Kind.CACHE: lambda owner, _: owner.cache_info(),
}


@dataclass(frozen=True, eq=False)
class Read:
    """A read while tracing: the place, and what it held.

    Attributes:
        holds: of a container, whether it still holds what it held then; None where the function reads no more of it than its
            elements that have places of their own, and for all else.
        was_empty: whether it held nothing.
    """

    slot: Slot
    value: Any
    holds: Callable[[Any], bool] | None = None
    was_empty: bool = False
