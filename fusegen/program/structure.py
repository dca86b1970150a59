"""How the results of a function are put together of tensors, as data."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class Kind(Enum):
    """What holds the parts."""

    TENSOR = "tensor"
    COMPLEX = "complex"
    NONE = "none"
    TUPLE = "tuple"
    LIST = "list"
    DICT = "dict"
    NAMED_TUPLE = "named tuple"


@dataclass(frozen=True)
class Structure:
    """A tensor, None, or something that holds structures.

    Attributes:
        kind: what holds them; a complex tensor is one of pairs, its part.
        parts: in order.
        keys: of a dict's values, or names of a named tuple's fields.
        name: of a named tuple's class.
    """

    kind: Kind
    parts: tuple[Structure, ...] = ()
    keys: tuple[str | int, ...] = ()
    name: str = ""

    @property
    def tensors(self) -> int:
        """How many tensors it holds."""
        return 1 if self.kind is Kind.TENSOR else sum(part.tensors for part in self.parts)


def builder(structure: Structure) -> Callable[[list[Any]], Any] | None:
    """What makes results of their tensors; None where the tensor is the result.

    A named tuple is of a class of its own, with the name and the fields of the function's.

    Raises:
        ValueError: a named tuple's class or fields cannot have their names, or there are more keys than parts.
    """
    if structure.kind is Kind.TENSOR:
        return None
    make = _maker(structure)
    return lambda tensors: make(iter(tensors))


def _maker(structure: Structure) -> Callable[[Iterator[Any]], Any]:
    if structure.kind is Kind.TENSOR:
        return next
    parts = [_maker(part) for part in structure.parts]
    if len(structure.keys) != (len(parts) if structure.kind in (Kind.DICT, Kind.NAMED_TUPLE) else 0):
        raise ValueError(f"{len(structure.keys)} keys for {len(parts)} parts of a {structure.kind.value}")
    if structure.kind is Kind.NONE:
        return lambda tensors: None
    if structure.kind is Kind.COMPLEX:
        if len(parts) != 1:
            raise ValueError(f"{len(parts)} parts of a complex tensor")
        return lambda tensors: torch.view_as_complex(parts[0](tensors))
    if structure.kind is Kind.DICT:
        keys = structure.keys
        return lambda tensors: {key: part(tensors) for key, part in zip(keys, parts, strict=True)}
    if structure.kind is Kind.NAMED_TUPLE:
        named: Any = namedtuple(structure.name, [str(key) for key in structure.keys])  # type: ignore[misc]
        return lambda tensors: named(*(part(tensors) for part in parts))
    holder = tuple if structure.kind is Kind.TUPLE else list
    return lambda tensors: holder(part(tensors) for part in parts)
