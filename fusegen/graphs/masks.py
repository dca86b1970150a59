"""Attention masks of transformers' models in calls that are recorded."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import pad

from fusegen.graphs.cache_memory import has_layers, is_cache

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
