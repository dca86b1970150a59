"""Caches of keys and values, as ``transformers`` has them: objects that change, as a kernel's arguments do not.

A layer whose cache is empty and only grows is one kernel, which returns its keys and values. With another cache it is two.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from fusegen.errors import UnsupportedError
from fusegen.guards import is_plain
from fusegen.trace.scalars import SymbolicSize, TracedScalar
from fusegen.trace.values import TracedTensor

_CACHES = "transformers.cache_utils"
_MODELS = "transformers.modeling_utils"
_MASK = "attention_mask"

CacheFunction: TypeAlias = Callable[..., Any]
"""A function of a module and the arguments of a call."""


@dataclass(frozen=True)
class CacheArgument:
    """The argument of a call that is a cache.

    Attributes:
        key: its position or name.
    """

    key: int | str
    kind: type

    def put(self, value: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another value there."""
        if isinstance(self.key, int):
            return (*args[: self.key], value, *args[self.key + 1 :]), dict(kwargs)
        return tuple(args), {**kwargs, self.key: value}


def cache_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CacheArgument, Any] | None:
    """The argument of a call that is a cache, if there is one."""
    module = sys.modules.get(_CACHES)
    if module is None:
        return None
    for name, value in numbered(args, kwargs):
        if isinstance(value, module.Cache):
            return CacheArgument(name, type(value)), value
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
        """The number of keys that it holds."""
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
        """The arguments of both."""
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


def filling(function: CacheFunction, place: CacheArgument, are_fresh: Sequence[bool]) -> CacheFunction:
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


# A layer as two kernels, before and behind its attention.
#
# Between them its cache and the model's own attention function run as they are. So the kernels know no length that grows from token
# to token, and the cache may be of any kind.


@dataclass(frozen=True)
class _Argument:
    """An argument of the layer's call, by position or name."""

    key: int | str


def mask_position(function: CacheFunction) -> int | None:
    """The position of the mask of attention among the arguments of a module's function."""
    names = list(inspect.signature(function).parameters)[1:]
    return names.index(_MASK) if _MASK in names else None


def without_mask(
    position: int | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a call with a stand-in for the mask of attention, whose shape changes from token to token, and which no
    kernel before or behind attention reads.

    Args:
        position: of the mask.
    """
    if kwargs.get(_MASK) is not None:
        return args, {**kwargs, _MASK: _MASK_ARGUMENT}
    if position is None or position >= len(args) or args[position] is None:
        return args, kwargs
    return (*args[:position], _Argument(position), *args[position + 1 :]), kwargs


_MASK_ARGUMENT = _Argument(_MASK)


@dataclass(frozen=True)
class _Result:
    """A result of the kernel before attention."""

    number: int


@dataclass(frozen=True, repr=False)
class Between:
    """The calls between both kernels: a constant of the first one's trace, which comes back with its results.

    Attributes:
        update: arguments of the cache's `update`, by position and by name.
        arguments: of it, likewise; behind the module, query, keys and values.
    """

    update: tuple[tuple[Any, ...], dict[str, Any]]
    attention: CacheFunction
    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def run(self, cache: Any, results: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The result of attention, (batch, positions, heads, channels).

        Args:
            results: of the kernel before: query, keys, values, and what else is needed.
            args, kwargs: of the layer's call.
        """

        def value(each: Any) -> Any:
            if isinstance(each, _Argument):
                return args[each.key] if isinstance(each.key, int) else kwargs[each.key]
            return results[each.number] if isinstance(each, _Result) else each

        query, keys, values = results[:3]
        given, named = tree_map(value, self.update)
        keys, values = cache.update(keys, values, *given, **named)
        given, named = tree_map(value, self.arguments)
        found: Tensor = self.attention(self.module, query, keys, values, *given, **named)[0]
        return found

    def __repr__(self) -> str:
        """Text that no other calls have: kernels are told apart by what comes back with their results."""
        parts = (self.attention, self.module, *tree_leaves((self.update, self.arguments)))
        return f"Between({', '.join(repr(each) if is_plain(each) else f'{type(each).__name__} {id(each)}' for each in parts)})"


@dataclass(frozen=True)
class Handed:
    """The results of the kernel before attention.

    Attributes:
        tensors: query, keys, values, and what else the calls between need.
        between: the calls.
    """

    tensors: tuple[Any, ...]
    between: Between


register_pytree_node(
    Handed, lambda handed: (handed.tensors, handed.between), lambda tensors, between: Handed(tuple(tensors), between)
)


class _Reached(BaseException):
    """A layer that is traced has come to its attention; no handler of the model's may catch that."""


@dataclass
class _Handing:
    """A trace that stops at attention, or goes on with a result that it is given.

    Attributes:
        result: what attention gives; None where the trace ends there.
        calls: the arguments of the attention function, with the function first.
    """

    result: Any = None
    calls: list[tuple[CacheFunction, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class _Thread(threading.local):
    handing: _Handing | None = None


_THREAD = _Thread()


def is_handing() -> bool:
    """True if a layer's code runs in this thread with stand-ins for its cache and its attention."""
    return _THREAD.handing is not None


@contextmanager
def _handing(result: Any) -> Iterator[_Handing]:
    given = _THREAD.handing
    _THREAD.handing = handing = _Handing(result)
    try:
        yield handing
    finally:
        _THREAD.handing = given


class HandedAttention:
    """An attention function of transformers that a trace may stop at; in all other calls the function itself."""

    def __init__(self, function: CacheFunction) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result and the weights, which are None where they are not wanted."""
        handing = None if is_compiling() else _THREAD.handing
        if handing is None:
            return self.function(*args, **kwargs)
        handing.calls.append((self.function, args, kwargs))
        if len(handing.calls) > 1:
            raise UnsupportedError("the layer computes attention more than once")
        if handing.result is None:
            raise _Reached
        return handing.result, None


def hand_attention() -> None:
    """Lets traces stop at all attention functions that transformers, where it is imported, knows by name."""
    module = sys.modules.get(_MODELS)
    mapping = {} if module is None else module.AttentionInterface._global_mapping
    for name, function in mapping.items():
        if not isinstance(function, HandedAttention):
            mapping[name] = HandedAttention(function)


def before_attention(function: CacheFunction, place: CacheArgument) -> CacheFunction:
    """A layer's function up to its attention, which gives a `Handed`.

    Args:
        function: of the layer.
        place: of the cache.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handed = HandedCache(place.kind)
        given, named = place.put(handed, args, kwargs)
        with _handing(None) as handing:
            try:
                function(module, *given, **named)
            except _Reached:
                pass
            except Exception as error:
                if handed.update_call is None or handing.calls:
                    raise
                raise _own_attention() from error
            else:
                raise _own_attention()
        if handed.update_call is None:
            raise UnsupportedError("the layer does not update its cache before its attention")
        return _handed(handed.update_call, handing.calls[0], args, kwargs)

    return call


def _own_attention() -> UnsupportedError:
    what = "the layer does not compute attention by a function that transformers knows by name"
    return UnsupportedError(what, hint='model.set_attn_implementation("sdpa")')


def behind_attention(function: CacheFunction, place: CacheArgument) -> CacheFunction:
    """The rest of a layer's function, of the module, the result of attention, and the layer's arguments."""

    def call(module: nn.Module, attended: Any, *args: Any, **kwargs: Any) -> Any:
        given, named = place.put(HandedCache(place.kind), args, kwargs)
        with _handing(attended):
            return function(module, *given, **named)

    return call


_TENSORS = (TracedTensor, Tensor)
_VALUES = (*_TENSORS, TracedScalar, SymbolicSize)


def _handed(
    update: tuple[tuple[Any, ...], dict[str, Any]],
    attention: tuple[CacheFunction, tuple[Any, ...], dict[str, Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Handed:
    """The calls between both kernels, with the results of the first that they need."""
    function, (owner, query, keys, values, *others), named = attention
    (new_keys, new_values, *update_args), update_named = update
    if keys is not new_keys or values is not new_values:
        raise UnsupportedError("the layer changes what its cache gives before its attention")
    results: list[Any] = [query, keys, values]
    known = {id(value): _Argument(key) for key, value in numbered(args, kwargs) if isinstance(value, _VALUES)}

    def stand_in(value: Any) -> Any:
        if id(value) in known:
            return known[id(value)]
        if not isinstance(value, _VALUES):
            return value
        if not isinstance(value, _TENSORS):
            raise UnsupportedError("the layer computes a number that its attention or its cache takes")
        results.append(value)
        return _Result(len(results) - 1)

    between = Between(
        update=tree_map(stand_in, (tuple(update_args), update_named)),
        attention=function,
        module=owner,
        arguments=tree_map(stand_in, (tuple(others), named)),
    )
    return Handed(tuple(results), between)
