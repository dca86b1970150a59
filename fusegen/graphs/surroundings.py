"""The surroundings of a recording: what must be as it is without one, and what a recorded run may not change."""

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
from fusegen.graphs.facts import OF_OTHERS, reached
from fusegen.guards import is_plain, same
from fusegen.threads import new_lock

_CAPTURING = "transformers.utils.output_capturing"
_RECORDING = new_lock()  # by one thread at a time


@contextmanager
def recording_alone() -> Iterator[None]:
    """Around a recording.

    Raises:
        UnsupportedError: another thread records one, or it fails.
    """
    if not _RECORDING.acquire(blocking=False):
        raise UnsupportedError("another thread records a graph")
    try:
        yield
    except Exception as error:
        raise UnsupportedError(reason_of(error)) from error
    finally:
        _RECORDING.release()


@contextmanager
def same_settings(device: str) -> Iterator[None]:
    """Around a recorded run.

    Raises:
        UnsupportedError: it changes what torch is set to, which a replay would not.
    """
    before, dtype = settings(device), torch.get_default_dtype()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
            if settings(device) != before:
                raise UnsupportedError("it changes what torch is set to", hint="do that outside of the call")
        finally:
            torch.set_default_dtype(dtype)


def lengths_added(view: CacheView, saved: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[int]:
    """The numbers that a run has added to the lengths of a cache.

    Raises:
        UnsupportedError: it has changed more than these.
    """
    before = {id(held): values for held, values in saved}
    lengths = {(id(held), name) for held, name in view.lengths}
    for held in view.parts:
        for name, value in held.items():
            if (id(held), name) not in lengths and value is not before[id(held)].get(name):
                raise UnsupportedError(f"it changes {name!r} of its cache")
    return [held[name] - before[id(held)][name] for held, name in view.lengths]


def require_no_hooks(roots: Iterable[nn.Module], outer: Sequence[nn.Module]) -> None:
    """Refuses hooks inside of a recorded run, which a replay does not run; those by which transformers captures outputs are a part
    of the forward pass.

    Args:
        outer: modules whose own forward hooks run outside of it.
    """
    if any(hooks for name, hooks in vars(module_hooks).items() if name.startswith("_global_") and isinstance(hooks, dict)):
        raise UnsupportedError("there are hooks of all modules", hint="remove them")
    for path, each in ((path, each) for root in roots for path, each in root.named_modules()):
        held = vars(each)
        is_outer = any(each is other for other in outer)
        names = ("_backward_hooks", "_backward_pre_hooks", *(() if is_outer else ("_forward_hooks", "_forward_pre_hooks")))
        hooks = [hook for name in names for hook in held[name].values()]
        if "_hf_hook" in held or any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks):
            raise UnsupportedError(f"{path or type(each).__name__} has hooks", hint="remove them")


def reason_of(error: Exception) -> str:
    """Why a call cannot be recorded, with the line of the user's or the model's code that is in the way."""
    while not isinstance(error, FusegenError) and isinstance(error.__context__, Exception):
        error = error.__context__  # behind the error of a capture that it has ended
    text = str(error).partition("\n")[0]
    what = error.what if isinstance(error, FusegenError) else f"{type(error).__name__}: {text}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OF_OTHERS)]
    return f"{what} · at: {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else what


# A training step: what it changes beside its arguments, which are gradients and an optimizer's state.


class RecordedStep:
    """Gradients and optimizers around the recording of a step, which runs its Python and nothing on the GPU, and around replays.

    Args:
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
                raise UnsupportedError("its optimizer has made new state", hint="call the step once before it is recorded")
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
                hint = f"pass capturable=True to the optimizer, and numbers as tensors on {self._device}"
                raise UnsupportedError(f"its optimizer keeps {name!r} on {value.device}", hint=hint)

    def _require_unchanged(self, held: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> None:
        for each, values in zip(held, before, strict=True):
            name = next((name for name, value in values.items() if not same(each.get(name), value)), None)
            if name is not None:
                raise UnsupportedError(f"it changes {name!r} of its optimizer on the host", hint="do that outside of the step")


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
