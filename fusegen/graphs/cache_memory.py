"""Memory of a static cache of keys and values, which recorded graphs own: whichever cache a call brings lies in it.

A graph reads and writes fixed addresses. Each `generate` makes a cache of its own, and beams make new keys in every step; so a
cache that comes has its tensors copied to the graphs' memory, and holds that memory from then on.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import pad

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


# Attention masks of transformers' models in calls that are recorded.


_DECIDING = ("attention_mask", "position_ids")
_ASKS = "is_tracing"
_ANSWERS = {_ASKS: False, "find_packed_sequence_indices": None}
_LEFT_OUT = threading.local()


def with_whole_mask(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call with a mask of as many tokens as a static cache has room for. Loops that decode pass one of the
    tokens so far, which is of another shape at each step; behind them there is nothing to see."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return kwargs
    caches = [value for value in kwargs.values() if has_layers(value)]
    room = max((getattr(layer, "max_cache_len", 0) for cache in caches for layer in cache.layers), default=0)
    missing = room - mask.shape[1]
    return {**kwargs, "attention_mask": pad(mask, (0, missing))} if missing > 0 else kwargs


@contextmanager
def masks_left_out(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Around a recorded call. Transformers looks into masks and positions to leave a mask out that hides nothing but later tokens,
    and in a capture, which cannot look, makes one, for which attention takes longer. Where the call of a model has no mask, no
    cache and no positions, there is nothing to look at, and the mask is left out as it is without a graph.

    Args:
        function: that is called.
    """
    masks = sys.modules.get("transformers.masking_utils")
    for name in _ANSWERS if masks is not None else ():
        asked = getattr(masks, name, None)
        if asked is not None and not hasattr(asked, "asked"):  # for good: graphs hold on to functions that they have called
            setattr(masks, name, _answered(asked, name))
    _LEFT_OUT.here = masks is not None and not _decides(function, args, kwargs)
    try:
        yield
    finally:
        _LEFT_OUT.here = False


def _decides(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if masks may depend on values: of arguments, or of what code that is not of transformers makes of them."""
    if not _is_of_transformers(function):
        return True
    given = inspect.signature(getattr(function, "forward", function)).bind(*args, **kwargs).arguments
    inside = (each for each in given.values() if isinstance(each, dict))
    named = {name: value for each in (given, *inside) for name, value in each.items()}
    return any(named.get(name) is not None for name in _DECIDING) or any(map(is_cache, named.values()))


def _is_of_transformers(function: Any) -> bool:
    """True of a model's forward pass, patched or not; false of the user's, which may compute positions."""
    if isinstance(function, nn.Module):
        function = vars(function).get("forward", partial(type(function).forward, function))
    module = next(iter(function.args), None) if isinstance(function, partial) else getattr(function, "module", None)
    return isinstance(module, nn.Module) and type(module).forward.__module__.startswith("transformers")


def _answered(asked: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A question of transformers, answered in recordings that leave masks out: values may be read where there are none, and no
    sequences are packed into one."""

    @wraps(asked)
    def question(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not getattr(_LEFT_OUT, "here", False) or (name == _ASKS and args != (None,)):
            return asked(*args, **kwargs)
        return _ANSWERS[name]

    question.asked = asked  # type: ignore[attr-defined]
    return question
