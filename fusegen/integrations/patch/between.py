"""A layer as two kernels, before and behind its attention.

Between them its cache and the model's own attention function run as they are. So the kernels know no length that grows from token
to token, and the cache may be of any kind.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from fusegen.errors import UnsupportedError
from fusegen.guards import is_plain
from fusegen.integrations.patch.caches import Function, HandedCache, Place, numbered
from fusegen.trace.scalars import SymbolicSize, TracedScalar
from fusegen.trace.values import TracedTensor

_MODELS = "transformers.modeling_utils"
_MASK = "attention_mask"


@dataclass(frozen=True)
class _Argument:
    """An argument of the layer's call, by position or name."""

    key: int | str


def mask_position(function: Function) -> int | None:
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
        attention: the attention function.
        arguments: of it, likewise; behind the module, query, keys and values.
        module: the attention module.
    """

    update: tuple[tuple[Any, ...], dict[str, Any]]
    attention: Function
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
    calls: list[tuple[Function, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


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
    """An attention function of transformers that a trace may stop at; in all other calls the function itself.

    Args:
        function: the function.
    """

    def __init__(self, function: Function) -> None:
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


def before_attention(function: Function, place: Place) -> Function:
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
    return UnsupportedError(what, mend='model.set_attn_implementation("sdpa")')


def behind_attention(function: Function, place: Place) -> Function:
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
    attention: tuple[Function, tuple[Any, ...], dict[str, Any]],
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
