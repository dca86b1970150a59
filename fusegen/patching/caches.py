"""Caches of keys and values, as ``transformers`` has them: objects that change, as a kernel's arguments do not.

A layer whose cache is empty and only grows is one kernel, which returns its keys and values. With another cache it is two
(`fusegen.patching.between`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from fusegen.errors import UnsupportedError

_CACHES = "transformers.cache_utils"
_MODELS = "transformers.modeling_utils"
_MASK = "attention_mask"

Function: TypeAlias = Callable[..., Any]
"""A function of a module and the arguments of a call."""


@dataclass(frozen=True)
class Place:
    """The argument of a call that is a cache: a position or a name."""

    key: int | str

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
            return Place(name), value
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
        UnsupportedError: it has several, or the cache is several.
    """
    if len(indices) != 1 or isinstance(cache, sys.modules[_CACHES].EncoderDecoderCache):
        raise UnsupportedError(f"{name} reads more than one place of its {type(cache).__name__}")
    (index,) = indices
    return index


def is_fresh(cache: Any, index: int) -> bool:
    """True if a cache holds nothing yet, and will give back what it is given."""
    known, layers = sys.modules[_CACHES], cache.layers
    if cache.offloading:
        return False
    kind = type(layers[index]) if index < len(layers) else cache.layer_class_to_replicate
    return kind in (known.DynamicLayer, known.DynamicSlidingWindowLayer) and (
        index >= len(layers) or not layers[index].is_initialized
    )


class HandedCache:
    """Stands for a cache while a layer is traced.

    Attributes:
        update_call: what the layer has called `update` with, keys and values first.
    """

    def __init__(self) -> None:
        self.update_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The new keys and values."""
        if self.update_call is not None:
            raise UnsupportedError("the layer updates its cache more than once")
        self.update_call = (keys, values, *args), kwargs
        return keys, values


def filling(function: Function, place: Place) -> Function:
    """A layer's function that returns its result, and what the empty cache in this place is to take: keys and values, or None."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handed = HandedCache()
        given, named = place.put(handed, args, kwargs)
        result = function(module, *given, **named)
        return result, None if handed.update_call is None else handed.update_call[0][:2]

    return call
