"""The forward pass of a model as CUDA graphs: calls that are alike are recorded once and replayed."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from fusegen.errors import FusegenError, UnsupportedError
from fusegen.graphs.cache_memory import CacheMemory, CacheView
from fusegen.graphs.facts import Facts, watching
from fusegen.graphs.recording import GraphPool, Recording
from fusegen.state import exact, is_plain
from fusegen.threads import new_lock

_CAPTURING = "transformers.utils.output_capturing"
_MOST = 32  # recorded calls of one model
_MOST_MET = 256  # kinds of calls that were met once


@dataclass(frozen=True)
class Call:
    """A call taken apart.

    Attributes:
        form: the arguments' structure, with `TENSOR` and `CACHE` in the places of these, and plain values.
        tensors: in the order of the form.
        views: the caches.
    """

    form: object
    tensors: list[Tensor]
    views: list[CacheView]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Takes a call apart.

        Raises:
            UnsupportedError: an argument is none of tensors, plain values, static caches and containers of these.
        """
        call = cls(None, [], [])
        form = (call._form(tuple(args)), call._form(dict(kwargs)))
        object.__setattr__(call, "form", form)
        return call

    def _form(self, value: Any) -> object:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _described(value)
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if kind is dict:
            return ("dict", *((name, self._form(each)) for name, each in value.items()))
        if kind is tuple or kind is list:
            return (kind, *map(self._form, value))
        if is_plain(value):
            return exact(value)
        if hasattr(value, "layers") and not isinstance(value, nn.Module):
            self.views.append(CacheView.of(value))
            return ("cache", len(self.views))
        raise UnsupportedError(f"an argument is a {kind.__name__}", mend="pass tensors, plain values and a StaticCache")


def _described(tensor: Tensor) -> tuple[object, ...]:
    return (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


@dataclass(frozen=True)
class Graph:
    """A recorded call.

    Attributes:
        recording: the call as a graph.
        facts: of the model, as it was recorded.
        memories: where the call's caches lie.
        advances: for each cache, what a call adds to the lengths that it keeps as Python numbers.
    """

    recording: Recording
    facts: Facts
    memories: Sequence[CacheMemory]
    advances: Sequence[Sequence[int]]

    def replay(self, call: Call) -> Any:
        """The result of a call of the same form."""
        for memory, view in zip(self.memories, call.views, strict=True):
            memory.bind(view)
        result = self.recording(call.tensors, [view.cache for view in call.views])
        for view, numbers in zip(call.views, self.advances, strict=True):
            for (held, name), number in zip(view.lengths, numbers, strict=True):
                held[name] += number
        return result


class GraphedForward:
    """Stands in the place of a model's forward pass. The first call of a form runs as it is, the second is recorded, later ones are
    replayed.

    Args:
        module: the model.

    Attributes:
        recorded: how many calls were recorded.
        replayed: how many were replayed.
        reasons: why calls ran as they are, the last one last.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._given = vars(module).get("forward")
        self.recorded = self.replayed = 0
        self.reasons: dict[str, int] = {}
        self._forget()

    def _forget(self) -> None:
        self._pool: GraphPool | None = None
        self._graphs: OrderedDict[object, Graph] = OrderedDict()
        self._met: OrderedDict[object, str] = OrderedDict()
        self._memories: dict[object, CacheMemory] = {}
        self._lock = new_lock()

    def put(self) -> None:
        """Takes the place of the forward pass."""
        self.__signature__ = inspect.signature(self.original)  # which `generate` reads
        self.module.forward = self

    def remove(self) -> None:
        """Puts back what was there, and frees the graphs."""
        if vars(self.module).get("forward") is self:
            if self._given is None:
                del self.module.forward
            else:
                self.module.forward = self._given
        self._forget()

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own forward pass."""
        return self._given or partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a forward pass."""
        if is_compiling():
            return self.original(*args, **kwargs)
        try:
            call = self._call(args, kwargs)
        except UnsupportedError as error:
            return self._as_it_is(error.what, args, kwargs)
        with self._lock:
            return self._run(call, args, kwargs)

    def _run(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        key = _key(call, kwargs)
        graph = self._graphs.get(key)
        if graph is not None and not graph.facts.hold():
            del self._graphs[key]
            graph = None
        if graph is None:
            reason = self._met.get(key)
            if reason is None or reason:
                self._met[key] = reason or ""
                return self._as_it_is(reason, args, kwargs) if reason else self.original(*args, **kwargs)
            graph = self._record(key, call, args, kwargs)
            if graph is None:
                return self._as_it_is(self._met[key], args, kwargs)
        self._graphs.move_to_end(key)
        self.replayed += 1
        with self._pool_of(call).in_order():
            return graph.replay(call)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call taken apart.

        Raises:
            UnsupportedError: it cannot be recorded, or something looks into it.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError("gradients are recorded", mend="call it under torch.no_grad()")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("a graph is being recorded around it")
        call = Call.of(args, kwargs)
        devices = {tensor.device for tensor in call.tensors}
        if len(devices) != 1 or next(iter(devices)).type != DEVICE:
            raise UnsupportedError("its tensors are not on one GPU")
        return call

    def _pool_of(self, call: Call) -> GraphPool:
        if self._pool is None:
            self._pool = GraphPool(call.tensors[0].device)
        return self._pool

    def _as_it_is(self, reason: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.reasons[reason] = self.reasons.pop(reason, 0) + 1
        return self.original(*args, **kwargs)

    def _record(self, key: object, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph | None:
        """The graph of a call, which has not run yet; None where it cannot be one, for the reason that `_met` has then."""
        saved = [(held, dict(held)) for view in call.views for held in view.parts]
        memories = []
        for view in call.views:
            layout = view.layout()
            if layout not in self._memories:
                self._memories[layout] = CacheMemory(view)
            self._memories[layout].bind(view)
            memories.append(self._memories[layout])
        saved = [(held, dict(held)) for view in call.views for held in view.parts]
        try:
            _require_no_hooks(self.module)
            run = partial(_run_with, self.original, args, kwargs)
            with watching() as read, self._pool_of(call).in_order():
                recording = Recording.of(self._pool_of(call), run, call.tensors, [view.cache for view in call.views])
            graph = Graph(recording, Facts(self.module, read), memories, [_advances(view, saved) for view in call.views])
        except Exception as error:
            self._met[key] = _words(error)
            return None
        finally:
            for held, before in saved:
                held.clear()
                held.update(before)
        self._graphs[key] = graph
        self.recorded += 1
        while len(self._graphs) > _MOST:
            self._graphs.popitem(last=False)
        while len(self._met) > _MOST_MET:
            self._met.popitem(last=False)
        return graph

    def __getstate__(self) -> dict[str, Any]:
        """The state that a file or a copy holds: graphs are recorded anew."""
        return {"module": self.module, "_given": self._given}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["module"])  # type: ignore[misc]
        self._given = state["_given"]
        self.__signature__ = inspect.signature(self.original)


DEVICE = "cuda"
"""The kind of device whose calls are recorded."""


def _key(call: Call, kwargs: Mapping[str, Any]) -> object:
    count, is_prepared = _new_tokens(kwargs)
    caches = tuple((view.layout(), view.phase(count, is_prepared)) for view in call.views)
    return call.form, caches, _settings(call.tensors[0].device.type)


def _new_tokens(kwargs: Mapping[str, Any]) -> tuple[int, bool]:
    """How many positions a call has, and whether it says where they are and what they see."""
    ids, positions, mask = kwargs.get("input_ids"), kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return 1, False
    return ids.shape[1], isinstance(positions, Tensor) and isinstance(mask, dict)


def _settings(device: str) -> tuple[object, ...]:
    """What torch is set to."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _run_with(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Calls a function with other tensors in the places of those of its arguments."""
    given = iter(tensors)
    args = _with(tuple(args), given)
    return function(*args, **_with(dict(kwargs), given))


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if type(value) is dict:
        return {name: _with(each, tensors) for name, each in value.items()}
    return type(value)(_with(each, tensors) for each in value) if type(value) in (tuple, list) else value


def _advances(view: CacheView, saved: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[int]:
    """What a run has added to the lengths of a cache.

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


def _require_no_hooks(module: nn.Module) -> None:
    """Refuses hooks inside of a model, which a replay does not run; those by which transformers captures outputs are a part of the
    forward pass."""
    for path, each in module.named_modules():
        held = vars(each)
        hooks = (*held["_forward_hooks"].values(), *held["_forward_pre_hooks"].values()) if each is not module else ()
        if "_hf_hook" in held or any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks):
            raise UnsupportedError(f"{path} has hooks", mend="remove them")


def _words(error: Exception) -> str:
    """Why a call cannot be recorded, with the line of the user's or the model's code that is in the way."""
    what = error.what if isinstance(error, FusegenError) else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    return f"{what} · at: {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else what
