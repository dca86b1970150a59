"""Objects in the places of others: the reads of a function of one layer have counterparts in another layer that is like it.

A function that reads the same of both does the same. It could tell them apart by a read, or by their identity: so each object has
one counterpart, and is that of one object.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, cast

import torch

from fusegen.guards.code import is_closed
from fusegen.guards.places import GONE, Kind, Read, Slot
from fusegen.guards.values import contents, has_identity, is_a, is_plain, matcher, same

GUARDED = "__guarded__"
"""The attribute of a class that names those attributes of its objects by which a trace of their calls goes."""

_BOUND: dict[type, tuple[str, ...]] = {MethodType: ("__func__", "__self__"), super: ("__self__", "__thisclass__")}
"""Names of what objects of the interpreter's lead to, which are no containers."""

_SHARED = (FunctionType, BuiltinFunctionType, type, ModuleType, MappingProxyType)
"""Owners that are of no object: what leads to one that is has no counterpart that leads to another one."""


class Counterparts:
    """The counterparts of objects that a function read."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, Any]] = {}  # by ids, with the objects, whose ids stay theirs
        self._attributes: dict[int, Any] = {}  # of objects, by the ids of the dictionaries that hold them
        self._taken: set[int] = set()

    def add(self, one: Any, other: Any) -> bool:
        """Makes an object the counterpart of another one, and likewise what both hold; False where a function could tell."""
        if is_plain(one):
            return same(one, other)
        if id(one) in self._of:
            return self._of[id(one)][1] is other
        if id(other) in self._taken or not (one is other or self._may_stand_for(one, other)):
            return False
        self._of[id(one)] = one, other
        self._taken.add(id(other))
        if is_a(one, (torch.Tensor, torch.nn.Module, FunctionType)):
            self._attributes[id(vars(one))] = vars(other)
        return all(self.add(*pair) for pair in _inside(one, other))

    def put(self, one: Any, other: Any) -> None:
        """Makes a function the counterpart of another one that was made alike."""
        self._of[id(one)] = one, other
        self._taken.add(id(other))

    def read(self, read: Read) -> Read | None:
        """The same read of the counterpart; None where that holds something else, or something that has no counterpart."""
        slot, owner = read.slot, self._owner(read.slot.owner)
        if slot.kind is Kind.CACHE or owner is None:  # a cache may hold what it was given for an object
            return None
        if read.holds is not None and not read.holds(read.value):  # a container that has changed since
            return None
        place = Slot(owner, slot.kind, slot.key)
        try:
            value = place.get()
        except GONE:
            return None
        if not self.add(read.value, value):
            return None
        return Read(place, value, None if read.holds is None else matcher(value), read.was_empty)

    def _owner(self, owner: Any) -> Any:
        if id(owner) in self._of:
            return self._of[id(owner)][1]
        if id(owner) in self._attributes:
            return self._attributes[id(owner)]
        if is_a(owner, dict):  # of which no more counts than is read
            return owner if _is_shared(owner) else None
        return owner if is_a(owner, _SHARED) and self.add(owner, owner) else None

    @staticmethod
    def _may_stand_for(one: Any, other: Any) -> bool:
        kind = type(one)
        if kind is not type(other):
            return False
        if is_a(one, torch.nn.Module):
            return has_identity(one) and not is_closed(kind)
        return is_a(one, (torch.Tensor, dict, list, tuple, partial, MethodType)) or hasattr(kind, GUARDED)


def _is_shared(variables: dict[Any, Any]) -> bool:
    """True for the variables of a module or of the environment, and for the table of modules."""
    return "__name__" in variables or variables is sys.modules or variables is cast(Any, os.environ)._data


def _inside(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """The contents of two values, in pairs; an unequal pair where there are more in one."""
    names = _BOUND.get(type(one), getattr(type(one), GUARDED, ()))
    yield from ((getattr(one, name), getattr(other, name)) for name in names)
    if is_a(one, weakref.ref):  # that of a method gives a new one each time
        yield weakref.ref.__call__(one), weakref.ref.__call__(other)
    inner, others = contents(one), contents(other)
    if inner is not None and others is not None and not is_a(one, torch.Tensor):
        if len(inner) != len(others):
            yield 0, 1
        yield from zip(inner, others, strict=False)
