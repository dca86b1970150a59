"""The way from a function and its arguments to a tensor that it closes over, as text: steps that Python can take anew.

`torch.compile` follows them to find the tensor at a place that it knows, and can watch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MethodType

from torch import nn

from fusegen.guards.slots import Kind, Read, Slot

BETWEEN = "\t"
"""Parts the steps of a way."""

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
