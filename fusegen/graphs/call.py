"""Calls taken apart: what tells those that one graph can serve from others, and what a training step changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_map_only

from fusegen.errors import UnsupportedError
from fusegen.graphs.cache_memory import CacheView, is_cache
from fusegen.graphs.facts import reached
from fusegen.guards import Conditions, Kind, Read, Slot, exact, is_plain, same
from fusegen.native import loaded


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
class Call:
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
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], known: Views) -> Call:
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
                raise UnsupportedError(what, mend="pass strided tensors")
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
        raise UnsupportedError(f"an argument is a {kind.__name__}", mend="pass tensors, plain values and a StaticCache")


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
        self, call: Call, form: Callable[..., tuple[list[Tensor], list[object]] | None], kwargs: Mapping[str, Any]
    ) -> None:
        self._form = form
        self._call = Call(call.form, [], call.views, call.modules)  # the caller's tensors are freed as soon as it drops them
        self._tokens = _new_tokens(kwargs)
        self._phases = [view.phase(*self._tokens) for view in call.views]
        conditions = Conditions()
        for function, arguments in _settings(call.tensors[0].device.type):
            conditions.read(Read(Slot(function, Kind.RESULT, arguments), function(*arguments)))
        self._has_settings = conditions.function()

    @classmethod
    def of(cls, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SameForm | None:
        """Makes one of a call; None without the native module, and for arguments that it does not know."""
        module = loaded()
        try:
            return None if module is None else cls(call, module.Form(same, _node(tuple(args)), _node(dict(kwargs))), kwargs)
        except UnsupportedError:
            return None

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any], known: Views) -> Call | None:
        """A later call taken apart; None where it is another one."""
        found = self._form(args, kwargs)
        if found is None or not self._has_settings.call():
            return None
        tensors, caches = found
        call = self._call
        for cache, view, phase in zip(caches, call.views, self._phases, strict=True):
            if known.of(cache) is not view or view.phase(*self._tokens) != phase:
                return None
        return Call(call.form, tensors, call.views, call.modules)


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


def key_of(call: Call, kwargs: Mapping[str, Any]) -> object:
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


# A training step: what it changes beside its arguments, which are gradients and an optimizer's state.


class Step:
    """Gradients and optimizers around the recording of a step, which runs its Python and nothing on the GPU, and around replays.

    Args:
        function: the step.
        roots: modules that it reads.
        device: of its graph.
    """

    def __init__(self, function: object, roots: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._optimizers = reached(function, torch.optim.Optimizer)
        groups = [each["params"] for optimizer in self._optimizers for each in optimizer.param_groups]
        found = [each for parameters in (*(root.parameters() for root in roots), *groups) for each in parameters]
        self._parameters = list({id(each): each for each in found}.values())
        self._needed: list[tuple[Tensor, Tensor | None]] = []
        self._made: list[tuple[Tensor, Tensor | None]] = []

    def is_ready(self) -> bool:
        """True if parameters have the gradients that a replay adds to, or needs to be missing."""
        return all(each.grad is gradient for each, gradient in self._needed)

    def finish(self) -> None:
        """Gives parameters the gradients that a replay has filled."""
        for parameter, gradient in self._made:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the recording: if it fails, all is as before.

        Raises:
            UnsupportedError: it changes what a replay would not.
        """
        gradients = [(each, each.grad, 0 if each.grad is None else each.grad._version) for each in self._parameters]
        sizes = [len(optimizer.state) for optimizer in self._optimizers]
        held = [*(each for optimizer in self._optimizers for each in (*optimizer.param_groups, *optimizer.state.values()))]
        before = [{name: value for name, value in each.items() if is_plain(value)} for each in held]
        try:
            self._require_device(held)
            yield
            self._require_unchanged(held, before)
            if [len(optimizer.state) for optimizer in self._optimizers] != sizes:
                raise UnsupportedError("its optimizer has made new state", mend="call the step once before it is recorded")
        except BaseException:
            for parameter, gradient, _ in gradients:
                parameter.grad = gradient
            for each, values in zip(held, before, strict=True):
                each.update(values)
            raise
        for parameter, gradient, version in gradients:
            is_added_to = gradient is not None and gradient._version != version
            if is_added_to or gradient is None or parameter.grad is gradient:
                self._needed.append((parameter, gradient))
            self._made.append((parameter, parameter.grad))

    def _require_device(self, held: Sequence[Mapping[str, Any]]) -> None:
        for name, value in (item for each in held for item in each.items()):
            if isinstance(value, Tensor) and value.device != self._device:
                mend = f"pass capturable=True to the optimizer, and numbers as tensors on {self._device}"
                raise UnsupportedError(f"its optimizer keeps {name!r} on {value.device}", mend=mend)

    def _require_unchanged(self, held: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> None:
        for each, values in zip(held, before, strict=True):
            name = next((name for name, value in values.items() if not same(each.get(name), value)), None)
            if name is not None:
                raise UnsupportedError(f"it changes {name!r} of its optimizer on the host", mend="do that outside of the step")
