"""The forward pass of a model as CUDA graphs: calls that are alike are recorded once and replayed."""

from __future__ import annotations

import inspect
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from fusegen.errors import FusegenError, UnsupportedError
from fusegen.graphs.cache_memory import CacheMemory, CacheView
from fusegen.graphs.facts import watching
from fusegen.graphs.recording import GraphPool, Recording
from fusegen.state import exact, is_plain
from fusegen.threads import new_lock

_CAPTURING = "transformers.utils.output_capturing"
_COMPILED = "get_compiled_call"
_MOST = 32  # recorded calls of one model
_MOST_MET = 256  # kinds of calls that have none
_MOST_CHANGES = 8  # of what a graph holds on to, before its calls run as they are


class Views(dict[int, CacheView]):
    """Caches that calls brought, taken apart, by their ids."""

    def of(self, cache: object) -> CacheView:
        """A cache taken apart, as it is now."""
        view = self.get(id(cache))
        if view is None or view.cache() is not cache or not view.is_current():
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
    """

    form: object
    tensors: list[Tensor]
    views: list[CacheView]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], known: Views) -> Call:
        """Takes a call apart.

        Raises:
            UnsupportedError: an argument is none of tensors, plain values, static caches and containers of these.
        """
        call = cls(None, [], [])
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
            self.tensors.append(value)
            return (kind, value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        if kind is dict:
            return ("dict", *((name, self._form(each, known)) for name, each in value.items()))
        if kind is tuple or kind is list:
            return (kind, *(self._form(each, known) for each in value))
        if is_plain(value):
            return exact(value)
        if hasattr(value, "layers") and not isinstance(value, nn.Module):
            self.views.append(known.of(value))
            return ("cache", len(self.views))
        raise UnsupportedError(f"an argument is a {kind.__name__}", mend="pass tensors, plain values and a StaticCache")


@dataclass(frozen=True)
class Graph:
    """A recorded call.

    Attributes:
        recording: the call as a graph.
        facts: says whether the model is as it was recorded.
        memories: where the call's caches lie.
        advances: for each cache, what a call adds to the lengths that it keeps as Python numbers.
    """

    recording: Recording
    facts: Callable[[], bool]
    memories: Sequence[CacheMemory]
    advances: Sequence[Sequence[int]]

    def replay(self, call: Call) -> Any:
        """The result of a call of the same form."""
        for memory, view in zip(self.memories, call.views, strict=True):
            memory.bind(view)
        result = self.recording(call.tensors, [view.cache() for view in call.views])
        for view, numbers in zip(call.views, self.advances, strict=True):
            for (held, name), number in zip(view.lengths, numbers, strict=True):
                held[name] += number
        return result


@dataclass
class Met:
    """Calls of a form that have no graph.

    Attributes:
        count: how many there were.
        changes: how often what a graph had read was not so any more.
        reason: why they cannot be recorded.
    """

    count: int = 0
    changes: int = 0
    reason: str = ""


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
        self._given: Callable[..., Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self.recorded = self.replayed = 0
        self.reasons: dict[str, int] = {}
        self._pool: GraphPool | None = None
        self._graphs: OrderedDict[object, Graph] = OrderedDict()
        self._met: OrderedDict[object, Met] = OrderedDict()
        self._memories: dict[object, CacheMemory] = {}
        self._views = Views()
        self._last: tuple[object, Graph] | None = None
        self._lock = new_lock()

    @property
    def is_put(self) -> bool:
        """True if the model calls it."""
        return vars(self.module).get("forward") is self

    def put(self) -> None:
        """Takes the place of the forward pass, and of its compilation in ``generate``, which looks for a static cache."""
        if not self.is_put:
            self._given = vars(self.module).get("forward")
        self.__signature__ = inspect.signature(self.original)  # which `generate` reads
        self.module.forward = self
        if hasattr(type(self.module), _COMPILED):
            setattr(self.module, _COMPILED, self.not_compiled)

    def not_compiled(self, _: object) -> nn.Module:
        """The model, whatever the settings of its compilation."""
        return self.module

    def remove(self) -> None:
        """Puts back what was there, and frees the graphs."""
        held = vars(self.module)
        if getattr(held.get(_COMPILED), "__self__", None) is self:
            delattr(self.module, _COMPILED)
        if held.get("forward") is self:
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
            with self._lock:
                graph = self._graph(call, args, kwargs)
                if graph is not None:
                    self.replayed += 1
                    with self._pool_of(call).in_order():
                        return graph.replay(call)
        except UnsupportedError as error:
            self.reasons[error.what] = self.reasons.pop(error.what, 0) + 1
        return self.original(*args, **kwargs)

    def _graph(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph | None:
        """The graph of a call; None the first time.

        Raises:
            UnsupportedError: there can be none.
        """
        key = _key(call, kwargs)
        graph = self._last[1] if self._last is not None and self._last[0] == key else self._graphs.get(key)
        if graph is not None and graph.facts():
            if self._last is None or self._last[1] is not graph:
                self._graphs.move_to_end(key)
                self._last = key, graph
            return graph
        met = self._met.setdefault(key, Met())
        _drop_oldest(self._met, _MOST_MET)
        if graph is not None:
            self._last = None
            del self._graphs[key]
            met.changes += 1
        if met.reason or met.changes > _MOST_CHANGES:
            raise UnsupportedError(met.reason or "what the model reads changes from call to call")
        met.count += 1
        return self._recorded(key, call, args, kwargs) if met.count > 1 else None

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call taken apart.

        Raises:
            UnsupportedError: it cannot be recorded, or something looks into it.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError("gradients are recorded", mend="call it under torch.no_grad()")
        call = Call.of(args, kwargs, self._views)
        devices = {tensor.device for tensor in call.tensors}
        if len(devices) != 1 or next(iter(devices)).type != DEVICE:
            raise UnsupportedError("its tensors are not on one GPU")
        if DEVICE == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("a graph is being recorded around it")
        return call

    def _pool_of(self, call: Call) -> GraphPool:
        if self._pool is None:
            self._pool = GraphPool(call.tensors[0].device)
        return self._pool

    def _recorded(self, key: object, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph:
        """The graph of a call, which has not run yet.

        Raises:
            UnsupportedError: it cannot be one.
        """
        _require_no_hooks(self.module)
        memories = [self._memory(view) for view in call.views]
        saved = [(held, dict(held)) for view in call.views for held in view.parts]
        run = partial(_run_with, self.original, args, kwargs)
        pool, caches = self._pool_of(call), [view.cache() for view in call.views]
        try:
            with watching(self.module) as reads, pool.in_order():
                recording = Recording.of(pool, run, call.tensors, caches)
            graph = Graph(recording, reads.facts(self.module), memories, [_advances(view, saved) for view in call.views])
        except Exception as error:
            self._met[key].reason = _words(error)
            raise UnsupportedError(self._met[key].reason) from error
        finally:
            for held, before in saved:
                held.clear()
                held.update(before)
        self._graphs[key], self._last = graph, (key, graph)
        self.recorded += 1
        _drop_oldest(self._graphs, _MOST)
        used = {id(memory) for each in self._graphs.values() for memory in each.memories}
        self._memories = {layout: memory for layout, memory in self._memories.items() if id(memory) in used}
        return graph

    def _memory(self, view: CacheView) -> CacheMemory:
        """The memory in which a cache lies from now on."""
        memory = self._memories.get(view.layout)
        if memory is None:
            memory = self._memories[view.layout] = CacheMemory(view)
        memory.bind(view)
        return memory

    def __str__(self) -> str:
        reasons = "; ".join(f"{count} as they are: {reason}" for reason, count in self.reasons.items())
        counts = f"CUDA graphs: {self.recorded} recorded, {self.replayed} calls replayed"
        return f"{counts}; {reasons}" if reasons else counts

    def __getstate__(self) -> dict[str, Any]:
        """The state that a file or a copy holds: graphs are recorded anew."""
        return {"module": self.module, "_given": self._given}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["module"])  # type: ignore[misc]
        self._given = state["_given"]
        self.__signature__ = inspect.signature(self.original)


def _drop_oldest(held: OrderedDict[Any, Any], most: int) -> None:
    while len(held) > most:
        held.popitem(last=False)


DEVICE = "cuda"
"""The kind of device whose calls are recorded."""


def _key(call: Call, kwargs: Mapping[str, Any]) -> object:
    count, is_prepared = _new_tokens(kwargs)
    caches = tuple((view.layout, view.phase(count, is_prepared)) for view in call.views)
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
    text = str(error).partition("\n")[0]
    what = error.what if isinstance(error, FusegenError) else f"{type(error).__name__}: {text}"
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    return f"{what} · at: {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else what
