"""Memory of a static cache of keys and values, which recorded graphs own: whichever cache a call brings lies in it.

A graph reads and writes fixed addresses. Each `generate` makes a cache of its own, and beams make new keys in every step; so a
cache that comes has its tensors copied to the graphs' memory, and holds that memory from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem, is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.errors import UnsupportedError
from fusegen.state import exact, is_plain

Held: TypeAlias = dict[str, Any]
"""The variables of an object."""

_LENGTH = "cumulative_length_int"
"""How far a sliding layer of ``transformers`` has come, as a Python number: its `update` asks whether it is full."""


@dataclass(frozen=True)
class CacheView:
    """A cache taken apart.

    Attributes:
        cache: the object.
        slots: its tensors: the variables that hold one, and its name there.
        plain: its other values, likewise.
        lengths: those of sliding layers, likewise, which advance in a call.
        parts: all these variables, object by object.
    """

    cache: object
    slots: list[tuple[Held, str]]
    plain: list[tuple[Held, str]]
    lengths: list[tuple[Held, str]]
    parts: list[Held]

    @classmethod
    def of(cls, cache: object) -> CacheView:
        """Takes a cache apart.

        Raises:
            UnsupportedError: it holds something else than tensors, plain values and layers that do.
        """
        view = cls(cache, [], [], [], list(_parts(cache)))
        for held in view.parts:
            if held.get("is_initialized") is False:
                raise UnsupportedError("its cache holds nothing yet")
            for name, value in held.items():
                if isinstance(value, Tensor):
                    view.slots.append((held, name))
                elif name == _LENGTH:
                    view.lengths.append((held, name))
                elif is_plain(value) or isinstance(value, type) or (type(value) is dict and all(map(is_plain, value.values()))):
                    view.plain.append((held, name))
                elif not (isinstance(value, list) or hasattr(value, "layers")):
                    raise UnsupportedError(f"its cache's {name!r} is a {type(value).__name__}", mend="use a StaticCache")
        return view

    def layout(self) -> tuple[object, ...]:
        """All that tells the shapes and settings of caches apart."""
        tensors = tuple((name, t.shape, t.stride(), t.dtype, t.device) for held, name in self.slots for t in (held[name],))
        return (type(self.cache), tensors, tuple((name, _exact(held[name])) for held, name in self.plain))

    def phase(self, count: int, is_prepared: bool) -> tuple[object, ...]:
        """What a call of some new tokens reads of the lengths: where its masks and positions are arguments, whether each layer is
        full, and else the numbers themselves."""
        if not is_prepared:
            return tuple(held[name] for held, name in self.lengths)
        return tuple((held[name] >= held["max_cache_len"], held[name] + count > held["max_cache_len"]) for held, name in self.lengths)


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
        if hasattr(value, "layers"):
            yield from _parts(value)


class CacheMemory:
    """The memory of caches of one layout.

    Args:
        view: the first of them, whose tensors it becomes.
    """

    def __init__(self, view: CacheView) -> None:
        with torch.inference_mode(False):
            self.tensors = [held[name].clone() if held[name].is_inference() else held[name] for held, name in view.slots]
        self._view: weakref.ref[Any] | None = None
        self._owners: list[Held] = []
        self._names: list[str] = []
        self.bind(view)

    def holds(self) -> bool:
        """True if the cache that was bound last lies in this memory still."""
        return all(map(is_, map(getitem, self._owners, self._names), self.tensors))

    def bind(self, view: CacheView) -> None:
        """Has a cache lie in this memory, with what it holds; the one before takes its own away with it, if somebody has it."""
        former = self._view() if self._view is not None else None
        if former is not None and former is not view.cache:
            self._leave()
        self._owners, self._names = [held for held, _ in view.slots], [name for _, name in view.slots]
        for (held, name), tensor in zip(view.slots, self.tensors, strict=True):
            if held[name] is not tensor:
                tensor.copy_(held[name])
                held[name] = tensor
        self._view = weakref.ref(view.cache)

    def _leave(self) -> None:
        for held, name, tensor in zip(self._owners, self._names, self.tensors, strict=True):
            if held.get(name) is tensor:
                held[name] = tensor.clone()
