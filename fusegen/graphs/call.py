"""Calls taken apart: what tells those that one graph can serve from others, and the memory of their caches."""

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
from fusegen.guards import Conditions, PlaceKind, StatePlace, StateRead, exact, is_plain, same
from fusegen.native import NativeChoice, loaded

# Memory of a static cache of keys and values, which recorded graphs own: whichever cache a call brings lies in it.
#
# A graph reads and writes fixed addresses. Each `generate` makes a cache of its own, and beams make new keys in every step; so a
# cache that comes has its tensors copied to the graphs' memory, and holds that memory from then on.


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

    is_current: NativeChoice[Callable[[], bool]]

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
    raise UnsupportedError(f"its cache's {name!r} is a {type(value).__name__}", hint="use a StaticCache")


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


# Calls.


class Views(dict[int, CacheView]):
    """Caches that calls brought, taken apart, by their ids."""

    def of(self, cache: object) -> CacheView:
        """A cache taken apart, as it is now."""
        view = self.get(id(cache))
        if view is None or view.cache() is not cache or not view.is_current.call():
            view = self[id(cache)] = CacheView(cache)
            for key in [key for key, each in self.items() if each.cache() is None]:
                del self[key]
        return view


@dataclass
class GraphCall:
    """A call taken apart.

    Attributes:
        form: the arguments' structure, with a description in the place of each tensor, and plain values.
        tensors: in the order of the form.
        views: the caches.
        modules: those among the arguments.
    """

    form: object
    tensors: list[Tensor]
    views: list[CacheView]
    modules: list[nn.Module]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], known: Views) -> GraphCall:
        """Takes a call apart.

        Raises:
            UnsupportedError: an argument is none of tensors, plain values, modules, static caches and containers of these.
        """
        call = cls(None, [], [], [])
        call.form = (
            *(call._form(value, known) for value in args),
            *((name, call._form(value, known)) for name, value in kwargs.items()),
        )
        return call

    def _form(self, value: Any, known: Views) -> object:
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
            return ("dict", *((name, self._form(each, known)) for name, each in value.items()))
        if kind is tuple or kind is list:
            return (kind, *(self._form(each, known) for each in value))
        if is_plain(value):
            return exact(value)
        if isinstance(value, nn.Module):
            self.modules.append(value)
            return (kind, id(value))
        if kind in SUPPORTED_NODES:  # an encoder's outputs
            parts, structure = SUPPORTED_NODES[kind].flatten_fn(value)
            return (kind, repr(structure), *(self._form(each, known) for each in parts))
        if is_cache(value):
            self.views.append(known.of(value))
            return ("cache", len(self.views))
        raise UnsupportedError(f"an argument is a {kind.__name__}", hint="pass tensors, plain values and a StaticCache")


class _Argument(IntEnum):
    """The ways in which the native module compares an argument: as an object, a plain value, a tensor of a layout, a list or a
    tuple, a dictionary, or a cache of a class."""

    IDENTITY = 0
    PLAIN = 1
    TENSOR = 2
    SEQUENCE = 3
    DICTIONARY = 4
    CACHE = 5


class SameForm:
    """Tells at once if a call has the form of one before, and reads the same settings.

    Args:
        call: the one before.
        form: its arguments, as the native module compares them.
        kwargs: those of them that have names.
    """

    def __init__(
        self, call: GraphCall, form: Callable[..., tuple[list[Tensor], list[object]] | None], kwargs: Mapping[str, Any]
    ) -> None:
        self._form = form
        self._call = GraphCall(call.form, [], call.views, call.modules)  # the caller's tensors are freed as soon as it drops them
        self._tokens = _new_tokens(kwargs)
        self._phases = [view.phase(*self._tokens) for view in call.views]
        conditions = Conditions()
        for function, arguments in _settings(call.tensors[0].device.type):
            conditions.read(StateRead(StatePlace(function, PlaceKind.RESULT, arguments), function(*arguments)))
        self._has_settings = conditions.function()

    @classmethod
    def of(cls, call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SameForm | None:
        """Makes one of a call; None without the native module, and for arguments that it does not know."""
        module = loaded()
        try:
            return None if module is None else cls(call, module.Form(same, _node(tuple(args)), _node(dict(kwargs))), kwargs)
        except UnsupportedError:
            return None

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any], known: Views) -> GraphCall | None:
        """A later call taken apart; None where it is another one."""
        found = self._form(args, kwargs)
        if found is None or not self._has_settings.call():
            return None
        tensors, caches = found
        call = self._call
        for cache, view, phase in zip(caches, call.views, self._phases, strict=True):
            if known.of(cache) is not view or view.phase(*self._tokens) != phase:
                return None
        return GraphCall(call.form, tensors, call.views, call.modules)


def _node(value: Any) -> tuple[Any, ...]:
    """An argument as the native module takes it.

    Raises:
        UnsupportedError: it does not know such an argument.
    """
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
    raise UnsupportedError(f"the native module knows no {kind.__name__}")


def key_of(call: GraphCall, kwargs: Mapping[str, Any]) -> object:
    """All that tells a call from others but what it reads of models."""
    count, is_prepared = _new_tokens(kwargs)
    caches = tuple((view.layout, view.phase(count, is_prepared)) for view in call.views)
    return call.form, caches, settings(call.tensors[0].device.type)


def _new_tokens(kwargs: Mapping[str, Any]) -> tuple[int, bool]:
    """The number of positions of a call, and True if it says where they are and what they see."""
    ids, positions, mask = kwargs.get("input_ids"), kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return 1, False
    is_prepared = isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() == 4)
    return ids.shape[1], is_prepared and isinstance(positions, Tensor)


def settings(device: str) -> tuple[object, ...]:
    """Torch's settings that decide which kernels run."""
    return tuple(function(*arguments) for function, arguments in _settings(device))


def _settings(device: str) -> Sequence[tuple[Callable[..., object], tuple[str, ...]]]:
    """Functions that tell a part of it each, with their arguments."""
    return [
        (torch.is_inference_mode_enabled, ()),
        (torch.is_grad_enabled, ()),
        (_autocast, (device,)),
        (torch.get_default_dtype, ()),
        *((_precision, ("cuda", each)) for each in ("matmul", "conv", "rnn")),
        (_order_of_attention, ()),
        *((get, ()) for get in _CHOICES),
    ]


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _order_of_attention() -> tuple[int, ...]:
    return tuple(torch._C._get_sdp_priority_order())


_precision = torch._C._get_fp32_precision_getter
_CHOICES = [
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
    if (get := getattr(torch._C, f"_get_{name}", None)) is not None  # newer releases of torch have more
]
"""Further settings, as torch keeps them: its own properties in Python take more time."""


def run_with(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Calls a function with other tensors in the places of those of its arguments."""
    given = iter(tensors)
    args = _with(tuple(args), given)
    return function(*args, **_with(dict(kwargs), given))


def without_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call for `run_with`, which hold none of the caller's tensors."""
    blanks = repeat(torch.empty(0))
    return _with(tuple(args), blanks), _with(dict(kwargs), blanks)


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if type(value) is dict:
        return {name: _with(each, tensors) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_with(each, tensors) for each in value)
    return tree_map_only(Tensor, lambda _: next(tensors), value)
