"""Conditions on the state of Python objects: true now, and asked again before each call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from fusegen.guards.places import Kind, Read, Slot
from fusegen.guards.values import contents, is_a, is_plain, matcher, same
from fusegen.native import NativeChoice

Layout: TypeAlias = tuple[Tensor, int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""A tensor, its address, its shape, its strides and its dtype."""

_MOST = 64  # values in a container that are looked at one by one
_PLACES = (
    Kind.ITEM,
    Kind.ATTRIBUTE,
    Kind.TYPE,
    Kind.CELL,
    Kind.LENGTH,
    Kind.RESULT,
    Kind.METHOD,
    Kind.HAS,
    Kind.MISSING,
    Kind.DEFINED,
    Kind.PARAMETER,
    Kind.BUFFER,
    Kind.SUBMODULE,
)
"""Kinds of places that the native module reads itself, in its order."""

_WITHIN = {Kind.DEFINED: "__dict__", Kind.PARAMETER: "_parameters", Kind.BUFFER: "_buffers", Kind.SUBMODULE: "_modules"}


class Conditions:
    """Conditions that are true now, and may be asked for again at little cost.

    Args:
        weak: tells which objects are held by a weak reference, where they can be: a condition on one that is gone is false.
    """

    def __init__(self, weak: Callable[[object], bool] = lambda _: False) -> None:
        self._weak = weak
        self._references: dict[int, weakref.ref[Any] | None] = {}  # by ids of what the places hold
        self._places: list[tuple[Slot, Any]] = []
        self._known: set[tuple[int, object]] = set()
        self._sized: dict[int, Any] = {}
        self._tensors: dict[int, Tensor] = {}
        self._classes: dict[type, Mapping[str, Any]] = {}

    def item(self, owner: Any, key: Any) -> None:
        """A dictionary, a list or a class holds the same object under a key, and where that is a container, it holds the same."""
        if (id(owner), key) in self._known:
            return
        self._known.add((id(owner), key))
        held = self._classes.setdefault(owner, vars(owner)) if isinstance(owner, type) else owner
        self._place(Slot(held, Kind.ITEM, key), held[key])

    def read(self, read: Read) -> None:
        """A place reads the same, however it is reached."""
        slot = read.slot
        if (id(slot.owner), (slot.kind, slot.key)) not in self._known:
            self._known.add((id(slot.owner), (slot.kind, slot.key)))
            self._place(slot, read.value)

    def holds(self, question: Callable[..., bool], *values: object) -> None:
        """A function of some values is true."""
        self._places.append((Slot(question, Kind.RESULT, values), True))

    def identity(self, slot: Slot, value: Any) -> None:
        """A place holds this object, or the same plain value, whatever that holds."""
        self._places.append((slot, value))

    def sizes(self, held: Sequence[Any]) -> None:
        """Containers hold as many things."""
        self._sized |= {id(each): each for each in held}

    def function(self) -> NativeChoice[Callable[[], bool]]:
        """A function that tells if all of it is true still. It keeps all objects that it asks, but for those held weakly."""
        layouts = [(tensor, *_layout(tensor)) for tensor in self._tensors.values() if not tensor.is_nested]
        for tensor in (tensor for tensor in self._tensors.values() if tensor.is_nested):
            self.holds(lambda nested, *wanted: (nested.data_ptr(), nested.dtype) == wanted, tensor, tensor.data_ptr(), tensor.dtype)
        sizes = [_Asked(Slot(each, Kind.LENGTH), len(each)) for each in self._sized.values()]
        asked = [*sizes, *(self._asked(slot, value) for slot, value in self._places)]
        return NativeChoice(lambda module: _native(module, asked, layouts), lambda: _written(asked, layouts))

    def _asked(self, slot: Slot, value: Any) -> _Asked:
        owner, wanted = self._reference(slot.owner), self._reference(value)
        held = slot if owner is None else Slot(owner, slot.kind, slot.key)
        return _Asked(held, value if wanted is None else wanted, owner is not None, wanted is not None)

    def _reference(self, value: object) -> weakref.ref[Any] | None:
        """The weak reference by which an object is held, if it is."""
        if id(value) not in self._references:
            self._references[id(value)] = _weak_reference(value) if self._weak(value) else None
        return self._references[id(value)]

    def _place(self, slot: Slot, value: Any) -> None:
        if is_a(value, Tensor):
            self._tensors[id(value)] = value
        self._places.append((slot, value))
        if not is_plain(value):
            self._contents(value)

    def _contents(self, value: Any) -> None:
        """Adds what a container holds; of a large one with more than plain values, its length."""
        inside = contents(value)
        if inside is None or is_a(value, Tensor) or (id(value), None) in self._known:
            return
        self._known.add((id(value), None))
        if not inside and isinstance(value, list | tuple | dict | set | frozenset):
            self._places.append((Slot(value, Kind.LENGTH), 0))
        elif isinstance(value, list | tuple | dict) and len(value) <= _MOST and (keys := _keys(value)) is not None:
            self._places.append((Slot(value, Kind.LENGTH), len(value)))
            for key in keys:
                self.item(value, key)
        elif len(inside) <= _MOST or all(map(is_plain, inside)):
            self.holds(matcher(value), value)
        elif hasattr(value, "__len__"):
            self._places.append((Slot(value, Kind.LENGTH), len(value)))


def _keys(container: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Sequence[Any] | None:
    """The keys by which a container gives what it holds, as far as they are texts and whole numbers."""
    if not isinstance(container, dict):
        return range(len(container))
    return list(container) if all(type(key) in (str, int) for key in container) else None


@dataclass(frozen=True)
class _Asked:
    """A condition: a place, and what it holds. Weak ones are references to the owner, and to what is held."""

    slot: Slot
    value: Any
    is_owner_weak: bool = False
    is_value_weak: bool = False


def _weak_reference(value: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def _native(module: ModuleType, asked: Sequence[_Asked], layouts: Sequence[Layout]) -> Callable[[], bool]:
    """The conditions as the native module asks them."""
    places = [(*_native_place(each), each.value, each.is_owner_weak, each.is_value_weak) for each in asked]
    found: Callable[[], bool] = module.Conditions(same, places, [layout[:4] for layout in layouts])
    return found


def _native_place(asked: _Asked) -> tuple[int, Any, Any]:
    """A place as the native module can read it, by its number, with its owner and key."""
    kind, owner, key = asked.slot.kind, asked.slot.owner, asked.slot.key
    return _PLACES.index(kind), owner, (_WITHIN[kind], key) if kind in _WITHIN else key


def _written(asked: Sequence[_Asked], layouts: Sequence[Layout]) -> Callable[[], bool]:
    """The conditions as a function of Python."""
    tensors, wanted_layouts = [tensor for tensor, *_ in layouts], [tuple(layout) for _, *layout in layouts]
    scope: dict[str, Any] = {"same": same, "lie_there": lambda: list(map(_layout, tensors)) == wanted_layouts}
    lines: list[str] = []

    def name(value: object, *, is_weak: bool = False) -> str:
        """A name for an object, which a line of its own takes from a reference."""
        if value is None or value is True or value is False:
            return repr(value)
        known, named = f"c{id(value)}", f"o{id(value)}" if is_weak else f"c{id(value)}"
        if is_weak and known not in scope:
            lines.append(f"if ({named} := {known}()) is None: return False")
        scope[known] = value
        return named

    for each in asked:
        key = "" if type(each.slot.key) in (str, int) else name(each.slot.key)
        place = each.slot.text(name(each.slot.owner, is_weak=each.is_owner_weak), key)
        wanted = name(each.value, is_weak=each.is_value_weak)
        is_one = each.is_value_weak or not is_plain(each.value) or each.value is None or isinstance(each.value, bool)
        condition = f"{place} is {wanted}" if is_one else f"(v := {place}) is {wanted} or same(v, {wanted})"
        lines.append(f"if not ({condition}): return False")
    body = "\n".join(f"        {line}" for line in (*lines, "return lie_there()"))
    text = f"def unchanged():\n    try:\n{body}\n    except (LookupError, AttributeError, ValueError, TypeError, NameError):\n"
    exec(compile(f"{text}        return False\n", "<conditions>", "exec"), scope)
    found: Callable[[], bool] = scope.pop("unchanged")  # no cycle, in which a graph's memory would wait for the collector
    return found


def _layout(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """A tensor's address, shape, strides and dtype, past what a subclass makes of these."""
    return Tensor.data_ptr(tensor), tuple(Tensor.size(tensor)), Tensor.stride(tensor), cast(Any, Tensor.dtype).__get__(tensor)
