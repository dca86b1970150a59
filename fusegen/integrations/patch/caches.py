"""Caches of keys and values, as ``transformers`` has them: objects that change, as a kernel's arguments do not.

A layer whose cache is empty and only grows is one kernel, which returns its keys and values. With another cache it is two
(`fusegen.integrations.patch.between`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

from torch import nn

from fusegen.errors import UnsupportedError

_CACHES = "transformers.cache_utils"
_MODELS = "transformers.modeling_utils"
_MASK = "attention_mask"

Function: TypeAlias = Callable[..., Any]
"""A function of a module and the arguments of a call."""


@dataclass(frozen=True)
class Place:
    """The argument of a call that is a cache.

    Attributes:
        key: its position or name.
        kind: the cache's class.
    """

    key: int | str
    kind: type

    def put(self, value: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another value there."""
        if isinstance(self.key, int):
            return (*args[: self.key], value, *args[self.key + 1 :]), dict(kwargs)
        return tuple(args), {**kwargs, self.key: value}


def cache_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Place, Any] | None:
    """The argument of a call that is a cache, if there is one."""
    module = sys.modules.get(_CACHES)
    if module is None:
        return None
    for name, value in numbered(args, kwargs):
        if isinstance(value, module.Cache):
            return Place(name, type(value)), value
    return None


def numbered(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, Any]]:
    """The arguments of a call with their positions and names."""
    yield from enumerate(args)
    yield from kwargs.items()


def layer_indices(module: nn.Module) -> frozenset[int]:
    """The places in a cache of a module and of those inside of it."""
    return frozenset(index for each in module.modules() if isinstance(index := getattr(each, "layer_idx", None), int))


def place_in(cache: Any, indices: frozenset[int], name: str) -> int:
    """The one place that a module has in a cache.

    Raises:
        UnsupportedError: it has several, or the cache is several that hold something there.
    """
    if len(indices) != 1 or (is_pair(cache) and not any(fresh_parts(cache, next(iter(indices))))):
        raise UnsupportedError(f"{name} reads more than one place of its {type(cache).__name__}")
    (index,) = indices
    return index


def fresh_parts(cache: Any, index: int) -> tuple[bool, ...]:
    """For a cache, or each of two, whether it is fresh."""
    if not is_pair(cache):
        return (is_fresh(cache, index),)
    is_filled = bool(cache.is_updated.get(index))
    return is_fresh(cache.self_attention_cache, index), not is_filled and is_fresh(cache.cross_attention_cache, index)


def is_fresh(cache: Any, index: int) -> bool:
    """True if a cache holds nothing yet, and will give back what it is given: by the code of ``transformers``, which classes and
    objects may have replaced."""
    known, layers = sys.modules[_CACHES], cache.layers
    if cache.offloading or not _is_of(known, cache, "update"):
        return False
    layer = layers[index] if index < len(layers) else cache.layer_class_to_replicate
    kind = type(layer) if index < len(layers) else layer
    if kind not in (known.DynamicLayer, known.DynamicSlidingWindowLayer) or (kind is not layer and layer.is_initialized):
        return False
    return all(_is_of(known, layer, name) for name in ("update", "lazy_initialization"))


def is_pair(cache: object) -> bool:
    """True for a cache of two: one of a decoder's own keys, and one of its encoder's."""
    return isinstance(cache, sys.modules[_CACHES].EncoderDecoderCache)


def _is_of(module: ModuleType, owner: object, name: str) -> bool:
    """True if the code of a method stands in a module's file."""
    method = getattr(owner, name)
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    return code is not None and code.co_filename == module.__file__


class HandedCache:
    """Stands for a cache while a layer is traced.

    Args:
        kind: the class that it says to be of.

    Attributes:
        update_call: what the layer has called `update` with, keys and values first.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.update_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The new keys and values."""
        if self.update_call is not None:
            raise UnsupportedError("the layer updates its cache more than once")
        self.update_call = (keys, values, *args), kwargs
        return keys, values

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(f"the layer asks its cache for {name!r}, which differs from call to call")

    def __len__(self) -> NoReturn:
        self.__getattr__("len")


class EmptyCache(HandedCache):
    """Stands for a cache that holds nothing yet."""

    def get_seq_length(self, *_: Any) -> int:
        """How many keys it holds."""
        return 0

    def taken(self) -> Any:
        """The keys and values that it is to take, or None."""
        return None if self.update_call is None else self.update_call[0][:2]


class UnreadCache(EmptyCache):
    """Stands for a cache that a layer has no business with."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses."""
        self.__getattr__("update")

    def get_seq_length(self, *_: Any) -> Any:
        """Something that is no number."""
        return object()


class HandedPair(EmptyCache):
    """Stands for a cache of two, one of a decoder's own keys and one of its encoder's.

    Args:
        are_fresh: for each, whether it holds nothing yet.
    """

    def __init__(self, kind: type, are_fresh: Sequence[bool]) -> None:
        super().__init__(kind)
        part = sys.modules[_CACHES].DynamicCache
        parts = [(EmptyCache if is_empty else UnreadCache)(part) for is_empty in are_fresh]
        self.self_attention_cache, self.cross_attention_cache = parts
        self.is_updated: dict[int, bool] = {}
        self.get_seq_length = self.self_attention_cache.get_seq_length  # type: ignore[method-assign]

    def taken(self) -> Any:
        """What both are to take."""
        return self.self_attention_cache.taken(), self.cross_attention_cache.taken()


def fill(cache: Any, index: int, results: tuple[Any, Any]) -> Any:
    """The result of a layer, whose keys and values its cache takes."""
    result, taken = results
    if not is_pair(cache):
        if taken is not None:
            cache.update(*taken, index)
        return result
    own, of_encoder = taken
    if own is not None:
        cache.self_attention_cache.update(*own, index)
    if of_encoder is not None:
        cache.cross_attention_cache.update(*of_encoder, index)
        cache.is_updated[index] = True  # as a decoder does which fills it
    return result


def filling(function: Function, place: Place, are_fresh: Sequence[bool]) -> Function:
    """A layer's function that returns its result, and what the empty cache in this place is to take: keys and values, or None; of
    a cache of two, that of both.

    Args:
        are_fresh: for each part of the cache, whether it is empty.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handed = EmptyCache(place.kind) if len(are_fresh) == 1 else HandedPair(place.kind, are_fresh)
        given, named = place.put(handed, args, kwargs)
        return function(module, *given, **named), handed.taken()

    return call
