"""Conditions on the state of Python objects: true now, and asked again before each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CellType, ModuleType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from fusegen.guards.content import contents, is_a, matcher
from fusegen.guards.plain import is_plain, same
from fusegen.guards.slots import Kind, Read, Slot
from fusegen.native import Choice

Layout: TypeAlias = tuple[Tensor, int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""A tensor, its address, its shape, its strides and its dtype."""

_MOST = 64  # values in a container that are looked at one by one
_PLACES = (Kind.ITEM, Kind.ATTRIBUTE, Kind.TYPE, Kind.CELL, Kind.LENGTH, Kind.RESULT)
"""Kinds of places that the native module reads itself, in its order."""


class Conditions:
    """Conditions that are true now, and may be asked for again at little cost."""

    def __init__(self) -> None:
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

    def identity(self, slot: Slot) -> None:
        """A place holds the same object, whatever that holds."""
        self._places.append((slot, slot.get()))

    def sizes(self, held: Sequence[Any]) -> None:
        """Containers hold as many things."""
        self._sized |= {id(each): each for each in held}

    def function(self) -> Choice[Callable[[], bool]]:
        """A function that tells if all of it is true still. It keeps all objects that it asks."""
        sizes = [(each, len(each)) for each in self._sized.values()]
        layouts = [(tensor, *_layout(tensor)) for tensor in self._tensors.values() if not tensor.is_nested]
        for tensor in (tensor for tensor in self._tensors.values() if tensor.is_nested):
            self.holds(lambda nested, *wanted: (nested.data_ptr(), nested.dtype) == wanted, tensor, tensor.data_ptr(), tensor.dtype)
        given = self._places, sizes, layouts
        return Choice(lambda module: _native(module, *given), lambda: _written(*given))

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


def _native(
    module: ModuleType, places: Sequence[tuple[Slot, Any]], sizes: Sequence[tuple[Any, int]], layouts: Sequence[Layout]
) -> Callable[[], bool]:
    """The conditions as the native module asks them."""
    asked: list[tuple[int, Any, Any, Any]] = [(_PLACES.index(Kind.LENGTH), held, None, size) for held, size in sizes]
    for slot, value in places:
        kind, owner, key = _native_place(slot)
        asked.append((_PLACES.index(kind), owner, key, value))
    found: Callable[[], bool] = module.Conditions(same, asked, [layout[:4] for layout in layouts])
    return found


def _native_place(slot: Slot) -> tuple[Kind, Any, Any]:
    """A place as the native module can read it, with its owner and key."""
    kind, owner, key = slot.kind, slot.owner, slot.key
    if kind is Kind.CELL and type(cell := owner.__closure__[key]) is CellType:
        return kind, cell, None
    if kind is Kind.MISSING:
        return Kind.RESULT, owner.keys().isdisjoint, (key,)
    if kind is Kind.HAS:
        return Kind.RESULT, hasattr, (owner, key)
    is_known = kind in _PLACES and kind is not Kind.CELL
    return (kind, owner, key) if is_known else (Kind.RESULT, slot.get, ())


def _written(places: Sequence[tuple[Slot, Any]], sizes: Sequence[tuple[Any, int]], layouts: Sequence[Layout]) -> Callable[[], bool]:
    """The conditions as a function of Python."""
    held, lengths = [each for each, _ in sizes], [size for _, size in sizes]
    tensors, wanted_layouts = [tensor for tensor, *_ in layouts], [tuple(layout) for _, *layout in layouts]
    scope: dict[str, Any] = {
        "same": same,
        "has_sizes": lambda: list(map(len, held)) == lengths,
        "lie_there": lambda: list(map(_layout, tensors)) == wanted_layouts,
    }

    def name(value: object) -> str:
        if value is None or value is True or value is False:
            return repr(value)
        scope[f"c{id(value)}"] = value
        return f"c{id(value)}"

    texts = ["has_sizes()"]
    for slot, value in places:
        key = "" if type(slot.key) in (str, int) else name(slot.key)
        place, wanted = slot.text(name(slot.owner), key), name(value)
        is_one = not is_plain(value) or value is None or isinstance(value, bool)
        texts.append(f"{place} is {wanted}" if is_one else f"((v := {place}) is {wanted} or same(v, {wanted}))")
    texts.append("lie_there()")
    text = "def unchanged():\n    try:\n        return {}\n    except (LookupError, AttributeError, ValueError, TypeError):\n"
    exec(compile(text.format(" and ".join(texts)) + "        return False\n", "<conditions>", "exec"), scope)
    found: Callable[[], bool] = scope.pop("unchanged")  # no cycle, in which a graph's memory would wait for the collector
    return found


def _layout(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """A tensor's address, shape, strides and dtype, past what a subclass makes of these."""
    return Tensor.data_ptr(tensor), tuple(Tensor.size(tensor)), Tensor.stride(tensor), cast(Any, Tensor.dtype).__get__(tensor)
