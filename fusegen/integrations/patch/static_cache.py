"""A layer with a static cache of ``transformers`` as one kernel, which writes the new keys and values and attends to all."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusegen.integrations.patch.caches import (
    CACHES,
    CacheArgument,
    CacheFunction,
    CacheStandIn,
    is_defined_in,
    is_pair,
    keyed_arguments,
)

_MOST_POSITIONS = 16  # in a step of decoding, also a speculative one; longer calls fill a cache
_COUNT = "cumulative_length_int"  # the length on the host, which a cache of a sliding window also has


@dataclass(frozen=True)
class CacheSlots:
    """The slots of a layer in a static cache.

    Attributes:
        layer: the layer's part of the cache.
        added: the number of new positions.
        is_full: True if they replace the oldest one.
    """

    layer: Any
    added: int
    is_full: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer.keys, self.layer.values, self.layer.cumulative_length

    def count(self) -> None:
        """Adds the new positions to the length on the host."""
        if hasattr(self.layer, _COUNT):
            setattr(self.layer, _COUNT, getattr(self.layer, _COUNT) + self.added)


def cache_slots(cache: Any, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CacheSlots | None:
    """Returns the slots that a layer's call writes; None unless its cache is static, of ``transformers``, and positions are few.

    Args:
        args, kwargs: arguments of the call, hidden states (batch, position, channel) first.
    """
    caches = sys.modules[CACHES]
    hidden = next((value for _, value in keyed_arguments(args, kwargs) if isinstance(value, Tensor) and value.dim() == 3), None)
    if hidden is None or hidden.shape[1] > _MOST_POSITIONS or is_pair(cache) or cache.offloading or index >= len(cache.layers):
        return None
    layer, added = cache.layers[index], hidden.shape[1]
    is_sliding = type(layer) is caches.StaticSlidingWindowLayer
    if not (is_sliding or type(layer) is caches.StaticLayer) or not layer.is_initialized:
        return None
    is_counted = isinstance(getattr(layer, "cumulative_length", None), Tensor)
    if not is_counted or not all(is_defined_in(caches, each, "update") for each in (cache, layer)):
        return None
    length, most = getattr(layer, _COUNT, 0) if is_sliding else 0, layer.max_cache_len
    is_full = is_sliding and length >= most
    has_room = added == 1 if is_full else not is_sliding or length + added <= most
    return CacheSlots(layer, added, is_full) if has_room else None


class StaticCacheStandIn(CacheStandIn):
    """Stands for a static cache while a layer is traced."""

    def __init__(self, kind: type, slots: tuple[Any, Any, Any], is_full: bool) -> None:
        super().__init__(kind)
        self._slots, self._is_full = slots, is_full

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Writes the new keys and values as the cache does, and returns all."""
        super().update(keys, values)
        *slots, length = self._slots
        added = keys.shape[-2]
        positions = torch.arange(added, device=keys.device) + length
        for slot, new in zip(slots, (keys, values), strict=True):
            if self._is_full:
                slot.copy_(torch.cat((slot[:, :, 1:], new), 2))
            else:
                slot.index_copy_(2, positions, new)
        if not self._is_full:
            length.add_(added)
        return slots[0], slots[1]


def with_static_cache(function: CacheFunction, argument: CacheArgument, is_full: bool) -> CacheFunction:
    """Wraps a layer's function so that it writes to the slots of its cache, which the new function takes after the module."""

    def call(module: nn.Module, cached_keys: Any, cached_values: Any, cached_length: Any, /, *args: Any, **kwargs: Any) -> Any:
        stand_in = StaticCacheStandIn(argument.kind, (cached_keys, cached_values, cached_length), is_full)
        positional, named = argument.substitute(stand_in, args, kwargs)
        return function(module, *positional, **named)

    return call


SLOTS = ("cached_keys", "cached_values", "cached_length")
"""The parameters that a function of `with_static_cache` writes."""
