"""Places that hold what a function reads, and the way to them from the function and its arguments.

A way is text: steps that Python can take anew. `torch.compile` follows them to find a tensor that a function closes over at a place
that it knows, and can watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from keyword import iskeyword
from types import FunctionType, MethodType
from typing import Any

from torch import nn

GONE = (AttributeError, LookupError, ValueError, TypeError, NameError)
"""Errors of a place that holds nothing any more."""


class Kind(Enum):
    """The step from an owner to a place: the text of an expression of the owner and the key."""

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
        """The value that the place holds now.

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
        holds: of a container, whether it still holds what it held then; None for all else.
        was_empty: whether it held nothing.
    """

    slot: Slot
    value: Any
    holds: Callable[[Any], bool] | None = None
    was_empty: bool = False


BETWEEN = "\t"
"""Parts the steps of a way."""

# Ways.

_PLAIN = (int, float, complex, str, bytes, type(None))
_MEMBERS = (Kind.ATTRIBUTE, Kind.PARAMETER, Kind.BUFFER, Kind.SUBMODULE)


def ways(function: object, arguments: Mapping[int, object], reads: Sequence[Read], slots: Sequence[Slot]) -> tuple[str | None, ...]:
    """The ways to some places.

    Args:
        function: the function, or a bound method.
        arguments: by position, what it was given besides tensors and numbers.
        reads: in their order.
        slots: the places.

    Returns:
        For each place ``function`` or ``argument N``, then steps ``member NAME``, ``item N``, ``key TEXT``, ``cell N`` or
        ``globals``; None where there is no such way.
    """
    known: dict[int, str] = {}
    _reach(known, function, "function")
    for position, value in arguments.items():
        _reach(known, value, f"argument {position}")
    for read in reads:
        way = _way(known, read.slot)
        if way is not None:
            _reach(known, read.value, way)
    return tuple(_way(known, slot) for slot in slots)


def _reach(known: dict[int, str], value: object, way: str) -> None:
    """Notes the way to an object, and to all that belongs to it."""
    stack = [(value, way)]
    while stack:
        value, way = stack.pop()
        if id(value) not in known:
            known[id(value)] = way
            stack += [(inner, f"{way}{BETWEEN}{step}") for step, inner in _inner(value) if not isinstance(inner, _PLAIN)]


def _inner(value: object) -> Iterator[tuple[str, object]]:
    """All that belongs to an object, each with the step that leads there."""
    if isinstance(value, FunctionType):
        yield "globals", value.__globals__
    elif isinstance(value, MethodType):
        yield "member __self__", value.__self__
        yield "member __func__", value.__func__
    elif isinstance(value, nn.Module):
        yield from ((f"member {name}", inner) for name, inner in value._modules.items() if _is_key(name))
    elif isinstance(value, (list, tuple)):
        yield from ((f"item {place}", inner) for place, inner in enumerate(value))
    elif isinstance(value, dict) and "__builtins__" not in value:  # all variables of a module are too many
        yield from ((f"key {key}", inner) for key, inner in value.items() if isinstance(key, str) and _is_key(key))


def _way(known: Mapping[int, str], slot: Slot) -> str | None:
    start, step = known.get(id(slot.owner)), _step(slot)
    return None if start is None or step is None else f"{start}{BETWEEN}{step}"


def _step(slot: Slot) -> str | None:
    key = slot.key
    if isinstance(key, str) and not _is_key(key):
        return None
    if slot.kind in _MEMBERS and isinstance(key, str):
        return f"member {key}"
    if slot.kind is Kind.CELL:
        return f"cell {key}"
    if slot.kind is Kind.ITEM and type(key) in (int, str):
        return f"item {key}" if type(key) is int else f"key {key}"
    return None


def _is_key(text: str) -> bool:
    """Tells if a name can stand in a way."""
    return BETWEEN not in text and "\n" not in text
