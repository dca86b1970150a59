"""A layer with a static cache of ``transformers`` as one kernel, which writes the new keys and values and attends to all."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fusegen.errors import UnsupportedError
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
        encoder: the layer's part of the filled cache of an encoder, if the cache is a pair.
    """

    layer: Any
    added: int
    is_full: bool
    encoder: Any = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments that a function of `with_static_cache` takes between the module and those of the layer."""
        encoder_entries = None if self.encoder is None else (self.encoder.keys, self.encoder.values)
        return self.layer.keys, self.layer.values, self.layer.cumulative_length, encoder_entries

    def count(self) -> None:
        """Adds the new positions to the length on the host."""
        if hasattr(self.layer, _COUNT):
            setattr(self.layer, _COUNT, getattr(self.layer, _COUNT) + self.added)


def cache_slots(cache: Any, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CacheSlots | None:
    """Returns the slots that a layer's call writes; None unless its cache is static, of ``transformers``, and positions are few.

    Args:
        args, kwargs: arguments of the call, hidden states (batch, position, channel) first.
    """
    hidden = next((value for _, value in keyed_arguments(args, kwargs) if isinstance(value, Tensor) and value.dim() == 3), None)
    if hidden is None or hidden.shape[1] > _MOST_POSITIONS:
        return None
    if not is_pair(cache):
        return _slots_of(cache, index, hidden.shape[1])
    encoder, is_filled = cache.cross_attention_cache, cache.is_updated.get(index)
    if not is_filled or encoder.offloading or not isinstance(encoder.layers[index].keys, Tensor):
        return None
    slots = _slots_of(cache.self_attention_cache, index, hidden.shape[1])
    return None if slots is None else replace(slots, encoder=encoder.layers[index])


def _slots_of(cache: Any, index: int, added: int) -> CacheSlots | None:
    caches = sys.modules[CACHES]
    if cache.offloading or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
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
        entries = zip(slots, (keys, values), strict=True)
        if self._is_full:
            shifted_keys, shifted_values = (_shifted(slot, new) for slot, new in entries)
            slots[0].copy_(shifted_keys)
            slots[1].copy_(shifted_values)
            return shifted_keys, shifted_values
        added = keys.shape[-2]
        positions = length.view(1) if added == 1 else torch.arange(added, device=keys.device) + length
        for slot, new in entries:
            slot.index_copy_(2, positions, new)
        length.add_(added)
        return slots[0], slots[1]

    def get_seq_length(self, *_: Any) -> Any:
        return self.__getattr__("get_seq_length") if self._is_full else self._slots[2].clone()


def _shifted(slots: Any, new: Any) -> Any:
    """Returns entries (batch, head, position, channel) without the first and with a new last one.

    They are computed elementwise, not concatenated, so that they are materialized once for attention and for the write.
    """
    last = slots.shape[2] - 1
    positions = torch.arange(last + 1, device=slots.device)[:, None]
    return torch.where(positions == last, new, slots.roll(-1, 2))


class _EveryIndex:
    """Stands for a list or dict with one value at all indices of layers."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, *_: Any) -> Any:
        return self._value

    __getitem__ = get

    def __setitem__(self, index: int, value: Any) -> None:
        if value is not self._value:
            raise UnsupportedError("the layer changes its cache other than by `update`")


class StaticPairStandIn(CacheStandIn):
    """Stands for a pair of a static cache and the filled cache of an encoder while a layer is traced."""

    def __init__(self, kind: type, static: StaticCacheStandIn, encoder_entries: tuple[Any, Any]) -> None:
        super().__init__(kind)
        keys, values = encoder_entries
        self.self_attention_cache, self.get_seq_length = static, static.get_seq_length
        self.cross_attention_cache = SimpleNamespace(layers=_EveryIndex(SimpleNamespace(keys=keys, values=values)))
        self.is_updated = _EveryIndex(True)


def with_static_cache(function: CacheFunction, argument: CacheArgument, is_full: bool) -> CacheFunction:
    """Wraps a layer's function so that it writes to the slots of its cache.

    The new function takes `CacheSlots.arguments` after the module.
    """

    def call(
        module: nn.Module,
        cached_keys: Any,
        cached_values: Any,
        cached_length: Any,
        encoder_entries: Any,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kind = argument.kind if encoder_entries is None else sys.modules[CACHES].StaticCache
        static = StaticCacheStandIn(kind, (cached_keys, cached_values, cached_length), is_full)
        stand_in = static if encoder_entries is None else StaticPairStandIn(argument.kind, static, encoder_entries)
        positional, named = argument.substitute(stand_in, args, kwargs)
        result = function(module, *positional, **named)
        if static.update_call is None:
            raise UnsupportedError("the layer does not update its cache")
        return result

    return call


SLOTS = ("cached_keys", "cached_values", "cached_length")
"""The parameters that a function of `with_static_cache` writes."""
