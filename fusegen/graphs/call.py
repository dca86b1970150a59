"""Signatures of calls, which select a recorded graph, and the memory of key-value caches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_map_only

from fusegen.errors import UnsupportedError
from fusegen.guards.locations import AccessKind, Conditions, StateLocation, StateRead
from fusegen.guards.values import exact_key, is_plain, same
from fusegen.native import NativeChoice, loaded

# Memory of static key-value caches, owned by recorded graphs, which read and write fixed addresses. Each `generate` makes a new
# cache, and beam search makes new keys at every step. So a cache is copied to the graphs' memory at its first call and stays there.


Held: TypeAlias = dict[str, Any]

_LENGTH = "cumulative_length_int"
"""The length of a sliding layer of ``transformers`` as a Python number. Its `update` tests whether the layer is full."""


class CacheView:
    """The tensors and settings of a cache of tensors, plain values and layers.

    Attributes:
        cache: a weak reference to the cache.
        slots: its tensors, as pairs of a variables dict and a name.
        lengths: the lengths of sliding layers, as the same pairs. A call advances them.
        parts: the variables dicts of the cache and its layers.
        layout: key of the cache's shapes and settings.
        is_current: tells whether the cache holds the same tensors and settings.
    """

    is_current: NativeChoice[Callable[[], bool]]

    def __init__(self, cache: object) -> None:
        self.cache = weakref.ref(cache)
        self.parts = list(_parts(cache))
        variables: dict[type, list[tuple[Held, str]]] = {Tensor: [], int: [], object: [], list: []}
        for held in self.parts:
            if held.get("is_initialized") is False:
                raise UnsupportedError("its cache is empty")
            for name, value in held.items():
                variables[_kind(name, value)].append((held, name))
        self.slots, self.lengths = variables[Tensor], variables[int]
        self._fixed = [*variables[Tensor], *variables[object], *variables[list]]
        tensors = tuple((name, t.shape, t.stride(), t.dtype, t.device) for held, name in self.slots for t in (held[name],))
        self.layout = (type(cache), tensors, tuple((name, _exact(held[name])) for held, name in variables[object]))
        self.refresh()

    def refresh(self) -> None:
        """Makes `is_current` expect the current tensors and settings."""
        facts = Conditions()
        facts.sizes(self.parts)
        for held, name in self._fixed:
            facts.item(held, name)
        self.is_current = facts.function()

    def phase(self, count: int, is_prepared: bool) -> tuple[object, ...]:
        """Returns the part of the lengths that a call with `count` new tokens reads. If masks and positions are arguments, it is
        only whether each layer is full."""
        if not is_prepared:
            return tuple(held[name] for held, name in self.lengths)
        return tuple(_phase(held[name], count, held["max_cache_len"]) for held, name in self.lengths)


class CacheFactory:
    """Makes copies of the cache that a recorded run returned and that each replay fills."""

    def __init__(self, cache: object) -> None:
        CacheView(cache)
        self._cache = cache
        self()  # rejects a cache that cannot be copied

    def __call__(self) -> object:
        return _copy(self._cache)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return dict(value)
    if isinstance(value, list):
        return list(map(_copy, value))
    if is_plain(value) or isinstance(value, type):
        return value
    copied = object.__new__(type(value))
    vars(copied).update({name: _copy(each) for name, each in vars(value).items()})
    return copied


def is_cache(value: object) -> bool:
    """True for a cache, or an object that holds caches, e.g. of encoder-decoder models."""
    held = getattr(value, "__dict__", {})
    return has_layers(value) or any(map(has_layers, held.values()))


def has_layers(value: object) -> bool:
    """True for an object with a list of layers, like the caches of transformers."""
    return isinstance(getattr(value, "layers", None), list)


def _phase(length: int, count: int, most: int) -> tuple[bool, int]:
    """Returns whether a sliding layer is full, and its length if this call fills it, else 0."""
    is_full = length >= most
    return is_full, length if length + count > most and not is_full else 0


def _kind(name: str, value: Any) -> type:
    if isinstance(value, Tensor):
        return Tensor
    if name == _LENGTH:
        return int
    if is_plain(value) or isinstance(value, type) or (type(value) is dict and all(map(is_plain, value.values()))):
        return object
    if isinstance(value, list) or has_layers(value):
        return list
    raise UnsupportedError(f"the attribute {name!r} of its cache is a {type(value).__name__}", hint="use a StaticCache")


def _exact(value: Any) -> object:
    if type(value) is dict:
        return tuple((key, exact_key(each)) for key, each in value.items())
    return value if isinstance(value, type) else exact_key(value)


def _parts(cache: Any) -> Iterator[Held]:
    """Yields the variables dicts of a cache, its layers, and nested caches."""
    held = vars(cache)
    yield held
    for layer in held.get("layers", ()):
        yield vars(layer)
    for value in held.values():
        if has_layers(value):
            yield from _parts(value)


class CacheMemory:
    """The memory of caches of one layout, initialized from the first cache."""

    def __init__(self, view: CacheView) -> None:
        self.tensors: list[Tensor] = []
        with torch.inference_mode(False):
            for held, name in view.slots:  # one by one, to bound the peak memory
                held[name] = held[name].clone()
                self.tensors.append(held[name])
        self._bound = view
        view.refresh()

    def bind(self, view: CacheView) -> None:
        """Moves a current cache into this memory. The previous cache gets copies of its tensors if it is still alive."""
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


# Calls.


class CacheViews(dict[int, CacheView]):
    """`CacheView`s of caches in earlier calls, by the caches' ids."""

    def of(self, cache: object) -> CacheView:
        view = self.get(id(cache))
        if view is None or view.cache() is not cache or not view.is_current.call():
            view = self[id(cache)] = CacheView(cache)
            for key in [key for key, each in self.items() if each.cache() is None]:
                del self[key]
        return view


@dataclass
class GraphCall:
    """The signature of a call: the arguments' structure, tensor layouts and plain values; and its tensors, caches and modules."""

    signature: object
    tensors: list[Tensor]
    views: list[CacheView]
    modules: list[nn.Module]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], known: CacheViews) -> GraphCall:
        """Analyzes a call. Arguments must be tensors, plain values, modules, static caches or containers of these."""
        call = cls(None, [], [], [])
        call.signature = (
            *(call._signature(value, known) for value in args),
            *((name, call._signature(value, known)) for name, value in kwargs.items()),
        )
        return call

    def _signature(self, value: Any, known: CacheViews) -> object:
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if issubclass(kind, Tensor):
            if value.is_nested or value.layout is not torch.strided or value.is_conj() or value.is_neg():
                what = f"an argument is a tensor of layout {value.layout}, a nested one, or a conjugate view"
                raise UnsupportedError(what, hint="pass strided tensors")
            self.tensors.append(value)
            return (kind, value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        if kind is dict:
            return ("dict", *((name, self._signature(each, known)) for name, each in value.items()))
        if kind is tuple or kind is list:
            return (kind, *(self._signature(each, known) for each in value))
        if is_plain(value):
            return exact_key(value)
        if isinstance(value, nn.Module):
            self.modules.append(value)
            return (kind, id(value))
        if kind in SUPPORTED_NODES:  # an encoder's outputs
            leaves, structure = SUPPORTED_NODES[kind].flatten_fn(value)
            return (kind, repr(structure), *(self._signature(each, known) for each in leaves))
        if is_cache(value):
            self.views.append(known.of(value))
            return ("cache", len(self.views))
        raise UnsupportedError(f"an argument is a {kind.__name__}", hint="pass tensors, plain values and a StaticCache")


class _Argument(IntEnum):
    """The native module's comparison of an argument: by identity, value, tensor layout, elements, or class of the cache."""

    IDENTITY = 0
    PLAIN = 1
    TENSOR = 2
    SEQUENCE = 3
    DICTIONARY = 4
    CACHE = 5


class SignatureCheck:
    """Compares the signature of calls and torch's settings to those of a previous call, in native code."""

    def __init__(
        self, call: GraphCall, compare: Callable[..., tuple[list[Tensor], list[object]] | None], kwargs: Mapping[str, Any]
    ) -> None:
        self._compare = compare
        self._call = GraphCall(call.signature, [], call.views, call.modules)  # drops the caller's tensors
        self._tokens = _new_tokens(kwargs)
        self._phases = [view.phase(*self._tokens) for view in call.views]
        conditions = Conditions()
        for function, arguments in _setting_getters(call.tensors[0].device.type):
            conditions.read(StateRead(StateLocation(function, AccessKind.RESULT, arguments), function(*arguments)))
        self._has_settings = conditions.function()

    @classmethod
    def of(cls, call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SignatureCheck | None:
        """Returns None without the native module, and for arguments that it does not support."""
        module = loaded()
        try:
            return None if module is None else cls(call, module.Form(same, _node(tuple(args)), _node(dict(kwargs))), kwargs)
        except UnsupportedError:
            return None

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any], known: CacheViews) -> GraphCall | None:
        """Returns the analysis of a later call, or None if its signature or settings differ."""
        arguments = self._compare(args, kwargs)
        if arguments is None or not self._has_settings.call():
            return None
        tensors, caches = arguments
        call = self._call
        for cache, view, phase in zip(caches, call.views, self._phases, strict=True):
            if known.of(cache) is not view or view.phase(*self._tokens) != phase:
                return None
        return GraphCall(call.signature, tensors, call.views, call.modules)


def _node(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    if value is None or value is True or value is False or isinstance(value, nn.Module):
        return _Argument.IDENTITY, value
    if issubclass(kind, Tensor):
        return _Argument.TENSOR, value
    if kind is dict and all(type(name) is str for name in value):
        return _Argument.DICTIONARY, None, tuple(map(_node, value.values())), tuple(value)
    if kind is tuple or kind is list:
        return _Argument.SEQUENCE, kind, tuple(map(_node, value))
    if is_plain(value):
        return _Argument.PLAIN, value
    if kind not in SUPPORTED_NODES and is_cache(value):
        return _Argument.CACHE, kind
    raise UnsupportedError(f"the native module does not support a {kind.__name__}")


def key_of(call: GraphCall, kwargs: Mapping[str, Any]) -> object:
    """Returns the key of a call, without the model state that it reads."""
    count, is_prepared = _new_tokens(kwargs)
    caches = tuple((view.layout, view.phase(count, is_prepared)) for view in call.views)
    return call.signature, caches, settings(call.tensors[0].device.type)


def _new_tokens(kwargs: Mapping[str, Any]) -> tuple[int, bool]:
    """Returns the number of tokens of a call, and whether its positions and 4D mask are arguments."""
    ids, positions, mask = kwargs.get("input_ids"), kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return 1, False
    is_prepared = isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() == 4)
    return ids.shape[1], is_prepared and isinstance(positions, Tensor)


def settings(device: str) -> tuple[object, ...]:
    """The settings of torch that select kernels."""
    return tuple(function(*arguments) for function, arguments in _setting_getters(device))


def _setting_getters(device: str) -> Sequence[tuple[Callable[..., object], tuple[str, ...]]]:
    return [
        (torch.is_inference_mode_enabled, ()),
        (torch.is_grad_enabled, ()),
        (_autocast, (device,)),
        (torch.get_default_dtype, ()),
        *((_precision, ("cuda", each)) for each in ("matmul", "conv", "rnn")),
        (_attention_order, ()),
        *((get, ()) for get in _FLAG_GETTERS),
    ]


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _attention_order() -> tuple[int, ...]:
    return tuple(torch._C._get_sdp_priority_order())


_precision = torch._C._get_fp32_precision_getter
_FLAG_GETTERS = [
    get
    for name in (
        "deterministic_algorithms",
        "flash_sdp_enabled",
        "mem_efficient_sdp_enabled",
        "math_sdp_enabled",
        "cudnn_sdp_enabled",
        "math_sdp_allow_fp16_bf16_reduction",
        "cudnn_enabled",
        "cudnn_benchmark",
        "cudnn_deterministic",
        "cublas_allow_bf16_reduced_precision_reduction",
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_fp16_accumulation",
    )
    if (get := getattr(torch._C, f"_get_{name}", None)) is not None  # missing in older releases of torch
]
"""Further settings. The native getters are faster than torch's Python properties."""


def run_with(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Calls a function with its tensor arguments replaced."""
    replacements = iter(tensors)
    args = _with_tensors(tuple(args), replacements)
    return function(*args, **_with_tensors(dict(kwargs), replacements))


def without_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Replaces the tensors among arguments by placeholders, to be used by `run_with`."""
    blanks = repeat(torch.empty(0))
    return _with_tensors(tuple(args), blanks), _with_tensors(dict(kwargs), blanks)


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if type(value) is dict:
        return {name: _with_tensors(each, tensors) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_with_tensors(each, tensors) for each in value)
    return tree_map_only(Tensor, lambda _: next(tensors), value)
