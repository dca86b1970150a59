"""Key-value caches of ``transformers``. They are mutable, unlike a kernel's arguments.

A layer with an empty, growing cache is one kernel, which returns its keys and values. With a filled static cache it is one kernel,
which writes them. With any other cache it is two kernels.
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
from fusegen.guards.values import is_plain
from fusegen.trace.scalars import SymbolicSize, TracedScalar
from fusegen.trace.values import TracedTensor

CACHES = "transformers.cache_utils"
_MODELS = "transformers.modeling_utils"
_MASK = "attention_mask"

CacheFunction: TypeAlias = Callable[..., Any]
"""A function of a module and the arguments of a call."""


@dataclass(frozen=True)
class CacheArgument:
    """The argument of a call that holds the cache; ``key`` is its position or name."""

    key: int | str
    kind: type

    def substitute(self, value: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.key, int):
            return (*args[: self.key], value, *args[self.key + 1 :]), dict(kwargs)
        return tuple(args), {**kwargs, self.key: value}


def cache_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CacheArgument, Any] | None:
    module = sys.modules.get(CACHES)
    if module is None:
        return None
    for name, value in keyed_arguments(args, kwargs):
        if isinstance(value, module.Cache):
            return CacheArgument(name, type(value)), value
    return None


def keyed_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def layer_indices(module: nn.Module) -> frozenset[int]:
    return frozenset(index for submodule in module.modules() if isinstance(index := getattr(submodule, "layer_idx", None), int))


def layer_index_in(cache: Any, indices: frozenset[int], name: str) -> int:
    """Returns the one index that a module's layers use in a cache.

    Raises:
        UnsupportedError: the layers use several or none, or the cache is a pair and both caches have entries at the index.
    """
    if len(indices) != 1 or (is_pair(cache) and not any(fresh_flags(cache, next(iter(indices))))):
        raise UnsupportedError(f"{name} uses more than one layer of its {type(cache).__name__}")
    (index,) = indices
    return index


def fresh_flags(cache: Any, index: int) -> tuple[bool, ...]:
    """Returns `is_fresh` of each cache: one flag, or two for a pair."""
    if not is_pair(cache):
        return (is_fresh(cache, index),)
    is_filled = bool(cache.is_updated.get(index))
    return is_fresh(cache.self_attention_cache, index), not is_filled and is_fresh(cache.cross_attention_cache, index)


def is_fresh(cache: Any, index: int) -> bool:
    """True if the layer's cache is empty, and `update` will return the new entries unchanged.

    The second condition is known for classes and methods of ``transformers`` only.
    """
    caches, layers = sys.modules[CACHES], cache.layers
    if cache.offloading or not is_defined_in(caches, cache, "update"):
        return False
    layer = layers[index] if index < len(layers) else cache.layer_class_to_replicate
    cls = type(layer) if index < len(layers) else layer
    if cls not in (caches.DynamicLayer, caches.DynamicSlidingWindowLayer) or (cls is not layer and layer.is_initialized):
        return False
    return all(is_defined_in(caches, layer, name) for name in ("update", "lazy_initialization"))


def is_pair(cache: object) -> bool:
    """True for a pair of caches: one for the decoder's self-attention, one for its cross-attention."""
    return isinstance(cache, sys.modules[CACHES].EncoderDecoderCache)


def is_defined_in(module: ModuleType, owner: object, name: str) -> bool:
    method = getattr(owner, name)
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    return code is not None and code.co_filename == module.__file__


class CacheStandIn:
    """Stands for a cache while a layer is traced, as an instance of ``kind``.

    Attributes:
        update_call: the arguments of the layer's call of `update`, keys and values first.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.update_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Records the call, and returns the new keys and values."""
        if self.update_call is not None:
            raise UnsupportedError("the layer updates its cache more than once")
        self.update_call = (keys, values, *args), kwargs
        return keys, values

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(f"the layer reads {name!r} of its cache, which differs from call to call")

    def __len__(self) -> NoReturn:
        self.__getattr__("len")


class EmptyCacheStandIn(CacheStandIn):
    def get_seq_length(self, *_: Any) -> int:
        return 0

    def new_entries(self) -> Any:
        """The keys and values that the layer adds, or None."""
        return None if self.update_call is None else self.update_call[0][:2]


class UnusedCacheStandIn(EmptyCacheStandIn):
    """Stands for a cache that a layer must not use."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.__getattr__("update")

    def get_seq_length(self, *_: Any) -> Any:
        return object()  # not a number


class CachePairStandIn(EmptyCacheStandIn):
    """Stands for a pair of caches while a layer is traced; ``are_fresh`` has a flag for each."""

    def __init__(self, kind: type, are_fresh: Sequence[bool]) -> None:
        super().__init__(kind)
        dynamic = sys.modules[CACHES].DynamicCache
        stand_ins = [(EmptyCacheStandIn if is_empty else UnusedCacheStandIn)(dynamic) for is_empty in are_fresh]
        self.self_attention_cache, self.cross_attention_cache = stand_ins
        self.is_updated: dict[int, bool] = {}
        self.get_seq_length = self.self_attention_cache.get_seq_length  # type: ignore[method-assign]

    def new_entries(self) -> Any:
        return self.self_attention_cache.new_entries(), self.cross_attention_cache.new_entries()


def fill_cache(cache: Any, index: int, results: tuple[Any, Any]) -> Any:
    """Adds the new entries to the cache, and returns the layer's result."""
    result, entries = results
    if not is_pair(cache):
        if entries is not None:
            cache.update(*entries, index)
        return result
    own_entries, encoder_entries = entries
    if own_entries is not None:
        cache.self_attention_cache.update(*own_entries, index)
    if encoder_entries is not None:
        cache.cross_attention_cache.update(*encoder_entries, index)
        cache.is_updated[index] = True  # as a decoder does itself
    return result


def with_empty_cache(function: CacheFunction, argument: CacheArgument, are_fresh: Sequence[bool]) -> CacheFunction:
    """Wraps a layer's function so that it also returns the new entries of its empty cache.

    The entries are keys and values, or None; for a pair of caches there are two of these.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stand_in = EmptyCacheStandIn(argument.kind) if len(are_fresh) == 1 else CachePairStandIn(argument.kind, are_fresh)
        positional, named = argument.substitute(stand_in, args, kwargs)
        return function(module, *positional, **named), stand_in.new_entries()

    return call


# A layer as two kernels, before and after its attention.
#
# Between them, its cache and the model's attention function run in Python. So no kernel depends on the growing length, and the
# cache may be of any class.


@dataclass(frozen=True)
class _Argument:
    key: int | str


def mask_position(function: CacheFunction) -> int | None:
    names = list(inspect.signature(function).parameters)[1:]
    return names.index(_MASK) if _MASK in names else None


def without_mask(
    position: int | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Replaces the attention mask in a call's arguments: neither kernel reads it, and its shape changes with each token.

    Args:
        position: position of the mask.
    """
    if kwargs.get(_MASK) is not None:
        return args, {**kwargs, _MASK: _MASK_ARGUMENT}
    if position is None or position >= len(args) or args[position] is None:
        return args, kwargs
    return (*args[:position], _Argument(position), *args[position + 1 :]), kwargs


_MASK_ARGUMENT = _Argument(_MASK)


@dataclass(frozen=True)
class _KernelResult:
    number: int


@dataclass(frozen=True, repr=False)
class AttentionCalls:
    """The calls between the two kernels, `update` and attention. The first kernel returns them as a constant of its trace.

    Attributes:
        update: arguments of the cache's `update` after keys and values.
        arguments: arguments of the attention function after the module, query, keys and values.
    """

    update: tuple[tuple[Any, ...], dict[str, Any]]
    attention: CacheFunction
    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def run(self, cache: Any, results: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Updates the cache and computes attention: (batch, positions, heads, channels).

        Args:
            results: results of the first kernel: query, keys, values, and further arguments.
            args, kwargs: arguments of the layer's call.
        """

        def value(argument: Any) -> Any:
            if isinstance(argument, _Argument):
                return args[argument.key] if isinstance(argument.key, int) else kwargs[argument.key]
            return results[argument.number] if isinstance(argument, _KernelResult) else argument

        query, keys, values = results[:3]
        positional, named = tree_map(value, self.update)
        keys, values = cache.update(keys, values, *positional, **named)
        positional, named = tree_map(value, self.arguments)
        attended: Tensor = self.attention(self.module, query, keys, values, *positional, **named)[0]
        return attended

    def __repr__(self) -> str:
        """Returns a text that is unique to these calls: the key of a trace contains it."""
        leaves = (self.attention, self.module, *tree_leaves((self.update, self.arguments)))
        names = (repr(leaf) if is_plain(leaf) else f"{type(leaf).__name__} {id(leaf)}" for leaf in leaves)
        return f"AttentionCalls({', '.join(names)})"


@dataclass(frozen=True)
class AttentionInputs:
    """The results of the first kernel.

    Attributes:
        tensors: query, keys, values, and further arguments of the calls.
    """

    tensors: tuple[Any, ...]
    calls: AttentionCalls


register_pytree_node(
    AttentionInputs, lambda inputs: (inputs.tensors, inputs.calls), lambda tensors, calls: AttentionInputs(tuple(tensors), calls)
)


class _AttentionReached(BaseException):
    """A traced layer has reached its attention. A BaseException, so that the model's handlers do not catch it."""


@dataclass
class _AttentionTrace:
    """The trace of a layer that stops at attention, or continues with a given result.

    Attributes:
        result: the result of attention; None stops the trace.
        calls: calls of the attention function, each with its arguments.
    """

    result: Any = None
    calls: list[tuple[CacheFunction, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class _Thread(threading.local):
    attention_trace: _AttentionTrace | None = None


_THREAD = _Thread()


def is_tracing_attention() -> bool:
    """True while this thread traces a layer with stand-ins for its cache and attention."""
    return _THREAD.attention_trace is not None


@contextmanager
def _tracing_attention(result: Any) -> Iterator[_AttentionTrace]:
    previous = _THREAD.attention_trace
    _THREAD.attention_trace = current = _AttentionTrace(result)
    try:
        yield current
    finally:
        _THREAD.attention_trace = previous


class InterceptedAttention:
    """An attention function of transformers at which a trace can stop; other calls run the function itself."""

    def __init__(self, function: CacheFunction) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = None if is_compiling() else _THREAD.attention_trace
        if current is None:
            return self.function(*args, **kwargs)
        current.calls.append((self.function, args, kwargs))
        if len(current.calls) > 1:
            raise UnsupportedError("the layer computes attention more than once")
        if current.result is None:
            raise _AttentionReached
        return current.result, None


def intercept_attention() -> None:
    """Wraps the attention functions of transformers, if it is imported: those in its table, and models' own that it looks up."""
    module = sys.modules.get(_MODELS)
    if module is None:
        return
    interface = module.AttentionInterface
    for name, function in interface._global_mapping.items():
        if not isinstance(function, InterceptedAttention):
            interface._global_mapping[name] = InterceptedAttention(function)
    lookup = getattr(interface, "get_interface", None)  # missing in old releases
    if lookup is not None and lookup.__module__ != __name__:
        interface.get_interface = _intercepting(lookup)


def _intercepting(lookup: CacheFunction) -> CacheFunction:
    """Wraps the method that returns an attention function, by name or a model's own."""

    def get_interface(*args: Any, **kwargs: Any) -> Any:
        function = lookup(*args, **kwargs)
        is_plain_function = is_compiling() or not is_tracing_attention() or isinstance(function, InterceptedAttention)
        return function if is_plain_function else InterceptedAttention(function)

    return get_interface


def before_attention(function: CacheFunction, argument: CacheArgument) -> CacheFunction:
    """Cuts a layer's function before its attention; the new function returns `AttentionInputs`."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stand_in = CacheStandIn(argument.kind)
        positional, named = argument.substitute(stand_in, args, kwargs)
        with _tracing_attention(None) as current:
            try:
                function(module, *positional, **named)
            except _AttentionReached:
                pass
            except Exception as error:
                if stand_in.update_call is None or current.calls:
                    raise
                raise _own_attention() from error
            else:
                raise _own_attention()
        if stand_in.update_call is None:
            raise UnsupportedError("the layer does not update its cache before its attention")
        return _attention_inputs(stand_in.update_call, current.calls[0], args, kwargs)

    return call


def _own_attention() -> UnsupportedError:
    what = "the layer does not look up its attention function in transformers"
    return UnsupportedError(what, hint='call model.set_attn_implementation("sdpa")')


def after_attention(function: CacheFunction, argument: CacheArgument) -> CacheFunction:
    """Returns the rest of a layer's function after its attention.

    The rest takes the module, the result of attention, and the layer's arguments.
    """

    def call(module: nn.Module, attended: Any, *args: Any, **kwargs: Any) -> Any:
        positional, named = argument.substitute(CacheStandIn(argument.kind), args, kwargs)
        with _tracing_attention(attended):
            return function(module, *positional, **named)

    return call


_TENSORS = (TracedTensor, Tensor)
_VALUES = (*_TENSORS, TracedScalar, SymbolicSize)


def _attention_inputs(
    update: tuple[tuple[Any, ...], dict[str, Any]],
    attention: tuple[CacheFunction, tuple[Any, ...], dict[str, Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> AttentionInputs:
    """The calls between the kernels, with the results of the first kernel that they need."""
    function, (owner, query, keys, values, *further), named = attention
    (new_keys, new_values, *update_args), update_named = update
    if keys is not new_keys or values is not new_values:
        raise UnsupportedError("the layer changes the keys or values from its cache before its attention")
    results: list[Any] = [query, keys, values]
    layer_arguments = {id(value): _Argument(key) for key, value in keyed_arguments(args, kwargs) if isinstance(value, _VALUES)}

    def stand_in(value: Any) -> Any:
        if id(value) in layer_arguments:
            return layer_arguments[id(value)]
        if not isinstance(value, _VALUES):
            return value
        if not isinstance(value, _TENSORS):
            raise UnsupportedError("the layer passes a number that it computes to its attention or its cache")
        results.append(value)
        return _KernelResult(len(results) - 1)

    calls = AttentionCalls(
        update=tree_map(stand_in, (tuple(update_args), update_named)),
        attention=function,
        module=owner,
        arguments=tree_map(stand_in, (tuple(further), named)),
    )
    return AttentionInputs(tuple(results), calls)
