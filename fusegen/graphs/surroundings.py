"""Conditions around a recording: settings, hooks, training state and masks that a replay could not reproduce."""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import pad
from torch.nn.modules import module as module_hooks

from fusegen.errors import FusegenError, UnsupportedError
from fusegen.graphs.call import CacheView, has_layers, is_cache, settings
from fusegen.graphs.facts import LIBRARY_FOLDERS, reachable
from fusegen.guards.values import is_plain, same
from fusegen.threads import new_lock

_CAPTURING = "transformers.utils.output_capturing"
_RECORDING = new_lock()  # one recording at a time


@contextmanager
def recording_alone() -> Iterator[None]:
    """Allows one recording at a time. Raises if another thread is recording, or the recording fails."""
    if not _RECORDING.acquire(blocking=False):
        raise UnsupportedError("another thread is recording a graph")
    try:
        yield
    except Exception as error:
        raise UnsupportedError(reason_of(error)) from error
    finally:
        _RECORDING.release()


@contextmanager
def require_same_settings(device: str) -> Iterator[None]:
    """Raises if a recorded run changes torch's settings."""
    before, dtype = settings(device), torch.get_default_dtype()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
            if settings(device) != before:
                raise UnsupportedError("it changes a setting of torch", hint="do that outside of the call")
        finally:
            torch.set_default_dtype(dtype)


def lengths_added(view: CacheView, saved: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[int]:
    """Returns a run's increments of the lengths of a cache. Raises if it has changed other settings of the cache."""
    before = {id(held): values for held, values in saved}
    lengths = {(id(held), name) for held, name in view.lengths}
    for held in view.parts:
        for name, value in held.items():
            if (id(held), name) not in lengths and value is not before[id(held)].get(name):
                raise UnsupportedError(f"it changes {name!r} of its cache")
    return [held[name] - before[id(held)][name] for held, name in view.lengths]


def require_no_hooks(roots: Iterable[nn.Module], outer: Sequence[nn.Module]) -> None:
    """Rejects hooks inside a recorded run, except those of transformers that capture outputs. Forward hooks of `outer` modules run
    outside of it."""
    if any(hooks for name, hooks in vars(module_hooks).items() if name.startswith("_global_") and isinstance(hooks, dict)):
        raise UnsupportedError("global module hooks are registered", hint="remove them")
    for path, each in ((path, each) for root in roots for path, each in root.named_modules()):
        held = vars(each)
        is_outer = any(each is module for module in outer)
        names = ("_backward_hooks", "_backward_pre_hooks", *(() if is_outer else ("_forward_hooks", "_forward_pre_hooks")))
        hooks = [hook for name in names for hook in held[name].values()]
        if "_hf_hook" in held or any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks):
            raise UnsupportedError(f"{path or type(each).__name__} has hooks", hint="remove them")


def reason_of(error: Exception) -> str:
    """Returns an error as text, with the last source line outside of libraries."""
    while not isinstance(error, FusegenError) and isinstance(error.__context__, Exception):
        error = error.__context__  # a capture's own error hides its cause
    text = str(error).partition("\n")[0]
    what = error.what if isinstance(error, FusegenError) else f"{type(error).__name__}: {text}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(LIBRARY_FOLDERS)]
    return f"{what} · at: {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else what


# Training steps, which change gradients and an optimizer's state.


class RecordedStep:
    """The gradients and optimizer state of a training step, during its recording and its replays."""

    def __init__(self, function: object, roots: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._optimizers = reachable(function, torch.optim.Optimizer)
        groups = [each["params"] for optimizer in self._optimizers for each in optimizer.param_groups]
        parameters = [each for parameters in (*(root.parameters() for root in roots), *groups) for each in parameters]
        self._parameters = list({id(each): each for each in parameters}.values())
        self._needed: list[tuple[Tensor, Tensor | None]] = []
        self._filled: list[tuple[Tensor, Tensor | None]] = []

    def is_ready(self) -> bool:
        """True if parameters have the gradients that a replay expects, including missing ones."""
        return all(each.grad is gradient for each, gradient in self._needed)

    def finish(self) -> None:
        """Assigns the gradients that a replay has filled."""
        for parameter, gradient in self._filled:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Restores the state if the recording fails. Raises if it changes state that a replay would not."""
        gradients = [(each, each.grad, 0 if each.grad is None else each.grad._version) for each in self._parameters]
        sizes = [len(optimizer.state) for optimizer in self._optimizers]
        held = [*(each for optimizer in self._optimizers for each in (*optimizer.param_groups, *optimizer.state.values()))]
        before = [{name: value for name, value in each.items() if is_plain(value)} for each in held]
        try:
            self._require_device(held)
            yield
            self._require_unchanged(held, before)
            if [len(optimizer.state) for optimizer in self._optimizers] != sizes:
                raise UnsupportedError("its optimizer has created new state", hint="call the step once before it is recorded")
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
            self._filled.append((parameter, parameter.grad))

    def _require_device(self, held: Sequence[Mapping[str, Any]]) -> None:
        for name, value in (item for each in held for item in each.items()):
            if isinstance(value, Tensor) and value.device != self._device:
                hint = f"pass capturable=True to the optimizer, and numbers as tensors on {self._device}"
                raise UnsupportedError(f"its optimizer keeps {name!r} on {value.device}", hint=hint)

    def _require_unchanged(self, held: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> None:
        for each, values in zip(held, before, strict=True):
            name = next((name for name, value in values.items() if not same(each.get(name), value)), None)
            if name is not None:
                raise UnsupportedError(f"it changes {name!r} of its optimizer on the host", hint="do that outside of the step")


# Attention masks of transformers models.


_MASK_ARGUMENTS = ("attention_mask", "position_ids")
_IS_TRACING = "is_tracing"
_FIXED_VALUES = {_IS_TRACING: False, "find_packed_sequence_indices": None}
_THREAD = threading.local()


def with_padded_mask(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Pads a 2D mask to the length of the static cache: otherwise its shape would change at each decoding step."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return kwargs
    caches = [value for value in kwargs.values() if has_layers(value)]
    room = max((getattr(layer, "max_cache_len", 0) for cache in caches for layer in cache.layers), default=0)
    missing = room - mask.shape[1]
    return {**kwargs, "attention_mask": pad(mask, (0, missing))} if missing > 0 else kwargs


@contextmanager
def without_trivial_masks(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Lets the `transformers` library skip causal masks during a capture, as it does in eager calls.

    Transformers inspects mask values to skip masks that hide only later tokens. A capture cannot inspect them, so it would build
    the mask, and attention would be slower. A call without masks, caches and positions has a causal mask
    whatever the values.
    """
    masks = sys.modules.get("transformers.masking_utils")
    for name in _FIXED_VALUES if masks is not None else ():
        original = getattr(masks, name, None)
        if original is not None and not hasattr(original, "original"):  # never removed: guards hold the wrapper
            setattr(masks, name, _with_fixed_answer(original, name))
    _THREAD.skips_masks = masks is not None and not _may_need_mask(function, args, kwargs)
    try:
        yield
    finally:
        _THREAD.skips_masks = False


def _may_need_mask(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if masks may depend on values of arguments, or if the function is not a model of transformers."""
    if not _is_transformers_model(function):
        return True
    arguments = inspect.signature(getattr(function, "forward", function)).bind(*args, **kwargs).arguments
    dictionaries = (each for each in arguments.values() if isinstance(each, dict))
    named = {name: value for each in (arguments, *dictionaries) for name, value in each.items()}
    return any(named.get(name) is not None for name in _MASK_ARGUMENTS) or any(map(is_cache, named.values()))


def _is_transformers_model(function: Any) -> bool:
    """True for the forward pass of a transformers model, patched or not."""
    if isinstance(function, nn.Module):
        function = vars(function).get("forward", partial(type(function).forward, function))
    module = next(iter(function.args), None) if isinstance(function, partial) else getattr(function, "module", None)
    return isinstance(module, nn.Module) and type(module).forward.__module__.startswith("transformers")


def _with_fixed_answer(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wraps a function of transformers to return a fixed value in recordings without masks."""

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not getattr(_THREAD, "skips_masks", False) or (name == _IS_TRACING and args != (None,)):
            return original(*args, **kwargs)
        return _FIXED_VALUES[name]

    wrapper.original = original  # type: ignore[attr-defined]
    return wrapper
