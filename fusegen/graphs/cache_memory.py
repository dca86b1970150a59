"""Memory of a static cache of keys and values, which recorded graphs own: whichever cache a call brings lies in it.

A graph reads and writes fixed addresses. Each `generate` makes a cache of its own, and beams make new keys in every step; so a
cache that comes has its tensors copied to the graphs' memory, and holds that memory from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.errors import UnsupportedError
from fusegen.guards import Conditions, exact, is_plain
from fusegen.native import Choice

Held: TypeAlias = dict[str, Any]
"""The variables of an object."""

_LENGTH = "cumulative_length_int"
"""The length of a sliding layer of ``transformers`` as a Python number: its `update` asks if the layer is full."""


class CacheView:
    """A cache taken apart.

    Args:
        cache: the object.

    Attributes:
        cache: a weak reference to it.
        slots: its tensors: the variables that hold one, and its name there.
        lengths: those of sliding layers, likewise, which advance in a call.
        parts: all these variables, object by object.
        layout: all that tells the shapes and settings of caches apart.
        is_current: true as long as the cache holds these very tensors and settings.

    Raises:
        UnsupportedError: it holds something else than tensors, plain values and layers that do.
    """

    is_current: Choice[Callable[[], bool]]

    def __init__(self, cache: object) -> None:
        self.cache = weakref.ref(cache)
        self.parts = list(_parts(cache))
        found: dict[type, list[tuple[Held, str]]] = {Tensor: [], int: [], object: [], list: []}
        for held in self.parts:
            if held.get("is_initialized") is False:
                raise UnsupportedError("its cache holds nothing yet")
            for name, value in held.items():
                found[_kind(name, value)].append((held, name))
        self.slots, self.lengths = found[Tensor], found[int]
        self._fixed = [*found[Tensor], *found[object], *found[list]]
        tensors = tuple((name, t.shape, t.stride(), t.dtype, t.device) for held, name in self.slots for t in (held[name],))
        self.layout = (type(cache), tensors, tuple((name, _exact(held[name])) for held, name in found[object]))
        self.refresh()

    def refresh(self) -> None:
        """Takes what the cache holds now for what it should hold."""
        facts = Conditions()
        facts.sizes(self.parts)
        for held, name in self._fixed:
            facts.item(held, name)
        self.is_current = facts.function()

    def phase(self, count: int, is_prepared: bool) -> tuple[object, ...]:
        """The part of the lengths that a call of some new tokens reads: where its masks and positions are arguments, if each layer
        is full, and else the numbers themselves."""
        if not is_prepared:
            return tuple(held[name] for held, name in self.lengths)
        return tuple(_phase(held[name], count, held["max_cache_len"]) for held, name in self.lengths)


class NewCaches:
    """Makes caches as a recorded run has made one, each with copies of what that one holds now.

    Args:
        cache: the run's, which each replay fills.

    Raises:
        UnsupportedError: it holds something else than tensors, plain values and layers that do.
    """

    def __init__(self, cache: object) -> None:
        CacheView(cache)
        self._cache = cache
        self()  # a cache that cannot be copied is refused now

    def __call__(self) -> object:
        """One more cache."""
        return _copied(self._cache)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return dict(value)
    if isinstance(value, list):
        return list(map(_copied, value))
    if is_plain(value) or isinstance(value, type):
        return value
    copy = object.__new__(type(value))
    vars(copy).update({name: _copied(each) for name, each in vars(value).items()})
    return copy


def is_cache(value: object) -> bool:
    """True for an object with layers, or one that holds such objects, as the caches of encoder-decoders do."""
    held = getattr(value, "__dict__", {})
    return has_layers(value) or any(map(has_layers, held.values()))


def has_layers(value: object) -> bool:
    """True for an object with a list of layers, as caches have them."""
    return isinstance(getattr(value, "layers", None), list)


def _phase(length: int, count: int, most: int) -> tuple[bool, int]:
    """The answers of a sliding layer's length: True if the layer is full, and the length itself where it becomes so."""
    is_full = length >= most
    return is_full, length if length + count > most and not is_full else 0


def _kind(name: str, value: Any) -> type:
    """The kind of a cache's variable: a tensor, a setting, or more of the cache.

    Raises:
        UnsupportedError: as none of these.
    """
    if isinstance(value, Tensor):
        return Tensor
    if name == _LENGTH:
        return int
    if is_plain(value) or isinstance(value, type) or (type(value) is dict and all(map(is_plain, value.values()))):
        return object
    if isinstance(value, list) or has_layers(value):
        return list
    raise UnsupportedError(f"its cache's {name!r} is a {type(value).__name__}", mend="use a StaticCache")


def _exact(value: Any) -> object:
    if type(value) is dict:
        return tuple((key, exact(each)) for key, each in value.items())
    return value if isinstance(value, type) else exact(value)


def _parts(cache: Any) -> Iterator[Held]:
    """The variables of a cache, of its layers, and of caches inside of it."""
    held = vars(cache)
    yield held
    for layer in held.get("layers", ()):
        yield vars(layer)
    for value in held.values():
        if has_layers(value):
            yield from _parts(value)


class CacheMemory:
    """The memory of caches of one layout.

    Args:
        view: the first of them.
    """

    def __init__(self, view: CacheView) -> None:
        self.tensors: list[Tensor] = []
        with torch.inference_mode(False):
            for held, name in view.slots:  # one by one, so that little lies twice
                held[name] = held[name].clone()
                self.tensors.append(held[name])
        self._bound = view
        view.refresh()

    def bind(self, view: CacheView) -> None:
        """Has a cache that is current lie in this memory, with what it holds; the one before takes its own away with it, if
        somebody has it."""
        if view is self._bound:
            return
        if self._bound.cache() not in (None, view.cache()):
            self._leave()
        for (held, name), tensor in zip(view.slots, self.tensors, strict=True):
            if held[name] is not tensor:
                tensor.copy_(held[name])
                held[name] = tensor
        self._bound = view
        view.refresh()

    def _leave(self) -> None:
        for (held, name), tensor in zip(self._bound.slots, self.tensors, strict=True):
            if held.get(name) is tensor:
                held[name] = tensor.clone()
