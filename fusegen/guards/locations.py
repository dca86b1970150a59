"""Locations of the state that a function reads: paths to them, conditions on their values, and their counterparts in another
object."""

from __future__ import annotations

import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from keyword import iskeyword
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from fusegen.guards.values import contents, equality_test, has_identity, is_a, is_plain, same, weak_reference
from fusegen.guards.watch import is_closed
from fusegen.native import NativeChoice

GONE = (AttributeError, LookupError, ValueError, TypeError, NameError)


class AccessKind(Enum):
    """The access from an owner to a location, as an expression of the owner ``o`` and the key ``k``."""

    ATTRIBUTE = "getattr({o}, {k})"
    ITEM = "{o}[{k}]"
    TYPE = "type({o})"
    PARAMETER = "{o}._parameters[{k}]"
    BUFFER = "{o}._buffers[{k}]"
    SUBMODULE = "{o}._modules[{k}]"
    METHOD = "(m.__func__ if (m := getattr({o}, {k})).__self__ is {o} else None)"  # a bound method of the owner
    DEFINED = "{o}.__dict__[{k}]"
    HAS = "hasattr({o}, {k})"
    CELL = "{o}.__closure__[{k}].cell_contents"
    LENGTH = "len({o})"
    RESULT = "{o}(*{k})"
    MISSING = "{o}.keys().isdisjoint({k})"
    CACHE = "{o}.cache_info()"


@dataclass(frozen=True, eq=False)
class StateLocation:
    """A storage location: an owner (an object, a dictionary of variables, a function) and an access in it."""

    owner: Any
    kind: AccessKind
    key: object = None

    def get(self) -> Any:
        return _GETTERS[self.kind](self.owner, self.key)

    def text(self, owner: str, key: str) -> str:
        """Returns a Python expression of the location. `key` is an expression, used unless the key is a literal."""
        is_name = isinstance(self.key, str) and self.key.isidentifier() and self.key.isascii() and not iskeyword(self.key)
        if self.kind is AccessKind.ATTRIBUTE and is_name:
            return f"{owner}.{self.key}"
        return self.kind.value.format(o=owner, k=repr(self.key) if type(self.key) in (str, int) else key)


_GETTERS: dict[AccessKind, Callable[[Any, Any], Any]] = {
    AccessKind.ATTRIBUTE: getattr,
    AccessKind.ITEM: operator.getitem,
    AccessKind.TYPE: lambda owner, _: type(owner),
    AccessKind.PARAMETER: lambda owner, key: owner._parameters[key],
    AccessKind.BUFFER: lambda owner, key: owner._buffers[key],
    AccessKind.SUBMODULE: lambda owner, key: owner._modules[key],
    AccessKind.METHOD: lambda owner, key: method.__func__ if (method := getattr(owner, key)).__self__ is owner else None,
    AccessKind.DEFINED: lambda owner, key: owner.__dict__[key],
    AccessKind.HAS: hasattr,
    AccessKind.CELL: lambda owner, key: owner.__closure__[key].cell_contents,
    AccessKind.LENGTH: lambda owner, _: len(owner),
    AccessKind.RESULT: lambda owner, key: owner(*key),
    AccessKind.MISSING: lambda owner, key: owner.keys().isdisjoint(key),
    AccessKind.CACHE: lambda owner, _: owner.cache_info(),
}


@dataclass(frozen=True, eq=False)
class StateRead:
    """A read during tracing. For a container, `holds` tells whether its contents are unchanged; it is None for other values."""

    location: StateLocation
    value: Any
    holds: Callable[[Any], bool] | None = None
    was_empty: bool = False


PATH_SEPARATOR = "\t"

# Paths from the function and its arguments to a location, as text. `torch.compile` follows them to locate captured tensors that it
# can guard itself.

_PLAIN = (int, float, complex, str, bytes, type(None))
_MEMBERS = (AccessKind.ATTRIBUTE, AccessKind.PARAMETER, AccessKind.BUFFER, AccessKind.SUBMODULE)


def find_paths(
    function: object, arguments: Mapping[int, object], reads: Sequence[StateRead], slots: Sequence[StateLocation]
) -> tuple[str | None, ...]:
    """Finds paths to locations from the function and its arguments.

    Args:
        arguments: all arguments but tensors and numbers, by position.
        reads: reads in order of execution.

    Returns:
        For each location ``function`` or ``argument N``, followed by steps ``member NAME``, ``item N``, ``key TEXT``, ``cell N`` or
        ``globals``; None if it has no path.
    """
    known: dict[int, str] = {}
    _record_paths(known, function, "function")
    for position, value in arguments.items():
        _record_paths(known, value, f"argument {position}")
    for read in reads:
        path = _path(known, read.location)
        if path is not None:
            _record_paths(known, read.value, path)
    return tuple(_path(known, slot) for slot in slots)


def _record_paths(known: dict[int, str], value: object, path: str) -> None:
    stack = [(value, path)]
    while stack:
        value, path = stack.pop()
        if id(value) not in known:
            known[id(value)] = path
            stack += [(inner, f"{path}{PATH_SEPARATOR}{step}") for step, inner in _inner(value) if not isinstance(inner, _PLAIN)]


def _inner(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, FunctionType):
        yield "globals", value.__globals__
    elif isinstance(value, MethodType):
        yield "member __self__", value.__self__
        yield "member __func__", value.__func__
    elif isinstance(value, nn.Module):
        yield from ((f"member {name}", inner) for name, inner in value._modules.items() if _is_key(name))
    elif isinstance(value, (list, tuple)):
        yield from ((f"item {index}", inner) for index, inner in enumerate(value))
    elif isinstance(value, dict) and "__builtins__" not in value:  # not all variables of a module
        yield from ((f"key {key}", inner) for key, inner in value.items() if isinstance(key, str) and _is_key(key))


def _path(known: Mapping[int, str], slot: StateLocation) -> str | None:
    start, step = known.get(id(slot.owner)), _step(slot)
    return None if start is None or step is None else f"{start}{PATH_SEPARATOR}{step}"


def _step(slot: StateLocation) -> str | None:
    key = slot.key
    if isinstance(key, str) and not _is_key(key):
        return None
    if slot.kind in _MEMBERS and isinstance(key, str):
        return f"member {key}"
    if slot.kind is AccessKind.CELL:
        return f"cell {key}"
    if slot.kind is AccessKind.ITEM and type(key) in (int, str):
        return f"item {key}" if type(key) is int else f"key {key}"
    return None


def _is_key(text: str) -> bool:
    return PATH_SEPARATOR not in text and "\n" not in text


# Conditions: true now, checked again before each call.

_Layout: TypeAlias = tuple[Tensor, int, tuple[int, ...], tuple[int, ...], torch.dtype]

_MAX_ELEMENTS = 64  # containers with more elements are compared by a matcher or by length
_NATIVE_KINDS = (
    AccessKind.ITEM,
    AccessKind.ATTRIBUTE,
    AccessKind.TYPE,
    AccessKind.CELL,
    AccessKind.LENGTH,
    AccessKind.RESULT,
    AccessKind.METHOD,
    AccessKind.HAS,
    AccessKind.MISSING,
    AccessKind.DEFINED,
    AccessKind.PARAMETER,
    AccessKind.BUFFER,
    AccessKind.SUBMODULE,
)

_DICTIONARIES = {
    AccessKind.DEFINED: "__dict__",
    AccessKind.PARAMETER: "_parameters",
    AccessKind.BUFFER: "_buffers",
    AccessKind.SUBMODULE: "_modules",
}


class Conditions:
    """Conditions that are true now and cheap to check again. `is_weak` selects the objects to hold weakly; a condition on a
    collected object is false."""

    def __init__(self, is_weak: Callable[[object], bool] = lambda _: False) -> None:
        self._is_weak = is_weak
        self._references: dict[int, weakref.ref[Any] | None] = {}  # by ids of owners and values
        self._places: list[tuple[StateLocation, Any]] = []
        self._known: set[tuple[int, object]] = set()
        self._sized: dict[int, Any] = {}
        self._tensors: dict[int, Tensor] = {}
        self._classes: dict[type, Mapping[str, Any]] = {}

    def item(self, owner: Any, key: Any) -> None:
        """Requires the same object under a key of a dictionary, list or class, and the same contents if it is a container."""
        if (id(owner), key) in self._known:
            return
        self._known.add((id(owner), key))
        held = self._classes.setdefault(owner, vars(owner)) if isinstance(owner, type) else owner
        self._add_location(StateLocation(held, AccessKind.ITEM, key), held[key])

    def read(self, read: StateRead) -> None:
        slot = read.location
        if (id(slot.owner), (slot.kind, slot.key)) not in self._known:
            self._known.add((id(slot.owner), (slot.kind, slot.key)))
            self._add_location(slot, read.value)

    def holds(self, question: Callable[..., bool], *values: object) -> None:
        """Requires that a function of some values returns True."""
        self._places.append((StateLocation(question, AccessKind.RESULT, values), True))

    def identity(self, slot: StateLocation, value: Any) -> None:
        """Requires the same object, or the same plain value, at a location. Contents are not compared."""
        self._places.append((slot, value))

    def sizes(self, containers: Sequence[Any]) -> None:
        self._sized |= {id(each): each for each in containers}

    def function(self) -> NativeChoice[Callable[[], bool]]:
        """Returns a function that checks all conditions. It keeps objects alive unless they are held weakly."""
        layouts = [(tensor, *_layout(tensor)) for tensor in self._tensors.values() if not tensor.is_nested]
        for tensor in (tensor for tensor in self._tensors.values() if tensor.is_nested):
            self.holds(
                lambda nested, *expected: (nested.data_ptr(), nested.dtype) == expected, tensor, tensor.data_ptr(), tensor.dtype
            )
        sizes = [_Condition(StateLocation(each, AccessKind.LENGTH), len(each)) for each in self._sized.values()]
        asked = [*sizes, *(self._condition(slot, value) for slot, value in self._places)]
        return NativeChoice(lambda module: _native_check(module, asked, layouts), lambda: _python_check(asked, layouts))

    def _condition(self, slot: StateLocation, value: Any) -> _Condition:
        owner, weak_value = self._reference(slot.owner), self._reference(value)
        held = slot if owner is None else StateLocation(owner, slot.kind, slot.key)
        return _Condition(held, value if weak_value is None else weak_value, owner is not None, weak_value is not None)

    def _reference(self, value: object) -> weakref.ref[Any] | None:
        """Returns the weak reference to an object, or None if it is held strongly."""
        if id(value) not in self._references:
            self._references[id(value)] = weak_reference(value) if self._is_weak(value) else None
        return self._references[id(value)]

    def _add_location(self, slot: StateLocation, value: Any) -> None:
        if is_a(value, Tensor):
            self._tensors[id(value)] = value
        self._places.append((slot, value))
        if not is_plain(value):
            self._add_contents(value)

    def _add_contents(self, value: Any) -> None:
        """Adds conditions on a container's contents; for large containers of objects, only on the length."""
        inside = contents(value)
        if inside is None or is_a(value, Tensor) or (id(value), None) in self._known:
            return
        self._known.add((id(value), None))
        if not inside and isinstance(value, list | tuple | dict | set | frozenset):
            self._places.append((StateLocation(value, AccessKind.LENGTH), 0))
        elif isinstance(value, list | tuple | dict) and len(value) <= _MAX_ELEMENTS and (keys := _keys(value)) is not None:
            self._places.append((StateLocation(value, AccessKind.LENGTH), len(value)))
            for key in keys:
                self.item(value, key)
        elif len(inside) <= _MAX_ELEMENTS or all(map(is_plain, inside)):
            self.holds(equality_test(value), value)
        elif hasattr(value, "__len__"):
            self._places.append((StateLocation(value, AccessKind.LENGTH), len(value)))


def _keys(container: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Sequence[Any] | None:
    if not isinstance(container, dict):
        return range(len(container))
    return list(container) if all(type(key) in (str, int) for key in container) else None


@dataclass(frozen=True)
class _Condition:
    """A condition: the expected value of a location. Weak fields hold references."""

    location: StateLocation
    value: Any
    is_owner_weak: bool = False
    is_value_weak: bool = False


def _native_check(module: ModuleType, asked: Sequence[_Condition], layouts: Sequence[_Layout]) -> Callable[[], bool]:
    entries = [(*_native_place(each), each.value, each.is_owner_weak, each.is_value_weak) for each in asked]
    check: Callable[[], bool] = module.Conditions(same, entries, [layout[:4] for layout in layouts])
    return check


def _native_place(asked: _Condition) -> tuple[int, Any, Any]:
    kind, owner, key = asked.location.kind, asked.location.owner, asked.location.key
    return _NATIVE_KINDS.index(kind), owner, (_DICTIONARIES[kind], key) if kind in _DICTIONARIES else key


def _python_check(asked: Sequence[_Condition], layouts: Sequence[_Layout]) -> Callable[[], bool]:
    """Returns the check without the native module. It resolves getters once: each call of a model checks hundreds of conditions."""
    tensors, expected_layouts = [tensor for tensor, *_ in layouts], [tuple(layout) for _, *layout in layouts]
    rows = [
        (_GETTERS[each.location.kind], each.location.owner, each.is_owner_weak, each.location.key, each.value, each.is_value_weak)
        for each in asked
    ]

    def unchanged() -> bool:
        try:
            for get, owner, is_owner_weak, key, expected, is_value_weak in rows:
                if is_owner_weak and (owner := owner()) is None:
                    return False
                if is_value_weak and (expected := expected()) is None:
                    return False
                value = get(owner, key)
                if value is not expected and not same(value, expected):
                    return False
            return list(map(_layout, tensors)) == expected_layouts
        except GONE:
            return False

    return unchanged


def _layout(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """A tensor's address, shape, strides and dtype, bypassing overrides of a subclass."""
    return Tensor.data_ptr(tensor), tuple(Tensor.size(tensor)), Tensor.stride(tensor), cast(Any, Tensor.dtype).__get__(tensor)


# Counterparts: the reads of a function of one layer, mapped to a similar layer. A function that reads the same values of both
# computes the same. It could also tell objects apart by identity, so the mapping must be one-to-one.

GUARDED = "__guarded__"
"""The class attribute with the names of the instance attributes that a trace of its calls depends on."""

_BOUND: dict[type, tuple[str, ...]] = {MethodType: ("__func__", "__self__"), super: ("__self__", "__thisclass__")}
"""Attributes to follow for interpreter objects that are not containers."""

_SHARED = (FunctionType, BuiltinFunctionType, type, ModuleType, MappingProxyType)
"""Owners that all layers share. They are their own counterparts."""


class Counterparts:
    """The one-to-one mapping of objects that a function read to those of another layer."""

    def __init__(self) -> None:
        self._counterparts: dict[int, tuple[Any, Any]] = {}  # by ids; holding the objects keeps the ids valid
        self._attributes: dict[int, Any] = {}  # counterparts of attribute dictionaries, by their ids
        self._taken: set[int] = set()

    def add(self, original: Any, counterpart: Any) -> bool:
        """Maps an object, and recursively its contents, to a counterpart. Returns False if a function could tell them apart."""
        if is_plain(original):
            return same(original, counterpart)
        if id(original) in self._counterparts:
            return self._counterparts[id(original)][1] is counterpart
        if id(counterpart) in self._taken or not (original is counterpart or self._may_correspond(original, counterpart)):
            return False
        self._counterparts[id(original)] = original, counterpart
        self._taken.add(id(counterpart))
        if is_a(original, (torch.Tensor, torch.nn.Module, FunctionType)):
            self._attributes[id(vars(original))] = vars(counterpart)
        return all(self.add(*pair) for pair in _pairs(original, counterpart))

    def map_function(self, original: Any, counterpart: Any) -> None:
        """Maps a function to a counterpart without comparing them."""
        self._counterparts[id(original)] = original, counterpart
        self._taken.add(id(counterpart))

    def read(self, read: StateRead) -> StateRead | None:
        """Returns the counterpart's read, or None if it reads another value or has no counterpart."""
        slot, owner = read.location, self._owner(read.location.owner)
        if slot.kind is AccessKind.CACHE or owner is None:  # a cache may hold results for specific objects
            return None
        if read.holds is not None and not read.holds(read.value):  # the container has changed since
            return None
        location = StateLocation(owner, slot.kind, slot.key)
        try:
            value = location.get()
        except GONE:
            return None
        if not self.add(read.value, value):
            return None
        return StateRead(location, value, None if read.holds is None else equality_test(value), read.was_empty)

    def _owner(self, owner: Any) -> Any:
        if id(owner) in self._counterparts:
            return self._counterparts[id(owner)][1]
        if id(owner) in self._attributes:
            return self._attributes[id(owner)]
        if is_a(owner, dict):  # only the items that are read matter
            return owner if _is_shared(owner) else None
        return owner if is_a(owner, _SHARED) and self.add(owner, owner) else None

    @staticmethod
    def _may_correspond(original: Any, counterpart: Any) -> bool:
        kind = type(original)
        if kind is not type(counterpart):
            return False
        if is_a(original, torch.nn.Module):
            return has_identity(original) and not is_closed(kind)
        return is_a(original, (torch.Tensor, dict, list, tuple, partial, MethodType)) or hasattr(kind, GUARDED)


def _is_shared(variables: dict[Any, Any]) -> bool:
    """True for a module's globals, the environment and `sys.modules`."""
    return "__name__" in variables or variables is sys.modules or variables is cast(Any, os.environ)._data


def _pairs(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """Yields pairs of the contents of two values. Different lengths yield an unequal pair."""
    names = _BOUND.get(type(a), getattr(type(a), GUARDED, ()))
    yield from ((getattr(a, name), getattr(b, name)) for name in names)
    if is_a(a, weakref.ref):  # a reference to a method yields a new one each time
        yield weakref.ref.__call__(a), weakref.ref.__call__(b)
    contents_a, contents_b = contents(a), contents(b)
    if contents_a is not None and contents_b is not None and not is_a(a, torch.Tensor):
        if len(contents_a) != len(contents_b):
            yield 0, 1
        yield from zip(contents_a, contents_b, strict=False)
